"""From scores to advantages: rewards per token, generalized advantage estimation, whitening, group baselines."""

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

# Added to a variance before its root is divided by.
EPSILON = 1e-8


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, steps: Tensor | None = None) -> Tensor:
    """Reward of every token: r_t = -kl_coef * kl_t, plus the sequence's score at its last learned token.

    Where a part of the score lies on tokens, ``steps``, it stays there, and the last token has the rest: the rewards of
    a row sum up to its score less the KL in any case.

    Args:
        scores: (B,), one of each sequence.
        kl: (B, T), estimates of the KL of each token to the reference.
        mask: (B, T), True at the tokens that the policy wrote.
        kl_coef: weight of the KL, at least 0.
        steps: (B, T), the part of the score that lies on each token; None is 0.

    Returns:
        (B, T), 0 where the mask is False. A row with no learned token has nowhere to put its score.

    Raises:
        ValueError: if the shapes do not align.
    """
    kl, steps = learned(mask, kl=kl, steps=torch.zeros_like(kl) if steps is None else steps)
    same_shape(rows=mask.any(1), scores=scores)
    learned_from_here = mask.flip(1).cumsum(1).flip(1)
    last = mask & (learned_from_here == 1)
    return steps - kl_coef * kl + torch.where(last, (upcast(scores) - steps.sum(1)).unsqueeze(1), 0)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Soft penalty of long completions: 0 up to longest - buffer tokens, from there linearly down to -1 at longest.

    Source: Yu et al., "DAPO: An open-source LLM reinforcement learning system at scale", 2025.

    Args:
        lengths: (N,), tokens of each completion.
        longest: the most tokens that can be sampled.
        buffer: in how many tokens the penalty grows from 0 to -1, from 1 to longest.

    Returns:
        (N,), in [-1, 0].
    """
    return -((upcast(lengths) - (longest - buffer)) / buffer).clamp(0, 1)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the learned tokens of each row.

    delta_t = r_t + gamma * V_next - V_t, A_t = delta_t + gamma * lam * A_next, returns_t = A_t + V_t, where "next" is
    the next learned token of the row, and 0 after the last one. Tokens that the policy did not write (prompts, tool
    output between turns, padding) are no steps. Padding, gaps and other rows do not change the result, to the last bit.

    Takes log2(T) passes over the row instead of one operation a token, and rounds less than the plain recursion.
    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation", 2015.

    Args:
        rewards: (B, T).
        values: (B, T), entry t predicted before token t is chosen.
        mask: (B, T), True at the tokens that the policy wrote.
        gamma: discount, in [0, 1].
        lam: 0 is the one-step residual, 1 the Monte Carlo return less the value.

    Returns:
        Advantages (not whitened) and returns, (B, T) each, 0 where the mask is False; without gradient; in float64 if
        the inputs are, else in float32.

    Raises:
        ValueError: if the shapes differ.
    """
    rewards, values = learned(mask, rewards=rewards, values=values)
    # The learned tokens of a row move to its left; all others share one more column, which holds 0.
    rows, width = mask.shape
    place = torch.where(mask, mask.cumsum(1) - 1, width)
    r, v = (x.new_zeros(rows, width + 1).scatter(1, place, x) for x in (rewards, values))
    sums = F.pad(r[:, :-1] + gamma * v[:, 1:] - v[:, :-1], (0, 1))
    # Entry t holds the sum of discounted residuals of the next ``reach`` steps; each pass doubles their number.
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
        mask: (B, T), True where an entry counts.
        shift_mean: False adds the mean back, so that only the spread changes.

    Returns:
        (B, T), 0 where the mask is False; exactly 0, or the entries themselves, where all entries are equal. Fewer than
        two entries have no variance: they are only centered. Padding does not change the result, to the last bit.

    Raises:
        ValueError: if the shapes differ.
    """
    (x,) = learned(mask, x=x)
    entries = x[mask]
    if len(entries) == 0:
        return x
    # As in group: measured from the smallest entry, equal entries are exactly 0.
    smallest = entries.detach().amin()
    above = entries - smallest
    mean = above.mean()
    centered = above - mean
    whitened = centered * (centered.square().sum() / max(len(entries) - 1, 1) + EPSILON).rsqrt()
    return torch.zeros_like(x).masked_scatter(mask, whitened if shift_mean else whitened + (smallest + mean))


def group(rewards: Tensor, groups: Tensor, kind: Grouping = "rloo") -> Tensor:
    """Advantages of completions of one prompt relative to one another; K rewards in a group with mean m.

    rloo: K / (K - 1) * (r - m), which is r less the mean of the others. mean: r - m. std: (r - m) / sqrt(variance +
    1e-8), with the variance over K, not K - 1.
    Source: rloo: Ahmadian et al., "Back to basics", 2024; std: Shao et al., "DeepSeekMath" (GRPO), 2024; mean: Liu et
    al., "Understanding R1-Zero-like training" (Dr. GRPO), 2025.

    Args:
        rewards: (N,).
        groups: (N,), integers; equal ones belong together, in any order.
        kind: rloo, mean or std.

    Returns:
        (N,); exactly 0 in a group whose rewards are equal.

    Raises:
        ValueError: if the shapes differ.
        UserError: if the kind is unknown, or a group of rloo has only one reward.
    """
    same_shape(rewards=rewards, groups=groups)
    _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    rewards = upcast(rewards)
    sizes = sizes.to(rewards.dtype)
    # Rewards are taken from their group's smallest one, else rounding leaves a rest of equal rewards that std blows up.
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
    """Mean and variance of all numbers seen so far: ``Moments(count=2, mean=1.5, squares=0.5)`` has seen 1 and 2.

    It never changes: ``update`` returns the next one. ``squares`` is the sum of squared distances from the mean.
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
        above = x - x.amin()  # as in whiten: equal numbers have no variance, and their mean is one of them
        apart = (x.amin() + above.mean()).item() - self.mean
        squares = self.squares + (above - above.mean()).square().sum().item() + apart**2 * self.count * n / count
        return Moments(count, self.mean + apart * (n / count), squares)

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(variance + 1e-8), with the unbiased variance; only centered before there is one."""
        x = upcast(x)
        if self.count < 2:
            return x - self.mean
        return (x - self.mean) / math.sqrt(self.squares / (self.count - 1) + EPSILON)


def compute_advantages(rewards: Tensor, mask: Tensor, groups: Tensor, kind: Baseline) -> Tensor:
    """Advantages of tokens without a critic, from rewards of tokens; R_b is the sum of a row's rewards.

    none: R_b, at every token of the row. mean: R_b minus the mean over all rows. rloo, group_mean, group_std: those of
    ``group``, on R_b. batch_whitened: the sum of rewards from a token on, whitened over all learned tokens
    (REINFORCE++). reinforce++-baseline: group_mean, whitened over all learned tokens.
    Source: Williams, 1992; batch_whitened and reinforce++-baseline: Hu et al., "REINFORCE++", 2025; the others as in
    ``group``.

    Args:
        rewards: (B, T), such as those of token_rewards.
        mask: (B, T), True at the tokens that are learned.
        groups: (B,), integers; equal ones are completions of one prompt.
        kind: one of the seven.

    Returns:
        (B, T), 0 where the mask is False; without gradient.

    Raises:
        ValueError: if the shapes differ.
        UserError: if a group of rloo has only one row.
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
