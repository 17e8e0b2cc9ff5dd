"""Faster attention and linear layers, and all changes that Burnish makes to the process or to a model for them.

Importing Burnish changes nothing. These functions do, and no other code does:

- ``set_environment``: environment variables of a process that Burnish owns; the command line calls it.
- ``prepare_process``: limits of oneDNN's caches (environment variables too), and two attention implementations in
  transformers' registry. Loading a model calls it.
- ``enable``: the class of a model's linear layers, for good.
- ``use_packed_attention``: a model's attention implementation, until it is called again.
- ``decoding_attention``: a model's attention implementation, within a context.

A model that is saved keeps no trace of them. Importing this file does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # tokenizers would print a warning in every forked data loader
    "TQDM_DISABLE": "1",  # the GGUF reader would draw progress bars even into files
}

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""OpenMP threads that have nothing to do spin for a tenth of a millisecond, then sleep.

Threads that keep spinning slow down everything else on the machine; with threads that sleep at once, a step of many
small products takes a quarter longer.
"""

CACHE_LIMITS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "40", "LRU_CACHE_CAPACITY": "40"}
"""Shapes that oneDNN, and PyTorch's layer above it, keep prepared kernels for; their default is 1,024.

Micro-batches have ever new lengths, and the kernels of 1,024 shapes took 300 MB. A pass through a model has 15 shapes
of its own, up to 35 with adapters. A smaller limit than that would prepare every kernel anew in every layer.
"""


def set_environment() -> None:
    """Set the environment variables of the command line, except those that the user has set.

    Call it before torch is imported, which is when OpenMP reads them.
    """
    waiting = {} if "OMP_WAIT_POLICY" in os.environ else WAITING
    for name, value in (ENVIRONMENT | waiting | CACHE_LIMITS).items():
        os.environ.setdefault(name, value)


def prepare_process() -> None:
    """Limit oneDNN's caches and register Burnish's attention with transformers. Call it before a model is used.

    oneDNN reads its limits when it computes for the first time. Calling this again changes nothing.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from burnish.kernels import attention, decoding

    for name, value in CACHE_LIMITS.items():
        os.environ.setdefault(name, value)
    # Without disable, a compiled model would be compiled again for every set of lengths.
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.varlen))
    AttentionMaskInterface.register(attention.NAME, sdpa_mask)
    AttentionInterface.register(decoding.NAME, decoding.attend)


def enable(model: nn.Module) -> nn.Module:
    """Give a model Burnish's linear layers, where this machine has the kernels for them; returns the same model.

    Layers of other classes, such as quantized ones, and layers whose forward another library has wrapped stay as they
    are.
    """
    from torch import nn

    from burnish.kernels import linear

    prepare_process()
    if linear.has_onednn():
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.__class__ = linear.Linear
    return model


def use_packed_attention(model: Any, on: bool) -> None:
    """Switch a transformers model from ``sdpa`` to ``attention.varlen``, or back."""
    from burnish.kernels import attention

    prepare_process()
    model.config._attn_implementation = attention.NAME if on else "sdpa"


@contextmanager
def decoding_attention(config: Any, on: bool = True) -> Iterator[None]:
    """Let the model of this configuration use ``decoding.attend`` within the context, if ``on``."""
    from burnish.kernels import decoding

    before = config._attn_implementation
    config._attn_implementation = decoding.NAME if on else before
    try:
        yield
    finally:
        config._attn_implementation = before
