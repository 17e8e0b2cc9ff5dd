"""Samples batches of rollouts while the trainer computes, without threads: a batch advances between micro-batches.

Everything runs in the main thread: the user's code is isolated, has its time limits, and runs one call at a time. What
overlaps with training is the work of a generator in another process, and what coroutines wait for.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import torch

from burnish import progress
from burnish.types import Trajectory
from burnish.user_tasks import user_tasks

T = TypeVar("T")


class Progress(enum.Enum):
    """What a step of some work says about the next one."""

    MADE = enum.auto()
    """It can follow at once."""
    WAITING = enum.auto()
    """It has to wait for something, such as a completion."""
    TOGETHER = enum.auto()
    """It exchanges data with other processes, so all of them have to make it at the same point."""


Steps = Generator[Progress, None, T]
"""Work that is done in steps, between which other work can be done. It returns its result."""


def finished(steps: Steps[T]) -> T:
    """Make all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Plan(NamedTuple):
    """A batch to sample: ``Plan(iteration=3, version=2, indices=(17, 4))``.

    ``version`` is that of the weights, the number of iterations that they have learned from. ``indices`` are those of
    the prompts.
    """

    iteration: int
    version: int
    indices: tuple[int, ...]


class SampledBatch(NamedTuple):
    """The scored trajectories of a plan, and metrics of how they were sampled."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]


class _Batch:
    """A plan, the steps that sample it, and their result."""

    def __init__(self, plan: Plan, steps: Steps[SampledBatch] | None, result: SampledBatch | None) -> None:
        self.plan, self.steps, self.result = plan, steps, result
        self.at = Progress.MADE


class Ahead:
    """Batches that are sampled while the trainer computes. They are taken in the order in which they were submitted.

    >>> ahead.submit(plan, steps)
    >>> ahead.advance()           # between micro-batches
    >>> plan, sampled = ahead.take()

    ``in_rounds`` says that a batch may use the generator again after it exchanged data with other processes.
    """

    def __init__(self) -> None:
        self.in_rounds = False
        self._batches: deque[_Batch] = deque()
        self._waits = True
        self._left = 0.0
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def patience(self) -> float | None:
        """The number of seconds that a step may wait: 0 while the trainer computes, and else no limit."""
        return None if self._waits else 0.0

    def submit(self, plan: Plan, steps: Steps[SampledBatch]) -> None:
        """Queue a batch. Its steps are made in ``advance``, or when it is taken."""
        self._batches.append(_Batch(plan, steps, None))

    def restore(self, plan: Plan, result: SampledBatch) -> None:
        """Queue a batch that was sampled before."""
        self._batches.append(_Batch(plan, None, result))

    def plans(self) -> list[tuple[Plan, SampledBatch | None]]:
        """The queued plans in order, with the result of those that are finished."""
        return [(batch.plan, batch.result) for batch in self._batches]

    def advance(self) -> None:
        """Make the steps that need not wait. An error is raised by ``check``, not here, inside of a step of training.

        Batches are sampled one after the other. One that waits for other processes lets the next one pass, unless it
        may need the generator again.
        """
        if self._error is not None or not any(batch.result is None for batch in self._batches):
            return
        with self._computing(waits=False), progress.shown_by(lambda *_: None):
            try:
                for batch in self._batches:
                    while batch.result is None and batch.at is not Progress.TOGETHER:
                        self._step(batch)
                        if batch.at is Progress.WAITING:
                            return
                    if batch.result is None and self.in_rounds:
                        return
            except Exception as error:
                # the trainer repeats its own step if memory runs out, which must not happen for an error of another one
                self._error = error

    def check(self) -> None:
        """Raise the error of a step that ``advance`` made, if there was one."""
        if self._error is not None:
            raise self._error

    def take(self) -> tuple[Plan, SampledBatch]:
        """Wait for the oldest batch, and remove it. All processes must call it at the same point."""
        result = self._finished(self._batches[0])
        return self._batches.popleft().plan, result

    def finish(self) -> None:
        """Wait for all batches, so that the generator is idle. All processes must call it at the same point."""
        for batch in self._batches:
            self._finished(batch)

    def close(self) -> None:
        """Cancel all batches."""
        while self._batches:
            if (steps := self._batches.pop().steps) is not None:
                steps.close()

    def _finished(self, batch: _Batch) -> SampledBatch:
        self.check()
        with self._computing(waits=True):
            while batch.result is None:
                self._step(batch)
        return batch.result

    def _step(self, batch: _Batch) -> None:
        assert batch.steps is not None
        try:
            batch.at = next(batch.steps)
        except StopIteration as end:
            assert end.value is not None, "the steps of this batch ended with an error before"
            batch.result = end.value

    @contextlib.contextmanager
    def _computing(self, waits: bool) -> Iterator[None]:
        """A context for steps. The time limits of the user's coroutines do not count the time since the last one."""
        now = time.monotonic()
        user_tasks().postpone(now - (self._left or now))
        self._waits = waits
        try:
            with torch.enable_grad():  # as if no one else had been computing
                yield
        finally:
            self._waits, self._left = True, time.monotonic()
