"""Progress of long passes over rows, such as encoding, sampling and the reference model's log-probabilities."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import Progress

Show = Callable[[str, int, int], None]
"""Called with what is being done, and how many rows are done of how many: ``show("sampling", 12, 64)``."""

SILENT_SECONDS = 2.0


class Bar:
    """A bar on stderr if that is a terminal, from the third second of a pass until it is done."""

    def __init__(self) -> None:
        self._what = ""
        self._began = 0.0
        self._bar: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the progress of a pass. Another name starts another bar."""
        if what != self._what or done >= total:
            if self._bar is not None:
                self._bar.stop()
            self._bar, self._what, self._began = None, what if done < total else "", time.monotonic()
        elif self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif sys.stderr.isatty() and time.monotonic() - self._began > SILENT_SECONDS:
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(what, total=total, completed=done)
            atexit.register(self._bar.stop)  # an error in the pass must not leave the cursor hidden
            self._bar.start()


_show: ContextVar[Show] = ContextVar("show", default=Bar())  # noqa: B039


def report(what: str, done: int, total: int) -> None:
    """Report that ``done`` of ``total`` rows are done. The last report of a pass has ``done == total``."""
    _show.get()(what, done, total)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Show progress with this function within the context, instead of the bar on stderr."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)
