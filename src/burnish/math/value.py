"""Value losses. Each returns a sum and its count, and the trainer divides once."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.math.reductions import reduce
from burnish.math.tensors import learned, same_shape
from burnish.types import Metric


def clipped_value(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Metric:
    """PPO's value loss: 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2).

    Source: the implementation of Schulman et al., "Proximal policy optimization algorithms", 2017 (OpenAI baselines).

    Args:
        values: (B, T), V, values from the current critic.
        old_values: (B, T), V_old, values at the time of sampling; no gradient flows into it.
        returns: (B, T), R; no gradient flows into it.
        mask: (B, T), the loss mask.
        clip: c, above 0; None disables clipping.

    Returns:
        The sum and the number of learned tokens.

    Raises:
        ValueError: if the shapes differ.
    """
    plain, clipped = _value_errors(values, old_values, returns, mask, clip)
    return reduce(torch.maximum(plain, clipped) / 2, mask)


@torch.no_grad()
def value_clipfrac(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Metric:
    """The number of tokens whose value loss is clipped, and the number of all. Arguments as in ``clipped_value``."""
    plain, clipped = _value_errors(values, old_values, returns, mask, clip)
    return reduce((clipped > plain).to(plain.dtype), mask)


def step_value(values: Tensor, targets: Tensor, mask: Tensor) -> Metric:
    """Squared error of step values: the sum of (V - Q)^2 over the ends of reasoning steps, and their number.

    Source: Chen et al., "AlphaMath almost zero", 2024.

    Args:
        values: (B, T), V in [-1, 1], values of the text up to and including each token.
        targets: (B, T), Q in [-1, 1]; no gradient flows into it.
        mask: (B, T), True on the last token of each reasoning step.

    Returns:
        The sum and its count.

    Raises:
        ValueError: if the shapes differ.
    """
    same_shape(values=values, targets=targets)
    values, targets = learned(mask, values=values, targets=targets.detach())
    return reduce((values - targets).square(), mask)


def _value_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    values, old_values, returns = learned(mask, values=values, old_values=old_values.detach(), returns=returns.detach())
    plain = (values - returns).square()
    if clip is None:
        return plain, plain
    # Clamp between two bounds instead of old + clamp(difference), so that values inside the range stay bit-equal.
    inside = torch.clamp(values, old_values - clip, old_values + clip)
    return plain, (inside - returns).square()
