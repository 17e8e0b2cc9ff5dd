"""Estimates from samples: perplexity, pass@k, best of k, and 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def perplexity(nll: float) -> float:
    """exp(nll), nll being the mean over tokens in nats; it stops growing at 700, where floats would overflow."""
    return math.exp(min(nll, 700.0))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that one of k answers is correct, from n of which ``correct`` are: 1 - C(n - c, k) / C(n, k).

    Unbiased (Chen et al. 2021); pass@1 = c / n.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {n} answers, {correct} of them correct")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def best_of_k(scores: list[float], values: list[float], k: int) -> float:
    """The expected value of the best of k answers, chosen by score, from n answers: a mean over all k of the n.

    Sorted by score, the answers at ranks a to b (from 1) that share a score hold the best with probability
    (C(b, k) - C(a - 1, k)) / C(n, k), and each of them is chosen as often.

    Args:
        scores: (n,), by which the best is chosen.
        values: (n,), what is then measured; the scores themselves, or another reward.
        k: answers that are chosen from, at most n.

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
    """The 95 % percentile interval of a statistic of column means, over rows drawn with replacement (Efron 1979).

    Columns of two models side by side give a paired interval of their difference.

    Args:
        columns: (N, C), one row an independent unit (a prompt with all its samples); computed in float64.
        statistic: column means (R, C) to (R,).
        resamples: how often N rows are drawn.
        seed: of the draws.

    Returns:
        The lower and the upper end; NaN if there are no rows.
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
    """The 95 % interval of a share of ``n`` independent trials (Wilson 1927); (0, 1) of none."""
    center = (share * n + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(share * (1 - share) * n + z * z / 4)
    return center - half, center + half
