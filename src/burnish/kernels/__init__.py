"""Faster attention and linear layers, and all changes to the process and to models that they need.

Importing Burnish changes nothing. Only these functions do:

- ``set_environment`` sets environment variables. Only the command line calls it.
- ``prepare_process`` limits oneDNN's caches (also by environment variables), registers two attention implementations
  with transformers, and replaces its ``sdpa`` by one that trains faster in half precision on a CPU. Loading a model
  calls it.
- ``enable`` changes the classes of a model's linear layers and LoRA layers permanently.
- ``use_packed_attention`` changes a model's attention implementation until it is called again.
- ``decoding_attention`` changes a model's attention implementation within a context.
- ``blocked.using`` gives linear layers copies of their weights within a context, in which a model samples.
- ``grouped.onednn`` changes the precision of oneDNN's products within a context, in which packed attention is computed.

None of this affects a saved model. Importing this file does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers print a warning in every forked data loader
    "TQDM_DISABLE": "1",  # otherwise the GGUF reader writes progress bars even to files
}

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""Idle OpenMP threads spin for a tenth of a millisecond and then sleep.

Threads that keep spinning slow down everything else on the machine. If they sleep immediately, a step of many small
matrix products takes a quarter longer.
"""

CACHE_LIMITS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "40", "LRU_CACHE_CAPACITY": "40"}
"""The number of shapes for which oneDNN, and PyTorch's layer above it, cache kernels. Their default is 1,024.

Micro-batches have many different lengths, and cached kernels for 1,024 shapes took 300 MB. One pass through a model has
15 shapes, or up to 35 with adapters. With a smaller limit, every layer would create its kernels again.
"""


def set_environment() -> None:
    """Set the environment variables of the command line, except those that the user has set.

    Call this before torch is imported, because OpenMP reads them at that time.
    """
    waiting = {} if "OMP_WAIT_POLICY" in os.environ else WAITING
    for name, value in (ENVIRONMENT | waiting | CACHE_LIMITS).items():
        os.environ.setdefault(name, value)


def prepare_process() -> None:
    """Limit oneDNN's caches and register Burnish's attention with transformers. Call this before a model is used.

    oneDNN reads its limits at its first computation. Calling this function again has no effect.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from burnish.kernels import attention, decoding

    for name, value in CACHE_LIMITS.items():
        os.environ.setdefault(name, value)
    # Without disable, torch.compile would recompile the model for every set of lengths.
    AttentionInterface.register("sdpa", attention.sdpa)
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.varlen))
    AttentionMaskInterface.register(attention.NAME, sdpa_mask)
    AttentionInterface.register(decoding.NAME, decoding.attend)


def enable(model: nn.Module) -> nn.Module:
    """Use Burnish's LoRA layers in a model, and its linear layers if this machine has the kernels. Returns the model.

    Layers of other classes, such as layers quantized to 8 bits, and layers whose forward was wrapped by another library
    are not changed.
    """
    from peft.tuners import lora as peft_lora
    from torch import nn

    from burnish.kernels import linear, lora

    prepare_process()
    classes: dict[type, type] = {peft_lora.Linear: lora.LoraLinear}
    if linear.has_onednn():
        classes[nn.Linear] = linear.Linear
    if any(lora.packing(weight) is not None for weight in model.parameters()):
        from burnish.kernels import quantized

        classes[quantized.Linear4bit] = quantized.LoraLinear4bit
    for module in model.modules():
        if "forward" not in vars(module):
            module.__class__ = classes.get(type(module), type(module))
    return model


def use_packed_attention(model: Any, on: bool) -> None:
    """Switch a transformers model from ``sdpa`` to ``attention.varlen``, or back."""
    from burnish.kernels import attention

    prepare_process()
    model.config._attn_implementation = attention.NAME if on else "sdpa"


@contextmanager
def decoding_attention(config: Any, on: bool = True) -> Iterator[None]:
    """Within the context, the model with this config uses ``decoding.attend``, if ``on``."""
    from burnish.kernels import decoding

    before = config._attn_implementation
    config._attn_implementation = decoding.NAME if on else before
    try:
        yield
    finally:
        config._attn_implementation = before
