"""Trains on batches that are sampled ahead, with workers of different speeds in each process; run by test_ahead.py.

``python -m torch.distributed.run --nproc-per-node 2 ahead_job.py OUT`` saves in OUT/end.pt the weights of each run.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from builders import character_tokenizer, llama
from burnish import GRPO
from burnish.generate.sampling import Sampling
from burnish.models.sharding import whole
from burnish.training.trainer import Trainer
from rl.test_ahead import FAST, NEVER, ROWS, Worker, by_tokens
from tiny_runs import arguments

KINDS: dict[str, dict[str, Any]] = {
    "completions": {"max_staleness": 1},
    "rounds": {"max_staleness": 2, "dynamic_sampling": 2},
    "sharded": {"max_staleness": 1},
}


def main(out: Path) -> None:
    """Train each kind with two assignments of speeds, and once more from a checkpoint in the middle."""
    rank, ends = int(os.environ["RANK"]), {}
    for kind, settings in KINDS.items():
        for name, held, start in [
            ("straight", (FAST, NEVER)[rank], None),
            ("other", (NEVER, FAST)[rank], None),
            ("resumed", (NEVER, FAST)[rank], f"{out}/{kind}-straight/checkpoint-3"),
        ]:
            method = GRPO(
                lambda answers: [x > 0 for x in by_tokens(answers)],
                Sampling(max_new_tokens=2, samples=2),
                lambda model, tokenizer, held=held: Worker(model, tokenizer, held, []),
                **settings,
            )
            saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
            trainer = Trainer(
                model=llama(),
                args=arguments(
                    out / f"{kind}-{name}", eval_steps=2, per_device_train_batch_size=2, ddp_backend="gloo", **saving
                ),
                method=method,
                train_dataset=ROWS,
                eval_dataset=ROWS[:3],
                processing_class=character_tokenizer(),
                sharded=kind == "sharded",
            )
            trainer.train(resume_from_checkpoint=start)
            method.close()
            replaced = [line["replaced_prompts"] for line in trainer.state.log_history if "replaced_prompts" in line]
            ends[kind, name] = {n: whole(w).clone() for n, w in trainer.network.policy.state_dict().items()}
            assert kind != "rounds" or sum(replaced) > 0
    if rank == 0:
        torch.save(ends, out / "end.pt")
    trainer.accelerator.wait_for_everyone()
    # exit without destroying gloo: its destructor holds the interpreter lock and may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
