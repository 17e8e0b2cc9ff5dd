"""Calls a model in one thread, one call at a time, for requests that arrive in other threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

AT_ONCE = 512
"""Maximum number of items of several requests in one call."""


@dataclass(eq=False)
class Job(Generic[ItemT, ResultT]):
    """What one request asks for: ``Job([first, second], joined=True)``.

    ``joined`` allows a call together with other requests.
    """

    items: list[ItemT]
    joined: bool
    result: Future[list[ResultT]] = field(default_factory=Future)


class Worker(Generic[ItemT, ResultT]):
    """Answers jobs in the thread that calls ``run``.

    Jobs that wait when a call ends, and may be joined, are answered in one call. If that call fails, each of them is
    repeated alone, so that a request fails only by its own fault.

    Args:
        function: returns one result for each item, in order.
    """

    def __init__(self, function: Callable[[list[ItemT]], list[ResultT]]) -> None:
        self.function = function
        self.calls = 0
        self._arrived: queue.SimpleQueue[Job[ItemT, ResultT] | None] = queue.SimpleQueue()
        self._waiting: deque[Job[ItemT, ResultT]] = deque()
        self._ending = self._ended = False

    def submit(self, items: list[ItemT], joined: bool = False) -> Future[list[ResultT]]:
        """Add a job. The future has a result for each item, or the exception that the function raised.

        It is canceled if the worker has been stopped.
        """
        job = Job[ItemT, ResultT](items, joined)
        self._arrived.put(job)
        if self._ended:
            job.result.cancel()
        return job.result

    def run(self) -> None:
        """Answer jobs until ``stop`` is called, and those that arrived before that."""
        try:
            while self._receive():
                if jobs := self._next():
                    self._answer(jobs)
        finally:
            self._ended = True
            self._cancel()

    def stop(self) -> None:
        """End ``run`` when the jobs that have arrived are answered. A signal handler may call this."""
        self._arrived.put(None)

    def _receive(self) -> bool:
        """Take in what has arrived, and wait if nothing has. False if the worker has been stopped and has no jobs."""
        while not self._ending and not (self._waiting and self._arrived.empty()):
            job = self._arrived.get()
            if job is None:
                self._ending = True
            else:
                self._waiting.append(job)
        return bool(self._waiting)

    def _cancel(self) -> None:
        """Cancel all jobs that are left."""
        while not self._arrived.empty():
            if (job := self._arrived.get()) is not None:
                self._waiting.append(job)
        for job in self._waiting:
            job.result.cancel()

    def _next(self) -> list[Job[ItemT, ResultT]]:
        """The waiting jobs of the next call, without those that were canceled."""
        jobs: list[Job[ItemT, ResultT]] = []
        size = 0
        while self._waiting:
            job = self._waiting[0]
            size += len(job.items)
            if jobs and not (jobs[0].joined and job.joined and size <= AT_ONCE):
                break
            self._waiting.popleft()
            if job.result.set_running_or_notify_cancel():
                jobs.append(job)
            else:
                size -= len(job.items)
        return jobs

    def _answer(self, jobs: list[Job[ItemT, ResultT]]) -> None:
        self.calls += 1
        items = [item for job in jobs for item in job.items]
        try:
            results = self.function(items)
            assert len(results) == len(items), f"got {len(results)} results for {len(items)} items"
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].result.set_exception(error)
                return
            for job in jobs:
                self._answer([job])
            return
        start = 0
        for job in jobs:
            job.result.set_result(results[start : start + len(job.items)])
            start += len(job.items)
