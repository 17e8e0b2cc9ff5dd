"""Agreement by hand, against published examples, and by identities."""

from __future__ import annotations

import math
import random

import pytest

from burnish.math.agreement import interval_of_alpha, krippendorff_alpha, midranks, share_beaten, share_preferred

NONE = None
# Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", example C: 4 observers, 12 units, missing values
OBSERVERS = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, NONE, NONE, NONE],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NONE, 3],
    [NONE, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NONE],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NONE],
]
UNITS = [[value for value in unit if value is not None] for unit in zip(*OBSERVERS, strict=True)]


def test_alpha_of_the_published_example() -> None:
    # the paper and R's irr::kripp.alpha(nmm, "ordinal") give 0.815
    assert krippendorff_alpha([[unit] for unit in UNITS]) == pytest.approx(0.815, abs=5e-4)
    # how units are grouped changes only the interval, and the unit with one value counts for nothing
    assert krippendorff_alpha([UNITS]) == krippendorff_alpha([[unit] for unit in UNITS if len(unit) > 1])


def test_alpha_by_hand() -> None:
    # two raters, items (1, 1), (1, 2), (2, 2): o_11 = 2, o_12 = o_21 = 1, o_22 = 2; n_1 = n_2 = 3, n = 6.
    # d_12 = 3/2 + 3/2 = 3; alpha = 1 - 5 (2 * 9) / (2 * 3 * 3 * 9) = 1 - 5/9
    assert krippendorff_alpha([[[1, 1], [1, 2], [2, 2]]]) == pytest.approx(4 / 9)


def test_alpha_of_full_agreement_disagreement_and_nothing() -> None:
    assert krippendorff_alpha([[[1, 1], [2, 2], [3, 3]]]) == 1
    # two raters with opposite ranks of two items: o_12 = o_21 = 2, n = 4: 1 - 3 (4 d^2) / (8 d^2)
    assert krippendorff_alpha([[[1, 2], [2, 1]]]) == pytest.approx(-0.5)
    assert math.isnan(krippendorff_alpha([]))
    assert math.isnan(krippendorff_alpha([[[1], [2]]]))  # one rater
    assert math.isnan(krippendorff_alpha([[[2, 2], [2, 2]]]))  # one value


def test_alpha_depends_on_the_order_of_values_and_not_on_their_size() -> None:
    stretched = [[10.0**value for value in unit] for unit in UNITS]
    assert krippendorff_alpha([stretched]) == pytest.approx(krippendorff_alpha([UNITS]))


def test_the_interval_is_around_alpha_and_shrinks_with_more_groups() -> None:
    draw = random.Random(0)
    ranks = [[1, 2, 3], [1, 3, 2], [2, 1, 3]]
    groups = [[list(item) for item in zip(draw.choice(ranks), draw.choice(ranks), strict=True)] for _ in range(320)]
    alpha = krippendorff_alpha(groups)
    few, many = interval_of_alpha(groups[:20]), interval_of_alpha(groups)
    assert few is not None and many is not None
    assert many[0] < alpha < many[1]
    # 16 times as many groups: about a quarter of the width
    assert 2 < (few[1] - few[0]) / (many[1] - many[0]) < 8
    assert interval_of_alpha(groups) == many  # seeded
    assert interval_of_alpha(groups[:1]) is None
    assert interval_of_alpha([[[1], [2]]] * 5) is None


def test_midranks_and_shares_by_hand() -> None:
    assert midranks((5, 1, 5)) == [2.5, 1.0, 2.5]
    # the best of three beats two others; two tied ones beat half of each other
    assert share_beaten((5, 1, 5)) == [0.25, 1.0, 0.25]
    assert share_preferred((1, 1, 2), (2, 1, 1)) == pytest.approx((1 + 0.5 + 0) / 3)


@pytest.mark.parametrize("ranks", [(1, 2), (1, 1), (3, 1, 2, 2), (1, 1, 1, 5, 9)])
def test_shares_average_one_half_and_pairs_are_complements(ranks: tuple[int, ...]) -> None:
    assert sum(share_beaten(ranks)) == pytest.approx(len(ranks) / 2)
    for first in ranks:
        for second in ranks:
            assert share_preferred((first,), (second,)) == 1 - share_preferred((second,), (first,))


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="no raters"):
        share_preferred((), ())
    with pytest.raises(ValueError):
        share_preferred((1,), (1, 2))
    with pytest.raises(ValueError, match="1 items"):
        share_beaten((1,))
