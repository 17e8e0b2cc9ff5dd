"""Micro-batches keep to their budget and lose no example; their tensors, masks and shared prompts."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.models.batching import attention_mask, collate, micro_batches, prompt_groups, shared_length
from burnish.types import Example, Pair, Sequence


def sequence(n: int, first: int = 10, **arrays: tuple[float, ...]) -> Sequence:
    return Sequence(tuple(range(first, first + n)), (False, *[True] * (n - 1)), f"{first}", arrays)


def example(*lengths: int) -> Example:
    return Example(tuple(sequence(n, 10 * n) for n in lengths))


def prompted(prompt: int, *answers: int) -> Example:
    """Answers of these lengths to one prompt of five: the first token of each is another one."""
    tokens = [tuple(range(5, 5 + prompt)) + tuple(range(50 * i, 50 * i + n)) for i, n in enumerate(answers, 1)]
    return Example(
        tuple(Sequence(t, (False,) * prompt + (True,) * (len(t) - prompt), "p") for t in tokens),
        tuple(Pair(0, i) for i in range(1, len(answers))),
    )


PROMPTED = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=3)).map(
        lambda case: prompted(case[0], *case[1])
    ),
    max_size=8,
)
EXAMPLES = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(lambda ns: example(*ns)), max_size=15)


@settings(max_examples=150)
@given(EXAMPLES | PROMPTED, st.integers(1, 60), st.booleans(), st.booleans())
def test_every_example_is_in_one_group_and_a_group_over_the_budget_has_one_example(examples, budget, packed, shared):
    groups = micro_batches(examples, budget, packed=packed, shared=shared)
    assert sorted(itertools.chain(*groups)) == list(range(len(examples)))
    for group in groups:
        batch = collate([examples[i] for i in group], 0, packed=packed, shared=shared)
        assert batch.tokens.numel() <= budget or len(group) == 1


@settings(max_examples=100)
@given(EXAMPLES.filter(bool), st.integers(20, 60))
def test_packed_groups_equal_first_fit_decreasing(examples, budget):
    examples = [Example(e.sequences[:1]) for e in examples]
    lengths = [len(e.sequences[0].tokens) for e in examples]
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        place = next((b for b in bins if sum(b) + length <= budget), None)
        bins.append([length]) if place is None else place.append(length)
    assert [[lengths[i] for i in group] for group in micro_batches(examples, budget, packed=True)] == bins


def test_first_fit_goes_back_to_the_first_group_with_room():
    groups = micro_batches([example(n) for n in (6, 5, 4, 3, 2)], 10, packed=True)
    assert groups == [[0, 2], [1, 3, 4]]


def test_padded_groups_are_of_similar_length():
    examples = [example(n) for n in (2, 9, 3, 10, 2)]
    assert micro_batches(examples, 20) == [[3, 1], [2, 0, 4]]


def test_without_a_budget_there_is_one_group_and_no_examples_give_none():
    assert micro_batches([example(3), example(9)], None) == [[0, 1]]
    assert micro_batches([], None) == [] == micro_batches([], 5)


def test_collate_right():
    batch = collate([Example((sequence(3, v=(0.0, 0.5, 1.5)),)), Example((sequence(2, 20, v=(0.0, 2.0)),))], pad_id=7)
    assert batch.tokens.tolist() == [[10, 11, 12], [20, 21, 7]]
    assert batch.segments.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.starts.tolist() == [0, 3] and batch.ends.tolist() == [2, 4]
    assert batch.arrays["v"].tolist() == [[0.0, 0.5, 1.5], [0.0, 2.0, 0.0]]
    assert batch.sources == ("10", "20")


def test_collate_left_and_wider():
    batch = collate([Example((sequence(3),)), Example((sequence(2, 20),))], pad_id=7, side="left", pad_to=4)
    assert batch.tokens.tolist() == [[7, 10, 11, 12], [7, 7, 20, 21]]
    assert batch.positions.tolist() == [[0, 0, 1, 2], [0, 0, 0, 1]]
    assert batch.starts.tolist() == [1, 6] and batch.ends.tolist() == [3, 7]


def test_collate_packed():
    batch = collate([example(2), Example((sequence(3, 50),))], pad_id=7, packed=True, pad_to=7)
    assert batch.tokens.tolist() == [[20, 21, 50, 51, 52, 7, 7]]
    assert batch.segments.tolist() == [[1, 1, 2, 2, 2, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, False, True, True, False, False]]
    assert batch.starts.tolist() == [0, 2] and batch.ends.tolist() == [1, 4]


def test_pairs_point_at_their_sequences_after_collating():
    ranked = Example((sequence(2), sequence(3, 20), sequence(2, 30)), (Pair(2, 0, 0.5, 0.1, 0.9), Pair(1, 0, 0.5)))
    batch = collate([example(4), ranked, example(1), ranked], 0)
    assert batch.pairs.tolist() == [[3, 1], [2, 1], [7, 5], [6, 5]]
    assert batch.pair_weights.tolist() == [0.5] * 4
    torch.testing.assert_close(batch.margins, torch.tensor([0.1, 0.0, 0.1, 0.0]))
    torch.testing.assert_close(batch.p_better, torch.tensor([0.9, 1.0, 0.9, 1.0]))


@pytest.mark.parametrize("layout", [{}, {"side": "left"}, {"packed": True}, {"pad_to": 9}], ids=str)
def test_neither_collating_nor_changing_a_batch_changes_an_example(layout):
    examples = [Example((sequence(3, v=(0.0, 1.0, 2.0)), sequence(5, 30, v=(1.0,) * 5)), (Pair(0, 1),))]
    before = copy.deepcopy(examples)
    batch = collate(examples, 0, **layout)
    batch.tokens.zero_()
    batch.arrays["v"].zero_()
    assert examples == before


def test_the_mask_of_a_pack_is_causal_within_segments():
    batch = collate([example(2), example(1)], 0, packed=True, pad_to=4)
    allowed = attention_mask(batch, torch.float32)[0, 0] == 0
    assert allowed.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]
    both_ways = attention_mask(batch, torch.float32, causal=False)[0, 0] == 0
    assert both_ways[0, 1] and not both_ways[0, 2]


def test_the_mask_of_rows_follows_their_lengths_and_not_the_pad_id():
    batch = collate([example(3), example(2)], pad_id=31)
    assert batch.tokens[0, 1] == batch.tokens[1, 2] == 31
    assert attention_mask(batch, torch.float32).tolist() == [[1, 1, 1], [1, 1, 0]]


def test_all_but_the_last_token_of_a_prompt_are_computed_once_for_its_answers():
    batch = collate([prompted(4, 2, 3), Example((sequence(2, 90),))], 0, shared=True)
    #                                 shared  |  chosen   |   rejected
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 50, 51, 8, 100, 101, 102], [90, 91] + [0] * 8]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert batch.segments[0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert batch.parents[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert batch.loss_mask[0].tolist() == [False] * 4 + [True, True, False, True, True, True]
    assert batch.starts.tolist() == [3, 6, 10] and batch.ends.tolist() == [5, 9, 11]
    sees = attention_mask(batch, torch.float32)[0, 0] == 0
    assert sees[6].nonzero().flatten().tolist() == [0, 1, 2, 6]  # the prompt and itself, not the other answer
    assert sees[5].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_tokens_that_are_learned_or_have_array_entries_are_not_shared():
    alike = ((1, 2, 3, 4, 5), (1, 2, 3, 4, 6))
    plain = [Sequence(tokens, (False,) * 5, "s") for tokens in alike]
    assert shared_length(Example(tuple(plain))) == 3
    learned = Sequence(alike[1], (False, False, True, True, True), "s")
    assert shared_length(Example((plain[0], learned))) == 1
    numbered = plain[1].with_arrays(value=(0.0, 0.5, 0.0, 0.0, 0.0))
    assert shared_length(Example((plain[0].with_arrays(value=(0.0,) * 5), numbered))) == 0
    assert shared_length(Example((plain[0],))) == 0
    assert shared_length(Example((plain[0], plain[0]))) == 4


def test_rollouts_of_a_prompt_are_grouped_up_to_the_budget():
    def rollout(start: int, length: int) -> Example:
        tokens, learned = (start, start + 1, 3, 4, *range(50, 50 + length)), (False,) * 4 + (True,) * length
        return Example((Sequence(tokens, learned, "r"),))

    rows = [rollout(1, 3), rollout(7, 3), rollout(1, 2), rollout(1, 3), rollout(7, 3), rollout(1, 2)]
    assert prompt_groups(rows, None) == [[0, 2, 3, 5], [1, 4]]
    # three tokens of the prompt run once: 7, 7 + 3, 7 + 3 + 4 with 2 learned ones and the one before them, ...
    assert prompt_groups(rows, 11) == [[0, 2], [1, 4], [3, 5]]
    assert prompt_groups(rows, 10) == [[0, 2], [1], [3, 5], [4]]
    assert prompt_groups(rows, 1) == [[0], [1], [2], [3], [4], [5]]
    pair = Example((rows[0].sequences[0], rows[2].sequences[0]))
    learned = Example((Sequence((1, 2, 3), (False, True, True), "r"),))
    numbered = Example((rows[0].sequences[0].with_arrays(value=(0.0, *(0.5,) * 6)),))
    assert prompt_groups([rows[0], pair, learned, numbered, learned, numbered], None) == [[0], [1], [2], [3], [4], [5]]
