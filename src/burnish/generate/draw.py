"""Draws tokens from logits, with their log-probabilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.errors import UserError
from burnish.generate.protocol import Request
from burnish.generate.sampling import Sampling
from burnish.math.tensors import cumulative_sum, upcast, warp
from burnish.models.forward import SamplingTransform

DRAW_BLOCK = 128
"""Block size of the two-level search: first a block of the vocabulary is drawn, then a token in it. Divides most
vocabulary sizes."""


def length_limit(request: Request) -> int:
    """The maximum number of tokens of a request. With ``length_range``, it is drawn from the range by the seed."""
    if request.sampling.length_range is None:
        return request.sampling.max_new_tokens
    generator = torch.Generator().manual_seed(request.seed)
    low, high = request.sampling.length_range
    return int(torch.randint(low, high, (), generator=generator))


def draw(
    logits: Tensor, uniforms: Tensor, sampling: Sampling | SamplingTransform, banned: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Draw tokens (B,) by inverse transform sampling, and return them with their log-probabilities (B,).

    With p = softmax(warp(logits)), the token is the first v with sum_{w <= v} p_w > u sum_w p_w, where both sums skip
    banned tokens. The log-probability is log p[token], where p includes the banned tokens. If top-k and top-p leave
    only banned tokens, the likeliest token that is not banned is taken, with its log-probability before top-k and
    top-p. The log-probability of greedy decoding is 0.

    Args:
        logits: (B, V).
        uniforms: (B,) float64 in [0, 1).
        sampling: temperature, top_k and top_p.
        banned: (B, V) or (1, V) bool, True for tokens that must not be sampled; None bans no token.

    Raises:
        UserError: if logits are NaN.
    """
    if sampling.temperature == 0:
        values, tokens = (logits if banned is None else logits.masked_fill(banned, -torch.inf)).max(-1)
        _check_numbers(values)
        return tokens, torch.zeros_like(upcast(values))
    warped = warp(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    largest = warped.amax(-1, keepdim=True)
    weights = (warped - largest).exp_()
    # Two levels, because a cumulative sum over V numbers is slow on every device.
    blocks = F.pad(weights, (0, -weights.shape[-1] % DRAW_BLOCK)) if weights.shape[-1] % DRAW_BLOCK else weights
    blocks = blocks.unflatten(-1, (-1, DRAW_BLOCK))
    sums = blocks.sum(-1)
    normalizer = largest[:, 0] + sums.sum(-1).log()
    if banned is not None:
        blocks.flatten(1)[:, : weights.shape[-1]].masked_fill_(banned, 0.0)
        sums = blocks.sum(-1)
    block, rest = _invert(sums, uniforms)
    chosen = blocks.gather(1, block[:, None, None].expand(-1, -1, DRAW_BLOCK))[:, 0]
    within, _ = _invert(chosen, rest)
    tokens = block * DRAW_BLOCK + within
    all_banned = ~(sums.sum(-1) > 0)
    if bool(all_banned.any()):
        _check_numbers(sums)
        plain = upcast(logits) / sampling.temperature
        allowed = plain if banned is None else plain.masked_fill(banned, -torch.inf)
        tokens = torch.where(all_banned, allowed.argmax(-1), tokens)
        warped = torch.where(all_banned[:, None], plain, warped)
        normalizer = torch.where(all_banned, plain.logsumexp(-1), normalizer)
    return tokens, warped.gather(-1, tokens[:, None])[:, 0] - normalizer


def _check_numbers(values: Tensor) -> None:
    if bool(values.isnan().any()):
        raise UserError(
            "the model's logits are not numbers (NaN): its weights are broken or training diverged; try a lower "
            "learning_rate or an earlier checkpoint"
        )


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The index (B,) of the weight (B, V) that each uniform number falls in, and its position within that weight.

    The position (B,) is again uniform in [0, 1).
    """
    cumulative = cumulative_sum(weights, torch.float64)
    # Clamped below 1 by more than rounding errors. Otherwise a last index of weight 0 could be drawn.
    target = uniforms[:, None].clamp(max=1 - 2**-40) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index).double()
    return index[:, 0], ((target - cumulative.gather(-1, index) + weight) / weight)[:, 0].clamp(0.0, 1.0)
