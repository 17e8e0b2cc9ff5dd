"""A lock that allows only one process at a time to use a run's folder."""

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

from burnish import files
from burnish.errors import UserError

LOCK = "RUN.lock"
CANNOT = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[IO[str]] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The file ``RUN.lock`` in it names the process and its host.

    The lock is the operating system's (``flock``). It is released when the process ends, however it ends, so a lock
    file left by a killed process locks nothing. Over NFS, the lock works between hosts if the mount supports locks.

    Raises:
        UserError: if another process has locked the folder, or its file system does not support locks.
    """
    path = folder / LOCK
    file = _open(path)
    try:
        owner = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with files.storing(path):
            file.truncate(0)
            json.dump(owner, file)
            file.flush()
        _held.add(file)
        yield
    finally:
        _held.discard(file)
        path.unlink(missing_ok=True)  # before the lock is released, so that this never removes another process's file
        file.close()


def _open(path: Path) -> IO[str]:
    """Open and lock the file."""
    while True:
        with files.storing(path):
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
        file.close()  # the process that held the lock has just removed this file: try again


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text("utf-8"))
        return f"process {owner['process']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the file is being written or removed
        return "another process"


def _let_go() -> None:
    """Close inherited lock files, so that a forked child does not keep its parent's lock."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
