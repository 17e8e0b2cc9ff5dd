"""On one GPU: SFT on long rows, decoding, and the parts of a PPO iteration, with a model of Qwen3-0.6B's shape.

    python benchmarks/gpu.py

Weights are random and kept in float32, passes compute products in bfloat16 by autocast, and sampling uses a copy in
bfloat16. SFT is also measured with TRL and decoding with vLLM if they are installed in this environment. ``--tiny``
takes a tiny model on any device: it shows that the script works, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import run
import torch
import workload
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments

from burnish import PPO, SFT, Trainer, machine
from burnish.data.readers import load
from burnish.generate.continuous import ContinuousGenerator
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
TINY = SHAPE | {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WARMUP = 2  # steps
PEAKS = {
    r"H100 PCIe": 756.0,  # NVIDIA H100 data sheet: 1,513 with sparsity
    r"H100|H200": 989.0,  # NVIDIA H100 and H200 data sheets: 1,979 with sparsity
    r"A100": 312.0,  # NVIDIA A100 data sheet
    r"L4\b": 121.0,  # NVIDIA L4 data sheet: 242 with sparsity
    r"RTX 4090$": 165.2,  # NVIDIA Ada GPU architecture, FP32 accumulate
}
"""TFLOP/s of dense bfloat16 products by a pattern of the GPU's name; the first that matches counts."""


class Clock(TrainerCallback):
    """Seconds of the steps behind the warm-up, when the device has done them."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the device, and look at the time."""
        self.ends.append(now())

    @property
    def seconds(self) -> float:
        """From the end of the warm-up to the end of the last step."""
        return self.ends[-1] - self.ends[WARMUP - 1]


def now() -> float:
    """The time when the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer(
    shape: dict[str, Any], method: Any, rows: Any, arguments: dict[str, Any], out: str, **others: Any
) -> Trainer:
    """Burnish's trainer of a fresh model, in bfloat16 by autocast on a GPU."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"bf16": torch.cuda.is_available(), "learning_rate": 1e-5, "logging_steps": 1}
    common |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return Trainer(
        model=Qwen3ForCausalLM(Qwen3Config(**shape)),
        args=TrainingArguments(out, **common, **arguments),
        method=method,
        train_dataset=rows,
        processing_class=workload.tokenizer(shape["vocab_size"]),
        **others,
    )


def peak_of(name: str) -> float | None:
    """The data sheet's operations per second of a GPU in dense bfloat16 products; None if it is not in the table."""
    return next((1e12 * peak for pattern, peak in PEAKS.items() if re.search(pattern, name)), None)


def operations(shape: dict[str, Any], rows: int, length: int) -> float:
    """Floating-point operations of a training step: 6 N D and attention, 6 layers x heads x size x rows x length^2.

    N are the weights of matrix products, with half of the head, because half of the tokens are learned; D are the
    tokens. Attention is causal: a token attends to half of the others on average.
    """
    h, heads, size = shape["hidden_size"], shape["num_attention_heads"], shape["head_dim"]
    layer = h * size * (2 * heads + 2 * shape["num_key_value_heads"]) + 3 * h * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + h * shape["vocab_size"] / 2
    return 6 * weights * rows * length + 6 * shape["num_hidden_layers"] * heads * size * rows * length**2


def peak_memory() -> float:
    """GiB, since the last time it was asked; what nothing holds any more is let go."""
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def sft(
    shape: dict[str, Any], batch: int, length: int, steps: int, peak: float | None, compiled: bool
) -> dict[str, float]:
    """Tokens a second, the share of the peak (MFU) and of a measured rate, and memory."""
    clock, total = Clock(), WARMUP + steps
    arguments = {"max_steps": total, "per_device_train_batch_size": batch, "torch_compile": compiled}
    made = [row["row"] for row in workload.rows("sft", batch * total, shape["vocab_size"], length)]
    with tempfile.TemporaryDirectory() as out:
        trainer(shape, SFT(), made, arguments, out, token_budget=length, callbacks=[clock]).train()
    return speed(shape, batch, length, steps, clock.seconds, peak)


