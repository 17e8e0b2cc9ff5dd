"""How far raters agree: Krippendorff's alpha of ranks, and the share of raters who prefer one of two answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ranks = Sequence[float]
"""The rank of each completion of a prompt; 1 is best, and equal numbers are a tie: ``(2, 1, 2)``."""
RESAMPLES_AT_ONCE = 64


def midranks(ranks: Ranks) -> list[float]:
    """Ranks from 1 in which tied items share the mean of their places: ``(5, 1, 5)`` gives ``[2.5, 1.0, 2.5]``."""
    return [sum(other < rank for other in ranks) + (sum(other == rank for other in ranks) + 1) / 2 for rank in ranks]


def share_preferred(first: Ranks, second: Ranks) -> float:
    """The share of raters who rank the first item better than the second one. A tie counts as half.

    Args:
        first: the rank that each rater gave to the first item.
        second: those of the second item, by the same raters in the same order.

    Raises:
        ValueError: there are no raters, or the lists differ in length.
    """
    if not first:
        raise ValueError("no raters")
    return sum((a < b) + (a == b) / 2 for a, b in zip(first, second, strict=True)) / len(first)


def share_beaten(ranks: Ranks) -> list[float]:
    """The share of the other items that each item beats in one ranking, ties counted as half (Borda 1781).

    It is (K - midrank) / (K - 1) for K items: 1 for the single best one, 0 for the single worst one, 0.5 on average.

    Raises:
        ValueError: there are fewer than two items.
    """
    if len(ranks) < 2:
        raise ValueError(f"{len(ranks)} items cannot be ranked")
    return [(len(ranks) - rank) / (len(ranks) - 1) for rank in midranks(ranks)]


def krippendorff_alpha(groups: Sequence[Sequence[Ranks]]) -> float:
    """Krippendorff's alpha for ordinal data: 1 if raters agree, 0 if they agree as often as by chance.

    alpha = 1 - (n - 1) sum_ck o_ck d_ck^2 / sum_ck n_c n_k d_ck^2, where o_ck is the number of pairs of values c and k
    given to one item, each item weighted by 1 / (its values - 1), n_c = sum_k o_ck, n = sum_c n_c, and
    d_ck = n_c / 2 + n_c+1 + ... + n_k-1 + n_k / 2 (Krippendorff 2011, Computing Krippendorff's Alpha-Reliability).

    Args:
        groups: items, grouped by what is resampled together in ``interval_of_alpha``, such as the completions of one
            prompt. An item is the list of the values that its raters gave. Items with fewer than two count for nothing.

    Returns:
        alpha; NaN if no item has two values, or all values are equal.
    """
    return float(_alphas(_coincidences(groups).sum(axis=0)[None])[0])


def interval_of_alpha(
    groups: Sequence[Sequence[Ranks]], resamples: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """The 95 % bootstrap percentile interval of Krippendorff's alpha over groups of items.

    Args:
        groups: as in ``krippendorff_alpha``. A bootstrap sample draws whole groups, because the ranks of the
            completions of one prompt depend on each other.
        resamples: the number of bootstrap samples.
        seed: the random seed.

    Returns:
        The lower and upper bound; None if fewer than two groups have an item with two values, or alpha is NaN.
    """
    paired = [group for group in groups if any(len(item) > 1 for item in group)]
    if len(paired) < 2 or math.isnan(krippendorff_alpha(paired)):
        return None
    counts = _coincidences(paired)
    generator = np.random.default_rng(seed)
    flat = counts.reshape(len(paired), -1)
    alphas = []
    for first in range(0, resamples, RESAMPLES_AT_ONCE):
        drawn = min(RESAMPLES_AT_ONCE, resamples - first)
        weights = generator.multinomial(len(paired), np.full(len(paired), 1 / len(paired)), size=drawn)
        alphas.append(_alphas((weights @ flat).reshape(drawn, *counts.shape[1:])))
    low, high = np.nanquantile(np.concatenate(alphas), [0.025, 0.975])
    return float(low), float(high)


def _coincidences(groups: Sequence[Sequence[Ranks]]) -> npt.NDArray[np.float64]:
    """The matrix o (V, V) of each group, (G, V, V); the values are in ascending order."""
    values = sorted({value for group in groups for item in group for value in item})
    index = {value: i for i, value in enumerate(values)}
    counts = np.zeros((len(groups), len(values), len(values)))
    for matrix, group in zip(counts, groups, strict=True):
        for item in group:
            if len(item) > 1:
                given = np.bincount([index[value] for value in item], minlength=len(values)).astype(float)
                matrix += (np.outer(given, given) - np.diag(given)) / (len(item) - 1)
    return counts


def _alphas(o: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Alpha (R,) of R matrices o (R, V, V)."""
    n_c = o.sum(axis=2)
    middle = n_c.cumsum(axis=1) - n_c / 2
    d_squared = (middle[:, :, None] - middle[:, None, :]) ** 2
    observed = (o * d_squared).sum(axis=(1, 2))
    expected = (n_c[:, :, None] * n_c[:, None, :] * d_squared).sum(axis=(1, 2))
    alphas = np.full(len(o), np.nan)
    np.divide((n_c.sum(axis=1) - 1) * observed, expected, out=alphas, where=expected > 0)
    return 1 - alphas
