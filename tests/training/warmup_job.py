"""Trains PPO with a critic warmup, in which only the critic learns; run by test_processes.py.

``python -m torch.distributed.run --nproc-per-node N warmup_job.py KIND OUT`` saves the weights after each step in
OUT/end.pt. KIND is the critic: shared or separate.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from gradient_job import exact
from resume_job import llama, tokenizer
from transformers import TrainerCallback, TrainingArguments

from burnish import PPO, Trainer
from burnish.generate.sampling import Sampling

PROMPTS = [{"prompt": f"{i} + {'1' * (i % 3)}"} for i in range(12)]


def reward(answers: list[Any]) -> list[float]:
    """A score that follows from the tokens alone."""
    return [sum(answer.tokens) % 9 / 4 - 1 for answer in answers]


def main(kind: str, out: str) -> None:
    """Train for three iterations of four prompts. Only the critic learns in the first two."""
    steps: list[dict[str, torch.Tensor]] = []

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            steps.append({n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()})

    processes = int(os.environ["WORLD_SIZE"])
    critic: Any = {"name": kind, "warmup": 2}
    trainer = Trainer(
        model=llama(initializer_range=0.2).double(),
        args=TrainingArguments(
            out,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=4 // processes,
            num_train_epochs=1,
            learning_rate=1e-2,
            weight_decay=0.1,
            ddp_backend="gloo",
        ),
        method=PPO(reward, Sampling(max_new_tokens=6, samples=3), critic=critic, epochs=2, mini_batches=2),
        train_dataset=PROMPTS,
        processing_class=tokenizer(),
        callbacks=[Keep()],
        token_budget=40,
    )
    for model in trainer.network.models:
        exact(model, torch.float64)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(steps, Path(out) / "end.pt")
    trainer.accelerator.wait_for_everyone()
    # exit without destroying gloo: its destructor holds the interpreter lock and may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
