"""Rows selected by their scores: each part by hand, nested thresholds, and rows of several files together."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.selection import Select, select
from burnish.errors import UserError
from burnish.types import Conversation, Messages, Row, Text


def row(prompt: str, completion: str, line: int) -> Row:
    messages: Messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
    return Conversation(messages, 1, f"a.jsonl:{line}")


ROWS = [row(prompt, completion, i) for i, (prompt, completion) in enumerate(["px", "px", "py", "qx", "qz", "qz"])]
SCORES = [0.5, 0.5, 0.9, 0.1, 0.7, 0.7]


def kept(**settings: Any) -> list[int]:
    return select(ROWS, SCORES, Select(**settings)).kept


def test_each_part_by_hand() -> None:
    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(distinct=True) == [0, 2, 3, 4]
    assert kept(above=0.5) == [2, 4, 5]  # strictly
    assert kept(best=1) == [2, 4]  # of the two with 0.7, the first
    assert kept(at_most=2) == [0, 1, 3, 4]
    assert kept(percentile=50) == [2, 4, 5]  # the median is 0.6
    assert kept(percentile=50, per="prompt") == [0, 1, 2, 4, 5]  # 0.5 and 0.7
    assert kept(percentile=0) == kept(percentile=0, per="prompt") == [0, 1, 2, 3, 4, 5]


def test_parts_apply_in_their_order_and_count_what_they_leave_out() -> None:
    selected = select(ROWS, SCORES, Select(distinct=True, above=0.3, percentile=50, best=1, at_most=1))
    # 0, 2, 3, 4 are distinct; 3 is not above; the median of 0.5, 0.9, 0.7 is 0.7.
    assert selected.kept == [2, 4]
    assert selected.left_out == {"duplicate": 2, "not above 0.3": 1, "below percentile 50": 1}


scores = st.lists(st.floats(-3, 3), min_size=6, max_size=6)


@given(scores, st.floats(-3, 3), st.floats(-3, 3))
def test_rising_thresholds_give_nested_sets(values: list[float], one: float, other: float) -> None:
    low, high = (set(select(ROWS, values, Select(above=x)).kept) for x in sorted((one, other)))
    assert high <= low
    assert len(select(ROWS, values, Select(above=-math.inf)).kept) == 6


@given(scores, st.floats(0, 100), st.floats(0, 100), st.sampled_from(["all", "prompt"]))
def test_rising_percentiles_give_nested_sets(values: list[float], one: float, other: float, per: Any) -> None:
    low, high = (set(select(ROWS, values, Select(percentile=x, per=per)).kept) for x in sorted((one, other)))
    assert high <= low and high


@given(scores)
def test_every_row_is_kept_or_counted(values: list[float]) -> None:
    selected = select(ROWS, values, Select(distinct=True, above=0, best=1))
    assert len(selected.kept) + sum(selected.left_out.values()) == 6
    assert selected.kept == sorted(selected.kept)


def test_text_has_no_prompt() -> None:
    with pytest.raises(UserError, match=r"b.txt:1: select: plain text has no prompt"):
        select([Text("a", "b.txt:1")], [1.0], Select(best=1))
    assert select([Text("a", "b.txt:1")], [1.0], Select(above=0)).kept == [0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"per": "prompt"}, "per: applies only with percentile"),
        ({"distinct": True, "key": "quality"}, "key: applies only with above, percentile or best"),
        ({"above": math.nan}, "above: expected a number, got nan"),
        ({"best": 0}, "expected more than 0, got 0"),
    ],
)
def test_settings_without_effect_are_errors(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Select(**settings)
