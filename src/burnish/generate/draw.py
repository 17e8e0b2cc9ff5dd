"""Draw tokens from logits, with their log-probabilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.errors import UserError
from burnish.generate.sampling import Sampling
from burnish.math.tensors import upcast, warp
from burnish.models.forward import SamplingTransform

DRAW_BLOCK = 128
"""Tokens of the vocabulary that are summed before one of their sums is drawn; 128 divides most vocabularies."""


def draw(
    logits: Tensor, uniforms: Tensor, sampling: Sampling | SamplingTransform, banned: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens (B,) by inverting the cumulative distribution at ``uniforms``, and their log-probabilities (B,).

    p = softmax(warp(logits)); token = the first v at which sum_{w <= v} p_w > u sum_w p_w, over the w not banned. The
    log-probability is log p[token] with the banned tokens still in p. Where p allows banned tokens only, the likeliest
    other one is taken, with its log-probability before top-k and top-p. Greedy log-probabilities are 0.

    Args:
        logits: (B, V).
        uniforms: (B,) float64 in [0, 1).
        sampling: temperature, top_k and top_p.
        banned: (B, V) or (1, V) bool, True for what is not to be sampled; None where nothing is.

    Raises:
        UserError: if a row has logits that are not numbers.
    """
    if sampling.temperature == 0:
        values, tokens = (logits if banned is None else logits.masked_fill(banned, -torch.inf)).max(-1)
        _check_numbers(values)
        return tokens, torch.zeros_like(upcast(values))
    warped = warp(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    largest = warped.amax(-1, keepdim=True)
    weights = (warped - largest).exp_()
    # In two levels, since a running sum over V numbers is slow on every device.
    blocks = F.pad(weights, (0, -weights.shape[-1] % DRAW_BLOCK)) if weights.shape[-1] % DRAW_BLOCK else weights
    blocks = blocks.unflatten(-1, (-1, DRAW_BLOCK))
    sums = blocks.sum(-1)
    normalizer = largest[:, 0] + sums.sum(-1).log()
    if banned is not None:
        blocks.flatten(1)[:, : weights.shape[-1]].masked_fill_(banned, 0.0)
        sums = blocks.sum(-1)
    block, rest = _invert(sums, uniforms)
    within, _ = _invert(blocks[torch.arange(len(block), device=block.device), block], rest)
    tokens = block * DRAW_BLOCK + within
    nothing = ~(sums.sum(-1) > 0)
    if bool(nothing.any()):
        _check_numbers(sums)
        plain = upcast(logits) / sampling.temperature
        allowed = plain if banned is None else plain.masked_fill(banned, -torch.inf)
        tokens = torch.where(nothing, allowed.argmax(-1), tokens)
        warped = torch.where(nothing[:, None], plain, warped)
        normalizer = torch.where(nothing, plain.logsumexp(-1), normalizer)
    return tokens, warped.gather(-1, tokens[:, None])[:, 0] - normalizer


def _check_numbers(values: Tensor) -> None:
    if bool(values.isnan().any()):
        raise UserError(
            "the model's logits are not numbers (NaN): its weights are broken or training diverged; a lower "
            "learning_rate or an earlier checkpoint would work"
        )


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index (B,) of the weight (B, V) in which each uniform number falls, and how far into it, again in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # Below 1 by more than the product's rounding, else a last index of weight 0 could be drawn.
    target = uniforms[:, None].clamp(max=1 - 2**-40) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index).double()
    return index[:, 0], ((target - cumulative.gather(-1, index) + weight) / weight)[:, 0].clamp(0.0, 1.0)
