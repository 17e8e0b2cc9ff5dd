"""Interrupts code that runs longer than it may."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


class TimeLimitExceeded(BaseException):
    """Raised in code whose time is up. It is no ``Exception``, so that the code does not catch it by accident."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitExceeded`` in the body once it has run for this long.

    A signal interrupts the body, also while it sleeps or waits for the network. Code in C that does not return to
    Python is interrupted when it does. In a thread other than the main one nothing can be interrupted, and the limit is
    checked when the body ends.

    The signal is SIGURG, which is ignored where nobody listens and which hardly anything uses. SIGALRM would clash with
    libraries that have time limits of their own.

    Raises:
        TimeLimitExceeded: the body took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        deadline = time.monotonic() + seconds
        yield
        if time.monotonic() > deadline:
            raise TimeLimitExceeded
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGURG, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGURG))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGURG, before)
