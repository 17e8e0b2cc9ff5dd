"""Policy losses, computed per token from log-probabilities and advantages.

Each loss is a function ``(logprobs, old_logprobs, advantages, mask, segments, **settings) -> (losses, metrics)``:

- ``logprobs`` (B, T): l, log-probabilities under the current policy, in nats.
- ``old_logprobs`` (B, T): l_old, log-probabilities at the start of the update. No gradient flows into it.
- ``advantages`` (B, T): A. No gradient flows into it.
- ``mask`` (B, T): the loss mask, True for tokens that enter the loss ("learned tokens").
- ``segments`` (B, T): the index of the sequence within its row, starting at 1; 0 for padding.

The losses are (B, T) and 0 where the mask is False; a reduction (``math/reductions.py``) combines them into one number.
The metrics are (B, T) too, and their means over learned tokens are logged. A shape mismatch raises a ValueError.

Below, r = exp(l - l_old) is the ratio of a token, with its exponent clamped to [-20, 20], and sg(x) is x without a
gradient. With ``dual_clip`` c, the loss of a token with A < 0 is at most c |A| (Ye et al., "Mastering complex control
in MOBA games with deep reinforcement learning", 2020). At r = 1, every loss has the gradient of ``reinforce``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.math.kl import LOG_RATIO_LIMIT
from burnish.math.segments import sequence_sums
from burnish.math.tensors import learned

# How far from 1 a probability must be for unlikelihood to push it down: log(1 - p) has no bound at p = 1.
CERTAIN = 1e-6

Metrics = dict[str, Tensor]


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    floor: float | None,
    unlikelihood: bool,
) -> tuple[Tensor, Metrics]:
    """Advantage-weighted log-likelihood: -A l. It uses neither ``old_logprobs`` nor ``segments``.

    A = 1 gives the negative log-likelihood; A and -A on the same token cancel. Where A < 0, the loss has no lower
    bound, because l can decrease indefinitely.
    Source: Williams, "Simple statistical gradient-following algorithms", 1992; unlikelihood: Welleck et al., "Neural
    text generation with unlikelihood training", 2020.

    Args:
        floor: Below 0, or None for no floor. Where A < 0 and l is below the floor, the loss is -A floor, which has no
            gradient.
        unlikelihood: Where A < 0, the loss is A log(1 - p), which is at least 0, instead of -A log p. It has no
            gradient where p > 1 - 1e-6.
    """
    logprobs, advantages = learned(mask, logprobs=logprobs, advantages=advantages.detach())
    down = logprobs if floor is None else logprobs.clamp(min=floor)
    if unlikelihood:
        # outside the mask, l is 0 and log(1 - p) would be infinite
        down = -torch.log(-torch.expm1(down.clamp(max=-CERTAIN)))
    return -advantages * torch.where(advantages < 0, down, logprobs), {}


def clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """The loss of PPO: max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)). It does not use ``segments``.

    The gradient is 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. The metric ``clipfrac`` is the
    fraction of these tokens.
    Source: Schulman et al., "Proximal policy optimization algorithms", 2017.

    Args:
        clip_low: In [0, 1].
        clip_high: At least 0.
        dual_clip: Above 1, or None.
    """
    (advantages,) = learned(mask, advantages=advantages.detach())
    ratios = log_ratios(logprobs, old_logprobs, mask).exp()
    return _clipped(ratios, advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """Group sequence policy optimization: ``clip`` with one ratio per sequence, s = exp(mean of l - l_old over it).

    The gradient of s is divided equally among the learned tokens of the sequence. For sequences of one token, the loss
    equals ``clip``.
    Source: Zheng et al., "Group sequence policy optimization", 2025.

    Args:
        clip_low: In [0, 1]; 3e-4 in the paper, because s varies far less than r.
        clip_high: At least 0; 4e-4 in the paper.
        dual_clip: Above 1, or None.
    """
    (advantages,) = learned(mask, advantages=advantages.detach())
    ratios = sequence_log_ratios(logprobs, old_logprobs, mask, segments).exp()
    return _clipped(ratios, advantages, clip_low, clip_high, dual_clip)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """GSPO with an advantage per token: ``clip`` with the ratio sg(s) exp(l - sg(l)), where s is as in ``gspo``.

    If all advantages of a sequence are equal, the gradient of its mean equals that of ``gspo``.
    Source: Zheng et al., "Group sequence policy optimization", 2025. Arguments as in ``gspo``.
    """
    (advantages,) = learned(mask, advantages=advantages.detach())
    of_tokens = log_ratios(logprobs, old_logprobs, mask)
    of_sequences = sequence_log_ratios(logprobs, old_logprobs, mask, segments)
    ratios = of_sequences.detach().exp() * (of_tokens - of_tokens.detach()).exp()
    return _clipped(ratios, advantages, clip_low, clip_high, dual_clip)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    clip_high: float | None,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """Clipped importance sampling: -sg(min(r, 1 + clip_high)) A l. It does not use ``segments``.

    Every token has a gradient; clipping only limits its weight. The metric ``clipfrac`` is the fraction of tokens whose
    weight was clipped.
    Source: MiniMax, "MiniMax-M1: Scaling test-time compute efficiently with lightning attention", 2025.

    Args:
        clip_high: At least 0, or None for no upper bound.
        dual_clip: Above 1, or None. Here it limits the weight where A < 0.
    """
    ratios = log_ratios(logprobs.detach(), old_logprobs, mask).exp()
    logprobs, advantages = learned(mask, logprobs=logprobs, advantages=advantages.detach())
    weights = ratios if clip_high is None else ratios.clamp(max=1 + clip_high)
    if dual_clip is not None:
        weights = torch.where(advantages < 0, weights.clamp(max=dual_clip), weights)
    return -weights * advantages * logprobs, {"clipfrac": (weights < ratios).to(ratios.dtype)}


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """Soft adaptive policy optimization: -A f(r), f(r) = 4 / tau * sigmoid(tau (r - 1)), a gate instead of the clip.

    The weight of a token's gradient decays smoothly as r moves away from 1, faster for larger tau. The loss does not
    use ``segments``.
    Source: Gao et al., "Soft adaptive policy optimization", 2025.

    Args:
        tau_positive: tau where A >= 0, above 0.
        tau_negative: tau where A < 0, above 0; larger than tau_positive in the paper.
        dual_clip: Above 1, or None.
    """
    (advantages,) = learned(mask, advantages=advantages.detach())
    ratios = log_ratios(logprobs, old_logprobs, mask).exp()
    tau = torch.where(advantages < 0, tau_negative, tau_positive).to(ratios.dtype)
    gates = torch.where(mask, 4 / tau * torch.sigmoid(tau * (ratios - 1)), 0)
    return _bounded(-advantages * gates, advantages, dual_clip), {}


def _clipped(
    ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    losses = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - clip_low, 1 + clip_high))
    outside = ((advantages > 0) & (ratios > 1 + clip_high)) | ((advantages < 0) & (ratios < 1 - clip_low))
    return _bounded(losses, advantages, dual_clip), {"clipfrac": outside.to(ratios.dtype)}


def _bounded(losses: Tensor, advantages: Tensor, dual_clip: float | None) -> Tensor:
    """Limit the losses to c |A| where A < 0, with c = ``dual_clip``."""
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)


# --- ratios -------------------------------------------------------------------------------------------------------


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log of the ratio of each token: clamp(l - l_old, -20, 20).

    Half its square is ``approxkl``, an estimate of how far the policy has moved since the rollouts were sampled
    (Ziegler et al., "Fine-tuning language models from human preferences", 2019).

    Args:
        logprobs: (B, T), log-probabilities under the current policy.
        old_logprobs: (B, T), log-probabilities under the policy that sampled the tokens; no gradient flows into it.
        mask: (B, T), the loss mask.

    Returns:
        (B, T), 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
    """
    logprobs, old_logprobs = learned(mask, logprobs=logprobs, old_logprobs=old_logprobs.detach())
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """The mean of ``log_ratios`` over the learned tokens of each token's sequence.

    Args:
        logprobs: (B, T), log-probabilities under the current policy.
        old_logprobs: (B, T), log-probabilities under the policy that sampled the tokens; no gradient flows into it.
        mask: (B, T), the loss mask.
        segments: (B, T), the index of the sequence within its row.

    Returns:
        (B, T), 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
    """
    differences = log_ratios(logprobs, old_logprobs, mask)
    sizes = sequence_sums(mask.to(differences.dtype), segments)
    (means,) = learned(mask, means=sequence_sums(differences, segments) / sizes.clamp(min=1))
    return means


