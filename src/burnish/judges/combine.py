"""Labels and measures from verdicts. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple


class Label(NamedTuple):
    """What a judge says about a pair: ``Label(p_first=0.7, biased=False)``.

    ``p_first`` is the probability that the first completion is better. ``biased`` says whether the judge prefers
    another completion when their order is swapped.
    """

    p_first: float
    biased: bool


def label(direct: Sequence[float], swapped: Sequence[float]) -> Label:
    """The label of a pair from verdicts in both orders, averaged over principles.

    p_first = mean over principles of (p_direct(A) + 1 - p_swapped(A)) / 2, so that p(first, second) is 1 - p(second,
    first), and a judge that only looks at the position gives exactly 0.5.

    Args:
        direct: p(A) for each principle, where A is the first completion.
        swapped: p(A) for each principle, where A is the second completion.

    Raises:
        ValueError: there is no verdict, or the numbers of verdicts differ.
    """
    if not direct or len(direct) != len(swapped):
        raise ValueError(f"{len(direct)} verdicts in one order and {len(swapped)} in the other")
    first, second = fmean(direct), fmean(swapped)
    return Label(0.5 + (first - second) / 2, (first - 0.5) * (0.5 - second) < 0)


def label_of_grades(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """The label of a pair from the grades of each completion: the probability that the first one is better.

    It is P(grade of first > grade of second) + P(the grades are equal) / 2, averaged over principles. The grades of the
    two completions are taken as independent. Swapping the completions gives 1 minus this label.

    Args:
        first: for each principle, the probabilities of the grades 1..n of the first completion.
        second: those of the second completion.

    Raises:
        ValueError: there is no verdict, or the numbers of verdicts or of grades differ.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} verdicts on one completion and {len(second)} on the other")
    return fmean(0.5 + (_higher(a, b) - _higher(b, a)) / 2 for a, b in zip(first, second, strict=True))


def _higher(a: Sequence[float], b: Sequence[float]) -> float:
    """P(grade of a > grade of b) of independent grades."""
    below = [0.0, *accumulate(b)]
    return math.fsum(p * q for p, q in zip(a, below[:-1], strict=True))


def clamp(p: float, distance: float | None) -> float:
    """A probability limited to [0.5 - distance, 0.5 + distance]; None does not limit it."""
    return p if distance is None else min(max(p, 0.5 - distance), 0.5 + distance)


def expected_grade(probabilities: Sequence[float]) -> float:
    """The expected grade sum_i i p(i) of grades i = 1..n, rescaled to [-1, 1]: the uniform distribution gives 0.

    This is the direct score of d-RLAIF (Lee et al. 2023). ``probabilities`` are those of the n > 1 grades.
    """
    n = len(probabilities)
    # sum_i p(i) (2i - n - 1) / (n - 1), in which opposite grades cancel exactly
    half = math.fsum((probabilities[n - 1 - i] - probabilities[i]) * (n - 1 - 2 * i) / (n - 1) for i in range(n // 2))
    return min(max(half / math.fsum(probabilities), -1.0), 1.0)


def kappa(own: Sequence[float], theirs: Sequence[float]) -> float:
    """Cohen's kappa between the judge's preferences and those of the labels: 1 is perfect agreement, 0 is chance.

    kappa = (p_o - p_e) / (1 - p_e), where p_o is the share of pairs with equal preferences, and p_e what it would be by
    chance. Which completion of a pair comes first is arbitrary, so every pair counts in both orders.

    Args:
        own: (N,) preferences of the judge: above 0 for the first completion, below 0 for the second, 0 for a tie.
        theirs: (N,) preferences of the labels.

    Returns:
        Kappa, or 0 if all preferences are ties, which chance explains too.

    Raises:
        ValueError: the numbers differ, or are 0.
    """
    if not own or len(own) != len(theirs):
        raise ValueError(f"{len(own)} preferences of the judge and {len(theirs)} of the labels")
    n = len(own)
    observed = sum(agrees(a, b) for a, b in zip(own, theirs, strict=True)) / n
    ties, their_ties = (sum(x == 0 for x in of) / n for of in (own, theirs))
    chance = (1 - ties) * (1 - their_ties) / 2 + ties * their_ties
    return 0.0 if chance == 1 else (observed - chance) / (1 - chance)


def agrees(own: float, theirs: float) -> bool:
    """Whether two preferences have the same sign."""
    return (own > 0) - (own < 0) == (theirs > 0) - (theirs < 0)
