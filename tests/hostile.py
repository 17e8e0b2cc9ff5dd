"""Runs checks on generated inputs and measures them: ``from hostile import examples, try_all``."""

from __future__ import annotations

import reprlib
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS = 5
"""CPU time that one input may take."""
PATIENCE = 120
"""Seconds that one input may take on a busy machine."""
GIGABYTE = 10**9
"""Bytes by which the peak memory may grow."""

T = TypeVar("T")
Record = Callable[[str, object], None]


class TookTooLongError(BaseException):
    """Not an ``Exception``, so that the tested code does not catch it."""


def examples(few: int, many: int) -> pytest.MarkDecorator:
    """A few inputs whenever the tests run, and many in ``make acceptance``."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.acceptance)])


def try_all(
    inputs: st.SearchStrategy[T] | Iterable[T], check: Callable[[T], None], examples: int, record: Record
) -> None:
    """Call a check with generated inputs, the same ones in every run. Records their number, time and memory.

    An input fails if the check raises an exception or takes longer than ``SECONDS``.
    """
    seconds: list[float] = []
    before = _peak()

    def measured(value: T) -> None:
        began = time.monotonic()
        with _limited():
            try:
                check(value)
            except BaseException as error:
                error.add_note(f"input: {reprlib.repr(value)}")
                raise
        seconds.append(time.monotonic() - began)

    if isinstance(inputs, st.SearchStrategy):
        _generated(inputs, measured, examples)
    else:
        for value in inputs:
            measured(value)
    growth = _peak() - before
    record("inputs", len(seconds))
    record("longest", f"{max(seconds):.2f} s")
    record("growth of memory", f"{growth / 1e6:.0f} MB")
    assert len(seconds) >= examples and growth < GIGABYTE


def _generated(inputs: st.SearchStrategy[T], check: Callable[[T], None], examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(inputs)
    def each(value: T) -> None:
        check(value)

    each()


def _peak() -> int:
    """Bytes of memory that this process, or a child of it that has ended, had at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TookTooLongError

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, PATIENCE))
    before = [signal.signal(number, stop) for number, _, _ in timers]
    try:
        for _, timer, limit in timers:
            signal.setitimer(timer, limit)
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