# --- corrections for a sampler that differs from the trainer ------------------------------------------------------


def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    cap: float,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Importance weights for tokens that were sampled by another policy or another program than the trainer.

    w = exp(l_old - l_sampler), per token or per sequence. For a sequence, the exponent is summed over its learned
    tokens. The exponent is clamped to [-20, 20]. ``truncate`` uses min(w, cap); ``mask`` uses w inside [low, high] and
    0 outside.
    Source: truncate: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025; mask:
    Ling team, "Every step evolves: Scaling reinforcement learning for trillion-scale thinking model" (IcePop), 2025.

    Args:
        old_logprobs: (B, T), l_old, log-probabilities under the trainer's policy at the start of the update.
        sampler_logprobs: (B, T), l_sampler, log-probabilities that the sampler returned.
        mask: (B, T), the loss mask.
        segments: (B, T), the index of the sequence within its row.
        level: token or sequence.
        mode: truncate or mask.
        cap: Above 0; used by truncate.
        low: At least 0; used by mask.
        high: Above low; used by mask.

    Returns:
        Weights (B, T), without a gradient and 1 where the mask is False; and a mask (B, T) of the tokens whose weight
        was truncated or set to 0.

    Raises:
        ValueError: if the shapes differ.
    """
    exponents = log_ratios(old_logprobs.detach(), sampler_logprobs, mask)
    if level == "sequence":
        exponents = sequence_sums(exponents, segments).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weights = exponents.masked_fill(~mask, 0).exp()
    if mode == "truncate":
        return torch.where(mask, weights.clamp(max=cap), 1), mask & (weights > cap)
    outside = mask & ((weights < low) | (weights > high))
    return weights.masked_fill(outside, 0), outside


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Effective sample size as a fraction of the n learned tokens: (sum w)^2 / (n sum w^2).

    Source: Kish, "Survey sampling", 1965.

    Args:
        weights: (B, T), at least 0.
        mask: (B, T), the loss mask.

    Returns:
        A scalar in [0, 1]; 0 if all weights are 0 or no token is learned.

    Raises:
        ValueError: if the shapes differ.
    """
    (weights,) = learned(mask, weights=weights)
    total = weights.square().sum() * mask.sum()
    return weights.sum().square() / total.where(total > 0, 1)
