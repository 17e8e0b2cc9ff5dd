"""What the files of a model hold: settings in JSON, and the headers of weight files, without loading any weight."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from burnish.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16}


class Stored(NamedTuple):
    """The tensors in the weight files of a model.

    ``Stored({"score.weight": ("F32", (1, 64))}, 1, {"model-00002-of-00002.safetensors": 17}, {}, False)``

    Attributes:
        tensors: dtype and shape of each tensor, by its name.
        files: the number of weight files that there should be.
        missing: files that are not there, each with the number of tensors that it should hold.
        damaged: files that cannot be read, each with the reason.
        pickled: whether there are only weights in pickle files, which Burnish does not load.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    files: int = 0
    missing: Mapping[str, int] = MappingProxyType({})
    damaged: Mapping[str, str] = MappingProxyType({})
    pickled: bool = False

    @property
    def complete(self) -> bool:
        """Whether all weight files are there and can be read."""
        return bool(self.tensors) and not self.missing and not self.damaged

    @property
    def parameters(self) -> int:
        """The number of stored parameters."""
        return sum(math.prod(shape) for _, shape in self.tensors.values())

    @property
    def bytes(self) -> int:
        """The size of the stored parameters."""
        return sum(math.prod(shape) * BITS.get(dtype, 8) // 8 for dtype, shape in self.tensors.values())

    def dtypes(self) -> dict[str, int]:
        """The number of parameters of each dtype, the most frequent first: ``{"bfloat16": 134515008}``."""
        sums: dict[str, int] = {}
        for dtype, shape in self.tensors.values():
            name = NAMES.get(dtype, dtype.lower())
            sums[name] = sums.get(name, 0) + math.prod(shape)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def local_file(reference: str, name: str) -> Path | None:
    """A file of a model folder, or of a model in the hub's cache. None if it is not on this machine."""
    try:
        found = cached_file(
            reference,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (OSError, ValueError):  # it is not a possible id
        return None
    return Path(found) if found else None


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model, such as config.json.

    Raises:
        UserError: the file is not valid JSON, or holds another value.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {json.dumps(value)[:60]}")
    return value


def stored(reference: str) -> Stored:
    """Read the headers of a model's weight files.

    Args:
        reference: a model folder, or a hub id.
    """
    single = local_file(reference, WEIGHTS)
    if single is not None:
        return of_files([single])
    index = local_file(reference, INDEX)
    if index is None:
        return Stored({}, pickled=any(local_file(reference, name) for name in PICKLES))
    try:
        shards: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        expected = sorted(set(shards.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Stored({}, damaged={INDEX: f"{type(error).__name__}: {error}"})
    found = {name: local_file(reference, name) for name in expected}
    missing = {name: list(shards.values()).count(name) for name in expected if found[name] is None}
    return of_files(path for path in found.values() if path)._replace(files=len(expected), missing=missing)


def of_files(paths: Iterable[Path]) -> Stored:
    """Read the headers of safetensors files."""
    tensors, damaged, count = {}, {}, 0
    for path in paths:
        count += 1
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_slice(name)
                    tensors[name] = (tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            damaged[path.name] = str(error)
    return Stored(tensors, count, {}, damaged)
