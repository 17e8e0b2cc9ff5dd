"""What an adapter was trained on: its base by name and by a hash of the base's weights, kept beside the adapter.

An adapter is a change to one model's weights. On any other model, be it the raw base of the fine-tuned one that it was
trained on, it loads without an error and computes something else. The hash is what tells them apart.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from burnish.errors import UserError

BASE = "base.json"
SHOWN = 12  # hex digits of a hash in messages


class Base(NamedTuple):
    """A whole model that an adapter belongs to: ``Base("runs/tiny/sft/model", "9f86d081884c...")``."""

    name: str
    weights: str

    def __str__(self) -> str:
        return f"{self.name} (weights {self.weights[:SHOWN]})"


def weights_hash(folder: str) -> str:
    """SHA-256, in hex, of the weights of a model folder or of a hub id in the cache: of names, types, shapes and bytes.

    Tensors are read one at a time, in the order of their names, so neither sharding nor the order in a file matters.

    Raises:
        UserError: it has no safetensors files, or one is damaged.
    """
    files = _files(folder)
    return _hash(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@functools.lru_cache(maxsize=8)
def _hash(files: tuple[tuple[Path, int, int], ...]) -> str:
    found: dict[str, str] = {}
    for path, _, _ in files:
        try:
            with safe_open(path, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is no dict
                    tensor = stored.get_tensor(name)
                    head = f"{name} {tensor.dtype} {list(tensor.shape)}\n"
                    digest = hashlib.sha256(head.encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
                    found[name] = digest.hexdigest()
        except SafetensorError as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
    return hashlib.sha256("".join(f"{name} {found[name]}\n" for name in sorted(found)).encode()).hexdigest()


def _files(folder: str) -> list[Path]:
    """The weight files of a folder, or of a hub id that has been fetched."""
    where = cached_file(folder, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if where is not None:
        return [Path(where)]
    index = cached_file(folder, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise UserError(f"{folder}: it has no weights as safetensors, which is what can be hashed and compared")
    names = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    return [Path(str(cached_file(folder, name))) for name in names]


def record(folder: Path, base: Base) -> None:
    """Write beside an adapter what it was trained on."""
    (folder / BASE).write_text(json.dumps({"base": base.name, "sha256 of weights": base.weights}, indent=1) + "\n")


def recorded(folder: str | Path) -> Base | None:
    """What an adapter's folder says that it was trained on; None where another tool wrote it."""
    path = Path(folder) / BASE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        return Base(values["base"], values["sha256 of weights"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected base and sha256 of weights: {error!r}") from error


def check(adapter: str | Path, candidate: Base) -> None:
    """Refuse a model that is not the base that an adapter was trained on, whatever it is called.

    Raises:
        UserError: its weights have another hash than those that the adapter records.
    """
    base = recorded(adapter)
    if base is None or base.weights == candidate.weights:
        return
    what = "which has changed since" if base.name == candidate.name else f"not on {candidate}"
    if base.name == candidate.name:
        what += f": its weights are now {candidate.weights[:SHOWN]}"
    raise UserError(
        f"{adapter}: this adapter was trained on {base}, {what}. On other weights it would compute something else: "
        "use it with the base it was trained on"
    )
