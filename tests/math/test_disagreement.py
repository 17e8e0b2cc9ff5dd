"""Disagreement of an ensemble, by hand and by identities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from burnish.math.disagreement import disagreement


def test_by_hand() -> None:
    # Members that say the same do not disagree, whether they are sure or not. Two that are sure of opposite answers
    # share log 2. Between: mean .5, so log 2, minus the entropy of .9, which is .9 log(1/.9) + .1 log(1/.1) = .3251.
    p = [[1.0, 0.5, 1.0, 0.9], [1.0, 0.5, 0.0, 0.1]]
    assert disagreement(p) == pytest.approx([0, 0, math.log(2), math.log(2) - 0.325083], abs=1e-6)


def test_order_of_members_and_naming_of_answers_do_not_matter() -> None:
    p = np.random.default_rng(0).random((5, 100))
    found = disagreement(p)
    assert disagreement(p[::-1]) == pytest.approx(found)
    assert disagreement(1 - p) == pytest.approx(found)
    assert ((found >= 0) & (found <= math.log(2))).all()
    assert disagreement(np.repeat(p[:1], 5, axis=0)) == pytest.approx(np.zeros(100), abs=1e-12)
