"""Mixtures draw every row, in the requested proportions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.mixing import epoch, mix, next_source
from burnish.data.readers import Mixed, Rows, Skipped
from burnish.errors import UserError
from burnish.types import Text

SOURCES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0])), min_size=1, max_size=4)


def test_without_weights_every_row_is_drawn_once():
    assert epoch([3, 2], None, 0) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_sources_take_turns_in_proportion_to_their_weights():
    """Of shares 2/3 and 1/3: behind by 2 and 1 thirds, then 1 and 2, then 3 and 0, and so on."""
    assert [source for source, _ in epoch([4, 2], [2, 1], 0)] == [0, 1, 0, 0, 1, 0]
    assert [source for source, _ in epoch([4, 2], [20, 10], 0)] == [0, 1, 0, 0, 1, 0]
    assert next_source([1, 1, 1], [4, 3, 4]) == 1


def test_weights_like_the_sizes_draw_every_row_once():
    assert sorted(epoch([4, 2], [2, 1], 0)) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_a_source_that_runs_out_is_reshuffled():
    draws = epoch([6, 30], [1, 1], 0)
    small = [row for source, row in draws if source == 0]
    assert len(draws) == 60 and len(small) == 30
    passes = [tuple(small[i : i + 6]) for i in range(0, 30, 6)]
    assert all(sorted(turn) == list(range(6)) for turn in passes)
    assert len(set(passes)) > 1


@given(SOURCES, st.integers(0, 5))
def test_an_epoch_ends_when_every_row_was_drawn(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    draws = epoch(sizes, weights, seed)
    assert set(draws) == {(i, row) for i, size in enumerate(sizes) for row in range(size)}
    assert Counter(draws[:-1])[draws[-1]] == 0  # not a draw too many
    for source, size in enumerate(sizes):
        times = Counter(row for i, row in draws if i == source)
        assert max(times.values()) - min(times.values()) <= 1, size
    assert draws == epoch(sizes, weights, seed)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_two_sources_keep_their_shares_at_every_draw(a, b):
    drawn = [0, 0]
    for done in range(1, 60):
        drawn[next_source([a, b], drawn)] += 1
        assert abs(drawn[0] - done * a / (a + b)) <= 1 + 1e-9


def test_rows_keep_where_they_came_from():
    first = Rows([Text("a", "a:1")], [Skipped("a:2", "empty text", "a:2: text: empty text")])
    second = Rows([Text("b", "b:1"), Text("c", "b:2")], [])
    mixture = mix([first, second], ["a", "b"], [1, 1], 0)
    assert Counter(row.source for row in mixture.rows) == {"a:1": 2, "b:1": 1, "b:2": 1}
    assert mixture.skipped == first.skipped
    assert mixture.mixed == (Mixed("a", 1, 2), Mixed("b", 2, 2))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_depends_on_the_seed(seed):
    assert epoch([20, 20], [1, 1], 0) != epoch([20, 20], [1, 1], seed)


def test_weights_that_are_too_uneven_are_an_error():
    sources = [
        Rows([Text(str(i), f"{name}:{i}") for i in range(size)], []) for name, size in (("big", 500), ("small", 2))
    ]
    assert len(mix(sources, ["big", "small"], [1.0, 1.0], 0).rows) == 999  # big is drawn first in each turn
    with pytest.raises(
        UserError, match="big: with these weights it takes 500,500 draws until all of its 500 rows have been drawn"
    ):
        mix(sources, ["big", "small"], [0.001, 1.0], 0)
