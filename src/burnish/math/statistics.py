"""Estimates from samples: perplexity, pass@k, best of k, and 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FEWEST_ROWS = 8
"""For a paired interval. That so many rows all change in one direction by chance has a probability below 1 %."""


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
    columns: Tensor, statistics: Callable[[Tensor], Tensor], resamples: int = 2000, seed: int = 0
) -> list[tuple[float, float]]:
    """The 95 % bootstrap percentile intervals of statistics of column means (Efron 1979).

    Putting the columns of two models side by side gives a paired interval for their difference.

    Args:
        columns: (N, C), one row per independent unit (a prompt with all its samples); computed in float64.
        statistics: maps column means (R, C) to the K statistics (R, K).
        resamples: the number of bootstrap samples of N rows.
        seed: the random seed.

    Returns:
        The lower and upper bound of each statistic; NaN if there are no rows.
    """
    columns = columns.double()
    if not len(columns):
        return [(math.nan, math.nan)] * statistics(columns).shape[1]
    lows, highs = statistics(_resampled_means(columns, resamples, seed)).quantile(_BOUNDS, dim=0).tolist()
    return list(zip(lows, highs, strict=True))


_BOUNDS = torch.tensor([0.025, 0.975], dtype=torch.float64)


def _resampled_means(columns: Tensor, resamples: int, seed: int) -> Tensor:
    """The means (R, C) of R bootstrap samples of the rows of (N, C)."""
    n, generator = len(columns), torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n).double() @ columns / n
            for _ in range(resamples)
        ]
    )


@dataclass(frozen=True)
class RowSums:
    """A metric of an evaluation as sums over each row: sum_k w_k * (sum x_k / sum n_k), or its exponential.

    ``RowSums({"chat.jsonl:7": (6.2, 4.0), "chat.jsonl:9": (1.1, 2.0)})`` is (6.2 + 1.1) / (4 + 2).
    """

    rows: Mapping[str, tuple[float, ...]]
    """x_1, n_1, x_2, n_2, ... of each row, by its source."""
    weights: tuple[float, ...] = (1.0,)
    """w_k."""
    exp: bool = False

    def __add__(self, other: RowSums) -> RowSums:
        """The sum of two metrics of the same rows."""
        rows = {source: (*sums, *other.rows[source]) for source, sums in self.rows.items()}
        return replace(self, rows=rows, weights=(*self.weights, *other.weights))

    def __mul__(self, factor: float) -> RowSums:
        """The metric times a factor."""
        return replace(self, weights=tuple(weight * factor for weight in self.weights))

    def of(self, means: Tensor) -> Tensor:
        """The metric (R,), from means (R, 2 K) over rows of x_1, n_1, x_2, n_2, ..."""
        ratios = means[:, 0::2] / means[:, 1::2]
        value = ratios @ torch.tensor(self.weights, dtype=torch.float64)
        return value.exp() if self.exp else value


def interval_of_rows(metric: RowSums, resamples: int = 2000, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of a metric over rows; None for fewer than ``FEWEST_ROWS`` rows."""
    if len(metric.rows) < FEWEST_ROWS:
        return None
    columns = torch.tensor([metric.rows[source] for source in sorted(metric.rows)], dtype=torch.float64)
    return bootstrap(columns, lambda means: metric.of(means)[:, None], resamples, seed)[0]


def paired_changes(
    before: Mapping[str, RowSums], after: Mapping[str, RowSums], resamples: int = 2000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % bootstrap intervals of after - before for each metric of two evaluations of the same rows.

    A bootstrap sample has the same rows on both sides and for all metrics, so that the difference is paired.

    Args:
        before: metrics of the first evaluation, by name.
        after: those of the second one.
        resamples: the number of bootstrap samples.
        seed: the random seed.

    Returns:
        The lower and upper bound of each metric that both have. A metric is left out if the evaluations measured it on
        other rows, or if an interval has no bound, because a bootstrap sample may lack what it counts. For fewer than
        ``FEWEST_ROWS`` rows, of which bootstrap intervals are too narrow, all are.
    """
    names = [name for name in after if name in before and before[name].rows.keys() == after[name].rows.keys()]
    sources = sorted({source for name in names for source in after[name].rows})
    if len(sources) < FEWEST_ROWS:
        return {}
    sides = [one for name in names for one in (before[name], after[name])]
    columns = [
        torch.tensor([one.rows.get(s, (0.0,) * 2 * len(one.weights)) for s in sources], dtype=torch.float64)
        for one in sides
    ]
    means = _resampled_means(torch.cat(columns, dim=1), resamples, seed).split([c.shape[1] for c in columns], dim=1)
    found = {}
    for i, name in enumerate(names):
        first, last = (sides[j].of(means[j]) for j in (2 * i, 2 * i + 1))
        low, high = (last - first).quantile(_BOUNDS).tolist()
        if math.isfinite(low) and math.isfinite(high):
            found[name] = (low, high)
    return found


def wilson(share: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a proportion of ``n`` independent trials (Wilson 1927); (0, 1) for n = 0."""
    center = (share * n + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(share * (1 - share) * n + z * z / 4)
    return center - half, center + half


def interval_of_mean(
    mean: float, variance: float, n: float, *, shares: bool, z: float = 1.959964
) -> tuple[float, float]:
    """The 95 % interval of the mean of n > 1 independent values: the normal approximation, or that of a proportion.

    Args:
        mean: the mean of the values.
        variance: the mean of their squared distances from the mean.
        n: their number.
        shares: whether all values are in [0, 1]. Then the interval is too, and it is not a single point if all values
            are 0 or all are 1. Values in between vary less than zeros and ones, and count as more trials.
        z: half the width in standard errors.
    """
    if not shares:
        half = z * math.sqrt(variance / (n - 1))
        return mean - half, mean + half
    of_trials = mean * (1 - mean)
    if of_trials > 0 and variance == 0:
        return mean, mean
    low, high = wilson(mean, n * of_trials / variance if of_trials > 0 else n, z)
    return max(0.0, low), min(1.0, high)
