"""The largest micro-batch of a step."""

from __future__ import annotations

import pytest

from burnish.plan.micro_batches import Lengths, MicroBatch, largest, lengths_of
from burnish.types import Example, Sequence

ROWS = Lengths(widths=(10, 40, 30, 20), longest=40, learned=0.5)


@pytest.mark.parametrize(
    ("rows", "budget", "processes", "expected"),
    [
        (4, None, 1, MicroBatch(100, 50, 1)),
        (4, 50, 1, MicroBatch(50, 25, 2)),
        (4, 30, 1, MicroBatch(40, 20, 3)),  # no smaller than a row
        (4, None, 2, MicroBatch(50, 25, 1)),
        (2, 1000, 1, MicroBatch(70, 35, 1)),  # the longest rows
        (4, 60, 8, MicroBatch(40, 20, 1)),
    ],
)
def test_largest(rows: int, budget: int | None, processes: int, expected: MicroBatch) -> None:
    assert largest(ROWS, rows, budget, processes) == expected


def test_prompts_have_several_completions() -> None:
    assert largest(ROWS, rows=4, budget=None, processes=1, samples=2).tokens == 40 + 40 + 30 + 30


def test_lengths() -> None:
    def of(length: int, learned: int) -> Sequence:
        return Sequence([5] * length, [False] * (length - learned) + [True] * learned, "rows:1")

    pairs = [Example((of(10, 4), of(6, 2))), Example((of(3, 1), of(5, 3)))]
    assert lengths_of(pairs, 0, packed=True) == Lengths((16, 8), 10, 10 / 24)
    assert lengths_of(pairs, 0, packed=False).widths == (20, 10)
    assert lengths_of([Example((of(7, 0),))], 5, packed=True) == Lengths((12,), 12, 5 / 12, prompt=7)
