"""Estimates against enumeration of every choice, and intervals against the normal approximation."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import pytest
import torch

from burnish.math.statistics import best_of_k, bootstrap, pass_at_k, perplexity


def test_perplexity_is_one_over_the_geometric_mean_of_probabilities() -> None:
    assert perplexity(-(math.log(0.5) + math.log(0.125)) / 2) == pytest.approx(4)
    assert perplexity(1e6) == perplexity(700) < math.inf


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_with_a_correct_answer(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [i < correct for i in range(n)]
        expected = fmean(float(any(choice)) for choice in itertools.combinations(answers, k))
        assert pass_at_k(n, correct, k) == pytest.approx(expected)
    assert [pass_at_k(n, c, 1) for c in range(n + 1)] == pytest.approx([c / n for c in range(n + 1)])


@pytest.mark.parametrize("scores", [[0.3, 2.0, 1.0, -1.0, 5.0], [1.0, 1.0, 0.0, 1.0, 2.0], [0.0] * 5])
@pytest.mark.parametrize("k", range(1, 6))
def test_best_of_k_is_the_mean_over_all_choices(scores: list[float], k: int) -> None:
    values = [1.0, -2.0, 4.0, 0.5, 3.0]

    def best(choice: tuple[int, ...]) -> float:  # a tie is broken by chance
        top = max(scores[i] for i in choice)
        return fmean(values[i] for i in choice if scores[i] == top)

    expected = fmean(best(choice) for choice in itertools.combinations(range(5), k))
    assert best_of_k(scores, values, k) == pytest.approx(expected)
    highest = fmean(max(scores[i] for i in choice) for choice in itertools.combinations(range(5), k))
    assert best_of_k(scores, scores, k) == pytest.approx(highest)


@pytest.mark.parametrize(("n", "correct", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (0, 0, 1)])
def test_choices_that_do_not_exist(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, correct, k)
    with pytest.raises(ValueError, match="best of"):
        best_of_k([1.0] * n, [1.0] * n, n + 1)


def test_an_interval_of_a_mean_is_as_wide_as_its_standard_error_says() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 1, dtype=torch.float64) * 3 + 1
    low, high = bootstrap(x, lambda means: means[:, 0])
    half = 1.96 * x.std(correction=0).item() / 20
    # 2,000 resamples: a percentile of the interval has a standard error of about 5 % of its half width.
    assert low == pytest.approx(x.mean().item() - half, abs=0.2 * half)
    assert high == pytest.approx(x.mean().item() + half, abs=0.2 * half)
    assert bootstrap(x, lambda means: means[:, 0]) == (low, high)
    assert bootstrap(x, lambda means: means[:, 0], seed=1) != (low, high)


def test_a_difference_is_paired() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 1, dtype=torch.float64)
    low, high = bootstrap(torch.cat([x + 0.5, x], dim=1), lambda means: means[:, 0] - means[:, 1])
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))
