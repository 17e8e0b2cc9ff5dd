"""Labels, grades and agreement: by hand, and by their identities."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.judges.combine import agrees, clamp, expected_grade, kappa, label, label_of_grades

P = st.floats(0, 1)


@given(st.lists(st.tuples(P, P), min_size=1, max_size=4))
def test_the_label_of_swapped_completions_is_the_opposite(both: list[tuple[float, float]]) -> None:
    direct, swapped = ([one[k] for one in both] for k in (0, 1))
    there, back = label(direct, swapped), label(swapped, direct)
    assert there.p_first == pytest.approx(1 - back.p_first, abs=1e-15)
    assert 0 <= there.p_first <= 1
    assert there.biased == back.biased


@given(P)
def test_a_judge_of_the_position_gives_exactly_one_half(p: float) -> None:
    assert label([p], [p]).p_first == 0.5
    assert label([p], [p]).biased == (p != 0.5)


def test_labels_by_hand() -> None:
    assert label([0.7], [0.4]).p_first == pytest.approx(0.65)  # (0.7 + 1 - 0.4) / 2
    assert not label([0.7], [0.4]).biased
    assert label([0.9], [0.6]).biased  # A in both orders
    assert label([0.9, 0.5], [0.2, 0.0]).p_first == pytest.approx(0.8)  # the mean of 0.85 and 0.75


@given(P)
def test_a_judge_that_is_right_with_probability_p_gives_the_label_p(p: float) -> None:
    """It is right or wrong in each order: both right is 1, one of them 0.5, none 0; p^2 + p (1 - p) = p."""
    expected = bias = 0.0
    for right, also in product((1.0, 0.0), repeat=2):
        weight = (p if right else 1 - p) * (p if also else 1 - p)
        one = label([right], [1 - also])
        expected += weight * one.p_first
        bias += weight * one.biased
    assert expected == pytest.approx(p, abs=1e-12)
    assert bias == pytest.approx(2 * p * (1 - p), abs=1e-12)


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=2, max_size=2))
def test_labels_of_grades_are_opposite_and_move_with_the_grades(counts: list[list[int]]) -> None:
    first, second = ([one / sum(of) for one in of] for of in counts)
    p = label_of_grades([first], [second])
    assert p == pytest.approx(1 - label_of_grades([second], [first]), abs=1e-15)
    assert 0 <= p <= 1
    assert label_of_grades([first], [first]) == 0.5
    enumerated = sum(first[a] * second[b] * ((a > b) + 0.5 * (a == b)) for a, b in product(range(4), repeat=2))
    assert p == pytest.approx(enumerated)
    assert label_of_grades([[0.0, *first]], [[*second, 0.0]]) >= p - 1e-15  # one grade higher


def test_labels_of_grades_by_hand() -> None:
    assert label_of_grades([[0, 0, 1]], [[0, 1, 0]]) == 1
    assert label_of_grades([[0.5, 0.5]], [[0.25, 0.75]]) == 0.375  # 0.5 x 0.25 + (0.5 x 0.25 + 0.5 x 0.75) / 2
    assert label_of_grades([[1, 0], [0, 1]], [[0, 1], [0, 1]]) == 0.25  # the mean of 0 and 0.5
    for first, second in (([], []), ([[1, 0]], [])):
        with pytest.raises(ValueError, match="verdicts on one completion"):
            label_of_grades(first, second)


@pytest.mark.parametrize("n", [2, 3, 7, 10])
def test_uniform_grades_score_zero(n: int) -> None:
    assert expected_grade([1 / n] * n) == 0


def test_grades_by_hand() -> None:
    assert expected_grade([0] * 9 + [1]) == 1
    assert expected_grade([1] + [0] * 9) == -1
    assert expected_grade([0] * 4 + [1] + [0] * 5) == pytest.approx(-1 / 9)  # 5 is 2 (5 - 1) / 9 - 1
    assert expected_grade([0, 0.25, 0.75]) == pytest.approx(0.75)  # the mean 2.75 of 1 to 3


@given(st.lists(P, min_size=2, max_size=10).filter(lambda p: sum(p) > 0.01))
def test_grades_are_the_rescaled_mean(weights: list[float]) -> None:
    n, total = len(weights), sum(weights)
    mean = sum(i * p for i, p in enumerate(weights, start=1)) / total
    score = expected_grade([p / total for p in weights])
    assert score == pytest.approx(2 * (mean - 1) / (n - 1) - 1, abs=1e-9)
    assert -1 <= score <= 1


def test_kappa_by_hand() -> None:
    # 4 pairs, 3 equal: p_o = 0.75 and without ties p_e = 0.5.
    assert kappa([1, 1, -1, -1], [2, 3, -1, 1]) == pytest.approx(0.5)
    # One of 4 is a tie of the judge: p_o = 0.75, p_e = 0.75 * 1 / 2 = 0.375.
    assert kappa([1, 1, -1, 0], [1, 1, -1, 1]) == pytest.approx((0.75 - 0.375) / 0.625)
    assert kappa([1, -1], [1, -1]) == 1
    assert kappa([1, -1], [-1, 1]) == -1
    assert kappa([0, 0], [0, 0]) == 0
    with pytest.raises(ValueError, match="2 preferences of the judge and 1"):
        kappa([1, 1], [1])


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1)), min_size=1))
def test_kappa_does_not_depend_on_which_completion_comes_first(pairs: list[tuple[int, int]]) -> None:
    own, theirs = ([one[k] for one in pairs] for k in (0, 1))
    swapped = [(-own[0], *own[1:]), (-theirs[0], *theirs[1:])]
    assert kappa(own, theirs) == pytest.approx(kappa(*swapped))


def test_preferences_agree_by_their_sign() -> None:
    assert agrees(0.1, 5) and agrees(0, 0.0) and agrees(-1, -0.1)
    assert not agrees(0.1, -5) and not agrees(0, 1)


def test_clamping() -> None:
    assert [clamp(p, 0.1) for p in (0.0, 0.45, 1.0)] == [0.4, 0.45, 0.6]
    assert clamp(0.99, None) == 0.99
