"""Which generator a stage uses, and its settings. It imports no torch, so that a recipe is checked quickly."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from burnish.generate.protocol import GeneratorFactory
from burnish.types import Config

CLASSES = {
    "local": "burnish.generate.local:LocalGenerator",
    "continuous": "burnish.generate.continuous:ContinuousGenerator",
    "process": "burnish.generate.process:ProcessGenerator",
}


class GeneratorSettings(Config, use_attribute_docstrings=True):
    """What completes prompts: ``{name: continuous, slots: 128}``."""

    name: Literal["local", "continuous", "process"] = "local"
    """``local`` is Burnish's own sampler, ``continuous`` transformers' continuous batching, for a GPU, and ``process``
    is ``local`` in a process of its own."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Completions that are decoded together. Absent: 64, and 256 with ``continuous``."""
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one forward pass of ``continuous``. Absent: 4096."""
    page_size: Annotated[int, Field(ge=4)] | None = None
    """Tokens of one block of the cache of ``continuous``. Absent: 64."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        paged = {"max_batch_tokens", "page_size"} & self.model_fields_set
        if paged and self.name != "continuous":
            raise ValueError(f"{', '.join(sorted(paged))} belong to {{name: continuous}}: take them away")
        return self


def factory(settings: GeneratorSettings) -> GeneratorFactory:
    """What makes the generator of these settings for a model and its tokenizer."""
    module, _, name = CLASSES[settings.name].partition(":")
    given = settings.model_dump(exclude={"name"}, exclude_none=True)
    return partial(getattr(import_module(module), name), **given)
