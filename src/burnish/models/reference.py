"""Log-probabilities under a frozen reference model: at every step, or once, cached on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from burnish import files
from burnish.models.adapters import Reference
from burnish.models.forward import learned_logprobs, unwrap
from burnish.models.sharding import whole
from burnish.protocols import Engine
from burnish.render.encode import CHECKSUM, cache_folder
from burnish.types import Example, MicroBatch

ARRAY = "ref_logprobs"


def compared(reference: Reference, engine: Engine, examples: list[Example]) -> list[Example]:
    """The examples with the array ``ref_logprobs``, from a forward pass of the reference without gradient."""

    def function(batch: MicroBatch) -> dict[str, Tensor]:
        with reference.use(engine.network.policy) as model:
            return {ARRAY: learned_logprobs(model, batch)}

    return engine.run(function, examples)


class ReferenceLogprobs:
    """Adds the array ``ref_logprobs`` to examples: the log-probability of each learned token under the reference.

    The cached file is named by a digest of the reference's weights, the tokens and the loss masks. A resumed run reads
    it, and so does any other run with the same reference and rows.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.reference = Reference(policy)
        self.digest: bytes | None = None

    def live(self, engine: Engine, examples: list[Example]) -> list[Example]:
        """The examples with the array, from a forward pass without gradient."""
        return compared(self.reference, engine, examples)

    def cached(self, engine: Engine, examples: list[Example]) -> list[Example]:
        """The examples with the array, read from the cache folder, or computed and written there."""
        path = cache_folder() / "reference" / f"{self._key(engine, examples)}.safetensors"
        values = _load(path)
        everywhere = all(engine.gather(values is not None))
        if values is not None and everywhere:
            return _with_array(examples, values)
        examples = self.live(engine, examples)
        self.reference.offload()  # no step uses it, so it need not take the GPU's memory
        if engine.rank == 0:
            _save(path, np.concatenate([s.arrays[ARRAY] for e in examples for s in e.sequences]))
        return examples

    def _key(self, engine: Engine, examples: list[Example]) -> str:
        if self.digest is None:
            with self.reference.use(engine.network.policy) as model:
                self.digest = weights_digest(model, adapter=self.reference.frozen is not None)
        computed_by = (torch.__version__, engine.device.type, engine.precision)
        digest = hashlib.blake2b(self.digest + repr(computed_by).encode(), digest_size=20)
        for sequence in (s for example in examples for s in example.sequences):
            digest.update(len(sequence).to_bytes(8, "little"))
            digest.update(sequence.tokens.tobytes() + sequence.loss_mask.tobytes())
        return digest.hexdigest()


def weights_digest(model: nn.Module, adapter: bool = True) -> bytes:
    """A digest of a model's configuration and weights; without ``adapter``, those of LoRA are left out."""
    digest = hashlib.blake2b(repr(sorted(unwrap(model).config.to_diff_dict().items())).encode())
    for name, weight in sorted(model.state_dict().items()):
        if not adapter and "lora_" in name:
            continue
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        weight = whole(weight)
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _load(path: Path) -> Tensor | None:
    """The cached array; None if there is none, or the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            values = file.get_tensor(ARRAY)
            if (file.metadata() or {}).get(CHECKSUM) != files.digest([values.numpy().data]):
                raise ValueError("its bytes do not match its checksum")
            return values
    except (OSError, ValueError, SafetensorError) as error:
        warnings.warn(f"{path} is damaged and will be rebuilt: {error}", stacklevel=3)
        return None


def _with_array(examples: list[Example], values: Tensor) -> list[Example]:
    lengths = [len(s) for e in examples for s in e.sequences]
    bounds = pairwise(np.cumsum([0, *lengths]).tolist())
    flat = values.numpy()
    arrays = ({ARRAY: flat[start:end]} for start, end in bounds)
    return [replace(e, sequences=tuple(s.with_arrays(**next(arrays)) for s in e.sequences)) for e in examples]


def _save(path: Path, values: np.ndarray) -> None:
    """Write the array atomically. If that fails, warn."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            stored = torch.from_numpy(values)
            save_file({ARRAY: stored}, Path(folder) / path.name, {CHECKSUM: files.digest([values.data])})
            os.replace(Path(folder) / path.name, path)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"log-probabilities of the reference could not be cached for the next run: {error}", stacklevel=2)
