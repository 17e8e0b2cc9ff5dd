"""Async rewards, time limits, and scores that come in while others are still awaited."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.errors import UserCodeError, UserError
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import Scorer, score
from burnish.types import Trajectory
from burnish.user_functions import load
from burnish.user_tasks import user_tasks


def trajectories(*texts: str) -> list[Trajectory]:
    return [
        Trajectory.from_text(text, tokens=[5] * len(text), columns={"n": i}, source=f"prompts.jsonl:{i + 1}")
        for i, text in enumerate(texts)
    ]


def drawn() -> float:
    return random.random() + np.random.rand() + torch.rand(()).item()


def sync_reward(given: list[Trajectory]) -> list[float]:
    return [len(t.text) + drawn() for t in given]


async def async_reward(given: list[Trajectory]) -> list[float]:
    """As ``sync_reward``, with waits and side effects between the draws."""
    scores = []
    for t in given:
        scores.append(len(t.text) + drawn())
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        await asyncio.sleep(0.002 * (t.columns["n"] % 3))
        given[0].columns.clear()  # type: ignore[attr-defined]
        assert Path.cwd() != Path("/") and torch.get_default_dtype() is torch.float32
        given[0] = t
    return scores


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=5), st.integers(0, 9))
@settings(max_examples=20)
def test_an_async_reward_gives_the_same_bytes_as_a_sync_one(texts: list[str], seed: int) -> None:
    def reward(function: Any) -> list[NamedReward]:
        return [NamedReward("draws", 2.0, function), NamedReward("again", 1.0, function)]

    before = random.getstate(), torch.get_rng_state().tolist()
    assert score(trajectories(*texts), reward(async_reward), (seed,)) == score(
        trajectories(*texts), reward(sync_reward), (seed,)
    )
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_random_numbers_of_async_tasks_do_not_depend_on_timing() -> None:
    def reward(pauses: list[float]) -> Callable[..., Any]:
        async def judge(t: Trajectory) -> float:
            await asyncio.sleep(pauses[t.columns["n"]])
            first = drawn()
            await asyncio.sleep(pauses[-1 - t.columns["n"]])
            return first + drawn()

        async def judges(given: list[Trajectory]) -> list[float]:
            return list(await asyncio.gather(*[judge(t) for t in given]))

        return judges

    one, two = (
        score(trajectories("a", "b", "c"), [NamedReward("judge", 1.0, reward(pauses))], (1,))
        for pauses in ([0.0, 0.01, 0.02], [0.02, 0.0, 0.01])
    )
    assert one == two and len(set(one.totals)) == 3


def test_async_rewards_run_while_others_are_sampled() -> None:
    events = []

    async def slow(given: list[Trajectory]) -> list[float]:
        events.append(f"begin {given[0].text}")
        await asyncio.sleep(0.05)
        events.append(f"end {given[0].text}")
        return [1.0] * len(given)

    with Scorer([NamedReward("slow", 1.0, slow)]) as scorer:
        for number, text in enumerate("abc"):
            scorer.add(number, trajectories(text))
            scorer.advance()
            events.append(f"sample after {text}")
        began = time.perf_counter()
        assert {number: scores.totals for number, scores in scorer.finish().items()} == {0: [1.0], 1: [1.0], 2: [1.0]}
        assert time.perf_counter() - began < 0.5
    assert events[:2] == ["begin a", "sample after a"] and events.index("begin c") < events.index("end a")


@given(st.permutations(range(4)))
@settings(max_examples=10)
def test_the_order_in_which_groups_finish_does_not_matter(order: list[int]) -> None:
    rewards = [NamedReward("async", 1.0, async_reward), NamedReward("sync", 1.0, sync_reward)]

    def scored(order: list[int]) -> dict[int, Any]:
        with Scorer(rewards, (3, 1)) as scorer:
            for number in order:
                scorer.add(number, trajectories("a" * number, "bb"))
                scorer.advance()
            return scorer.finish()

    assert scored(order) == scored([0, 1, 2, 3])


def test_the_result_of_an_async_reward_is_checked() -> None:
    async def short(given: list[Trajectory]) -> list[float]:
        return [1.0]

    async def of_tokens(given: list[Trajectory]) -> list[list[float]]:
        return [[float(i) for i in range(len(t.tokens))] for t in given]

    with pytest.raises(UserError, match="reward short returned 1 scores for 2 trajectories"):
        score(trajectories("a", "b"), [NamedReward("short", 1.0, short)])
    scores = score(trajectories("abc", "b"), [NamedReward("tokens", 2.0, of_tokens)])
    assert scores.tokens is not None and [one.tolist() for one in scores.tokens] == [[0.0, 2.0, 4.0], [0.0]]
    assert scores.totals == [6.0, 0.0]


CODE = """
import asyncio, json, sys, time
async def ratio(trajectories):
    await asyncio.sleep(0)
    return [await ratio_of(t) for t in trajectories]
