"""How the losses of tokens become one number: what each of them counts, and what their sum is divided by."""

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
    """What each token counts, (B, T), and what the sum is divided by, a scalar.

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
    """Weights that turn losses of tokens into one number; n is the number of learned tokens of a token's sequence.

    token_mean: weight 1, count all learned tokens. The other three count sequences with a learned token, and weigh each
    of its tokens by 1 / n (sequence_mean), by 1 (sequence_sum), or by 1 / length (fixed_length). No weight depends on
    how far a row is padded.

    Args:
        mask: (B, T), True where a token is learned.
        kind: one of the four.
        length: the constant of fixed_length, such as the most tokens that can be sampled; of no other kind.
        segments: (B, T), the number of the sequence within its row, where rows hold several; None is one a row.
        dtype: of the losses that are weighted; half precision becomes float32, or counts above 256 would be rounded.

    Returns:
        Weights, 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
        UserError: if the kind is unknown, or the length is missing or would be ignored.
    """
    if kind not in ("token_mean", "sequence_mean", "sequence_sum", "fixed_length"):
        raise UserError(f"unknown reduction {kind!r}: expected token_mean, sequence_mean, sequence_sum or fixed_length")
    if (length is None) == (kind == "fixed_length") or (length is not None and length < 1):
        raise UserError(f"a length of at least 1 belongs to the reduction fixed_length only: got {length} for {kind}")
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
    """Sum of values over the learned tokens, and its count: sum_t w_t * x_t.

    Args:
        values: (B, T), such as losses or entropies.
        mask: (B, T), True where a token is learned.
        weights: from reduction_weights; None is 1 for each token, and their number as the count.

    Returns:
        Metric; total and count are 0 if nothing is learned.

    Raises:
        ValueError: if the shapes differ.
    """
    (values,) = learned(mask, values=values)
    if weights is None:
        return Metric(values.sum(), mask.sum().to(values.dtype))
    (tokens,) = learned(mask, weights=weights.tokens)
    return Metric((values * tokens).sum(), weights.count)
