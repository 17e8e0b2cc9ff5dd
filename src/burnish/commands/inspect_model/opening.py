"""Opens a model without loading its weights: its config, its class on the meta device, and what its files hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from burnish.config import shipped
from burnish.errors import UserError, did_you_mean
from burnish.files import expanded
from burnish.models import loading
from burnish.models.stored import Stored, json_object, stored

READ_LIMIT = 2**30
"""Bytes of weights up to which they are read, to compare scores and to hash the base of an adapter."""
MOST_LAYERS = 10_000
# What transformers raises for configs that it does not understand.
BAD_CONFIG = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    StrictDataclassError,
)


@dataclass
class Model:
    """A model whose weights have not been loaded.

    Attributes:
        reference: what the user named.
        source: a folder or hub id, or for a GGUF file its folder.
        settings: config.json.
        config: the same, as transformers reads it. None if only the model's own code can read it.
        network: the model on the meta device. None if transformers has no class for it.
        stored: its tensors.
        gguf: the name of the GGUF file, or None.
        adapter: the adapter's folder, or None. The other attributes then describe its base.
    """

    reference: str
    source: str
    settings: Mapping[str, Any]
    config: PreTrainedConfig | None
    network: PreTrainedModel | None
    stored: Stored
    gguf: str | None = None
    adapter: str | None = None

    @property
    def classifies(self) -> bool:
        """Whether the model is a sequence classifier."""
        return self.network is not None and type(self.network).__name__.endswith("ForSequenceClassification")

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder. Transformers names the head of causal classifiers ``score``."""
        if self.network is None or self.network.get_output_embeddings() is not None:
            return False
        return not hasattr(self.network, "score") and not getattr(self.config, "is_decoder", False)

    @property
    def folder(self) -> str:
        """Where a value head and a tokenizer are: the adapter's folder if there is one."""
        return self.adapter or self.source

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the model: ``read("generation_config.json")``. A GGUF file has none."""
        return {} if self.gguf else read_json(self.source, name)


def locate(reference: str) -> str | Path:
    """Where a model is: the path of a GGUF file, or a folder or hub id as a string.

    Raises:
        UserError: it is not a model.
    """
    path = expanded(reference)
    try:
        place = loading.locate(reference)
    except UserError as error:
        stages = sorted(folder.parent.name for folder in path.glob("*/model"))
        if stages:
            reason = f"this is the folder of a run: name one of its stages: {', '.join(stages)}"
        elif path.is_dir():
            reason = str(error).removeprefix(f"{reference}: ")
        else:
            reason = "a file of another kind" if path.exists() else "there is no such file or folder"
        raise _neither(reference, reason) from error
    if isinstance(place, str) and not any(model_file(place, name) for name in ("config.json", "adapter_config.json")):
        reason = "there is no such file or folder, and no such model in the hub's cache or on the hub"
        raise _neither(reference, reason + did_you_mean(reference, shipped()))
    return place


def _neither(reference: str, reason: str) -> UserError:
    return UserError(
        f"{reference}: neither a recipe nor a model: {reason}\n"
        f"  a recipe is a .yaml file or one of {', '.join(shipped())}\n"
        "  a model is a folder (of a model, adapter or stage), a .gguf file or a hub id"
    )


def model_file(source: str, name: str) -> Path | None:
    """A file of a model folder or hub id, downloaded if it must be."""
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # there is no network, or no such id
        return None
    return Path(found) if found else None


def read_json(source: str, name: str) -> dict[str, Any]:
    """A JSON file of a model folder or hub id; empty if there is no such file."""
    path = model_file(source, name)
    return {} if path is None else json_object(path)


def _config(source: str, **options: Any) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    except BAD_CONFIG as error:
        raise UserError(f"{source}: its config cannot be read: {_reason(error)}") from error
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        raise UserError(f"{source}: its config cannot be right: {layers} layers")
    return config


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def on_meta(make: Callable[[], PreTrainedModel], reference: str) -> PreTrainedModel:
    """Make a model on the meta device, where it takes no memory.

    Raises:
        UserError: its config is impossible.
    """
    try:
        with torch.device("meta"):
            return make()
    except BAD_CONFIG as error:
        raise UserError(f"{reference}: no model can be built from its config: {_reason(error)}") from error


def open_model(reference: str, source: str) -> Model:
    """Open a whole model in a folder or of a hub id."""
    settings = read_json(source, "config.json")
    known = isinstance(kind := settings.get("model_type"), str) and kind in transformers.CONFIG_MAPPING
    if not known and "auto_map" in settings:
        return Model(reference, source, settings, None, None, stored(source))
    config = _config(source)
    names = settings.get("architectures") or []
    cls = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel)):
        cls = None
    network = on_meta(lambda: cls(config) if cls else AutoModel.from_config(config), reference)
    return Model(reference, source, settings, config, network, stored(source))


def open_gguf(reference: str, path: Path) -> Model:
    """Open a GGUF file."""
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(path).tensors
        config = _config(str(path.parent), gguf_file=path.name)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{path}: cannot be read as a GGUF model: {_reason(error)}") from error
    network = on_meta(lambda: AutoModelForCausalLM.from_config(config), reference)
    held = {tensor.name: (tensor.tensor_type.name, tuple(int(n) for n in tensor.shape)) for tensor in tensors}
    return Model(reference, str(path.parent), config.to_dict(), config, network, Stored(held, 1), path.name)
