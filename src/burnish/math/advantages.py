"""Advantages from scores: token rewards, generalized advantage estimation, whitening and group baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.errors import UserError
from burnish.math.choices import Baseline
from burnish.math.tensors import learned, same_shape, upcast

Grouping = Literal["rloo", "mean", "std"]

# Added to a variance before dividing by its square root.
EPSILON = 1e-8


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, steps: Tensor | None = None) -> Tensor:
    """Token rewards: r_t = -kl_coef * kl_t, plus the sequence's score at its last learned token.

    ``steps`` assigns parts of the score to individual tokens, and the last token receives the rest. Either way, the
    rewards of a row sum to its score minus kl_coef times its KL.

    Args:
        scores: (B,), one score per sequence.
        kl: (B, T), KL estimates per token.
        mask: (B, T), True for tokens that the policy generated.
        kl_coef: weight of the KL, at least 0.
        steps: (B, T), the part of the score that each token receives; None means 0.

    Returns:
        (B, T), 0 where the mask is False. The score of a row without learned tokens is dropped.

    Raises:
        ValueError: if the shapes do not match.
    """
    kl, steps = learned(mask, kl=kl, steps=torch.zeros_like(kl) if steps is None else steps)
    same_shape(rows=mask.any(1), scores=scores)
    learned_from_here = mask.flip(1).cumsum(1).flip(1)
    last = mask & (learned_from_here == 1)
    return steps - kl_coef * kl + torch.where(last, (upcast(scores) - steps.sum(1)).unsqueeze(1), 0)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Soft penalty on long completions: 0 up to longest - buffer tokens, then linear down to -1 at longest.

    Source: Yu et al., "DAPO: An open-source LLM reinforcement learning system at scale", 2025.

    Args:
        lengths: (N,), number of tokens in each completion.
        longest: the maximum number of sampled tokens.
        buffer: number of tokens over which the penalty goes from 0 to -1, in [1, longest].

    Returns:
        (N,), in [-1, 0].
    """
    return -((upcast(lengths) - (longest - buffer)) / buffer).clamp(0, 1)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the learned tokens of each row.

    delta_t = r_t + gamma * V_next - V_t, A_t = delta_t + gamma * lam * A_next, returns_t = A_t + V_t, where "next" is
    the next learned token of the row, and V and A are 0 after the last one. Tokens that the policy did not generate
    (prompts, tool output between turns, padding) are skipped. Padding, skipped tokens and other rows do not change any
    bit of the result.

    This takes log2(T) passes over the row instead of one operation per token, and has a smaller rounding error than the
    plain recursion.
    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation", 2015.

    Args:
        rewards: (B, T).
        values: (B, T), where entry t is predicted before token t is chosen.
        mask: (B, T), True for tokens that the policy generated.
        gamma: discount, in [0, 1].
        lam: in [0, 1]; 0 gives the one-step residual, 1 the Monte Carlo return minus the value.

    Returns:
        Advantages (not whitened) and returns, each (B, T), without a gradient and 0 where the mask is False; float64
        if the inputs are float64, otherwise float32.

    Raises:
        ValueError: if the shapes differ.
    """
    rewards, values = learned(mask, rewards=rewards, values=values)
    # Move the learned tokens of each row to the left; all others share one extra column, which holds 0.
    rows, width = mask.shape
    place = torch.where(mask, mask.cumsum(1) - 1, width)
    r, v = (x.new_zeros(rows, width + 1).scatter(1, place, x) for x in (rewards, values))
    sums = F.pad(r[:, :-1] + gamma * v[:, 1:] - v[:, :-1], (0, 1))
    # Entry t holds the sum of discounted residuals over the next ``reach`` tokens; each pass doubles ``reach``.
    reach, decay = 1, gamma * lam
    while reach < width and decay > 0:
        sums[:, :-reach] += decay * sums[:, reach:]
        reach, decay = 2 * reach, decay * decay
    advantages = sums.gather(1, place)
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the learned entries, with the unbiased variance.

    Args:
        x: (B, T).
        mask: (B, T), True for the entries to whiten.
        shift_mean: False adds the mean back, so that only the scale changes.

    Returns:
        (B, T), 0 where the mask is False. If all entries are equal, the result is exactly 0, or the entries themselves
        with shift_mean=False. A single entry has no variance and is only centered. Padding does not change any bit of
        the result.

    Raises:
        ValueError: if the shapes differ.
    """
    (x,) = learned(mask, x=x)
    entries = x[mask]
    if len(entries) == 0:
        return x
    # As in group: subtract the smallest entry first, so that equal entries become exactly 0.
    smallest = entries.detach().amin()
    above = entries - smallest
    mean = above.mean()
    centered = above - mean
    whitened = centered * (centered.square().sum() / max(len(entries) - 1, 1) + EPSILON).rsqrt()
    return torch.zeros_like(x).masked_scatter(mask, whitened if shift_mean else whitened + (smallest + mean))


