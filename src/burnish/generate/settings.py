"""Which generator a stage uses, and its settings. It imports no torch, so that a recipe is checked quickly."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, Literal

from pydantic import Field

from burnish.generate.protocol import GeneratorFactory
from burnish.types import Config


class LocalSettings(Config, use_attribute_docstrings=True):
    """Burnish's own sampler, in the process that trains: ``{name: local, slots: 64}``."""

    name: Literal["local"] = "local"
    slots: int = Field(64, ge=1)
    """Completions that are decoded together."""


class ContinuousSettings(Config, use_attribute_docstrings=True):
    """transformers' continuous batching, with a paged cache; for a GPU: ``{name: continuous, slots: 256}``."""

    name: Literal["continuous"]
    slots: int = Field(256, ge=1)
    """Completions that are decoded together."""
    max_batch_tokens: int = Field(4096, ge=1)
    """Tokens of one forward pass."""
    page_size: int = Field(64, ge=4)
    """Tokens of one block of the cache."""


class ProcessSettings(Config, use_attribute_docstrings=True):
    """``local`` in a process of its own, which receives the weights: ``{name: process, slots: 64}``."""

    name: Literal["process"]
    slots: int = Field(64, ge=1)
    """Completions that are decoded together."""


GeneratorSettings = Annotated[LocalSettings | ContinuousSettings | ProcessSettings, Field(discriminator="name")]

CLASSES = {
    "local": "burnish.generate.local:LocalGenerator",
    "continuous": "burnish.generate.continuous:ContinuousGenerator",
    "process": "burnish.generate.process:ProcessGenerator",
}


def factory(settings: LocalSettings | ContinuousSettings | ProcessSettings) -> GeneratorFactory:
    """What makes the generator of these settings for a model and its tokenizer."""
    module, _, name = CLASSES[settings.name].partition(":")
    return partial(getattr(import_module(module), name), **settings.model_dump(exclude={"name"}))
