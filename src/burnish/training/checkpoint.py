"""Folders that are complete or absent: written aside, sealed with a checksum of every file, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKSUMS = "checksums.json"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by relative path; the list itself is left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def write_text(path: Path, text: str) -> None:
    """Replace a file by new text in one step, on disk before this returns."""
    staging = path.with_name(f".{path.name}.partial")
    with staging.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staging.rename(path)
    _sync(path.parent)


def staging(folder: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return folder.with_name(f".{folder.name}.partial")


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which takes the place of ``folder`` once the context ends without an error."""
    aside = staging(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    write_text(aside / CHECKSUMS, json.dumps(checksums(aside), indent=1))
    for path in aside.rglob("*"):
        _sync(path)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old)
    else:
        aside.rename(folder)
    _sync(folder.parent)


def is_complete(folder: Path) -> bool:
    """Whether every file of a folder is there with the bytes that were written."""
    listed = folder / CHECKSUMS
    try:
        return listed.is_file() and json.loads(listed.read_text(encoding="utf-8")) == checksums(folder)
    except ValueError:  # the list itself was cut off
        return False


def latest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step in a run folder, None where there is none."""
    found = [
        (int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := re.search(r"-(\d+)$", path.name))
    ]
    return next((path for _, path in sorted(found, reverse=True) if is_complete(path)), None)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
