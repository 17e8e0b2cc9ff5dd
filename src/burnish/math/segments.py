"""Sums over the sequences of packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.math.tensors import same_shape


def sequence_ids(segments: Tensor) -> Tensor:
    """A number of its own for every sequence of a batch, (B, T): segment s of row b is b * (T + 1) + s.

    Args:
        segments: (B, T), the number of the sequence within its row, from 1; 0 on padding.
    """
    rows, width = segments.shape
    return segments.long() + torch.arange(rows, device=segments.device).unsqueeze(1) * (width + 1)


def sequence_sums(x: Tensor, segments: Tensor) -> Tensor:
    """The sum over each token's sequence, (B, T): equal for all tokens of a sequence.

    Args:
        x: (B, T), 0 where a token does not count.
        segments: (B, T), as in sequence_ids.

    Raises:
        ValueError: if the shapes differ.
    """
    same_shape(x=x, segments=segments)
    rows, width = segments.shape
    ids = sequence_ids(segments)
    return x.new_zeros(rows * (width + 1)).index_add(0, ids.flatten(), x.flatten())[ids]
