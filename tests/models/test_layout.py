"""Passes without gradient: limited on every device, and repeated in smaller parts if memory runs out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import SFT, UserError
from burnish.models import forward, layout
from burnish.models.batching import deal
from burnish.models.heads import Network, StepValueHead
from burnish.models.layout import BUDGET_OF_PASS, Layout, budget_of_pass
from burnish.models.loading import load_reward_model
from burnish.models.logprobs import logprobs
from burnish.rewards.model import ModelReward
from burnish.rewards.steps import StepReward
from burnish.types import Conversation, Example, Messages, MicroBatch, Sequence, Trajectory


def examples(n: int, length: int = 10) -> list[Example]:
    """Rows of different lengths and contents."""
    rows = [tuple((7 * i + t) % 90 + 10 for t in range(length + i % 3)) for i in range(n)]
    return [Example((Sequence(row, (False,) + (True,) * (len(row) - 1), f"row:{i}"),)) for i, row in enumerate(rows)]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes memory run out if a pass has more than so many tokens; records the tokens of each pass."""
    seen: list[int] = []

    def limit(tokens: int) -> list[int]:
        plain = forward.backbone

        def body(model: Any) -> Any:
            inner = plain(model)

            def run(*args: Any, **kwargs: Any) -> Any:
                size = kwargs["input_ids"].numel()
                if size > tokens:
                    raise torch.OutOfMemoryError("full")
                seen.append(size)
                return inner(*args, **kwargs)

            run.parameters = inner.parameters  # type: ignore[attr-defined]
            return run

        monkeypatch.setattr(forward, "backbone", body)
        return seen

    return limit


def test_a_pass_has_a_default_budget(tiny_llama: Any) -> None:
    model = tiny_llama()
    sizes = [b.tokens.numel() for _, b, _ in Layout([model]).passes(lambda b: None, examples(500, 20))]
    assert len(sizes) > 1 and max(sizes) <= BUDGET_OF_PASS


@pytest.mark.parametrize(
    ("free", "expected"),
    [(2**34, 16384), (2 * 4096 * (8 * 32 + 3 * 64) * 4, 4096), (2 * 4096 * (8 * 32 + 3 * 64) * 4 - 1, 2048), (0, 1024)],
)
def test_the_default_of_a_pass_on_a_gpu_fits_half_of_its_free_memory(
    free: int, expected: int, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer keeps 8 vectors of 32 and 3 of 64 float32 numbers for each token."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    assert budget_of_pass([tiny_llama()], torch.device("cuda")) == expected
    assert budget_of_pass([tiny_llama()], torch.device("cpu")) == BUDGET_OF_PASS


def test_the_default_is_measured_once_and_stays_halved(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, full: Any
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(layout, "budget_of_pass", lambda *_: (measured.append(1), 64)[1])
    model, seen = tiny_llama(), full(40)
    rows = Layout([model])
    with pytest.warns(UserWarning, match="continuing with token_budget=3"):
        list(rows.passes(lambda b: forward.learned_logprobs(model, b), examples(12)))
    assert rows.pass_budget is not None and rows.pass_budget <= 32 and max(seen) <= 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not tried again
        done = list(rows.passes(lambda b: forward.learned_logprobs(model, b), examples(12)))
    assert sorted(i for group, _, _ in done for i in group) == list(range(12)) and len(measured) == 1
    assert rows.limit(16) == 16 and rows.limit(10**6) == rows.pass_budget


def test_a_checkpoint_keeps_the_budget_of_passes(make_trainer: Any, tiny_llama: Any, tmp_path: Path) -> None:
    def make() -> Any:
        rows = [Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), None, "c:1")]
        settings = {"max_steps": 1, "save_steps": 1, "save_strategy": "steps", "output_dir": str(tmp_path)}
        return make_trainer(SFT(), tiny_llama(), rows, own={"token_budget": 512}, **settings)

    first, second = make(), make()
    first.engine.layout.pass_budget = 128
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert second.engine.layout.pass_budget == 128 and second.engine.layout.limit(512) == 128


