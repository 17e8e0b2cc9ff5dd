"""Records which base an adapter was trained on: its name and a hash of its weights, in a file beside the adapter.

An adapter changes the weights of one model. On any other model it loads without an error and computes something else;
a common mistake is to put an adapter of a fine-tuned model on the pretrained one. The hash prevents it.
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
    """SHA-256, in hex, of a model's weights: of the names, dtypes, shapes and bytes of its tensors.

    The result does not depend on how tensors are split into files or ordered in them.

    Args:
        folder: a model folder, or the id of a model in the hub's cache.

    Raises:
        UserError: the model has no safetensors files, or one is damaged.
    """
    return _hash(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in _files(folder)))


@functools.lru_cache(maxsize=8)
def _hash(files: tuple[tuple[Path, int, int], ...]) -> str:
    digests: dict[str, str] = {}
    for path, _, _ in files:
        try:
            with safe_open(path, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a dict
                    tensor = stored.get_tensor(name)
                    head = f"{name} {tensor.dtype} {list(tensor.shape)}\n"
                    digest = hashlib.sha256(head.encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
                    digests[name] = digest.hexdigest()
        except SafetensorError as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _files(folder: str) -> list[Path]:
    """The weight files of a model folder or of a model in the hub's cache."""
    single = cached_file(folder, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    index = cached_file(folder, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise UserError(f"{folder}: it has no weights in safetensors files, which Burnish needs to compare bases")
    names = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    return [Path(str(cached_file(folder, name))) for name in names]


def record(folder: Path, base: Base) -> None:
    """Write the base that an adapter was trained on into the adapter's folder."""
    (folder / BASE).write_text(json.dumps({"base": base.name, "sha256 of weights": base.weights}, indent=1) + "\n")


def recorded(folder: str | Path) -> Base | None:
    """The base recorded in an adapter's folder; None if another tool wrote the adapter."""
    path = Path(folder) / BASE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        return Base(values["base"], values["sha256 of weights"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected base and sha256 of weights: {error!r}") from error


def check(adapter: str | Path, candidate: Base) -> None:
    """Check that a model is the base that an adapter was trained on. Only the weights count, not the name.

    Raises:
        UserError: the hash of the model's weights is not the recorded one.
    """
    base = recorded(adapter)
    if base is None or base.weights == candidate.weights:
        return
    if base.name == candidate.name:
        difference = f"which has changed since: its weights are now {candidate.weights[:SHOWN]}"
    else:
        difference = f"not on {candidate}"
    raise UserError(
        f"{adapter}: this adapter was trained on {base}, {difference}. On other weights it would compute something "
        "else: use it with the base it was trained on"
    )
