"""Writes files and folders atomically, detects damage by checksums, and explains why storage fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.errors import UserError

CHECKSUMS = "checksums.json"
PARTIAL, OLD = ".partial", ".old"
"""Suffixes of files and folders while they are written, and while they are removed."""


def expanded(path: str | Path) -> Path:
    """A path that the user wrote, with ``~`` and ``~NAME`` replaced by home folders.

    Raises:
        UserError: if the user's home folder is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}") from error


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
    """Replace the content of a file atomically, and flush it to disk.

    Raises:
        UserError: if the disk is full or the folder cannot be written. The old file is kept.
    """
    aside = path.with_name(f".{path.name}{PARTIAL}")
    data = text.encode("utf-8", "backslashreplace")  # in JSON, the escape of a lone surrogate
    with storing(path, len(data)):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- storage that fails -------------------------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "its file system is read-only",
    errno.EIO: "its device reports an input/output error",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ELOOP: "its symbolic links form a loop",
    errno.ENOTDIR: "a part of its path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open",
}
"""Why an operation on a file may fail for reasons outside of Burnish, by the number of the error."""
# safetensors, tokenizers and torch raise their own errors, which have the reason only in their text. torch does not
# even know the reason: it notices that less was written than it passed on.
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large", "inline_container.cc")


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, its inodes, a quota or a limit on file sizes is used up."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return any(text in str(error) for text in _FULL_TEXTS)


def explain(error: OSError) -> str | None:
    """A message about an operation on a file that failed: ``a.jsonl: permission denied``; None for other errors."""
    if error.filename is None:
        return None
    if is_full(error):
        return _full_message(Path(os.fsdecode(error.filename)))
    reason = REASONS.get(error.errno or 0)
    return f"{os.fsdecode(error.filename)}: {reason}" if reason else None


@contextmanager
def storing(path: Path, needed: int | None = None, aside: Path | None = None) -> Iterator[None]:
    """A context that writes a file or a folder. A full disk or a missing right is a UserError that names it.

    Args:
        path: what is written.
        needed: its size in bytes, if known.
        aside: the folder in which it is written, which is removed if the disk is full, so that its space is free again.
    """
    try:
        yield
    except Exception as error:  # tokenizers raises Exception itself
        if is_full(error):
            message = _full_message(path, needed, aside)
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            raise UserError(message) from error
        if isinstance(error, OSError) and (reason := REASONS.get(error.errno or 0)):
            raise UserError(f"{path}: cannot be written: {reason}") from error
        raise


def _full_message(path: Path, needed: int | None = None, aside: Path | None = None) -> str:
    home = next(folder for folder in path.absolute().parents if folder.is_dir())
    disk = os.statvfs(home)
    free = disk.f_bavail * disk.f_frsize
    facts = [f"{megabytes(needed)} were needed"] if needed is not None else []
    if aside is not None and aside.is_dir():
        facts.append(f"{megabytes(size(aside))} of it were written")
    without_inodes = disk.f_files and not disk.f_favail
    facts.append("no more files can be created" if without_inodes else f"{megabytes(free)} are free")
    return (
        f"{path}: cannot be written: the disk is full, or a quota or limit is reached ({', '.join(facts)}): free some "
        "space and run the same command again; a run resumes from its last complete checkpoint"
    )


def size(folder: Path) -> int:
    """The size in bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """A number of bytes for people: ``12.3 MB``."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


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
    staging(folder / CHECKSUMS).unlink(missing_ok=True)  # left behind if the process was killed here before
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
def writing(folder: Path, needed: int | None = None) -> Iterator[Path]:
    """A context that provides a temporary folder, which replaces ``folder`` if the context ends without an error.

    Args:
        folder: the folder to write.
        needed: its size in bytes, if known, for the message if the disk is full.

    Raises:
        UserError: if the disk is full or the folder cannot be written. The old folder is kept.
    """
    aside, old = staging(folder), removing(folder)
    for left_behind in (aside, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    with storing(folder, needed, aside):
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
