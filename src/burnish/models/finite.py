"""Finds weights that are NaN or infinite."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def non_finite(model: nn.Module, *, trained: bool = False) -> str | None:
    """The name of the first weight that holds NaN or infinity, or None.

    Args:
        model: any module. Quantized weights cannot hold NaN and are skipped. Of sharded weights, the part of this
            process is checked.
        trained: check only the weights that require a gradient.
    """
    for name, weight in model.named_parameters():
        mine = weight.to_local() if isinstance(weight, DTensor) else weight
        if weight.is_floating_point() and (weight.requires_grad or not trained) and not mine.isfinite().all():
            return name
    return None
