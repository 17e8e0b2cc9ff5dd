"""The simulated order of a run: schedules that were computed by hand, and the clock of the code that samples ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from burnish import PPO
from burnish.generate.local import LocalGenerator
from burnish.generate.sampling import Sampling
from burnish.plan.simulation import Profile, Schedule, scaled, simulate
from burnish.types import Prompt, Trajectory


def test_without_staleness_sampling_and_updates_take_turns() -> None:
    assert simulate([6, 4], [2, 3], 0) == Schedule(((0, 6), (8, 12)), ((6, 8), (12, 15)))


def test_with_staleness_1_the_next_batch_is_sampled_during_an_update() -> None:
    found = simulate([6, 6, 6], [4, 4, 4], 1)
    # batches 0 and 1 are submitted at once, batch 2 after the first update
    assert found.sampled == ((0, 6), (6, 12), (12, 18))
    assert found.updated == ((6, 10), (12, 16), (18, 22))
    assert found.waiting == pytest.approx(1 - 12 / 22)
    slow_updates = simulate([4, 4, 4], [6, 6, 6], 1)
    assert slow_updates.sampled == ((0, 4), (4, 8), (10, 14))
    assert slow_updates.updated == ((4, 10), (10, 16), (16, 22))


def test_more_staleness_helps_only_if_durations_vary() -> None:
    steady = [simulate([5] * 9, [5] * 9, s).seconds for s in (0, 1, 2)]
    assert steady == [90, 50, 50]
    uneven = [simulate([1, 9, 1, 9], [5] * 4, s).seconds for s in (0, 1, 2)]
    assert uneven == [40, 29, 25]


def test_a_batch_begins_only_when_the_trainer_looks() -> None:
    """Batch 1 ends at 3, but the trainer, which looks at 1, 5, 9 and 11, begins batch 2 at 5."""
    at_once, looking = (simulate([1, 2, 2], [10, 10, 10], 2, looks) for looks in (None, 10))
    assert at_once.sampled == ((0, 1), (1, 3), (3, 5))
    assert looking.sampled == ((0, 1), (1, 3), (3, 5))
    seldom = simulate([1, 2, 2], [8, 8, 8], 2, looks=2)
    assert seldom.sampled == ((0, 1), (1, 3), (5, 7))


def test_the_mean_is_that_of_a_full_queue() -> None:
    found = simulate([6] * 10, [4] * 10, 1)
    assert found.seconds == 64 and found.seconds_per_iteration == 6


@pytest.mark.parametrize("given", [([], []), ([1.0], [1.0, 2.0])])
def test_batches_and_updates_must_align(given: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="as many updates as batches"):
        simulate(*given, staleness=0)


def test_more_workers_sample_fewer_completions_each() -> None:
    profile = Profile(sampling=(60.0,), updating=(20.0,), workers=1, trainers=2, rollouts=10)
    assert scaled(profile, 1, 2) == ([60.0], [20.0])
    assert scaled(profile, 4, 8) == ([60.0 * 3 / 10], [5.0])
    assert scaled(profile, 64, 1) == ([6.0], [40.0])  # one completion is not divided


# --- the clock of rl/ahead.py -------------------------------------------------------------------------------------

ROWS = [Prompt(({"role": "user", "content": f"{i} +"},), {}, f"rows:{i}") for i in range(24)]
SAMPLING, UPDATING = (3.0, 11.0, 1.0, 7.0, 2.0, 2.0), (4.0, 1.0, 9.0, 4.0, 6.0, 1.0)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_simulation_equals_the_clock_of_a_run(staleness: int, make_trainer: Any, tiny_llama: Any) -> None:
    now, begun, learned = 0.0, [], []

    class Worker(LocalGenerator):
        """Samples batch k in SAMPLING[k] seconds, in which this process may compute."""

        overlaps = True

        def submit(self, requests: Any, version: int) -> list[int]:
            self.ready = now + SAMPLING[len(begun)]
            begun.append((now, self.ready))
            return super().submit(requests, version)

        def poll(self, timeout: float | None) -> list[Any]:
            nonlocal now
            now = max(now, self.ready if timeout is None else min(self.ready, now + timeout))
            return super().poll(None) if now >= self.ready else []

    class Timed(PPO):
        def loss(self, network: Any, batch: Any) -> Any:
            nonlocal now
            k = len(learned) // 4
            learned.append(now)
            now += UPDATING[k] / 4
            return super().loss(network, batch)

    make: Callable[..., Any] = lambda model, tokenizer: Worker(copy.deepcopy(model), tokenizer)  # noqa: E731
    settings: dict[str, Any] = {"epochs": 1, "mini_batches": 1, "max_staleness": staleness}
    method = Timed(by_tokens, Sampling(max_new_tokens=4), make, **settings)
    trainer = make_trainer(method, tiny_llama(), ROWS, batch=4, own={"token_budget": 1})
    trainer.train()
    method.close()
    found = simulate(SAMPLING, UPDATING, staleness, looks=4)
    assert begun == [pytest.approx(times) for times in found.sampled]
    assert learned[::4] == pytest.approx([start for start, _ in found.updated])
    assert now == pytest.approx(found.seconds)


def by_tokens(answers: list[Trajectory]) -> list[float]:
    return [sum(answer.tokens) % 9 / 4 - 1 for answer in answers]
