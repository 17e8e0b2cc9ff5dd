"""Losses and the metrics of their updates: each returns a sum and its count, and the trainer divides once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.math.kl import LOG_RATIO_LIMIT
from burnish.math.preference import kto as kto
from burnish.math.preference import kto_baseline as kto_baseline
from burnish.math.preference import preference as preference
from burnish.math.reductions import Weights, reduce, reduction_weights
from burnish.math.tensors import learned, same_shape, upcast
from burnish.types import Metric

# How far from 1 a probability must be for unlikelihood to push it down: log(1 - p) has no bound at p = 1.
CERTAIN = 1e-6


def nll(logprobs: Tensor, mask: Tensor, weights: Weights | None = None) -> Metric:
    """Negative log-likelihood: -sum_t log p(token_t).

    Args:
        logprobs: (B, T), in nats.
        mask: (B, T), True where a token is learned.
        weights: from reduction_weights; None is the mean over tokens.

    Returns:
        Metric.

    Raises:
        ValueError: if the shapes differ.
    """
    return reduce(-logprobs, mask, weights)


def reinforce(
    logprobs: Tensor,
    mask: Tensor,
    rewards: Tensor,
    weights: Weights | None = None,
    floor: float | None = None,
    unlikelihood: bool = False,
) -> Metric:
    """Reward-weighted log-likelihood: -sum_b sum_t r_b l_t, over sequences unless the weights say otherwise.

    r = 1 is nll summed over tokens; r and -r on the same tokens cancel. Where r < 0 nothing bounds it from below, for l
    can fall without end. A floor takes l as the floor below it, so that such tokens have no gradient left; unlikelihood
    takes -log(1 - p), which is at least 0, in the place of log p, with no gradient where p > 1 - 1e-6.
    Source: Williams, "Simple statistical gradient-following algorithms", 1992; unlikelihood: Welleck et al., "Neural
    text generation with unlikelihood training", 2020.

    Args:
        logprobs: (B, T), l, in nats.
        mask: (B, T), True where a token is learned.
        rewards: (B,), one a row, or (B, T), one a token; no gradient flows into it.
        weights: from reduction_weights; None is sequence_sum, one sequence a row.
        floor: where r < 0, the least l that is still pushed down; None is no bound.
        unlikelihood: where r < 0, the loss is -|r| log(1 - p).

    Returns:
        Metric.

    Raises:
        ValueError: if the shapes differ.
    """
    if rewards.dim() == 1:
        same_shape(rows=mask.any(1), rewards=rewards)
        rewards = rewards.unsqueeze(1).expand_as(mask)
    logprobs, rewards = learned(mask, logprobs=logprobs, rewards=rewards.detach())
    down = logprobs
    if floor is not None:
        down = down.clamp(min=floor)
    if unlikelihood:
        # outside the mask l is 0, where log(1 - p) is not finite
        down = -torch.log(-torch.expm1(down.clamp(max=-CERTAIN)))
    if weights is None:
        weights = reduction_weights(mask, "sequence_sum", dtype=logprobs.dtype)
    return reduce(-rewards * torch.where(rewards < 0, down, logprobs), mask, weights)


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    p_chosen: Tensor | None = None,
    weights: Tensor | None = None,
) -> Metric:
    """Cross-entropy of sig(x), the modelled chance that chosen is better, with p; x = r_c - r_r - margin.

    -p log sig(x) - (1 - p) log sig(-x), which is -log sig(x) at p = 1.
    Source: Bradley and Terry, 1952; Ouyang et al., "Training language models to follow instructions", 2022; the margin:
    Touvron et al., "Llama 2", 2023.

    Args:
        chosen: (P,), scores r_c of the better answers.
        rejected: (P,), scores r_r of the worse ones.
        margin: (P,), by how much r_c should exceed r_r at least; None is 0.
        p_chosen: (P,), in [0, 1], share of judges that preferred chosen, 0.5 for a tie; None is 1.
        weights: (P,), at least 0, such as 1 / (number of pairs) of a ranking; None is 1.

    Returns:
        Metric: weighted sum over pairs, and the sum of the weights.

    Raises:
        ValueError: if the shapes differ.
    """
    given = {"margin": margin, "p_chosen": p_chosen}
    same_shape(chosen=chosen, rejected=rejected, **{name: x for name, x in given.items() if x is not None})
    difference = upcast(chosen) - upcast(rejected)
    if margin is not None:
        difference = difference - upcast(margin)
    losses = -F.logsigmoid(difference)
    if p_chosen is not None:
        losses = losses + (1 - upcast(p_chosen)) * difference
    return _over_pairs(losses, weights)


def centering(chosen: Tensor, rejected: Tensor, weights: Tensor | None = None) -> Metric:
    """(r_c + r_r)^2: Bradley-Terry does not fix where scores lie; this, with a small weight, keeps them around 0.

    Source: Eisenstein et al., "Helping or herding?", 2023. Arguments, result and errors as in bradley_terry.
    """
    same_shape(chosen=chosen, rejected=rejected)
    return _over_pairs((upcast(chosen) + upcast(rejected)).square(), weights)


@torch.no_grad()
def pair_accuracy(chosen: Tensor, rejected: Tensor, weights: Tensor | None = None) -> Metric:
    """Share of pairs with r_c > r_r; equal scores count 1/2. Arguments and result as in bradley_terry."""
    same_shape(chosen=chosen, rejected=rejected)
    return _over_pairs((1 + (upcast(chosen) - upcast(rejected)).sign()) / 2, weights)


def _over_pairs(losses: Tensor, weights: Tensor | None) -> Metric:
    weights = torch.ones_like(losses) if weights is None else upcast(weights)
    same_shape(pairs=losses, weights=weights)
    return Metric((weights * losses).sum(), weights.sum())


def clipped_policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Weights | None = None,
) -> Metric:
    """PPO's policy loss: max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)), ratio = exp(l - l_old).

    With dual_clip c, where A < 0 it is at most -A * c. The exponent is clamped to [-20, 20].
    Source: Schulman et al., "Proximal policy optimization algorithms", 2017; the dual clip: Ye et al., 2020.

    Args:
        logprobs: (B, T), of the policy that is trained.
        old_logprobs: (B, T), of the policy that sampled; no gradient flows into it.
        advantages: (B, T); no gradient flows into it.
        mask: (B, T), True where a token is learned.
        clip_low: in [0, 1].
        clip_high: at least 0.
        dual_clip: above 1, or None.
        weights: from reduction_weights; None is the mean over tokens.

    Returns:
        Metric.

    Raises:
        ValueError: if the shapes differ.
    """
    (advantages,) = learned(mask, advantages=advantages.detach())
    ratios = importance(logprobs, old_logprobs, mask)
    losses = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return reduce(losses, mask, weights)


def clipped_value(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None,
    weights: Weights | None = None,
) -> Metric:
    """PPO's value loss: 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2).

    Source: the implementation of Schulman et al., "Proximal policy optimization algorithms", 2017 (OpenAI baselines).

    Args:
        values: (B, T), of the critic that is trained.
        old_values: (B, T), at the time of sampling; no gradient flows into it.
        returns: (B, T), R; no gradient flows into it.
        mask: (B, T), True where a token is learned.
        clip: c, above 0; None leaves out the second part.
        weights: from reduction_weights; None is the mean over tokens.

    Returns:
        Metric.

    Raises:
        ValueError: if the shapes differ.
    """
    plain, clipped = _value_errors(values, old_values, returns, mask, clip)
    return reduce(torch.maximum(plain, clipped) / 2, mask, weights)


def truncated_importance(logprobs: Tensor, sampled: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Weight of a token that another policy, or another program, sampled: min(exp(l - l_sampled), cap), no gradient.

    Multiplied with the advantages it corrects for what was sampled with other probabilities than those that are
    trained; the cap bounds what one unlikely token can do.
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.

    Args:
        logprobs: (B, T), of the trainer, before the update.
        sampled: (B, T), of the sampler.
        mask: (B, T), True where a token is learned.
        cap: above 0.

    Returns:
        (B, T), min(1, cap) where the mask is False.

    Raises:
        ValueError: if the shapes differ.
    """
    return importance(logprobs.detach(), sampled, mask).clamp(max=cap)


