"""One measured run of one side, in a process of its own; the last line that it prints is a JSON object.

``python benchmarks/side.py burnish sft --folder FOLDER``, where FOLDER is what ``workload.py`` made. Warm-up steps come
first; what is counted lies between the end of the last of them and the end of the last step. ``--given`` takes one step
on given completions instead, for methods that sample.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import flops
import workload

ONLINE = ("grpo", "rloo", "ppo")
LEARNING_RATE = 1e-5


class Job(NamedTuple):
    """What both sides are told: the method, rows of the warm-up and of the measured steps, and where models lie."""

    method: str
    folder: Path
    rows: list[dict[str, Any]]
    warmup: int
    steps: int
    given: list[list[list[int]]] | None
    options: argparse.Namespace

    @property
    def batch(self) -> int:
        """Rows of a step; prompts, where completions are sampled."""
        return self.options.batch or (4 if self.method in ("grpo", "rloo") else 16)

    @property
    def samples(self) -> int:
        """Completions of a prompt."""
        return 8 if self.method in ("grpo", "rloo") else 1

    def arguments(self, out: str) -> dict[str, Any]:
        """Of ``transformers.TrainingArguments``, for both sides."""
        return {
            "output_dir": out,
            "use_cpu": True,
            "bf16": self.options.bf16,
            "per_device_train_batch_size": self.batch,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }


class Clock:
    """What a run tells: when each step ended, and how many tokens each batch of completions had.

    Of Burnish also the lengths of prompts and completions, and the CPU seconds of its passes with gradient.
    """

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.completed: list[int] = []
        self.sequences: list[list[tuple[int, list[int]]]] = []
        self.update = 0.0
        self.losses: list[float] = []
        self.gradients: list[float] = []

    def tick(self) -> None:
        """A step has ended."""
        self.ends.append((time.process_time(), time.perf_counter()))

    def look(self, loss: float, model: Any) -> None:
        """A loss and the norm of its gradient, without that of a value head's bias, which only Burnish's critic has."""
        import torch

        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None and p.shape != (1,)]
        self.losses.append(loss)
        self.gradients.append(float(torch.cat(parts).norm()))

    def callback(self) -> Any:
        """What ticks at the end of each step of a trainer."""
        from transformers import TrainerCallback

        clock = self

        class Tick(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.tick()

        return Tick()


def score(completions: list[Any]) -> list[float]:
    """The reward of both sides where it is a function: a number that every token changes."""
    return [sum(int(i) for i in ids) % 7 / 3 for ids in completions]


def tokens_of(job: Job, clock: Clock) -> int:
    """Real tokens of the measured steps; a prompt counts once for each of its sequences, padding never."""
    size = len(job.rows) // (job.warmup + job.steps)
    parts = [row["tokens"] for row in job.rows[job.warmup * size :]]
    if job.method in ONLINE:
        prompts = sum(part["prompt"] for part in parts) * job.samples
        return prompts + sum(clock.completed[job.warmup :])
    return sum(part["prompt"] * len(part["answers"]) + sum(part["answers"]) for part in parts)


def share_of_machine(job: Job, clock: Clock, cpu: float) -> dict[str, float]:
    """Rates of matrix products, and the share of each that the measured steps reach; online of their updates alone.

    ``torch.mm``, and oneDNN's product where Burnish uses it.
    """
    import torch

    from burnish.kernels import linear

    size = len(job.rows) // (job.warmup + job.steps)
    parts = [row["tokens"] for row in job.rows[job.warmup * size :]]
    sequences = [(part["prompt"], part["answers"]) for part in parts]
    if job.method in ONLINE:
        sequences = [one for batch in clock.sequences for one in batch]
    passes = 4 if job.method == "ppo" else 1
    operations = passes * flops.needed(job.method, sequences, job.options.vocabulary)
    reached = operations / (clock.update if job.method in ONLINE else cpu)
    rates = {"mm": flops.multiply_rate(torch.mm)}
    rates["fastest"] = max(rates["mm"], flops.multiply_rate(linear.product) if linear.has_onednn() else 0.0)
    return {f"{name}_rate": rate for name, rate in rates.items()} | {
        f"{name}_share": reached / rate for name, rate in rates.items()
    }


def measure(side: str, job: Job) -> dict[str, Any]:
    """Train, and say what it took."""
    import torch

    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        os.environ["BURNISH_CACHE"] = f"{out}/cache"
        trainer, ticks = importlib.import_module(f"{side}_side").trainer(job, clock, out)
        with open("/proc/self/statm", encoding="ascii") as file:
            loaded = int(file.read().split()[1]) * resource.getpagesize()
        began = time.process_time()
        # here Burnish encodes its rows and works out the reference; TRL has encoded them when it was made
        trainer.get_train_dataloader()
        preparation = time.process_time() - began
        trainer.train()
    ends = clock.ends if job.warmup == 0 else clock.ends[job.warmup * ticks - 1 :]
    cpu, wall = (after - before for before, after in zip(ends[0], ends[-1], strict=True))
    if job.method == "dpo":
        cpu += preparation * job.steps / (job.warmup + job.steps)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "side": side,
        "method": job.method,
        "losses": clock.losses or [line["loss"] for line in lines],
        "gradients": clock.gradients or [line["grad_norm"] for line in lines],
        "tokens": tokens_of(job, clock),
        "cpu": cpu,
        "wall": wall,
        "preparation": preparation,
        "loaded": loaded,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    } | (share_of_machine(job, clock, cpu) if job.options.rate and side == "burnish" else {})


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["burnish", "trl"])
    parser.add_argument("method", choices=["sft", "dpo", "reward", *ONLINE])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, help="of every row; else log-normal")
    parser.add_argument("--batch", type=int, help="rows of a step")
    parser.add_argument("--copies", type=int, default=1, help="how often the rows of the measured steps come")
    parser.add_argument("--without", help="one thing of Burnish that is taken away (ablations.py)")
    parser.add_argument("--given", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--rate", action="store_true", help="measure the rate of matrix products as well")
    options = parser.parse_args()
    warmup, steps = (0, 1) if options.given else (options.warmup, options.steps)
    job = Job(options.method, options.folder, [], warmup, steps * options.copies, None, options)
    count = job.batch * (1 if job.method == "ppo" else warmup + steps)
    made = workload.rows(job.method, count, options.vocabulary, options.length)
    made = made * (warmup + steps) if job.method == "ppo" else made  # PPO sees one batch of prompts again and again
    made += made[warmup * job.batch :] * (options.copies - 1)
    given = workload.given(job.batch, job.samples, options.vocabulary, job.method == "ppo") if options.given else None
    print(json.dumps(measure(options.side, job._replace(rows=made, given=given))))


if __name__ == "__main__":
    main()
