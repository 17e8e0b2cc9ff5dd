"""Reductions: how the losses of tokens become one number.

Each reduction is a function ``(losses, mask, segments, **settings) -> Term``:

- ``losses`` (B, T): the losses of tokens. Values where the mask is False are ignored.
- ``mask`` (B, T): the loss mask, True for tokens that enter the loss ("learned tokens").
- ``segments`` (B, T): the index of the sequence within its row, starting at 1; 0 for padding.

The term is a sum over the learned tokens. The trainer divides it by a count over the whole optimizer step: that of the
learned tokens, or of the sequences with a learned token. So the result depends neither on padding nor on micro-batches.
Sums are in float32, or in float64 for losses in float64. A shape mismatch raises a ValueError.
"""

from __future__ import annotations

from torch import Tensor

from burnish.math.segments import sequence_count, sequence_sums
from burnish.math.tensors import learned
from burnish.types import Metric, Term


def reduce(values: Tensor, mask: Tensor) -> Metric:
    """The sum of values over the learned tokens, and their number.

    Args:
        values: (B, T), for example losses or entropies.
        mask: (B, T), the loss mask.

    Returns:
        Metric; total and count are 0 if no token is learned.

    Raises:
        ValueError: if the shapes differ.
    """
    (values,) = learned(mask, values=values)
    return Metric(values.sum(), mask.sum().to(values.dtype), (values, mask))


def token_mean(losses: Tensor, mask: Tensor, segments: Tensor) -> Term:
    """The mean over all learned tokens. Long sequences weigh more than short ones. It does not use ``segments``."""
    return reduce(losses, mask).over("tokens")


def sequence_sum(losses: Tensor, mask: Tensor, segments: Tensor) -> Term:
    """The sum over the learned tokens of each sequence, averaged over sequences."""
    (losses,) = learned(mask, losses=losses)
    return Term(losses.sum(), "sequences", sequence_count(mask, segments).to(losses.dtype))


def sequence_mean(losses: Tensor, mask: Tensor, segments: Tensor) -> Term:
    """The mean over the learned tokens of each sequence, averaged over sequences (GRPO: Shao et al. 2024)."""
    (losses,) = learned(mask, losses=losses)
    sizes = sequence_sums(mask.to(losses.dtype), segments)
    return sequence_sum(losses / sizes.clamp(min=1), mask, segments)


def fixed_length(losses: Tensor, mask: Tensor, segments: Tensor, *, length: int) -> Term:
    """The sum over each sequence, divided by a constant and averaged over sequences (Dr. GRPO: Liu et al. 2025).

    Args:
        length: At least 1, for example the largest number of sampled tokens.
    """
    term = sequence_sum(losses, mask, segments)
    return term._replace(total=term.total / length)
