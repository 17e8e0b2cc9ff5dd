"""Settings of a stage's generator. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from burnish.generate.protocol import GeneratorFactory
from burnish.types import Config

CLASSES = {
    "local": "burnish.generate.local:LocalGenerator",
    "continuous": "burnish.generate.continuous:ContinuousGenerator",
    "process": "burnish.generate.process:ProcessGenerator",
    "vllm": "burnish.generate.vllm:VllmGenerator",
}
NO_VALUES = "the generator continuous returns no values: use generator: {name: local}"


class GeneratorSettings(Config, use_attribute_docstrings=True):
    """The generator that samples completions: ``{name: continuous, slots: 128}``."""

    name: Literal["local", "continuous", "process"] = "local"
    """local: Burnish's own sampler; continuous: transformers' continuous batching, for a GPU; process: ``local`` in a
    child process."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Number of completions decoded together. Default: 64, or 256 with ``continuous``."""
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """continuous: maximum number of tokens in a forward pass. Default: 4096."""
    page_size: Annotated[int, Field(ge=4)] | None = None
    """continuous: number of tokens in a block of the KV cache. Default: 64."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        paged = {"max_batch_tokens", "page_size"} & self.model_fields_set
        if paged and self.name != "continuous":
            raise ValueError(f"{', '.join(sorted(paged))} applies only to {{name: continuous}}: remove this key")
        return self


def factory(settings: GeneratorSettings, critic: Any = None) -> GeneratorFactory:
    """A factory that creates the generator of these settings for a model and its tokenizer.

    ``critic`` is the head that computes the values of sampled tokens, for ``local``.
    """
    module, _, name = CLASSES[settings.name].partition(":")
    given = settings.model_dump(exclude={"name"}, exclude_none=True)
    if critic is not None:
        given["critic"] = critic
    return partial(getattr(import_module(module), name), **given)
