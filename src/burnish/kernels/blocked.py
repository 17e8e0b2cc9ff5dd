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
    forward was wrapped by another library are left out.
    There are no copies at all if the processor does not have the kernels, or if they would need more than
    ``max_bytes``. A copy does not follow changes of the weight.
    """
    if not linear.has_onednn():
        return {}
    layers = [module for module in model.modules() if type(module) is linear.Linear and _fits(module)]
    if bytes_of(layers) > max_bytes:
        return {}
    return {layer: torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS) for layer in layers}


@contextmanager
def using(blocked: Blocked) -> Iterator[None]:
    """Within the context, layers compute with these copies where no gradient is needed. Nothing else reads them."""
    # not by setattr, which takes longer than all other work of this function, since it looks for parameters
    for layer, weight in blocked.items():
        vars(layer)["blocked"] = weight
    try:
        yield
    finally:
        for layer in blocked:
            del vars(layer)["blocked"]


def bytes_of(layers: Iterable[nn.Module]) -> int:
    """The memory that copies for these layers take. Other modules than linear layers take none."""
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    return sum(weight.nbytes for weight in weights if weight.dtype in DTYPES and weight.numel() >= FEWEST_WEIGHTS)


def _fits(layer: linear.Linear) -> bool:
    weight, wrapped = layer.weight, "forward" in vars(layer)
    return weight.device.type == "cpu" and weight.dtype in DTYPES and weight.numel() >= FEWEST_WEIGHTS and not wrapped
