"""Estimates from samples: perplexity, pass@k, best of k, and 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def perplexity(nll: float) -> float:
    """exp(nll), where nll is the mean over tokens in nats. nll is limited to 700, so that floats do not overflow."""
    return math.exp(min(nll, 700.0))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The probability that at least one of k answers is correct: 1 - C(n - c, k) / C(n, k), given c correct out of n.

    The estimate is unbiased (Chen et al. 2021); pass@1 = c / n.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {n} answers, {correct} of them correct")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def best_of_k(scores: list[float], values: list[float], k: int) -> float:
    """The expected value of the best of k answers by score, averaged over all subsets of k out of n answers.

    When answers are sorted by score, those at ranks a to b (from 1) with equal scores contain the best answer with
    probability (C(b, k) - C(a - 1, k)) / C(n, k), and each of them is equally likely to be chosen.

    Args:
        scores: (n,), used to choose the best answer.
        values: (n,), the values to average: the scores themselves or another reward.
        k: the number of answers to choose from, at most n.

    Raises:
        ValueError: unless 1 <= k <= n, or if the lists differ in length.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} from {n} answers")
    groups: dict[float, list[float]] = {}
    for score, value in sorted(zip(scores, values, strict=True)):
        groups.setdefault(score, []).append(value)
    total, below = 0.0, 0
    for group in groups.values():
        chance = (math.comb(below + len(group), k) - math.comb(below, k)) / math.comb(n, k)
        total += chance * math.fsum(group) / len(group)
        below += len(group)
    return total


def bootstrap(
    columns: Tensor, statistic: Callable[[Tensor], Tensor], resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The 95 % bootstrap percentile interval of a statistic of column means (Efron 1979).

    Putting the columns of two models side by side gives a paired interval for their difference.

    Args:
        columns: (N, C), one row per independent unit (a prompt with all its samples); computed in float64.
        statistic: maps column means (R, C) to (R,).
        resamples: the number of bootstrap samples of N rows.
        seed: the random seed.

    Returns:
        The lower and upper bounds; NaN if there are no rows.
    """
    columns = columns.double()
    n = len(columns)
    if n == 0:
        return math.nan, math.nan
    generator = torch.Generator().manual_seed(seed)
    means = torch.stack(
        [
            torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n).double() @ columns / n
            for _ in range(resamples)
        ]
    )
    low, high = statistic(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def wilson(share: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a proportion of ``n`` independent trials (Wilson 1927); (0, 1) for n = 0."""
    center = (share * n + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(share * (1 - share) * n + z * z / 4)
    return center - half, center + half
