"""Loaders of rows: the order depends only on the seed and the epoch, and a loader resumes where it was saved."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.loader import RowLoader, permutation
from burnish.errors import UserError
from burnish.types import Example, Sequence


def numbered(n: int) -> list[Example]:
    return [Example((Sequence((i,), (False,), str(i)),)) for i in range(n)]


def numbers_of(step: list[Example]) -> list[int]:
    return [e.sequences[0].tokens[0] for e in step]


@given(st.integers(0, 50), st.integers(0, 10), st.integers(0, 3))
def test_a_permutation_has_every_index_once_and_depends_only_on_its_seeds(n, seed, epoch):
    order = permutation(n, seed, epoch)
    assert sorted(order) == list(range(n))
    torch.rand(3)
    assert permutation(n, seed, epoch) == order


def test_seeds_are_kept_apart():
    assert permutation(20, 1, 12) != permutation(20, 11, 2)


@pytest.mark.parametrize("rows_per_step", [1, 3, 10, 17])
def test_an_epoch_has_every_row_once(rows_per_step):
    loader = RowLoader(numbered(10), rows_per_step, seed=3)
    first, second = ([numbers_of(step) for step in loader] for _ in range(2))
    assert len(first) == len(second) == len(loader) == -(-10 // rows_per_step)
    flat = [list(itertools.chain(*epoch)) for epoch in (first, second)]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(10))
    assert flat[0] != flat[1]
    assert all(len(step) == rows_per_step for step in first[:-1])


def test_the_order_depends_on_the_seed():
    def first(seed):
        return [numbers_of(step) for step in RowLoader(numbered(10), 4, seed)]

    assert first(3) == first(3) != first(4)


@pytest.mark.parametrize("steps", range(8))
def test_a_loader_resumes_from_its_state(steps):
    def stream(loader):
        while True:
            yield from loader

    straight = [numbers_of(step) for step in itertools.islice(stream(RowLoader(numbered(10), 4, 3)), 9)]
    loader = RowLoader(numbered(10), 4, 3)
    for _ in itertools.islice(stream(loader), steps):
        pass
    again = RowLoader(numbered(10), 2, 3)  # another number of processes: the run keeps its rows per step
    again.load_state_dict(loader.state_dict())
    assert [numbers_of(step) for step in itertools.islice(stream(again), 9 - steps)] == straight[steps:]


def test_an_empty_list_of_rows_is_an_error():
    with pytest.raises(UserError, match="no rows"):
        RowLoader([], 4, 0)
