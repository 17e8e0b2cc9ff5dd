"""Shapes of labelled, scored and stepwise rows."""

import json

import pytest

from burnish.data.rows import BadRow, parse
from burnish.types import Conversation, Labelled, Messages, Scored, Steps, Text

HI: Messages = ({"role": "user", "content": "Hi"},)
HELLO: Messages = ({"role": "assistant", "content": "Hello"},)


@pytest.mark.parametrize("key", ["text", "messages"])
def test_a_scored_conversation(key: str) -> None:
    row = parse({key: [*HI, *HELLO], "reward": -1}, (Scored, Text, Conversation), "r.jsonl:1")
    assert row == Scored(HI + HELLO, -1.0, "r.jsonl:1")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "high", True])
def test_a_reward_must_be_a_finite_number(reward: object) -> None:
    with pytest.raises(BadRow, match=r"r\.jsonl:1: .*reward"):
        parse({"text": [*HI, *HELLO], "reward": reward}, (Scored,), "r.jsonl:1")


@pytest.mark.parametrize(("label", "expected"), [(True, True), (0, False), ("true", True), ("False", False)])
def test_a_label_is_true_or_false(label: object, expected: bool) -> None:
    record = {"prompt": "Hi", "completion": "Hello", "label": label}
    assert parse(record, (Labelled,), "k.jsonl:1") == Labelled(HI, HELLO, expected, "k.jsonl:1")


@pytest.mark.parametrize("label", ["good", 2, 0.5])
def test_another_label_is_refused(label: object) -> None:
    with pytest.raises(BadRow, match=r"k\.jsonl:1: label: not true or false"):
        parse({"prompt": "Hi", "completion": "Hello", "label": label}, (Labelled,), "k.jsonl:1")


@pytest.mark.parametrize("as_text", [False, True])
def test_steps_keep_their_values_and_the_last_one_is_the_outcome(as_text: bool) -> None:
    output = [{"step": " 3 * 4 = 12\n", "Q": 0.8, "P": 0.3}, {"step": "14", "Q": 1 - 1e-7}]
    record = {"instruction": "2 + 3 * 4 = ?", "output": json.dumps(output) if as_text else output}
    row = parse(record, (Steps,), "s.jsonl:1")
    assert isinstance(row, Steps) and row.correct
    assert (row.steps, row.values) == (("3 * 4 = 12", "14"), (0.8, 1.0))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([{"step": "a", "Q": 1.2}], r"output\[0\]\.Q: Q outside \[-1, 1\]"),
        ([{"step": "a", "Q": 0.5}], r"output\[0\]\.Q: last Q is not 1 or -1"),
        ([{"step": "  ", "Q": 1}], r"output\[0\]\.step: empty text"),
        ([{"Q": 1}], r"output\[0\]\.step: missing key"),
        ([], "output: no steps"),
        ("3 * 4", "output: not a list"),
    ],
)
def test_faults_of_steps_name_their_key(output: object, message: str) -> None:
    with pytest.raises(BadRow, match=r"s\.jsonl:1: " + message):
        parse({"instruction": "2 + 3 * 4 = ?", "output": output}, (Steps,), "s.jsonl:1")
