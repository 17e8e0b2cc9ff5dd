"""Trains on completions of vLLM servers in two processes; run by test_vllm_training.py.

``python -m torch.distributed.run --nproc-per-node 2 vllm_job.py OUT NAME=URL ...`` trains each of ``CASES`` with the
server of its name, and saves what it measured in OUT/results.pt.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from builders import character_tokenizer, llama
from burnish import GRPO, Trainer
from burnish.generate.sampling import Sampling
from burnish.generate.vllm import VllmGenerator
from burnish.generate.vllm_server import VllmServer
from burnish.generate.vllm_weights import BroadcastTensors
from burnish.types import Prompt
from fake_vllm import GlooBroadcast
from tiny_runs import arguments, lora

ROWS = [Prompt(({"role": "user", "content": f"{i} + {'1' * (i % 3)}"},), {}, f"rows:{i}") for i in range(7)]
CASES: dict[str, dict[str, Any]] = {
    "tensors": {},
    "sharded": {"sharded": True},
    "adapter": {"adapter": True},
    "dies": {},
    "other tokens": {},
    "drifts": {},
}


def reward(answers: list[Any]) -> list[float]:
    """A score that follows from the tokens alone."""
    return [sum(answer.tokens) % 9 / 4 - 1 for answer in answers]


def counting(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which counts its calls."""

    def counted(*given: Any) -> Any:
        counts[name] += 1
        return function(*given)

    return counted


def train(
    folder: Path, url: str, sharded: bool = False, adapter: bool = False, start: str | None = None
) -> dict[str, Any]:
    """One iteration of four prompts and one of three. Returns weights, scores, and what each process has sent."""
    processes, counts = int(os.environ.get("WORLD_SIZE", 1)), Counter({"requests": 0, "weights": 0})
    generator = partial(VllmGenerator, url=url, group=GlooBroadcast, wait=20.0, folder=f"{folder}-adapters")
    method = GRPO(reward, Sampling(max_new_tokens=4, samples=3), generator)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    distributed: dict[str, Any] = {"ddp_backend": "gloo"} if processes > 1 else {}
    trainer = Trainer(
        model=lora(llama()) if adapter else llama(),
        args=arguments(folder, per_device_train_batch_size=4 // processes, num_train_epochs=1, **saving, **distributed),
        method=method,
        train_dataset=ROWS,
        processing_class=character_tokenizer(),
        sharded=sharded,
    )
    complete, send = VllmServer.complete, BroadcastTensors.send
    VllmServer.complete = counting(counts, "requests", complete)  # type: ignore[method-assign]
    BroadcastTensors.send = counting(counts, "weights", send)  # type: ignore[method-assign]
    try:
        trainer.train(resume_from_checkpoint=start)
    finally:
        VllmServer.complete, BroadcastTensors.send = complete, send  # type: ignore[method-assign]
        method.close()
    named = trainer.network.named_parameters()
    return {
        "weights": {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named},
        "scores": [line["score"] for line in trainer.state.log_history if "score" in line],
        "sent": trainer.engine.gather(dict(counts)),
    }


def attempt(*given: Any, **settings: Any) -> dict[str, Any]:
    """As ``train``, or the error of each process."""
    try:
        return train(*given, **settings)
    except (ValueError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
    if not torch.distributed.is_initialized():
        return {"errors": [found]}
    errors: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, found)
    return {"errors": errors}


def main(out: Path, urls: dict[str, str]) -> None:
    """Train all cases, and resume the one whose server died."""
    results = {name: attempt(out / name, urls[name], **settings) for name, settings in CASES.items()}
    results["resumed"] = attempt(out / "dies", urls["dies"], start=str(out / "dies" / "checkpoint-1"))
    if torch.distributed.get_rank() == 0:
        torch.save(results, out / "results.pt")
    torch.distributed.barrier()
    # without taking gloo down: its destructor, which holds the interpreter, may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(argument.split("=", 1) for argument in sys.argv[2:]))
