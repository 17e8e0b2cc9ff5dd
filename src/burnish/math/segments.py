"""Sums over the sequences of packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.math.tensors import same_shape


def sequence_ids(segments: Tensor) -> Tensor:
    """A unique id for each sequence of a batch, (B, T): segment s of row b has id b * (T + 1) + s.

    Args:
        segments: (B, T), the index of the sequence within its row, starting at 1; 0 for padding.
    """
    rows, width = segments.shape
    return segments.long() + torch.arange(rows, device=segments.device).unsqueeze(1) * (width + 1)


def sequence_count(mask: Tensor, segments: Tensor) -> Tensor:
    """The number of sequences with a learned token, a scalar.

    Args:
        mask: (B, T), the loss mask.
        segments: (B, T), as in ``sequence_ids``.

    Raises:
        ValueError: if the shapes differ.
    """
    same_shape(mask=mask, segments=segments)
    rows, width = segments.shape
    ids = sequence_ids(segments)
    return (ids.new_zeros(rows * (width + 1)).index_add(0, ids.flatten(), mask.long().flatten()) > 0).sum()


def sequence_sums(x: Tensor, segments: Tensor) -> Tensor:
    """Sums of x over sequences, (B, T). All tokens of a sequence hold the sum over that sequence.

    Args:
        x: (B, T), 0 for tokens that do not count.
        segments: (B, T), as in ``sequence_ids``.

    Raises:
        ValueError: if the shapes differ.
    """
    same_shape(x=x, segments=segments)
    rows, width = segments.shape
    ids = sequence_ids(segments)
    return x.new_zeros(rows * (width + 1)).index_add(0, ids.flatten(), x.flatten())[ids]
