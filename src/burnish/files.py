"""Folders that are complete or absent, files that are replaced in one step, and checksums that tell damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKSUMS = "checksums.json"
PARTIAL, OLD = ".partial", ".old"  # endings of what is being written and of what is being removed


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """The SHA-256, in hex, of the lengths and the bytes of several parts."""
    found = hashlib.sha256()
    for part in parts:
        view = memoryview(part)
        found.update(view.nbytes.to_bytes(8, "little"))
        found.update(view)
    return found.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a file by new text in one step, on disk before this returns."""
    aside = path.with_name(f".{path.name}{PARTIAL}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- sealed folders -----------------------------------------------------------------------------------------------


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by relative path; the list itself is left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def listed(folder: Path) -> dict[str, str]:
    """The checksums that a sealed folder was written with: ``{"model.safetensors": "9f86d0..."}``.

    Raises:
        ValueError: it has no list of them, or the list is damaged.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        raise ValueError(f"it has no {CHECKSUMS}")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{CHECKSUMS} is damaged") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return found


def seal(folder: Path) -> None:
    """List the checksums of a folder's files in it, and put all of it on disk."""
    write_text(folder / CHECKSUMS, json.dumps(checksums(folder), indent=1))
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def staging(folder: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return folder.with_name(f".{folder.name}{PARTIAL}")


def removing(folder: Path) -> Path:
    """Where a folder is while it is removed."""
    return folder.with_name(f".{folder.name}{OLD}")


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which takes the place of ``folder`` once the context ends without an error."""
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
    """What is wrong with a sealed folder, None where nothing is; files that it was not sealed with do not matter."""
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
    """Remove a folder so that it is gone at once: under its own name there is never a part of it."""
    old = removing(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left in a stage's folder: folders that it was writing or removing."""
    for path in folder.glob(".*"):
        if path.is_dir() and not path.is_symlink() and path.name.endswith((PARTIAL, OLD)):
            shutil.rmtree(path)


# --- checkpoints --------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a stage's folder, the one with the highest step first, whether or not they are complete."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The complete checkpoint with the highest step, None where there is none, and what is wrong with later ones."""
    damaged = []
    for path in checkpoints(folder):
        wrong = damage(path)
        if wrong is None:
            return path, damaged
        damaged.append(f"{path}: {wrong}")
    return None, damaged


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was saved after: 30 for ``checkpoint-30``."""
    return int(checkpoint.name.rpartition("-")[2])


def rotate(folder: Path, limit: int | None, best: Path | None, step: int) -> None:
    """Remove the oldest checkpoints until ``limit`` are left; the best and the newest always stay.

    Checkpoints after ``step``, the one that training has reached, do not count: training has started over since, and
    will replace them.
    """
    if not limit:
        return
    found = [path for path in checkpoints(folder) if step_of(path) <= step]
    others = [path for path in found if path != best]
    kept = found[:limit] if best in (None, *found[:limit]) else [*others[: max(limit - 1, 1)], best]
    for path in found:
        if path not in kept:
            remove(path)
