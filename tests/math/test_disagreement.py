"""Disagreement of predictors: hand-computed values, bounds, and what cancels."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.math.disagreement import disagreement


def test_hand_computed():
    # sure of opposite labels: H(1/2) - 0 = ln 2; equally unsure: H(1/2) - H(1/2) = 0
    # 0.9 and 0.5: H(0.7) - (H(0.9) + H(0.5)) / 2 = 0.610864 - (0.325083 + 0.693147) / 2 = 0.101749
    found = disagreement([[1.0, 0.5, 0.9, 1.0], [0.0, 0.5, 0.5, 1.0]])
    assert found == pytest.approx([math.log(2), 0.0, 0.101749, 0.0], abs=1e-6)


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_bounds_and_symmetries(p):
    found = disagreement(p)
    assert np.all((found >= 0) & (found <= math.log(2) + 1e-12))
    assert disagreement(1 - np.array(p)) == pytest.approx(found, abs=1e-9)  # the other label
    assert disagreement([*p, *p]) == pytest.approx(found, abs=1e-9)  # each predictor twice
    assert disagreement(p[:1]) == pytest.approx([0, 0, 0], abs=1e-9)  # one predictor


@pytest.mark.parametrize("wrong", [[[1.1]], [[math.nan]], [0.5]])
def test_what_is_no_probability_is_refused(wrong):
    with pytest.raises(ValueError, match="probabilities"):
        disagreement(wrong)
