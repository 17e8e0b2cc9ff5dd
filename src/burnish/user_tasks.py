"""Runs the user's coroutines, such as async rewards, interleaved with other work of this process.

Coroutines run in the calling thread, and only during ``UserTasks.advance``, so the user's code never runs at the same
time as ours. Between two awaits, a coroutine is isolated like all code of the user (``user_code``) and has its own
random states. Its result therefore does not depend on what else is running.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from burnish.time_limit import TimeLimitExceeded, time_limit
from burnish.user_code import RandomStates, isolated, random_states, reported, seed_random, set_random_states

SLICE = 0.001
"""Seconds that ``advance`` runs the event loop if it does not wait."""

PAUSE = 1e6
"""Seconds that a task may wait for its turn: practically no limit."""

WAIT = 1.0
"""Maximum number of seconds that ``advance`` waits. Deadlines change meanwhile if tasks get their turn."""

CLEANUP = 1.0
"""Seconds that a coroutine may run between two awaits after its time limit, for its ``finally`` blocks."""


@dataclass
class _Call:
    """A call of the user's code: its seed, its deadline (``time.monotonic``), and the number of tasks it started."""

    seed: int
    deadline: float
    tasks: int = 0

    def next_seed(self) -> int:
        """The call's own seed for its first task, and a derived seed for each further task."""
        number, self.tasks = self.tasks, self.tasks + 1
        digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1 if number else self.seed


_current: ContextVar[_Call | None] = ContextVar("the call that a task belongs to", default=None)


@contextlib.contextmanager
def time_limit_paused() -> Iterator[None]:
    """A context in which a task waits for its turn. This does not count toward its time limit."""
    call = _current.get()
    assert call is not None, "only tasks of UserTasks have a time limit"
    left = call.deadline - time.monotonic()
    call.deadline = time.monotonic() + PAUSE
    try:
        yield
    finally:
        call.deadline = time.monotonic() + left


class UserTasks:
    """The event loop that runs the user's coroutines. ``user_tasks()`` returns the one of this process."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.runner.get_loop().set_task_factory(_new_task)
        self.running: dict[asyncio.Task[Any], _Call] = {}

    def start(
        self, awaitable: Awaitable[Any], *, what: str, during: str, seed: int, timeout: float
    ) -> asyncio.Task[Any]:
        """Create a task for an awaitable that the user's code returned. Arguments are as in ``user_code``.

        ``advance`` runs the task. It ends with the result of the awaitable, or with the exception that ``user_code``
        would raise.
        """
        call = _Call(seed, time.monotonic() + timeout)
        token = _current.set(call)
        try:
            task = self.runner.get_loop().create_task(_reporting(awaitable, what, during, timeout))
        finally:
            _current.reset(token)
        self.running[task] = call
        return task

    def advance(self, wait: bool = False) -> None:
        """Run all tasks as far as they get. With ``wait``, wait up to a second until one of them has ended."""
        if not self.running:
            return
        end = min(call.deadline for call in self.running.values()) if wait else 0.0
        self._run(self.running, min(max(end - time.monotonic(), SLICE), WAIT))
        # Check deadlines only after running, because this process may have been busy when a server's answer arrived.
        now = time.monotonic()
        self.running = {task: call for task, call in self.running.items() if not task.done()}
        self.cancel([task for task, call in self.running.items() if now > call.deadline])

    def postpone(self, seconds: float) -> None:
        """Extend the time limits of all tasks, because they could not run for so long."""
        for call in self.running.values():
            call.deadline += seconds

    def cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel those of the tasks that are still running, as if they had exceeded their time limit."""
        tasks = list(tasks)
        if canceled := [task for task in tasks if task.cancel()]:
            self._run(canceled, None, asyncio.ALL_COMPLETED)
        for task in tasks:
            self.running.pop(task, None)
            task.exception()  # otherwise asyncio logs that the exception was never retrieved

    def _run(
        self, tasks: Iterable[asyncio.Task[Any]], seconds: float | None, until: str = asyncio.FIRST_COMPLETED
    ) -> None:
        # Not Runner.run, because it would keep Ctrl-C from code that sleeps or waits without await.
        self.runner.get_loop().run_until_complete(asyncio.wait(list(tasks), timeout=seconds, return_when=until))


@functools.cache
def user_tasks() -> UserTasks:
    """The event loop of this process. There is only one, because clients in the user's code may be bound to a loop."""
    tasks = UserTasks()
    atexit.register(tasks.runner.close)
    return tasks


async def _reporting(awaitable: Awaitable[Any], what: str, during: str, timeout: float) -> Any:
    with reported(what, during, timeout):
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise TimeLimitExceeded from error
            raise RuntimeError("the coroutine awaited something that was canceled") from error


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Create a task of the loop. A task that belongs to a call of the user's code is isolated."""
    call = _current.get()
    return asyncio.Task(coroutine if call is None else _Isolated(coroutine, call), loop=loop, **options)


class _Isolated(Coroutine[Any, Any, Any]):
    """A coroutine with its own random states. At every await, its changes to the process are undone."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], call: _Call) -> None:
        self.coroutine, self.call, self.seed = coroutine, call, call.next_seed()
        self.states: RandomStates | None = None

    def send(self, value: Any, /) -> Any:
        return self._step(self.coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self.coroutine.throw, *error)

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("a task drives this coroutine; nothing awaits it")

    def _step(self, resume: Callable[..., Any], *arguments: Any) -> Any:
        """Run to the next await, or to the end, which raises ``StopIteration``."""
        with isolated():
            if self.states is None:
                seed_random(self.seed)
            else:
                set_random_states(self.states)
            try:
                with time_limit(max(self.call.deadline - time.monotonic(), CLEANUP)):
                    return resume(*arguments)
            finally:
                self.states = random_states()
