"""On one GPU: SFT of a model of Qwen3-0.6B's shape on rows of 8,192 tokens, and what an iteration of PPO spends.

    python benchmarks/gpu.py --peak 989

Weights are random and kept in float32, products of passes are computed in bfloat16 by autocast; sampling is in float32,
so that an update's log-probabilities are measured again. ``--peak`` is the data sheet's rate of dense bfloat16 products
in TFLOP/s. ``--small`` takes a tiny model and any device: it shows that the script works, and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from typing import Any

import run
import torch
import workload
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments

from burnish import PPO, SFT, Trainer, machine
from burnish.data.readers import load
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
SMALL = SHAPE | {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WARMUP = 2  # steps


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


def operations(shape: dict[str, Any], rows: int, length: int) -> float:
    """Of a training step: 6 a weight and token, the head on the learned half, and attention where a token may look."""
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


def sft(shape: dict[str, Any], batch: int, length: int, steps: int, peak: float, compiled: bool) -> dict[str, float]:
    """Tokens a second, the share of the peak and of a measured rate, and memory."""
    clock, total = Clock(), WARMUP + steps
    arguments = {"max_steps": total, "per_device_train_batch_size": batch, "torch_compile": compiled}
    made = [row["row"] for row in workload.rows("sft", batch * total, shape["vocab_size"], length)]
    with tempfile.TemporaryDirectory() as out:
        trainer(shape, SFT(), made, arguments, out, token_budget=length, callbacks=[clock]).train()
    done = operations(shape, batch, length) * steps / clock.seconds
    size, dtype = (8192, torch.bfloat16) if torch.cuda.is_available() else (512, torch.float32)
    measured = machine.matmul_rate(dtype, size)
    found = {"tokens_per_second": batch * length * steps / clock.seconds, "of_measured_rate": done / measured}
    return found | ({"of_peak": done / peak / 1e12} if peak else {}) | {"peak_gib": peak_memory()}


def ppo(shape: dict[str, Any], batch: int, longest: int, steps: int) -> dict[str, float]:
    """Seconds of the parts of an iteration: sampling, what is worked out before the update, and the update; memory."""
    clock, parts = Clock(), {"sampling": 0.0, "experience": 0.0, "update": 0.0}
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
        timed(method.sampler.bind(job.engine, job.run), "poll", "sampling")
        timed(job.get_train_dataloader(), "_measured", "experience")
        timed(job, "training_step", "update")
        job.train()
    return {f"{name}_seconds": seconds / steps for name, seconds in parts.items()} | {
        "iteration_seconds": clock.seconds / steps,
        "peak_gib": peak_memory(),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=float, default=0.0, help="TFLOP/s in bfloat16, by the data sheet")
    parser.add_argument("--compile", action="store_true", help="SFT under torch.compile")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: there is no GPU here; --small shows that the script works")
    shape, batch, length, longest = (SMALL, 2, 128, 16) if options.small else (SHAPE, 8, 8192, 512)
    found = {"sft": sft(shape, batch, length, options.steps, options.peak, options.compile)}
    found["ppo"] = ppo(shape, 4 if options.small else 64, longest, options.steps)
    for method, numbers in found.items():
        print(method, "  ".join(f"{name} {number:.4g}" for name, number in numbers.items()), flush=True)
    if not options.small:
        run.write("gpu", {"machine": run.machine(), "device": torch.cuda.get_device_name(), "found": found})


if __name__ == "__main__":
    main()