@pytest.mark.parametrize("pass_", ["logprobs", "model reward", "step reward", "evaluate", "annotate"])
def test_passes_continue_with_half_the_budget_when_memory_runs_out(
    pass_: str, tiny_llama: Any, tiny_tokenizer: Any, tiny_folder: Any, make_trainer: Any, full: Any
) -> None:
    """Only training steps were repeated: an evaluation or a reward ended the run."""
    prompt: Messages = ({"role": "user", "content": "Hi"},)
    words = ["yes\n" * (1 + i % 4) for i in range(12)]
    ids = [tuple(tiny_tokenizer(text, add_special_tokens=False)["input_ids"]) for text in words]
    answers = [
        Trajectory.from_text(t.strip(), prompt, tokens=i, source=f"a:{k}")
        for k, (t, i) in enumerate(zip(words, ids, strict=True))
    ]
    rows = [
        Conversation((*prompt, {"role": "assistant", "content": text}), None, f"c:{i}") for i, text in enumerate(words)
    ]
    model = tiny_llama()
    trainer = make_trainer(SFT(), model, rows[:4], own={"eval_dataset": rows[4:], "token_budget": 4096})

    def run() -> Any:
        if pass_ == "logprobs":
            return logprobs(model, [e.sequences[0] for e in examples(12)])
        if pass_ == "model reward":
            torch.manual_seed(0)
            return ModelReward(load_reward_model(str(tiny_folder)), tiny_tokenizer)(answers)
        if pass_ == "step reward":
            torch.manual_seed(0)
            head = StepValueHead(32)
            torch.nn.init.normal_(head.value.weight)
            return StepReward(Network(model, head), tiny_tokenizer).values(answers)
        if pass_ == "evaluate":
            return [trainer.evaluate()["eval_loss"]]
        results = trainer.engine.run(lambda b: {"x": forward.learned_logprobs(model, b)}, examples(12))
        return [e.sequences[0].arrays["x"] for e in results]

    expected = run()
    seen = full(60)
    with pytest.warns(UserWarning, match="out of memory: continuing with token_budget="):
        halved = run()
    assert len(seen) > 2 and max(seen) <= 60
    for a, b in zip(halved, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_padding_to_a_fixed_width_does_not_repeat_a_pass_forever(tiny_llama: Any, full: Any) -> None:
    model = tiny_llama()
    layout = Layout([model], pad_to=128, packed=False)
    seen = full(300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = list(layout.passes(lambda b: forward.learned_logprobs(model, b), examples(8)))
    assert sorted(i for group, _, _ in done for i in group) == list(range(8)) and max(seen) <= 300


def test_one_example_that_does_not_fit_is_an_error(tiny_llama: Any, full: Any) -> None:
    model = tiny_llama()
    layout = Layout([model])
    full(5)
    with warnings.catch_warnings(), pytest.raises(UserError, match=r"micro-batch of one example \(.* 12 tokens, row:"):
        warnings.simplefilter("ignore")
        list(layout.passes(lambda b: forward.learned_logprobs(model, b), examples(3)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_process_makes_equally_many_passes(world_size: int, tiny_llama: Any) -> None:
    rows, layout = examples(5), Layout([tiny_llama()])
    calls: list[int] = []
    seen: list[int] = []
    for rank in range(world_size):
        batches: list[MicroBatch] = []
        most = iter([-(-5 // world_size), 0])
        processes: Any = {"rank": rank, "world_size": world_size, "gather": lambda n, most=most: [n, next(most)]}
        seen += [i for group, _, _ in layout.passes_together(batches.append, rows, 10, **processes) for i in group]
        calls.append(len(batches))
    assert sorted(seen) == list(range(5)), "no example is lost, and none is seen twice"
    assert len(set(calls)) == 1 and calls[0] * world_size >= 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_runs_out_of_memory_keeps_step_with_the_other_one(rank: int, tiny_llama: Any, full: Any) -> None:
    """The other process makes two passes of up to 40 tokens, and then waits for those of half the size."""
    model = tiny_llama()
    layout = Layout([model], packed=True)
    seen = full(25 if rank == 1 else 100)
    left: list[int] = []

    def gather(waiting: int) -> list[int]:
        left.append(waiting)
        return [waiting, 2 if len(left) == 1 else 0] if rank == 1 else [waiting, [2, 2, 0][len(left) - 1]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        passes = layout.passes_together(
            lambda b: forward.learned_logprobs(model, b), examples(12), 40, rank=rank, world_size=2, gather=gather
        )
        done = [i for group, _, _ in passes for i in group]
    assert len(done) == 6 and len(set(done)) == 6
    if rank == 1:  # a pass that fails, a short one for it and one for the second pass, and the rest in smaller parts
        assert left[0] == 2 and left[1] >= 3 and left[2] == 0 and len(seen) == 2 + left[1]
    else:  # two passes, and two short ones
        assert left == [2, 0, 0] and len(seen) == 4 and max(seen[2:]) < 15


LOG_NORMAL = torch.distributions.LogNormal(4.0, 0.8)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("budget", [2048, 700, None])
@pytest.mark.parametrize("packed", [True, False])
def test_the_slowest_process_has_at_most_a_tenth_more_tokens_than_the_mean(
    world_size: int, budget: int | None, packed: bool, tiny_llama: Any
) -> None:
    layout = Layout([tiny_llama(max_position_embeddings=4096)], packed=packed)
    torch.manual_seed(world_size)
    for rows in (97, 256):
        drawn: torch.Tensor = LOG_NORMAL.sample((rows,))  # type: ignore[assignment]
        lengths = drawn.clamp(4, 600).int().tolist()
        step = [Example((Sequence((5,) * n, (False,) + (True,) * (n - 1), f"row:{i}"),)) for i, n in enumerate(lengths)]
        of_ranks = [layout.cut(step, budget, rank, world_size) for rank in range(world_size)]
        assert len({len(batches) for batches in of_ranks}) == 1
        learned = [s for batches in of_ranks for b in batches if b.counts["tokens"] for s in b.sources]
        assert sorted(learned) == sorted(f"row:{i}" for i in range(rows))
        sizes = [b.tokens.numel() for batches in of_ranks for b in batches]
        assert budget is None or max(sizes) <= budget
        loads = [sum(b.tokens.numel() for b in batches) for batches in of_ranks]
        assert max(loads) <= 1.1 * sum(loads) / world_size, loads


def test_micro_batches_are_dealt_longest_first_to_the_rank_with_the_fewest_tokens() -> None:
    assert deal([5, 9, 7, 1, 3], 2) == [[1, 4, 3], [2, 0]]
    assert deal([4, 1, 1, 1], 2) == [[0, 3], [1, 2]]  # not three for the second: all have equally many
    assert deal([3], 2) == [[0], []]
