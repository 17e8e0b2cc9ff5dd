"""Sequences and examples: what they hold, what they refuse, and that they survive a checkpoint."""

import copy
import pickle

import numpy as np
import pytest

from burnish.types import Example, Pair, Sequence

VALUES = Sequence([1, 9, 8, 2], (False, False, True, True), "chat.jsonl:17", {"advantages": (0.0, 0.0, 0.5, -0.5)})


def test_lists_and_tuples_become_read_only_arrays() -> None:
    assert VALUES.tokens.dtype == np.int64 and VALUES.loss_mask.dtype == np.bool_
    assert VALUES.arrays["advantages"].dtype == np.float64
    assert VALUES.tokens.tolist() == [1, 9, 8, 2] and len(VALUES) == 4
    for array in (VALUES.tokens, VALUES.loss_mask, VALUES.arrays["advantages"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_an_array_is_not_copied_and_stays_writable_for_its_owner() -> None:
    tokens = np.arange(3)
    sequence = Sequence(tokens, [False, True, True], "row")
    assert np.shares_memory(sequence.tokens, tokens) and tokens.flags.writeable
    assert Sequence(sequence.tokens, sequence.loss_mask, "row").tokens is sequence.tokens


def test_equality_is_by_content() -> None:
    same = Sequence(np.array([1, 9, 8, 2]), [0, 0, 1, 1], "chat.jsonl:17", {"advantages": [0, 0, 0.5, -0.5]})
    assert same == VALUES == copy.deepcopy(VALUES) == pickle.loads(pickle.dumps(VALUES))
    others = [
        Sequence([1, 9, 8, 3], VALUES.loss_mask, VALUES.source, VALUES.arrays),
        Sequence(VALUES.tokens, [False, True, True, True], VALUES.source, VALUES.arrays),
        Sequence(VALUES.tokens, VALUES.loss_mask, "chat.jsonl:18", VALUES.arrays),
        Sequence(VALUES.tokens, VALUES.loss_mask, VALUES.source),
        VALUES.with_arrays(advantages=[0.0, 0.0, 0.5, 0.5]),
        VALUES.with_arrays(values=[0.0] * 4),
    ]
    assert all(other != VALUES for other in others)
    assert VALUES != "chat.jsonl:17"


def test_arrays_that_do_not_align_are_refused() -> None:
    with pytest.raises(ValueError, match="row: loss_mask must align with tokens: got 1, expected 2"):
        Sequence([1, 2], [False], "row")
    with pytest.raises(ValueError, match="row: x must align with tokens: got 3, expected 2"):
        Sequence([1, 2], [False, True], "row", {"x": [0.0] * 3})
    with pytest.raises(ValueError, match="the first token of a sequence has no predecessor"):
        Sequence([1, 2], [True, True], "row")


def test_an_example_survives_a_checkpoint() -> None:
    example = Example((VALUES, VALUES.with_arrays(advantages=[0.1, 0.2, 0.3, 0.4])), (Pair(1, 0, margin=0.5),))
    assert Example.from_plain(example.to_plain()) == example
