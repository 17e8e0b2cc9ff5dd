"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from burnish.errors import UserError

LOCK = "RUN.lock"
CANNOT = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[IO[str]] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone, as ``RUN.lock`` in it, which names the process and its host.

    The lock is the operating system's (``flock``): it ends with the process, however that ends, so a file that a killed
    process left behind locks nothing. Over NFS it holds between hosts wherever the mount supports locks.

    Raises:
        UserError: another process holds the folder, or its file system has no locks.
    """
    path = folder / LOCK
    file = _open(path)
    try:
        owner = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.truncate(0)
        json.dump(owner, file)
        file.flush()
        _held.add(file)
        yield
    finally:
        _held.discard(file)
        path.unlink(missing_ok=True)  # before the lock ends, so that it is never another process's file
        file.close()


def _open(path: Path) -> IO[str]:
    """The file, with the lock on it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(path)
            file.close()
            if error.errno in CANNOT:
                raise UserError(
                    f"{path.parent}: its file system cannot lock files ({error.strerror}), so nothing would keep two "
                    "runs from writing to one folder: name a folder on another file system with out=FOLDER"
                ) from error
            if not isinstance(error, BlockingIOError):
                raise
            raise UserError(
                f"{path.parent} is in use by {owner}: wait until that run ends, stop it, or name another folder with "
                "out=FOLDER"
            ) from error
        try:
            same = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            same = False
        if same:
            return file
        file.close()  # the run that held it has just ended and removed this file


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text("utf-8"))
        return f"process {owner['process']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just being written or removed
        return "another process"


def _let_go() -> None:
    """A forked child must not hold its parent's lock after the parent has ended."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
