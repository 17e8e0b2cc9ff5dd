"""NEFTune: noise on the embeddings that depends only on the tokens and the optimizer step, like our dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from burnish.errors import UserError
from burnish.models.dropout import hashes, offset_of, token_keys
from burnish.models.forward import unwrap
from burnish.types import MicroBatch, Prompt, Row

LAYER = -1  # dropout layers are numbered from 0


class EmbeddingNoise:
    """Adds uniform noise in [-m, m] to the embeddings, with m = alpha / sqrt(L H).

    H is the width of an embedding and L is the length of the token's sequence, so sequences of different lengths cannot
    share a prompt. Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning".

    Args:
        model: the model whose embeddings get noise.
        alpha: strength of the noise; None or 0 adds none.
    """

    def __init__(self, model: nn.Module, alpha: float | None) -> None:
        self.model = model
        self.alpha = alpha
        self.keys = self.lengths = torch.empty(0)

    @contextmanager
    def of(self, batch: MicroBatch, seed: int, step: int) -> Iterator[None]:
        """Add noise in forward passes on this micro-batch within the context."""
        if not self.alpha:
            yield
            return
        self.keys, self.lengths = token_keys(batch, seed, step), lengths(batch)
        hook = unwrap(self.model).get_input_embeddings().register_forward_hook(self._add)
        try:
            yield
        finally:
            hook.remove()

    def _add(self, _: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor:
        """The forward hook: returns embeddings (B, T, H) with noise."""
        assert self.alpha is not None
        return embeddings + noise(self.keys, self.lengths, self.alpha, embeddings.shape[-1], embeddings.dtype)


def noise(keys: Tensor, length: Tensor, alpha: float, width: int, dtype: torch.dtype) -> Tensor:
    """The noise (B, T, width) of tokens with these keys (B, T), in sequences of these lengths (B, T)."""
    wide = torch.promote_types(dtype, torch.float32)
    bound = (alpha / math.sqrt(width)) * length.to(wide).rsqrt()
    drawn = hashes(keys, offset_of(LAYER), width).to(wide) / 2**31  # uniform in [-1, 1]
    return (bound.unsqueeze(-1) * drawn).to(dtype)


def lengths(batch: MicroBatch) -> Tensor:
    """The length (B, T) of each token's sequence. No prompt may be shared."""
    segments = batch.segments
    rows, width = segments.shape
    sizes = segments.new_zeros(rows, width + 1).scatter_add_(1, segments, torch.ones_like(segments))
    return sizes.gather(1, segments)


def check_noise(alpha: float | None, rows: list[Row]) -> None:
    """Check that alpha is positive, and that no completions are sampled: the sampler does not add noise.

    Raises:
        UserError: otherwise.
    """
    if not alpha:
        return
    if not 0 < alpha < math.inf:
        raise UserError(f"neftune_noise_alpha: expected a number above 0, got {alpha:g}")
    if any(isinstance(row, Prompt) for row in rows):
        raise UserError(
            f"neftune_noise_alpha={alpha:g}: noise on the embeddings would make the log-probabilities of the policy "
            "differ from those with which its completions were sampled. Remove this setting"
        )
