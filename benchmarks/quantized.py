"""LoRA on bases in float32, bfloat16, 4 and 8 bits on a CPU: tokens per CPU second and peak memory.

    python benchmarks/quantized.py

The bases are SmolLM2-135M, and a model of the shape of Qwen2.5-1.5B with random weights. The runs are those of
``precision.py`` with SFT on rows of about 30 tokens, one thread. Passes over quantized bases are in bfloat16. Peaks are
those of the whole run, and those after loading. It needs bitsandbytes, which ``make quantized`` installs: set
PYTHONPATH=.bitsandbytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from pathlib import Path
from statistics import median

import precision
import run

SHAPE = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
BASES = (*precision.PRECISIONS, "nf4", "int8")


def save_random(folder: Path) -> None:
    """A model of Qwen2.5-1.5B's shape."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--bases", nargs="+", choices=BASES, default=BASES)
    options = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: the peak memory of a run would include what its parent has in memory
        saving = multiprocessing.get_context("spawn").Process(target=save_random, args=(Path(folder),))
        saving.start()
        saving.join()
        for name, others in {"SmolLM2-135M": [], "Qwen2.5-1.5B's shape": ["--model", folder]}.items():
            for base in options.bases:
                runs = [
                    precision.measured("sft 30", base, options.steps, 1, 1, *others) for _ in range(options.repeats)
                ]
                speed = median(one["tokens"] / one["cpu"] for one in runs)
                peaks = {what: median(one[what] for one in runs) for what in ("peak", "peak_in_training")}
                cases.append({"model": name, "base": base, "speed": speed, **peaks, "losses": runs[0]["losses"]})
                whole, in_training = (peak / 2**30 for peak in peaks.values())
                print(
                    f"{name:22} {base:9} {speed:7.1f} tokens/s  {whole:5.2f} GiB, in training {in_training:5.2f}",
                    runs[0]["losses"],
                    flush=True,
                )
    kept = [one for one in run.read("quantized").get("cases", []) if one["base"] not in options.bases]
    cases = sorted([*kept, *cases], key=lambda one: (one["model"] != "SmolLM2-135M", BASES.index(one["base"])))
    run.write("quantized", {"machine": run.machine(), "cases": cases})


if __name__ == "__main__":
    main()
