"""Weights that are not numbers."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def non_finite(model: nn.Module, *, trained: bool = False) -> str | None:
    """The name of the first weight that holds NaN or infinity, None where there is none.

    Args:
        model: any module; weights stored in fewer bits have no NaN and are passed over.
        trained: look at the weights that are trained, and at no others.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and (weight.requires_grad or not trained) and not weight.isfinite().all():
            return name
    return None
