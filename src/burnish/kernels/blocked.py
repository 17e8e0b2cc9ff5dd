"""Copies of the weights of linear layers in oneDNN's blocked layout, for sampling on a CPU.

Given a plain weight, oneDNN reorders it in every call. With few rows, this takes as long as the product itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from burnish.kernels import linear

FEWEST_WEIGHTS = 2**16
"""Layers with fewer weights stay as they are: calling oneDNN takes longer than their product."""

ROWS = 32
"""Number of rows for which oneDNN chooses the layout. It is about as fast for 1 to 512 rows; that for 1 row is not."""

DTYPES = (torch.float32, torch.bfloat16)

Blocked = dict[linear.Linear, Tensor]
"""The copy of each layer's weight: ``{layer: weight}``."""


def copies(model: nn.Module, max_bytes: int) -> Blocked:
    """Copy the weights of a model's linear layers, its head included, into the blocked layout.

    Call ``kernels.enable`` first. Layers of other classes, of other dtypes, on a GPU, with few weights, or whose
    forward was wrapped by another library are left out, and so are the factors of LoRA.
    There are no copies at all if the processor does not have the kernels, or if they would need more than
    ``max_bytes``. A copy does not follow changes of the weight.
    """
    if not linear.has_onednn():
        return {}
    layers = [layer for layer in _copied(model) if isinstance(layer, linear.Linear) and _fits(layer)]
    if sum(layer.weight.nbytes for layer in layers) > max_bytes:
        return {}
    return {layer: torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS) for layer in layers}


@contextmanager
def using(blocked: Blocked) -> Iterator[None]:
    """Within the context, layers compute with these copies where no gradient is needed. Nothing else reads them."""
    try:
        # not by setattr, which takes longer than all other work of this function, since it looks for parameters
        for layer, weight in blocked.items():
            vars(layer)["blocked"] = weight
        yield
    finally:
        for layer in blocked:
            vars(layer).pop("blocked", None)


def bytes_of(model: nn.Module) -> int:
    """The memory that copies of a model's weights take. Its parameters may be on the meta device."""
    return sum(layer.weight.nbytes for layer in _copied(model))


def _copied(model: nn.Module) -> Iterable[nn.Linear]:
    """The linear layers of which there are copies, if they are on a CPU."""
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, linear.Linear) and ".lora_" not in name:
            assert isinstance(module, nn.Linear)
            if module.weight.dtype in DTYPES and module.weight.numel() >= FEWEST_WEIGHTS:
                yield module


def _fits(layer: linear.Linear) -> bool:
    return layer.weight.device.type == "cpu" and "forward" not in vars(layer)
