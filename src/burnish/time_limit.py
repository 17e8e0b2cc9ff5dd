"""Interrupts code that exceeds a time limit."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


class TimeLimitExceeded(BaseException):
    """Raised in code that exceeds its time limit. Not an ``Exception``, so the code does not catch it by accident."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitExceeded`` in the body after this many seconds.

    A signal interrupts the body, even while it sleeps or waits for the network. C code is interrupted when it returns
    to Python. In threads other than the main thread, the body cannot be interrupted, and the limit is checked when it
    ends.

    The signal is SIGURG, because hardly any code uses it and it is ignored by default. SIGALRM would conflict with
    libraries that have their own time limits.

    Raises:
        TimeLimitExceeded: if the body takes longer.
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
