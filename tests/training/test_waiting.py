"""How often an optimizer step and a pass make the program wait for a GPU, and how micro-batches get there."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

import pytest
import torch

from burnish import DPO, GRPO, PPO, SFT, Trainer
from burnish.generate.sampling import Sampling
from burnish.kernels import attention, grouped
from burnish.models.batching import collate
from burnish.training import terms
from burnish.types import Example, Sequence
from operations import Counter
from tiny_runs import PAIRS, PROMPTS, ROWS

SAMPLING = Sampling(max_new_tokens=8, samples=2)
JOBS: dict[str, tuple[Any, list[Any]]] = {
    "sft": (SFT, ROWS),
    "dpo": (DPO, PAIRS),
    "grpo": (lambda: GRPO(distinct, SAMPLING), PROMPTS),
    "ppo": (lambda: PPO(distinct, SAMPLING, epochs=2, mini_batches=2), PROMPTS),
}


def distinct(trajectories: list[Any]) -> list[float]:
    """Reward different tokens."""
    return [float(len(set(t.tokens))) for t in trajectories]


@pytest.mark.parametrize("name", JOBS)
def test_a_step_waits_a_few_times_however_many_micro_batches_it_has(name: str, make: Any, monkeypatch: Any) -> None:
    # both are only on a CPU
    monkeypatch.setattr(terms, "_check_count", lambda *_: None)
    monkeypatch.setattr(grouped, "fits", lambda dtype, device: False)
    step, next_rows = Trainer.training_step, Trainer.get_batch_samples
    counter, counted, cuts = Counter(on=False), list[Tally[str]](), list[int]()

    def training_step(self: Any, *args: Any) -> Any:
        counter.syncs, counter.on = Tally(), True
        cut = self.engine.cut
        monkeypatch.setattr(self.engine, "cut", lambda e: (batches := cut(e), cuts.append(len(batches)))[0])
        return step(self, *args)

    def get_batch_samples(self: Any, *args: Any) -> Any:  # the step is over, and its line is logged
        counted.extend([counter.syncs] if counter.on else [])
        counter.on = False
        return next_rows(self, *args)

    method, rows = JOBS[name]
    trainer = make(method(), rows=rows, max_steps=4, max_grad_norm=1.0, token_budget=64)
    monkeypatch.setattr(Trainer, "training_step", training_step)
    monkeypatch.setattr(Trainer, "get_batch_samples", get_batch_samples)
    with counter:
        trainer.train()
    assert max(cuts[:3]) >= 3, cuts
    # whether the loss and the gradient are finite, the loss of transformers' log, and all metrics together
    assert all(sum(syncs.values()) <= 5 for syncs in counted[1:3]), counted
    assert counted[1]["index"] == counted[1]["masked_select"] == 0


def test_a_pass_waits_twice_for_each_micro_batch(make: Any) -> None:
    trainer = make(token_budget=64)
    examples = trainer.train_examples.examples
    batches = len(trainer.engine.cut(examples))

    def arrays(batch: Any) -> dict[str, torch.Tensor]:
        return {name: batch.tokens.float() for name in ("a", "b", "c")}

    with Counter() as counter:
        trainer.engine.run(arrays, examples)
    copies = counter.syncs["tolist"] + counter.syncs["cpu"]
    assert batches > 2 and copies == 2 * batches, counter.syncs


def test_a_micro_batch_is_copied_to_a_gpu_from_pinned_memory_without_waiting(monkeypatch: Any) -> None:
    """A stand-in for a GPU: the copies stay on the CPU."""
    calls: list[tuple[str, Any]] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        calls.append(("pin", self.clone()))
        return self

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(("to", (self.clone(), args, kwargs)))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = collate([Example((Sequence([5, 9, 12, 3], [False, False, True, True], "chat.jsonl:17"),))], pad_id=0)
    gpu = torch.device("cuda")
    moved = batch.to(gpu)
    assert [name for name, _ in calls] == ["pin", "to"] * (len(calls) // 2) and len(calls) == 2 * 12
    assert all(args == (gpu,) and kwargs == {"non_blocking": True} for _, (_, args, kwargs) in calls[1::2])
    assert all(torch.equal(pinned, sent[0]) for (_, pinned), (_, sent) in zip(calls[::2], calls[1::2], strict=True))
    assert torch.equal(moved.tokens, batch.tokens) and torch.equal(moved.learned, torch.tensor([2, 3]))
    calls.clear()
    batch.to(torch.device("cpu"))
    assert {name for name, _ in calls} == {"to"}


def test_the_plan_of_packed_attention_is_copied_from_pinned_memory(monkeypatch: Any) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: (pinned.append(self.tolist()), self)[1])
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    attention._plan.cache_clear()
    index, of_queries, of_keys, longest = attention._plan(attention.Segments((2, 3), (None, 0)), torch.device("cuda"))
    attention._plan.cache_clear()
    assert index is not None and index.tolist() == [0, 1, 0, 1, 2, 3, 4] and longest == 5
    assert (of_queries.tolist(), of_keys.tolist()) == ([0, 2, 5], [0, 2, 7])
    assert pinned == [[0, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3, 4]]