def group(rewards: Tensor, groups: Tensor, kind: Grouping = "rloo") -> Tensor:
    """Advantages relative to the other completions of the same prompt, for a group of K rewards with mean m.

    rloo: K / (K - 1) * (r - m), which equals r minus the mean of the other rewards. mean: r - m. std: (r - m) /
    sqrt(variance + 1e-8), where the variance divides by K, not K - 1.
    Source: rloo: Ahmadian et al., "Back to basics", 2024; std: Shao et al., "DeepSeekMath" (GRPO), 2024; mean: Liu et
    al., "Understanding R1-Zero-like training" (Dr. GRPO), 2025.

    Args:
        rewards: (N,).
        groups: (N,), integer ids of the groups, in any order.
        kind: rloo, mean or std.

    Returns:
        (N,), exactly 0 in a group with equal rewards.

    Raises:
        ValueError: if the shapes differ.
        UserError: if the kind is unknown, or rloo gets a group with only one reward.
    """
    same_shape(rewards=rewards, groups=groups)
    _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    rewards = upcast(rewards)
    sizes = sizes.to(rewards.dtype)
    # Subtract the smallest reward of the group first. Otherwise, rounding errors of equal rewards would be divided by a
    # tiny standard deviation.
    smallest = rewards.new_zeros(len(sizes)).scatter_reduce(0, index, rewards, "amin", include_self=False)
    above = rewards - smallest[index]
    centered = above - _group_mean(above, index, sizes)
    if kind == "mean":
        return centered
    if kind == "std":
        return centered * (_group_mean(centered.square(), index, sizes) + EPSILON).rsqrt()
    if kind == "rloo":
        if (sizes < 2).any():
            raise UserError("a leave-one-out baseline needs at least 2 completions of every prompt, got 1")
        return centered * (sizes / (sizes - 1))[index]
    raise UserError(f"unknown group baseline {kind!r}: expected rloo, mean or std")


@dataclass(frozen=True)
class Moments:
    """Mean and variance of all numbers seen so far: ``Moments(count=2, mean=1.5, squares=0.5)`` after 1 and 2.

    Instances are immutable: ``update`` returns a new one. ``squares`` is the sum of squared deviations from the mean.
    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, x: Tensor) -> Moments:
        """The moments after also seeing ``x`` (N,)."""
        x = x.double()
        count, n = self.count + len(x), len(x)
        if n == 0:
            return self
        above = x - x.amin()  # as in whiten: equal numbers then have exactly no variance
        apart = (x.amin() + above.mean()).item() - self.mean
        squares = self.squares + (above - above.mean()).square().sum().item() + apart**2 * self.count * n / count
        return Moments(count, self.mean + apart * (n / count), squares)

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(variance + 1e-8), with the unbiased variance; only centered if count is below 2."""
        x = upcast(x)
        if self.count < 2:
            return x - self.mean
        return (x - self.mean) / math.sqrt(self.squares / (self.count - 1) + EPSILON)


def compute_advantages(rewards: Tensor, mask: Tensor, groups: Tensor, kind: Baseline) -> Tensor:
    """Token advantages without a critic, computed from token rewards; R_b is the sum of a row's rewards.

    none: R_b for every token of the row. mean: R_b minus the mean over all rows. rloo, group_mean, group_std: ``group``
    applied to R_b. batch_whitened: the sum of the rewards from each token onward, whitened over all learned tokens
    (REINFORCE++). reinforce++-baseline: group_mean, whitened over all learned tokens.
    Source: Williams, 1992; batch_whitened and reinforce++-baseline: Hu et al., "REINFORCE++", 2025; the others as in
    ``group``.

    Args:
        rewards: (B, T), for example from ``token_rewards``.
        mask: (B, T), the loss mask.
        groups: (B,), integers, equal for completions of the same prompt.
        kind: one of the seven above.

    Returns:
        (B, T), without a gradient and 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
        UserError: if rloo gets a group with only one row.
    """
    (rewards,) = learned(mask, rewards=rewards.detach())
    if kind == "batch_whitened":
        return whiten(rewards.flip(1).cumsum(1).flip(1), mask)
    total = rewards.sum(1)
    if kind == "mean":
        total = group(total, torch.zeros_like(groups), "mean")
    elif kind != "none":
        named: dict[str, Grouping] = {"rloo": "rloo", "group_std": "std"}
        total = group(total, groups, named.get(kind, "mean"))
    (advantages,) = learned(mask, advantages=total.unsqueeze(1).expand_as(mask))
    return whiten(advantages, mask) if kind == "reinforce++-baseline" else advantages


def _group_mean(x: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return (x.new_zeros(len(sizes)).index_add(0, index, x) / sizes)[index]
