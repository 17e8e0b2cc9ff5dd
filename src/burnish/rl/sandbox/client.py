"""The trainer's side of the sandbox."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import burnish
from burnish.errors import UserError
from burnish.rl.sandbox import landlock
from burnish.rl.sandbox.server import MESSAGE, Settings
from burnish.rl.sandbox.types import History, Limits, Report, Result

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Numeric libraries must not start threads, which a fork does not copy and the sandbox denies."""

PRELOAD = ("math", "statistics", "fractions")


def default_preload() -> tuple[str, ...]:
    """``PRELOAD``, and sympy if it is installed."""
    return (*PRELOAD, "sympy") if importlib.util.find_spec("sympy") else PRELOAD


class Sandbox:
    """Runs Python that a model wrote, in processes with limits.

    ``sandbox.run("x = 6")`` returns a ``Result``. ``sandbox.run("x * 7", after=result.history)`` continues in the same
    namespace, as often as wanted and in several ways: each continuation starts from a copy. Several threads can use
    one sandbox.

    A session is only its history. The processes that keep namespaces can be ended at any time; then the snippets of
    the history run again. For this reason, the clock stands still, and Python's hashes and the module ``random`` start
    from the same state in each sandbox.

    Args:
        limits: what one snippet may use.
        preload: modules to import in advance, from where this process would import them. Other modules that are not of
            the standard library cannot be imported. The default is ``default_preload()``.
        protected: whether to lock processes in. Without this, only the limits on CPU time, memory, time, files and
            output hold, and a snippet can read and start whatever this process can.
        processes: how many namespaces are kept.
        parallel: how many snippets run at the same time. The default is the number of cores.

    Raises:
        UserError: if this machine cannot lock processes in, or if a module cannot be preloaded.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        preload: Sequence[str] | None = None,
        protected: bool = True,
        processes: int = 32,
        parallel: int | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise UserError("the sandbox for Python needs Linux: use a Linux machine or a container")
        self._limits = limits or Limits()
        self._preload = list(default_preload() if preload is None else preload)
        self._protected = protected
        self._processes = processes
        self._parallel = parallel or len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._closed = False
        self._server: _Server | None = None
        self._running()

    def run(self, code: str, after: History = ()) -> Result:
        """Run a snippet in a new namespace, or in a copy of the namespace that a session has after a history.

        Raises:
            RuntimeError: the sandbox is closed.
        """
        request = json.dumps([*after, code]).encode()
        for _ in range(2):
            server = self._running()
            if answer := server.ask(request):
                kept = answer.pop("kept")
                return Result(**answer, history=(*after, code) if kept else after)
            self._end(server)
        return Result("", "the server of the sandbox ended twice, as if the machine had no more memory", "crash", after)

    def enforced(self) -> dict[str, str]:
        """What this machine enforces: ``{"files": "Landlock (version 7)", "processes": "not enforced", ...}``."""
        return self._running().enforced

    def close(self) -> None:
        """End all processes of the sandbox, also those that run snippets for other threads."""
        with self._lock:
            server, self._server, self._closed = self._server, None, True
        if server is not None:
            server.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, after which nothing runs any more."""
        return self._closed

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _running(self) -> _Server:
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            if self._server is None:
                self._server = _Server(self._limits, self._preload, self._protected, self._processes, self._parallel)
            return self._server

    def _end(self, server: _Server) -> None:
        with self._lock:
            if self._server is server:
                self._server = None
        server.close()


def enforced() -> dict[str, str]:
    """What this machine enforces for snippets. This starts a sandbox and ends it, in a fraction of a second."""
    try:
        with Sandbox(preload=()) as sandbox:
            return sandbox.enforced()
    except UserError as error:
        return {"protection": str(error)}


def _enforced(report: Report) -> dict[str, str]:
    """Describe what the root process reports that it has given up."""
    limits = {"CPU time, memory": "limits of the process", "time, output": "its server"}
    if not report.seccomp:
        return dict.fromkeys(("files", "network", "signals", "processes"), "not enforced") | limits
    return {
        "files": f"Landlock (version {report.landlock})",
        "network": "seccomp and Landlock" if report.landlock >= landlock.TCP_SINCE else "seccomp",
        "signals": "seccomp and Landlock" if report.landlock >= landlock.SIGNALS_SINCE else "seccomp",
        "processes": "seccomp",
        **limits,
    }


class _Server:
    """The process of the server, and the trainer's end of the socket."""

    def __init__(self, limits: Limits, preload: list[str], protected: bool, processes: int, parallel: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="burnish-sandbox-")
        path = [entry for entry in sys.path if isinstance(entry, str) and entry]
        settings = Settings(os.getpid(), preload, path, self._folder, asdict(limits), protected, processes, parallel)
        source = str(Path(burnish.__file__).parent.parent)
        code = f"import sys; sys.path.append({source!r}); from burnish.rl.sandbox.server import main; main(sys.argv[1])"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Neither variables, user packages, the current folder nor `site` change what this interpreter imports.
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-S", "-X", "utf8", "-c", code, json.dumps(settings._asdict())],
                stdin=theirs.fileno(),
                start_new_session=True,
                env=dict.fromkeys(THREADS, "1")
                | {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            )
        try:
            message = self._control.recv(MESSAGE)
            report = Report(**json.loads(message)) if message else Report("its server ended")
            if report.error is not None:
                raise UserError(f"the sandbox for Python did not start: {report.error}")
        except BaseException:
            self.close()
            raise
        self.enforced = _enforced(report)

    def ask(self, request: bytes) -> dict | None:
        """Send a request and wait for the answer, or return None if the server has ended."""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._control, [b"r"], [theirs.fileno()])
                ours.sendall(request)
                ours.shutdown(socket.SHUT_WR)
                answer = bytearray()
                while part := ours.recv(2**16):
                    answer += part
            except OSError:
                return None
        return json.loads(answer) if answer else None

    def close(self) -> None:
        """Let the server end, and wait for it."""
        with contextlib.suppress(OSError):  # closing alone would not end it while a fork of this process has a copy
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
