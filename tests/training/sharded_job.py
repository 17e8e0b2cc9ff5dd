"""Trains with sharded weights in several processes, or without in one; run by test_sharded.py.

``python -m torch.distributed.run --nproc-per-node 2 sharded_job.py OUT`` saves the results of all ``CASES`` in
OUT/results.pt, and the trained models in OUT/CASE.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from burnish import PPO, SFT, Trainer, UserError
from burnish.generate.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parent))
from gradient_job import exact
from resume_job import ROWS, tokenizer
from warmup_job import PROMPTS, reward

CASES = {
    f"{kind} {dtype}": (kind, dtype)
    for kind, dtype in [
        ("sft", "float32"),
        ("sft", "float64"),
        ("shared", "float32"),
        ("shared", "float64"),
        ("separate", "float32"),
    ]
}
"""SFT, and PPO with each kind of critic, which learns alone in the first step."""


class Observer(TrainerCallback):
    """Keeps what is logged, and asserts that weights and gradients are sharded, or that none of them are."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self.logs: list[dict[str, float]] = []
        self.without_gradient: list[list[str]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check the parameters and their gradients."""
        self.on_step_end(args, state, control, model)
        gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        assert all(g is None or isinstance(g, DTensor) == self.sharded for g in gradients.values())
        self.without_gradient.append([name for name, gradient in gradients.items() if gradient is None])

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check the parameters."""
        assert all(isinstance(p, DTensor) == self.sharded for p in model.parameters())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep a line of the log."""
        self.logs.append(dict(logs))


def trainer(kind: str, dtype: str, folder: Path, processes: int) -> tuple[Trainer, Observer]:
    """A trainer of three optimizer steps that shards if there are several processes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=102,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        initializer_range=0.2,
        tie_word_embeddings=kind == "shared",
    )
    observer = Observer(processes > 1)
    critic: Any = {"name": kind, "learning_rate": 2e-2, "warmup": 1}
    made = Trainer(
        model=exact(LlamaForCausalLM(config), getattr(torch, dtype)),
        args=TrainingArguments(
            str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            per_device_train_batch_size=4 // processes,
            max_steps=3,
            learning_rate=1e-2,
            weight_decay=0.1,
            max_grad_norm=0.5,
            ddp_backend="gloo" if processes > 1 else None,
        ),
        method=SFT()
        if kind == "sft"
        else PPO(reward, Sampling(max_new_tokens=6, samples=3), critic=critic, epochs=1, mini_batches=1),
        train_dataset=ROWS if kind == "sft" else PROMPTS,
        eval_dataset=ROWS[:3] if kind == "sft" else PROMPTS[:3],
        processing_class=tokenizer(),
        callbacks=[observer],
        token_budget=40,
        sharded=processes > 1,
    )
    return made, observer


def full(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of all parameters."""
    named = trainer.network.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def train(kind: str, dtype: str, folder: Path, processes: int) -> dict[str, Any]:
    """Evaluate, train, evaluate and save; with sharded weights, also load what was saved."""
    made, observer = trainer(kind, dtype, folder, processes)
    made.evaluate()
    made.train()
    made.evaluate()
    made.save_model(str(folder))
    weights = full(made)
    results = {"metrics": observer.logs, "weights": weights, "without_gradient": observer.without_gradient}
    if processes > 1:
        made.accelerator.wait_for_everyone()
        with torch.no_grad():
            for parameter in made.network.parameters():
                parameter.zero_()
        made.engine.load(folder)
        results["loaded"] = full(made)
        if kind == "sft":
            check_out_of_memory(made)
    return results


def check_out_of_memory(made: Trainer) -> None:
    """A pass without gradient that runs out of memory names the setting, and is not repeated."""

    def too_large(batch: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    examples = made.train_examples.examples
    made.engine.token_budget = 100  # three examples
    with pytest.raises(UserError, match="set a smaller token_budget"):
        made.engine.run(too_large, examples)


def main(out: Path) -> None:
    """Train all cases."""
    results = {
        name: train(kind, dtype, out / name, int(os.environ["WORLD_SIZE"])) for name, (kind, dtype) in CASES.items()
    }
    if torch.distributed.get_rank() == 0:
        torch.save(results, out / "results.pt")
    torch.distributed.barrier()
    # without taking gloo down: its destructor, which holds the interpreter, may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
