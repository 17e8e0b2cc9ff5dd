"""The time of a run that samples on workers of their own, with batches sampled ahead, by a simulation of its order.

Batch k is submitted after max(0, k - s) completed updates, with ``max_staleness`` s, as in ``rl/loader.py``. The
generator samples one batch after the other. The trainer starts update k when update k - 1 and batch k are done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Schedule:
    """When each batch was sampled and learned, in seconds: ``Schedule(sampled=((0, 6),), updated=((6, 8),))``."""

    sampled: tuple[tuple[float, float], ...]
    """Start and end of sampling each batch."""
    updated: tuple[tuple[float, float], ...]
    """Start and end of each update."""

    @property
    def seconds(self) -> float:
        """The end of the last update."""
        return self.updated[-1][1]

    @property
    def seconds_per_iteration(self) -> float:
        """The mean time from one update's end to the next, of the second half, when the queue is full."""
        ends = [0.0, *(end for _, end in self.updated)]
        late = list(pairwise(ends))[len(self.updated) // 2 :]
        return sum(b - a for a, b in late) / len(late)

    @property
    def waiting(self) -> float:
        """The share of the time in which the trainer waits for the generator."""
        return 1 - sum(end - start for start, end in self.updated) / self.seconds


def simulate(
    sampling: Sequence[float], updating: Sequence[float], staleness: int, looks: int | None = None
) -> Schedule:
    """Simulate a run.

    Args:
        sampling: seconds to sample and score each batch.
        updating: seconds of each update, with the passes before it.
        staleness: ``method.max_staleness``. With 0, sampling and updates take turns.
        looks: micro-batches of an update. The trainer looks after the generator before each of them, and only then can
            the next batch begin. None: the next batch begins at once.

    Returns:
        The times of each batch and update.

    Raises:
        ValueError: if there are not as many updates as batches, or none.
    """
    if not sampling or len(sampling) != len(updating):
        raise ValueError(f"expected as many updates as batches, at least one: got {len(updating)} and {len(sampling)}")
    batches: list[tuple[float, float]] = []
    updates: list[tuple[float, float]] = []
    submitted: list[float] = []

    def begin(now: float) -> None:
        """Begin the batches that can begin by now."""
        while len(batches) < len(submitted):
            free = batches[-1][1] if batches else 0.0
            if looks is not None and free > now:
                return
            start = max(free, submitted[len(batches)]) if looks is None else now
            batches.append((start, start + sampling[len(batches)]))

    now = 0.0
    for k, seconds in enumerate(updating):
        while len(submitted) < min(k + staleness + 1, len(sampling)):
            submitted.append(now)
        begin(now)
        now = max(now, batches[k][1])
        begin(now)
        start = now
        for look in range(looks or 1):
            begin(start + look * seconds / (looks or 1))
        now = start + seconds
        updates.append((start, now))
    return Schedule(tuple(batches), tuple(updates))


@dataclass(frozen=True)
class Profile:
    """What a run took: ``Profile(sampling=(60, 58), updating=(20, 21), workers=1, trainers=1, rollouts=64)``."""

    sampling: tuple[float, ...]
    """Seconds to sample and score the batch of each iteration."""
    updating: tuple[float, ...]
    """The other seconds of each iteration."""
    workers: int
    """Processes that sampled."""
    trainers: int
    """Processes that trained."""
    rollouts: int
    """Completions of a batch."""


def scaled(profile: Profile, workers: int, trainers: int) -> tuple[list[float], list[float]]:
    """The seconds of each batch and each update on other numbers of processes.

    Sampling is split by completions: with n of them, w workers take ceil(n / w) / ceil(n / w_0) of the time of w_0. An
    update is divided evenly. So these are lower bounds: long completions, and what processes exchange, come on top.

    Args:
        profile: the measured run.
        workers: processes that sample.
        trainers: processes that train.
    """
    n = profile.rollouts
    share = math.ceil(n / workers) / math.ceil(n / profile.workers)
    return [s * share for s in profile.sampling], [s * profile.trainers / trainers for s in profile.updating]