async def ratio_of(trajectory):
    await asyncio.sleep(0.001)
    return 1 / 0
async def gathered(trajectories):
    return await asyncio.gather(*[ratio_of(t) for t in trajectories])
async def leave(trajectories):
    await asyncio.sleep(0)
    sys.exit(3)
async def waiting(trajectories):
    await asyncio.sleep(60)
async def blocking(trajectories):
    await asyncio.sleep(0)
    time.sleep(60)
def sleeping(trajectories):
    try:
        time.sleep(60)
    except Exception:
        pass
def spinning(trajectories):
    while True:
        pass
async def canceled(trajectories):
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    await task
"""


@pytest.fixture
def failing(tmp_path: Path) -> Callable[..., UserCodeError]:
    file = tmp_path / "mine.py"
    file.write_text(CODE)

    def call(name: str, timeout: float = 600.0) -> UserCodeError:
        reward = NamedReward(name, 1.0, load(f"{file}:{name}"), f"mine.py:{name}", timeout)
        with pytest.raises(UserCodeError) as caught:
            score(trajectories("a", "b", "c"), [reward])
        frames = [line for line in caught.value.traceback.splitlines() if line.startswith('  File "')]
        assert frames and all(line.startswith(f'  File "{file}"') for line in frames), caught.value.traceback
        return caught.value

    return call


BATCH = "on a batch of 3 trajectories (prompts.jsonl:1 ... prompts.jsonl:3)"


@pytest.mark.parametrize("name", ["ratio", "gathered"])
def test_an_exception_of_an_async_reward_has_the_message_of_a_sync_one(name: str, failing: Any) -> None:
    error = failing(name)
    assert str(error) == f"reward {name} (mine.py:{name}) raised ZeroDivisionError {BATCH}: division by zero"
    assert "return 1 / 0" in error.traceback
    assert not user_tasks().running


def test_exits_and_cancellations_of_an_async_reward_are_reported(failing: Any) -> None:
    assert str(failing("leave")) == f"reward leave (mine.py:leave) raised SystemExit {BATCH}: 3"
    assert "raised RuntimeError" in str(failing("canceled"))


@pytest.mark.parametrize("name", ["waiting", "sleeping", "spinning"])
def test_a_reward_over_its_time_limit_is_reported_with_its_rows(name: str, failing: Any) -> None:
    began = time.perf_counter()
    error = failing(name, 0.2)
    assert 0.2 <= time.perf_counter() - began < 5
    limit = f"reward {name} (mine.py:{name}) exceeded its time limit of 0.2 seconds {BATCH}"
    assert str(error) == f"{limit}; a larger timeout allows more"
    assert f"in {name}" in error.traceback
    assert score(trajectories("a"), [NamedReward("sync", 1.0, lambda given: [1.0])]).totals == [1.0]


def test_an_async_reward_that_blocks_is_interrupted(failing: Any) -> None:
    assert "exceeded its time limit of 0.1 seconds" in str(failing("blocking", 0.1))


def test_if_a_call_fails_the_others_are_canceled() -> None:
    ended = []

    async def waits(given: list[Trajectory]) -> list[float]:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(given[0].text)
        return [1.0]

    async def fails(given: list[Trajectory]) -> list[float]:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    began = time.perf_counter()
    with pytest.raises(UserCodeError, match=r"reward fails raised ValueError on prompts\.jsonl:1: no"):
        score(trajectories("a"), [NamedReward("waits", 1.0, waits), NamedReward("fails", 1.0, fails)])
    assert ended == ["a"] and not user_tasks().running and time.perf_counter() - began < 5


def test_an_interrupt_passes_through_an_async_reward() -> None:
    async def interrupted(given: list[Trajectory]) -> list[float]:
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(trajectories("a"), [NamedReward("interrupted", 1.0, interrupted)])
    assert not user_tasks().running
