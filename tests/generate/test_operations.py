"""How many operations and waits ``local`` needs for a token of all rows. On a GPU, each operation is a kernel."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request
from burnish.generate.sampling import Sampling
from burnish.kernels import decoding
from operations import Counter

TOKENS = 10


@pytest.mark.parametrize(("rows", "gpu", "most"), [(1, True, 148), (16, True, 148), (16, False, 159)])
def test_a_token_of_all_rows_takes_a_fixed_number_of_operations(
    rows: int, gpu: bool, most: int, tiny_llama: Any, monkeypatch: Any
) -> None:
    """Of a model of two layers, whose own code calls 89 of them."""
    monkeypatch.setattr(decoding, "is_faster", lambda model: not gpu)
    generator = LocalGenerator(tiny_llama())
    sampling = Sampling(max_new_tokens=4 * TOKENS, temperature=0.7)
    generator.submit([Request((1, 9, 8, row + 3), row, sampling, frozenset()) for row in range(rows)], 0)
    generator.poll(0.0)  # the prompts, and the first token
    with Counter() as counter:
        for _ in range(TOKENS):
            assert not generator.poll(0.0)
    assert TOKENS < counter.operations.total() <= most * TOKENS, counter.operations
    # whether the numbers are finite, and which rows are finished; on a CPU also the lengths of the rows
    assert counter.syncs.total() == (2 if gpu else 3) * TOKENS, counter.syncs
