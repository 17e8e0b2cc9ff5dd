"""Losses of language models and reward models. Each returns a sum and its count, and the trainer divides once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.math.preference import kto as kto
from burnish.math.preference import kto_baseline as kto_baseline
from burnish.math.preference import preference as preference
from burnish.math.reductions import reduce
from burnish.math.tensors import same_shape, upcast
from burnish.types import Metric


def nll(logprobs: Tensor, mask: Tensor) -> Metric:
    """Negative log-likelihood: -sum_t log p(token_t).

    Args:
        logprobs: (B, T), in nats.
        mask: (B, T), the loss mask.

    Returns:
        The sum and the number of learned tokens.

    Raises:
        ValueError: if the shapes differ.
    """
    return reduce(-logprobs, mask)


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    p_chosen: Tensor | None = None,
    weights: Tensor | None = None,
) -> Metric:
    """Cross-entropy loss of pairs: -p log sig(x) - (1 - p) log sig(-x), with x = r_c - r_r - margin.

    sig(x) models the probability that chosen is better, and p is its target. For p = 1, the loss is -log sig(x).
    Source: Bradley and Terry, 1952; Ouyang et al., "Training language models to follow instructions", 2022; the margin:
    Touvron et al., "Llama 2", 2023.

    Args:
        chosen: (P,), scores r_c of the better answers.
        rejected: (P,), scores r_r of the worse ones.
        margin: (P,), the margin by which r_c should exceed r_r; None means 0.
        p_chosen: (P,), p in [0, 1], the fraction of judges that preferred chosen, 0.5 for a tie; None means 1.
        weights: (P,), at least 0, for example 1 / (number of pairs) of a ranking; None means 1.

    Returns:
        The weighted sum over pairs, and the sum of the weights.

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
    """(r_c + r_r)^2, which keeps scores near 0 if added with a small weight. Bradley-Terry does not fix their offset.

    Source: Eisenstein et al., "Helping or herding?", 2023. Arguments, result and errors are as in ``bradley_terry``.
    """
    same_shape(chosen=chosen, rejected=rejected)
    return _over_pairs((upcast(chosen) + upcast(rejected)).square(), weights)


@torch.no_grad()
def pair_accuracy(chosen: Tensor, rejected: Tensor, weights: Tensor | None = None) -> Metric:
    """Fraction of pairs with r_c > r_r; equal scores count 1/2. Arguments and result are as in ``bradley_terry``."""
    same_shape(chosen=chosen, rejected=rejected)
    return _over_pairs((1 + (upcast(chosen) - upcast(rejected)).sign()) / 2, weights)


def _over_pairs(losses: Tensor, weights: Tensor | None) -> Metric:
    weights = torch.ones_like(losses) if weights is None else upcast(weights)
    same_shape(pairs=losses, weights=weights)
    return Metric.of(losses, weights)
