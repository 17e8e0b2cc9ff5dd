"""What a process of the sandbox does: wait for commands, fork, run one snippet, and wait again.

The root process and all others run the same loop. A process that has run a snippet may have been changed by it in any
way, so nothing here protects anything. The kernel and the server do.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import io
import json
import os
import random
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from burnish.rl.sandbox import landlock, linux, seccomp
from burnish.rl.sandbox.types import Reason, Report

NULL, OUT, ERROR, SERVER = 0, 1, 2, 3  # the file descriptors of a process
COMMAND, GO = b"f", b"g"
NOW = 1577836800.0  # 2020-01-01 00:00:00 UTC, the time at which every snippet runs
VALUE_CHARACTERS = 10_000
WARM_UP = {
    "sympy": """
from sympy import cos, integrate, limit, simplify, sin, solve, symbols
x, y = symbols("x y")
solve([x**2 - y, x + y - 2], [x, y])
simplify(sin(x) ** 2 + cos(x) ** 2 + integrate(sin(x) / x, x) + limit(sin(x) / x, x, 0))
"""
}
"""What runs after a module is imported. sympy imports most of its parts when they are first used, and each snippet is
the first use in its process: without this, solving an equation takes 0.2 s more."""
RESERVE = 2**20  # bytes that are freed after a MemoryError, so that the result can be sent


def root(server: socket.socket, preload: Sequence[str], path: Sequence[str], protected: bool) -> NoReturn:
    """Preload modules, lock this process in, and wait for commands. Ends when the server does."""
    parent = os.getppid()
    _arrange_files(server.detach(), NULL)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    _fix_clock()
    listeners: list[int] = []
    try:
        _preload(preload, path)
    except Exception as error:  # of the modules, which the user chose
        report = Report(f"cannot preload {', '.join(preload)}: {_last_line(error)}")
    else:
        report = Report()
        if protected:
            try:
                version = _lock_in(listeners)
            except OSError as error:
                report = Report(
                    f"this kernel cannot lock processes in with Landlock and seccomp ({error.strerror}): use a newer "
                    "kernel, or run the model's code without protection, with sandbox: none"
                )
            else:
                report = Report(None, version, True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, os.dup(SERVER)) as connection:
        socket.send_fds(connection, [json.dumps(asdict(report)).encode()], listeners)
    for listener in listeners:
        os.close(listener)
    for code in ("1", "1 / 0"):  # what Python sets up for the first snippet and the first traceback, all inherit
        _evaluate(code, {})
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    gc.collect()
    gc.freeze()
    _serve(main.__dict__, parent)


def _lock_in(listeners: list[int]) -> int:
    """Give up all that snippets do not need. Return the version of Landlock, and add the listener of the filter.

    Raises:
        OSError: if the kernel refuses.
    """
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    version = landlock.restrict(_readable(), _listed())
    linux.drop_capabilities()
    listeners.append(seccomp.install())
    return version


def _preload(modules: Sequence[str], path: Sequence[str]) -> None:
    """Import modules from ``path``, and leave nothing but the standard library for snippets to import."""
    library = _libraries()
    sys.path[:] = [*library, *(entry for entry in path if entry not in library)]
    for name in modules:
        importlib.import_module(name)
        exec(WARM_UP.get(name, ""), {})
    sys.path[:] = library
    sys.argv[:] = [""]
    for name in [name for name in sys.modules if name.partition(".")[0] == "burnish"]:
        del sys.modules[name]
    random.seed(0)
    os.environ.clear()


def _libraries() -> list[str]:
    """Where Python's standard library is. Its modules in C may be in a folder of their own."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return sorted(path for folder in folders for path in (folder, f"{folder}/lib-dynload") if os.path.isdir(path))


def _readable() -> Iterator[str]:
    """The code that snippets may import: the standard library and the packages that are preloaded."""
    for library in _libraries():
        names = [name for name in os.listdir(library) if name not in ("site-packages", "dist-packages")]
        yield from (os.path.join(library, name) for name in names)
    for name, module in sys.modules.items():
        if "." not in name:
            yield from getattr(module, "__path__", [])


