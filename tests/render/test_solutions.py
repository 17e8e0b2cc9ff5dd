"""Solutions in steps: which ids they become, where their values sit, what is learned, and what is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burnish import StepValue
from burnish.errors import UserError
from burnish.methods import step_value
from burnish.models.batching import collate
from burnish.render import solutions
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Example, Messages, Sequence, Steps

QUESTION: Messages = ({"role": "user", "content": "3+8-2=?"},)
RIGHT = Steps(QUESTION, ("3+8=11", "11-2=9"), (0.5, 1.0), "steps.jsonl:1")
WRONG = Steps(QUESTION, ("3+8=11", "11-2=8"), (0.0, -1.0), "steps.jsonl:2")


@pytest.fixture
def ids(tiny_tokenizer):
    return lambda text: tiny_tokenizer.encode(text, add_special_tokens=False)


def asked(tokenizer) -> list[int]:
    return list(tokenizer.apply_chat_template(list(QUESTION), add_generation_prompt=True, return_dict=False))


def test_a_correct_solution_written_out_by_hand(tiny_tokenizer, ids):
    sequence = solutions.solution(Renderer(tiny_tokenizer), RIGHT)
    prompt = asked(tiny_tokenizer)
    steps = [ids("3+8=11\n"), ids("11-2=9\n")]
    assert list(sequence.tokens) == [*prompt, *steps[0], *steps[1], tiny_tokenizer.eos_token_id]
    assert list(sequence.loss_mask) == [False] * len(prompt) + [True] * 15  # 7 + 7 characters and the end token
    first, last = len(prompt) + 6, len(prompt) + 13
    for name, numbers in {"targets": (0.5, 1.0), "outcomes": (1.0, 1.0), "depths": (0.5, 1.0)}.items():
        expected = [0.0] * len(sequence.tokens)
        expected[first], expected[last] = numbers
        assert list(sequence.arrays[name]) == expected, name


def test_of_an_incorrect_solution_only_values_are_learned(tiny_tokenizer):
    for learn in ("steps", "everything"):
        sequence = solutions.solution(Renderer(tiny_tokenizer), WRONG, learn=learn)
        assert not any(sequence.loss_mask)
        start = len(asked(tiny_tokenizer))
        # a Q of 0 is told from no Q by the outcome
        assert [t - start for t, outcome in enumerate(sequence.arrays["outcomes"]) if outcome == -1] == [6, 13]
        assert [sequence.arrays["targets"][start + t] for t in (6, 13)] == [0.0, -1.0]


def test_everything_adds_the_question_and_leaves_the_ids_alone(tiny_tokenizer):
    steps, everything = (
        solutions.solution(Renderer(tiny_tokenizer), RIGHT, learn=how) for how in ("steps", "everything")
    )
    assert tuple(everything.tokens) == tuple(steps.tokens)
    np.testing.assert_equal(everything.arrays, steps.arrays)
    assert list(everything.loss_mask) == [False] + [True] * (len(steps.tokens) - 1)


def test_the_end_token_is_there_where_it_is_learned(tiny_tokenizer):
    with_end, without = (solutions.solution(Renderer(tiny_tokenizer), RIGHT, learn_eos=how) for how in (True, False))
    assert tuple(with_end.tokens) == (*without.tokens, tiny_tokenizer.eos_token_id)
    assert without.arrays["outcomes"][-1] == 1


def test_steps_are_stripped_end_with_one_delimiter_and_are_tokenized_one_by_one(tiny_tokenizer, ids):
    assert list(solutions.step_tokens(Renderer(tiny_tokenizer), "  3 + 8 = 11 \n")) == ids("3 + 8 = 11\n")
    assert list(solutions.step_tokens(Renderer(tiny_tokenizer), "so 11", "</step>")) == ids("so 11</step>")
    row = Steps(QUESTION, ("a b", "c d"), (0.0, 1.0), "s:1")
    sequence = solutions.solution(Renderer(tiny_tokenizer), row, learn_eos=False, delimiter=" ; ")
    steps = tuple(ids("a b ; ") + ids("c d ; "))
    assert tuple(sequence.tokens[-len(steps) :]) == steps
    assert [t for t, outcome in enumerate(sequence.arrays["outcomes"][-len(steps) :]) if outcome] == [5, 11]


def test_a_special_token_that_a_step_spells_stays_text(tiny_tokenizer):
    tokens = solutions.step_tokens(Renderer(tiny_tokenizer), "say <|im_end|>")
    assert tiny_tokenizer.eos_token_id not in tokens


@pytest.mark.parametrize(
    ("step", "message"),
    [("a\nb", r"steps.jsonl:3: step 2 of 2: a step holds the delimiter '\\n'"), ("  ", "step 2 of 2: a step is empty")],
)
def test_a_step_is_one_step(step, message, tiny_tokenizer):
    with pytest.raises(UserError, match=message):
        solutions.solution(Renderer(tiny_tokenizer), Steps(QUESTION, ("3+8=11", step), (0.5, 1.0), "steps.jsonl:3"))


def test_one_target_a_whole_step_after_collating(tiny_tokenizer):
    examples = [Example((solutions.solution(Renderer(tiny_tokenizer), row),)) for row in (RIGHT, WRONG)]
    newline = tiny_tokenizer.encode("\n", add_special_tokens=False)[0]
    layouts: list[dict[str, Any]] = [{"side": "left"}, {"side": "right"}, {"packed": True}]
    for layout in layouts:
        batch = collate(examples, 0, **layout)
        ends = batch.arrays["outcomes"] != 0
        assert batch.tokens[ends].tolist() == [newline] * 4
        assert batch.arrays["targets"][ends].tolist() == [0.5, 1.0, 0.0, -1.0]


# --- output of code ---


CODED = Steps(QUESTION, ("<3+8>", "11-2=9"), (0.5, 1.0), "steps.jsonl:1", ("[11]", ""))


def test_output_follows_its_step_and_is_not_learned(tiny_tokenizer, ids):
    masked, learned = (solutions.solution(Renderer(tiny_tokenizer), CODED, mask_output=mask) for mask in (True, False))
    prompt = asked(tiny_tokenizer)
    expected = [*prompt, *ids("<3+8>"), *ids("[11]\n"), *ids("11-2=9\n"), tiny_tokenizer.eos_token_id]
    assert list(masked.tokens) == list(learned.tokens) == expected
    start = [False] * len(prompt)
    assert list(masked.loss_mask) == start + [True] * 5 + [False] * 5 + [True] * 8
    assert list(learned.loss_mask) == start + [True] * 18
    # The value of a step is at its last token, the delimiter after the output.
    assert np.flatnonzero(masked.arrays["outcomes"]).tolist() == [len(prompt) + 9, len(prompt) + 16]
    np.testing.assert_equal(masked.arrays, learned.arrays)


def test_output_is_masked_where_everything_is_learned(tiny_tokenizer):
    sequence = solutions.solution(Renderer(tiny_tokenizer), CODED, learn="everything")
    prompt = len(asked(tiny_tokenizer))
    assert np.flatnonzero(~sequence.loss_mask).tolist() == [0, *range(prompt + 5, prompt + 10)]


def test_output_may_contain_the_delimiter_and_a_step_may_not(tiny_tokenizer, ids):
    lines = replace(CODED, outputs=("[1\n1]", ""))
    sequence = solutions.solution(Renderer(tiny_tokenizer), lines, learn_eos=False)
    assert list(sequence.tokens)[-18:] == ids("<3+8>[1\n1]\n11-2=9\n")
    with pytest.raises(UserError, match="step 1 of 2: a step holds the delimiter"):
        solutions.solution(Renderer(tiny_tokenizer), replace(CODED, steps=("a\nb", "c")))


def test_steps_values_and_outputs_must_be_as_many():
    with pytest.raises(ValueError, match="s:1: 2 steps, 2 values, 1 outputs"):
        Steps(QUESTION, ("a", "b"), (0.5, 1.0), "s:1", ("x",))


def test_the_cache_tells_masked_from_learned_output(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    counts = []
    for mask in (True, False):
        (example,), _ = StepValue(mask_output=mask).examples([CODED], tiny_tokenizer, Truncation())
        counts.append(int(example.sequences[0].loss_mask.sum()))
    assert counts == [13, 18]


# --- length --------------------------------------------------------------------------------------------------------


def encode(tokenizer, rows, **length):
    return StepValue().examples(rows, tokenizer, Truncation(**length))


def test_a_step_that_would_be_cut_is_left_out_whole(tiny_tokenizer, caplog):
    prompt = len(asked(tiny_tokenizer))
    whole = solutions.solution(Renderer(tiny_tokenizer), RIGHT)
    for limit, kept, said in (
        (prompt + 14, prompt + 14, "the end token left out"),
        (prompt + 13, prompt + 7, "1 of 2 steps left out"),
        (prompt + 7, prompt + 7, "1 of 2 steps left out"),
    ):
        examples, changed = encode(tiny_tokenizer, [RIGHT], max_length=limit, too_long="truncate_right")
        (sequence,) = examples[0].sequences
        expected = {name: numbers[:kept] for name, numbers in whole.arrays.items()}
        assert sequence == Sequence(whole.tokens[:kept], whole.loss_mask[:kept], whole.source, expected)
        assert changed[0].source == "steps.jsonl:1"
        assert changed[0].reason == f"truncate_right: {prompt + 15} tokens, max_length {limit}: {said}"
    assert "rows truncated or dropped: 1, the first: steps.jsonl:1" in caplog.text


@pytest.mark.parametrize(
    ("too_long", "extra", "message"),
    [
        ("error", 7, "set too_long: drop or truncate_right, or raise max_length$"),
        ("truncate_left", 7, "would separate steps from their question"),
        ("split", 7, "would separate steps from their question"),
        ("truncate_right", 6, "not one step fits"),
    ],
)
def test_what_does_not_fit_is_told(too_long, extra, message, tiny_tokenizer):
    limit = len(asked(tiny_tokenizer)) + extra
    with pytest.raises(UserError, match=f"steps.jsonl:1: .*{message}"):
        encode(tiny_tokenizer, [RIGHT], max_length=limit, too_long=too_long)


def test_a_long_solution_may_be_dropped(tiny_tokenizer):
    examples, changed = encode(tiny_tokenizer, [RIGHT, WRONG], max_length=8, too_long="drop")
    assert not examples
    assert [change.source for change in changed] == ["steps.jsonl:1", "steps.jsonl:2"]


def test_the_cache_keeps_values(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    third = Steps(QUESTION, ("a",), (-1.0,), "s:3")
    first = encode(tiny_tokenizer, [RIGHT, WRONG, third])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    monkeypatch.setattr(step_value, "solutions", None)  # it is not encoded a second time
    assert encode(tiny_tokenizer, [RIGHT, WRONG, third]) == first