def step_value(values: Tensor, targets: Tensor, mask: Tensor) -> Metric:
    """Squared error of the values of reasoning steps: sum over step ends of (V - Q)^2, and their number.

    Source: Chen et al., "AlphaMath almost zero", 2024.

    Args:
        values: (B, T), V in [-1, 1] of the text up to and including each token.
        targets: (B, T), Q in [-1, 1]; no gradient flows into it. ValueError: if the shapes differ.
        mask: (B, T), True on the last token of each step.
    """
    same_shape(values=values, targets=targets)
    values, targets = learned(mask, values=values, targets=targets.detach())
    return reduce((values - targets).square(), mask)


def importance(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Ratio of each token's probability to the one it was sampled with: exp(clamp(l - l_old, -20, 20)).

    Args:
        logprobs: (B, T), of the policy that is trained.
        old_logprobs: (B, T), of the policy that sampled; no gradient flows into it.
        mask: (B, T), True where a token is learned.

    Returns:
        (B, T), 1 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
    """
    return _log_ratio(logprobs, old_logprobs, mask).exp()


@torch.no_grad()
def ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Metric:
    """Sum of the importance ratios over learned tokens, and their number. Arguments as in importance."""
    return reduce(importance(logprobs, old_logprobs, mask), mask)


@torch.no_grad()
def approxkl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Metric:
    """How far the policy has moved since it sampled: sum of (l - l_old)^2 / 2, in nats. Arguments as in importance.

    Source: Ziegler et al., "Fine-tuning language models from human preferences", 2019.
    """
    return reduce(_log_ratio(logprobs, old_logprobs, mask).square() / 2, mask)


@torch.no_grad()
def clipfrac(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Metric:
    """Tokens without a gradient in clipped_policy: A > 0 and ratio > 1 + clip_high, or A < 0 and ratio < 1 - clip_low.

    Arguments as in clipped_policy; the mean of the Metric is their share of the learned tokens.
    """
    (advantages,) = learned(mask, advantages=advantages)
    ratios = importance(logprobs, old_logprobs, mask)
    above = (advantages > 0) & (ratios > 1 + clip_high)
    below = (advantages < 0) & (ratios < 1 - clip_low)
    return reduce((above | below).to(ratios.dtype), mask)


@torch.no_grad()
def value_clipfrac(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Metric:
    """Tokens where the second part of clipped_value is the larger one, so that it decides. Arguments as there."""
    plain, clipped = _value_errors(values, old_values, returns, mask, clip)
    return reduce((clipped > plain).to(plain.dtype), mask)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    logprobs, old_logprobs = learned(mask, logprobs=logprobs, old_logprobs=old_logprobs.detach())
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _value_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    values, old_values, returns = learned(mask, values=values, old_values=old_values.detach(), returns=returns.detach())
    plain = (values - returns).square()
    if clip is None:
        return plain, plain
    # Clamped between two bounds rather than as old + clamp(difference): inside the clip the value stays bit-equal.
    inside = torch.clamp(values, old_values - clip, old_values + clip)
    return plain, (inside - returns).square()