def trl_sft(shape: dict[str, Any], batch: int, length: int, steps: int, peak: float | None) -> dict[str, float]:
    """The same with TRL's trainer, one row at a time, as a row fills the token budget here."""
    trl = importlib.import_module("trl")
    datasets = importlib.import_module("datasets")
    clock, total = Clock(), WARMUP + steps
    made = [row["row"] for row in workload.rows("sft", batch * total, shape["vocab_size"], length)]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as out:
        trl.SFTTrainer(
            model=Qwen3ForCausalLM(Qwen3Config(**shape)),
            args=trl.SFTConfig(
                out,
                bf16=torch.cuda.is_available(),
                max_steps=total,
                max_length=None,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=batch,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(made),
            processing_class=workload.tokenizer(shape["vocab_size"]),
            callbacks=[clock],
        ).train()
    return speed(shape, batch, length, steps, clock.seconds, peak)


def speed(
    shape: dict[str, Any], batch: int, length: int, steps: int, seconds: float, peak: float | None
) -> dict[str, float]:
    """What a number of training steps in so many seconds amounts to."""
    done = operations(shape, batch, length) * steps / seconds
    size, dtype = (8192, torch.bfloat16) if torch.cuda.is_available() else (512, torch.float32)
    measured = machine.matmul_rate(dtype, size)
    found = {"tokens_per_second": batch * length * steps / seconds, "of_measured_rate": done / measured}
    return found | ({"mfu": done / peak} if peak else {}) | {"peak_gib": peak_memory()}


def requests(shape: dict[str, Any], rows: int, longest: int, seed: int) -> list[Request]:
    """Prompts of 64 random tokens, all to be completed with ``longest`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(len(workload.SPECIAL), shape["vocab_size"], (rows, 64), generator=generator).tolist()
    return [Request(tuple(prompt), i, Sampling(max_new_tokens=longest)) for i, prompt in enumerate(prompts)]


def decoding(
    kind: type[LocalGenerator | ContinuousGenerator], shape: dict[str, Any], rows: int, longest: int
) -> dict[str, float]:
    """Sampled tokens a second of a generator, all rows together, and memory."""
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    generator = kind(model, slots=rows)
    complete(generator, requests(shape, rows, longest, 0))
    began = now()
    done = complete(generator, requests(shape, rows, longest, 1))
    seconds = now() - began
    generator.close()
    return {"tokens_per_second": sum(len(one.tokens) for one in done) / seconds, "peak_gib": peak_memory()}


def vllm_decoding(shape: dict[str, Any], rows: int, longest: int) -> dict[str, float]:
    """Sampled tokens a second of vLLM with the same requests."""
    vllm = importlib.import_module("vllm")
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        workload.tokenizer(shape["vocab_size"]).save_pretrained(folder)
        engine = vllm.LLM(model=folder, dtype="bfloat16", max_num_seqs=rows, max_model_len=64 + longest)
        settings = vllm.SamplingParams(max_tokens=longest, ignore_eos=True)
        for seed in (0, 1):
            prompts = [{"prompt_token_ids": list(one.tokens)} for one in requests(shape, rows, longest, seed)]
            began = now()
            done = engine.generate(prompts, settings, use_tqdm=False)
    return {"tokens_per_second": sum(len(one.outputs[0].token_ids) for one in done) / (now() - began)}


def ppo(shape: dict[str, Any], batch: int, longest: int, steps: int) -> dict[str, float]:
    """Seconds of the parts of an iteration: rollouts, their log-probabilities and values, and the update; memory."""
    clock, parts = Clock(), {"rollout": 0.0, "scoring": 0.0, "update": 0.0}
    method = PPO(
        lambda answers: [float(len(set(answer.tokens))) for answer in answers],
        Sampling(max_new_tokens=longest),
        epochs=1,
    )
    made = workload.rows("grpo", batch, shape["vocab_size"])
    rows = load([{"prompt": row["row"]["prompt"]} for row in made], PPO.spec.kinds)

    def timed(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **others: Any) -> Any:
            began = now()
            found = inner(*args, **others)
            parts[part] += (now() - began) * (len(clock.ends) >= WARMUP)
            return found

        setattr(owner, name, outer)

    arguments = {"max_steps": WARMUP + steps, "per_device_train_batch_size": batch}
    with tempfile.TemporaryDirectory() as out:
        job = trainer(shape, method, rows.rows, arguments, out, callbacks=[clock])
        timed(method.sampler.bind(job.engine, job.run), "poll", "rollout")
        timed(job.get_train_dataloader(), "_measured", "scoring")
        timed(job, "training_step", "update")
        job.train()
    return {f"{name}_seconds": seconds / steps for name, seconds in parts.items()} | {
        "iteration_seconds": clock.seconds / steps,
        "peak_gib": peak_memory(),
    }


def table(found: dict[str, dict[str, float] | str]) -> str:
    """One line for each measurement, or for why there is none."""
    lines = []
    for name, numbers in found.items():
        if isinstance(numbers, str):
            lines.append(f"{name:22}{numbers}")
        else:
            lines.append(f"{name:22}" + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=float, help="TFLOP/s in dense bfloat16 by the data sheet of another GPU")
    parser.add_argument("--compile", action="store_true", help="SFT under torch.compile")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="show that the script works, on any device")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not options.tiny and not gpu:
        raise SystemExit("benchmarks/gpu.py: there is no GPU here; --tiny shows that the script works")
    device = torch.cuda.get_device_name() if gpu else "CPU"
    peak = 1e12 * options.peak if options.peak else peak_of(device)
    shape, batch, length = (TINY, 2, 128) if options.tiny else (SHAPE, 8, 8192)
    rows, longest = (4, 16) if options.tiny else (64, 512)
    steps = options.steps
    jobs: dict[str, tuple[str | None, Callable[[], dict[str, float]]]] = {
        "sft": (None, lambda: sft(shape, batch, length, steps, peak, options.compile)),
        "sft, TRL": ("trl", lambda: trl_sft(shape, batch, length, steps, peak)),
        "decoding, local": (None, lambda: decoding(LocalGenerator, shape, rows, longest)),
        "decoding, continuous": (None, lambda: decoding(ContinuousGenerator, shape, rows, longest)),
        "decoding, vLLM": ("vllm", lambda: vllm_decoding(shape, rows, longest)),
        "ppo": (None, lambda: ppo(shape, rows, longest, steps)),
    }
    found: dict[str, dict[str, float] | str] = {}
    for name, (package, job) in jobs.items():
        missing = package is not None and importlib.util.find_spec(package) is None
        found[name] = f"skipped: {package} is not installed in this environment" if missing else job()
    label = f"{device}, tiny: these numbers mean nothing" if options.tiny else device
    print(f"{label}\n{table(found)}")
    if peak is None and gpu:
        print("no MFU: the peak of this GPU is not in the table; give it with --peak")
    result = {"machine": run.machine(), "device": label, "found": found}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if not options.tiny:
        run.write("gpu", result)


if __name__ == "__main__":
    main()
