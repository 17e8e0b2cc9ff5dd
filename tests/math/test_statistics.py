"""Estimates against enumeration of every choice, and intervals against the normal approximation."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import pytest
import torch

from burnish.math.statistics import (
    RowSums,
    best_of_k,
    bootstrap,
    interval_of_mean,
    interval_of_rows,
    paired_changes,
    pass_at_k,
    perplexity,
    wilson,
)


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
    [(low, high)] = bootstrap(x, lambda means: means)
    half = 1.96 * x.std(correction=0).item() / 20
    # 2,000 resamples: a percentile of the interval has a standard error of about 5 % of its half width.
    assert low == pytest.approx(x.mean().item() - half, abs=0.2 * half)
    assert high == pytest.approx(x.mean().item() + half, abs=0.2 * half)
    assert bootstrap(x, lambda means: means) == [(low, high)]
    assert bootstrap(x, lambda means: means, seed=1) != [(low, high)]


def test_a_difference_is_paired() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 1, dtype=torch.float64)
    [(low, high)] = bootstrap(torch.cat([x + 0.5, x], dim=1), lambda means: means[:, :1] - means[:, 1:])
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))


# --- paired changes -----------------------------------------------------------------------------------------------

SOURCES = [f"pairs.jsonl:{i}" for i in range(1, 13)]


def sums(values: list[float], counts: list[float] | None = None) -> RowSums:
    """A metric with these totals and counts of the rows of SOURCES."""
    return RowSums(dict(zip(SOURCES, zip(values, counts or [1.0] * len(values), strict=True), strict=False)))


def test_a_change_that_is_the_same_in_every_row_has_an_interval_without_width() -> None:
    start = [float(i) for i in range(12)]  # its own interval is 3.5 wide
    changed = paired_changes({"score": sums(start)}, {"score": sums([x + 0.25 for x in start])})
    assert changed == {"score": pytest.approx((0.25, 0.25))}


def test_rows_weigh_as_much_as_they_count() -> None:
    counts = [1.0, 5.0, 2.0] * 4
    before, after = [3.0 * n for n in counts], [2.5 * n for n in counts]
    assert paired_changes({"nll": sums(before, counts)}, {"nll": sums(after, counts)})["nll"] == pytest.approx(
        (-0.5,) * 2
    )
    # a change of 1 in the last row alone, which has 4 of 15 tokens in this sample and 400 of 411 in that one
    few, many = [1.0] * 11 + [4.0], [1.0] * 11 + [400.0]
    for sizes, value in ((few, 4 / 15), (many, 400 / 411)):
        zero, last = sums([0.0] * 12, sizes), sums([0.0] * 11 + [sizes[-1]], sizes)
        means = torch.tensor([[sum(x for x, _ in last.rows.values()), sum(n for _, n in last.rows.values())]])
        assert last.of(means.double()).item() == pytest.approx(value)
        low, high = paired_changes({"nll": zero}, {"nll": last})["nll"]
        assert low == 0 < value < high <= 1


def test_a_perplexity_and_a_weighted_sum() -> None:
    certain, one_bit = sums([0.0] * 12), sums([math.log(2)] * 12)
    before, after = (RowSums(one.rows, exp=True) for one in (certain, one_bit))
    assert paired_changes({"perplexity": before}, {"perplexity": after})["perplexity"] == pytest.approx((1.0, 1.0))
    loss = {"loss": certain + certain * 3.0}, {"loss": one_bit + one_bit * 3.0}
    assert paired_changes(*loss)["loss"] == pytest.approx((4 * math.log(2),) * 2)


def test_an_interval_is_as_wide_as_the_standard_error_of_the_differences_says() -> None:
    names = [f"a:{i}" for i in range(400)]
    before = RowSums({name: (100.0 * i, 1.0) for i, name in enumerate(names)})
    after = RowSums({name: (100.0 * i + (-1) ** i, 1.0) for i, name in enumerate(names)})
    low, high = paired_changes({"x": before}, {"x": after})[
        "x"
    ]  # differences of 1 and -1: the standard error is 1 / 20
    assert (low, high) == (pytest.approx(-1.96 / 20, rel=0.2), pytest.approx(1.96 / 20, rel=0.2))
    # the order of rows depends on the processes, and must not matter
    turned = RowSums(dict(reversed([*after.rows.items()])))
    assert paired_changes({"x": before}, {"x": turned}) == {"x": (low, high)}


def test_what_cannot_be_paired_is_left_out() -> None:
    some = sums([1.0] * 12)
    assert paired_changes({"a": some}, {"b": some}) == {}
    assert paired_changes({"a": some}, {"a": RowSums({**some.rows, "other:1": (1.0, 1.0)})}) == {}
    assert paired_changes({"a": sums([1.0] * 7)}, {"a": sums([2.0] * 7)}) == {}
    uncounted = sums([0.0] * 12, [0.0] * 12)
    assert paired_changes({"a": uncounted, "b": some}, {"a": uncounted, "b": some}) == {"b": (0.0, 0.0)}


@pytest.mark.parametrize("values", [[0.0], [1.0], [0.5], [0.0, 1.0], [0.25, 0.25, 1.0], [1.0] * 49 + [0.0]])
@pytest.mark.parametrize("n", [2, 50, 10_000])
def test_the_interval_of_shares_stays_in_0_1_and_agrees_with_the_others(values: list[float], n: int) -> None:
    mean = fmean(values)
    variance = fmean((value - mean) ** 2 for value in values)
    low, high = interval_of_mean(mean, variance, n, shares=True)
    assert 0 <= low <= mean <= high <= 1
    if {0.0, 1.0}.issuperset(values):
        assert (low, high) == pytest.approx(wilson(mean, n)) and low < high
    if n == 10_000 and variance:
        assert (low, high) == pytest.approx(interval_of_mean(mean, variance, n, shares=False), abs=1e-3)


def test_the_interval_of_rows_agrees_with_the_normal_approximation() -> None:
    """For a mean over tokens, with the standard error of a ratio of two means."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 9, (400,), generator=generator).double()
    totals = counts * torch.rand(400, dtype=torch.float64, generator=generator)
    rows = zip(totals.tolist(), counts.tolist(), strict=True)
    found = interval_of_rows(RowSums({str(i): row for i, row in enumerate(rows)}))
    ratio = totals.sum() / counts.sum()
    half = 1.96 * (totals - ratio * counts).std().item() / math.sqrt(400) / counts.mean().item()
    assert found == pytest.approx((ratio.item() - half, ratio.item() + half), abs=0.1 * half)


def test_too_few_rows_have_no_interval() -> None:
    assert interval_of_rows(RowSums({str(i): (1.0 * i, 1.0) for i in range(7)})) is None
