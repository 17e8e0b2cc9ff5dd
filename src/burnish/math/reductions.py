"""Reductions of token losses to one number: the weight of each token, and the divisor of their sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.errors import UserError
from burnish.math.choices import Reduction
from burnish.math.segments import sequence_ids
from burnish.math.tensors import learned, same_shape
from burnish.types import Metric


class Weights(NamedTuple):
    """The weight of each token, (B, T), and the count that divides the weighted sum, a scalar.

    ``Weights(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor(1.0))`` is the mean over the two tokens of one sequence.
    """

    tokens: Tensor
    count: Tensor


def reduction_weights(
    mask: Tensor,
    kind: Reduction = "token_mean",
    length: int | None = None,
    segments: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """Weights that reduce token losses to one number. n is the number of learned tokens in a token's sequence.

    token_mean gives every learned token weight 1 and counts tokens. The other three count the sequences that have a
    learned token, and weight each learned token by 1 / n (sequence_mean), 1 (sequence_sum) or 1 / length
    (fixed_length). The weights do not depend on padding.

    Args:
        mask: (B, T), the loss mask.
        kind: one of the four reductions.
        length: the constant of fixed_length, for example the maximum number of sampled tokens; not allowed for others.
        segments: (B, T), the index of the sequence within its row; None means one sequence per row.
        dtype: dtype of the losses. Half precision becomes float32, because it would round counts above 256.

    Returns:
        Weights, 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
        UserError: if the kind is unknown, or the length is missing or would be ignored.
    """
    if kind not in ("token_mean", "sequence_mean", "sequence_sum", "fixed_length"):
        raise UserError(f"unknown reduction {kind!r}: expected token_mean, sequence_mean, sequence_sum or fixed_length")
    if (length is None) == (kind == "fixed_length") or (length is not None and length < 1):
        raise UserError(
            f"reduction fixed_length needs a length of at least 1, others take none: got {length} for {kind}"
        )
    dtype = torch.promote_types(dtype, torch.float32)
    tokens = mask.to(dtype)
    if kind == "token_mean":
        return Weights(tokens, mask.sum().to(dtype))
    if segments is None:
        segments = torch.ones_like(mask, dtype=torch.long)
    same_shape(mask=mask, segments=segments)
    rows, width = mask.shape
    sequence = sequence_ids(segments)
    sizes = sequence.new_zeros(rows * (width + 1)).index_add(0, sequence.flatten(), mask.long().flatten())
    count = (sizes > 0).sum().to(dtype)
    if kind == "sequence_mean":
        tokens = tokens / sizes[sequence].clamp(min=1)
    elif length is not None:
        tokens = tokens / length
    return Weights(tokens, count)


def reduce(values: Tensor, mask: Tensor, weights: Weights | None = None) -> Metric:
    """The weighted sum of values over the learned tokens, sum_t w_t * x_t, and its count.

    Args:
        values: (B, T), for example losses or entropies.
        mask: (B, T), the loss mask.
        weights: from ``reduction_weights``; None weights every learned token by 1 and counts them.

    Returns:
        Metric; total and count are 0 if no token is learned.

    Raises:
        ValueError: if the shapes differ.
    """
    (values,) = learned(mask, values=values)
    if weights is None:
        return Metric(values.sum(), mask.sum().to(values.dtype))
    (tokens,) = learned(mask, weights=weights.tokens)
    return Metric((values * tokens).sum(), weights.count)