def _listed() -> list[str]:
    return [".", *_libraries()]


def _fix_clock() -> None:
    """Make the clock stand still. Only ``perf_counter`` and its relatives, which measure durations, still run."""
    gmtime, localtime, strftime = time.gmtime, time.localtime, time.strftime
    time.time = lambda: NOW
    time.time_ns = lambda: int(NOW) * 10**9
    time.gmtime = lambda seconds=None: gmtime(NOW if seconds is None else seconds)
    time.localtime = lambda seconds=None: localtime(NOW if seconds is None else seconds)
    time.strftime = lambda form, at=None: strftime(form, localtime(NOW) if at is None else at)
    sys.modules["_datetime"] = None  # pyright: ignore[reportArgumentType]  # datetime in C does not call time.time
    sys.modules.pop("datetime", None)


def _arrange_files(server: int, output: int) -> None:
    """Give the file descriptors of this process their numbers, and close all others."""
    os.dup2(server, SERVER)
    os.dup2(output, OUT)
    os.dup2(output, ERROR)
    os.closerange(SERVER + 1, 256)


def _serve(namespace: dict[str, Any], server: int) -> NoReturn:
    """Fork for every command. The child runs its snippet and then waits for commands itself."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, os.dup(SERVER)) as connection:
            command, received, _, _ = socket.recv_fds(connection, len(COMMAND), 3)
        if command != COMMAND:
            os._exit(0)
        state = random.getstate()
        if (middle := os.fork()) == 0:
            if os.fork():
                # The child of a process that has ended is a child of the server, which learns how it ends.
                os._exit(0)
            random.setstate(state)  # the module takes a new seed in each fork
            _run(received, namespace, server)
        else:
            os.waitpid(middle, 0)
            for descriptor in received:
                os.close(descriptor)


def _run(received: list[int], namespace: dict[str, Any], server: int) -> None:
    """Run a snippet in this new process, and send the result."""
    connection, output, file = received
    code = os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "surrogatepass")
    _arrange_files(connection, output)
    while os.getppid() != server:
        os.sched_yield()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    printed = io.BufferedWriter(io.FileIO(OUT, "w", closefd=False))
    stream = sys.stdout = sys.stderr = io.TextIOWrapper(printed, "utf-8", "backslashreplace", line_buffering=True)
    os.write(SERVER, b"hello")
    if os.read(SERVER, len(GO)) != GO:
        os._exit(1)
    reserve = bytearray(RESERVE)
    reason, value = _evaluate(code, namespace)
    with contextlib.suppress(Exception):
        stream.flush()
    del reserve
    result = json.dumps({"reason": reason, "value": value}, ensure_ascii=False)
    os.write(SERVER, result.encode("utf-8", "backslashreplace"))
    os.dup2(NULL, OUT)
    os.dup2(NULL, ERROR)


def _evaluate(code: str, namespace: dict[str, Any]) -> tuple[Reason, str]:
    """Run a snippet, and return the value of its last expression or the last line of the traceback."""
    try:
        tree = ast.parse(code, "<snippet>")
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            exec(compile(tree, "<snippet>", "exec"), namespace)
            return "ok", ""
        exec(compile(ast.Module(tree.body[:-1], tree.type_ignores), "<snippet>", "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), "<snippet>", "eval"), namespace)
        return "ok", "" if value is None else cut(repr(value))
    except MemoryError:
        return "memory", "MemoryError"
    except PermissionError as error:
        return "denied", _last_line(error)
    except BaseException as error:
        return "error", _last_line(error)


def _last_line(error: BaseException) -> str:
    try:
        return cut(traceback.format_exception_only(error)[-1].strip())
    except BaseException:  # of a class that the snippet defined
        return type(error).__name__


def cut(text: str) -> str:
    """Cut a value, with a marker. Cutting it again changes nothing."""
    if len(text) <= VALUE_CHARACTERS:
        return text
    return text[:VALUE_CHARACTERS] + f"... [cut after {VALUE_CHARACTERS:,} characters]"
