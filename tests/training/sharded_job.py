"""Trains with sharded weights, or in one process; run by test_sharded.py.

``python -m torch.distributed.run --nproc-per-node N sharded_job.py KIND DTYPE OUT`` trains for three optimizer steps,
saves the model in OUT/model, and what was measured in OUT/end.pt. KIND is sft, or the critic of PPO: shared, separate.
With more than one process the weights are sharded.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from resume_job import ROWS, tokenizer
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from warmup_job import PROMPTS, reward

from burnish import PPO, SFT, Trainer
from burnish.generate.sampling import Sampling


def model(dtype: torch.dtype, **config: Any) -> LlamaForCausalLM:
    """A Llama of two layers."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 102,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | config)).to(dtype)


class Keep(TrainerCallback):
    """Keeps losses and gradient norms, and checks that the weights are sharded wherever they should be."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check parameters and gradients."""
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) == self.sharded, name
            assert parameter.grad is None or isinstance(parameter.grad, DTensor) == self.sharded, name

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check parameters."""
        assert all(isinstance(parameter, DTensor) == self.sharded for parameter in model.parameters())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep a line of the log."""
        self.logs.append(dict(logs))


def main(kind: str, dtype: str, out: str) -> None:
    """Train for three optimizer steps."""
    processes = int(os.environ["WORLD_SIZE"])
    keep = Keep(processes > 1)
    if kind == "sft":
        method: Any = SFT()
    else:
        critic: Any = {"name": kind, "learning_rate": 2e-2}
        method = PPO(reward, Sampling(max_new_tokens=6, samples=3), critic=critic, epochs=1)
    trainer = Trainer(
        model=model(getattr(torch, dtype)),
        args=TrainingArguments(
            out,
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
            ddp_backend="gloo",
        ),
        method=method,
        train_dataset=ROWS if kind == "sft" else PROMPTS,
        eval_dataset=(ROWS if kind == "sft" else PROMPTS)[:3],
        processing_class=tokenizer(),
        callbacks=[keep],
        token_budget=40,
        sharded=processes > 1,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model(f"{out}/model")
    weights = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in trainer.network.named_parameters()}
    if trainer.is_world_process_zero():
        end = {"before": before, "after": after, "logs": keep.logs, "weights": weights}
        torch.save({name: x for name, x in end.items()}, Path(out) / "end.pt")
    trainer.accelerator.wait_for_everyone()
    # without taking gloo down: its destructor, which holds the interpreter, may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
