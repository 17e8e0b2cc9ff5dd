"""Settings of a stage's generator. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from burnish.addresses import plain_address
from burnish.generate.protocol import GeneratorFactory
from burnish.types import Config

CLASSES = {
    "local": "burnish.generate.local:LocalGenerator",
    "continuous": "burnish.generate.continuous:ContinuousGenerator",
    "process": "burnish.generate.process:ProcessGenerator",
    "ray": "burnish.generate.ray:RayGenerator",
    "vllm": "burnish.generate.vllm:VllmGenerator",
}
IN_THIS_PROCESS = ("local", "continuous")
"""Generators that sample only while nothing else is computed."""
WITHOUT_VALUES = ("continuous", "vllm")
"""Generators that cannot return the values of a critic."""
NO_VALUES = "the generator {name} returns no values: use generator: {{name: local}}"
ONLY = {
    "continuous": {"max_batch_tokens", "page_size"},
    "ray": {"workers", "cpus", "gpus", "address", "timeout"},
    "vllm": {"url", "key", "timeout", "wait", "folder"},
}
"""Settings that not all generators have."""
MAY_CHANGE = ("url", "key", "timeout", "wait", "folder", "address")
"""Settings on which no completion depends. They may change before a run is resumed."""
EXAMPLE = "http://127.0.0.1:8000"
Seconds = Annotated[float, Field(gt=0, le=86400)]


class GeneratorSettings(Config, use_attribute_docstrings=True):
    """The generator that samples completions: ``{name: continuous, slots: 128}``."""

    name: Literal["local", "continuous", "process", "ray", "vllm"] = "local"
    """local: Burnish's own sampler; continuous: transformers' continuous batching, for a GPU; process: ``local`` in a
    child process; ray: ``local`` in actors of a Ray cluster; vllm: a vLLM server."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Number of completions decoded together, with ``ray`` by each worker, or, with ``vllm``, of requests in flight.
    Default: 64, or 256 with ``continuous`` and ``vllm``."""
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """continuous: maximum number of tokens in a forward pass. Default: 4096."""
    page_size: Annotated[int, Field(ge=4)] | None = None
    """continuous: number of tokens in a block of the KV cache. Default: 64."""
    workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """ray: number of actors that share the requests. Default: 1."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """ray: CPUs of each actor, and its number of threads. Default: 1."""
    gpus: Annotated[float, Field(ge=0, le=64)] | None = None
    """ray: GPUs of each actor, such as 0.5. Default: 0, which samples on the CPU."""
    address: Annotated[str, Field(min_length=1)] | None = None
    """ray: address of the cluster, or auto. Default: RAY_ADDRESS, or else a cluster of this machine for this run."""
    url: str | None = None
    """vllm: address of the server, such as http://127.0.0.1:8000."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """vllm: NAME of the environment variable with the server's API key; the key itself is never written down."""
    timeout: Seconds | None = None
    """vllm: seconds to wait for an answer. Default: 600. ray: seconds to wait for resources that others use, and for an
    actor to start. Default: 300."""
    wait: Seconds | None = None
    """vllm: seconds to wait for a server that does not answer, such as one that is starting. Default: 600."""
    folder: Annotated[str, Field(min_length=1)] | None = None
    """vllm: folder for adapters, which the server can read. Default: a temporary folder on this machine."""

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        url = plain_address(url, EXAMPLE)
        if url.endswith("/v1"):
            raise ValueError(f"expected an address without /v1, such as {EXAMPLE}")
        return url

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key in sorted(self.model_fields_set & set().union(*ONLY.values()) - ONLY.get(self.name, set())):
            names = " and ".join(f"{{name: {name}}}" for name, keys in ONLY.items() if key in keys)
            raise ValueError(f"{key} applies only to {names}: remove this key")
        if self.name == "vllm" and self.url is None:
            raise ValueError(f"vllm needs url:, the address of a vLLM server, such as {EXAMPLE}")
        return self


def factory(settings: GeneratorSettings, critic: Any = None, frozen: bool = False) -> GeneratorFactory:
    """A factory that creates the generator of these settings for a model and its tokenizer.

    ``critic`` is the head that computes the values of sampled tokens, for ``local``. ``frozen`` says that the weights
    stay as they are, so that ``local`` keeps its copies of them.
    """
    module, _, name = CLASSES[settings.name].partition(":")
    given = settings.model_dump(exclude={"name"}, exclude_none=True)
    if critic is not None:
        given["critic"] = critic
    if frozen and settings.name == "local":
        given["frozen"] = True
    return partial(getattr(import_module(module), name), **given)
