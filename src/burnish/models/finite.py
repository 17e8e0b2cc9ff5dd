"""Finds weights that are NaN or infinite."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def non_finite(model: nn.Module, *, trained: bool = False) -> str | None:
    """The name of the first weight that holds NaN or infinity, or None.

    Args:
        model: any module. Quantized weights cannot hold NaN and are skipped.
        trained: check only the weights that require a gradient.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and (weight.requires_grad or not trained) and not weight.isfinite().all():
            return name
    return None
