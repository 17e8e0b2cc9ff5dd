"""Writes files and folders atomically, and detects damage by checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKSUMS = "checksums.json"
PARTIAL, OLD = ".partial", ".old"
"""Suffixes of files and folders while they are written, and while they are removed."""


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """The SHA-256, in hex, of the lengths and the bytes of several parts."""
    hasher = hashlib.sha256()
    for part in parts:
        view = memoryview(part)
        hasher.update(view.nbytes.to_bytes(8, "little"))
        hasher.update(view)
    return hasher.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file atomically, and flush it to disk."""
    aside = path.with_name(f".{path.name}{PARTIAL}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- sealed folders -----------------------------------------------------------------------------------------------


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, keyed by relative path. The list of checksums itself is not included."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def listed(folder: Path) -> dict[str, str]:
    """The checksums that a sealed folder lists: ``{"model.safetensors": "9f86d0..."}``.

    Raises:
        ValueError: if the folder has no list of checksums, or the list is damaged.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        raise ValueError(f"it has no {CHECKSUMS}")
    try:
        by_name = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{CHECKSUMS} is damaged") from error
    if not isinstance(by_name, dict) or not all(isinstance(value, str) for value in by_name.values()):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return by_name


def seal(folder: Path) -> None:
    """Write the list of checksums of a folder, and flush the whole folder to disk."""
    write_text(folder / CHECKSUMS, json.dumps(checksums(folder), indent=1))
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def staging(folder: Path) -> Path:
    """The path of a folder while it is being written."""
    return folder.with_name(f".{folder.name}{PARTIAL}")


def removing(folder: Path) -> Path:
    """The path of a folder while it is being removed."""
    return folder.with_name(f".{folder.name}{OLD}")


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A context that provides a temporary folder, which replaces ``folder`` if the context ends without an error."""
    aside, old = staging(folder), removing(folder)
    for left_behind in (aside, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    seal(aside)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, or None. Files that are not in its list of checksums are ignored."""
    try:
        expected = listed(folder)
    except ValueError as error:
        return str(error)
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path) != checksum:
            return f"{name} has changed since it was saved"
    return None


def remove(folder: Path) -> None:
    """Remove a folder atomically, so that it never exists in part."""
    old = removing(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Remove folders that a killed process left behind in a stage's folder while writing or removing them."""
    for path in folder.glob(".*"):
        if path.is_dir() and not path.is_symlink() and path.name.endswith((PARTIAL, OLD)):
            shutil.rmtree(path)
