"""What a snippet may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal["ok", "error", "denied", "memory", "cpu", "time", "output", "crash"]
REASONS: tuple[Reason, ...] = get_args(Reason)
History = tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """What one snippet may use: ``Limits(cpu_seconds=5, wall_seconds=20.0, memory=2**29, output=10_000)``.

    Attributes:
        cpu_seconds: CPU time.
        wall_seconds: time on the clock. It also depends on what else the machine does, so it should be longer.
        memory: bytes of address space, beyond what the preloaded modules take. Snippets of a session share it.
        output: bytes that a snippet may print.
        open_files: open files, the four of the sandbox itself among them.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory: int = 2**29
    output: int = 10_000
    open_files: int = 32

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "memory", "output"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.open_files < 8:
            raise ValueError(f"open_files must be at least 8, of which the sandbox uses four, not {self.open_files}")


@dataclass(frozen=True)
class Result:
    r"""What a snippet did: ``Result("4 is even\n", "2", "ok", ("x = 4", "print(x, 'is even')\nx // 2"))``.

    Attributes:
        output: what it printed, to standard output and standard error. A marker says where it was cut.
        value: the ``repr`` of its last expression, if its last statement is one and its value is not None. After an
            exception, the last line of the traceback. If a limit ended the snippet, which one.
        reason: ``ok``; ``error`` if it raised an exception; ``denied`` if that was a PermissionError, as for what the
            sandbox refuses; ``memory`` if it was a MemoryError; ``cpu``, ``time`` or ``output`` if it exceeded this
            limit; ``crash`` if its process ended in another way.
        history: the snippets whose namespace the session has now. Pass it as ``after`` to continue. Snippets that
            raised an exception belong to it, because what they did before remains. Snippets that exceeded a limit do
            not: the session is as it was before them.
    """

    output: str
    value: str
    reason: Reason
    history: History


@dataclass(frozen=True)
class Report:
    """How the root process has started: ``Report(error=None, landlock=7, seccomp=True)``.

    Attributes:
        error: why it could not start.
        landlock: the version of the Landlock ABI that locks it in, or 0.
        seccomp: whether a filter of system calls locks it in.
    """

    error: str | None = None
    landlock: int = 0
    seccomp: bool = False
