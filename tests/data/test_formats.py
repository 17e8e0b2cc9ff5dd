"""Shapes of labeled, scored and stepwise rows, and columns that no shape has."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.yaml import read
from burnish.data.formats import SHAPES
from burnish.data.readers import BadRow, load, parse
from burnish.data.recognition import HIDDEN
from burnish.errors import UserError
from burnish.types import Conversation, Labelled, Messages, Preference, Prompt, Ranking, Scored, Steps, Text

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


NUMBERS = {"1e308": 1e308, "-3.5e38": -3.5e38, "400 digits": 10**400, "5000 digits": -(10**5000), "text": "1e300"}


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("key", ["reward", "scores", "margin", "p_chosen", "Q"])
def test_a_number_that_float32_cannot_hold_is_a_bad_row(key: str, value: object) -> None:
    records: dict[str, tuple[dict[str, object], type]] = {
        "reward": ({"text": [*HI, *HELLO], "reward": value}, Scored),
        "scores": ({"prompt": "Hi", "completions": ["a", "b"], "scores": [1, value]}, Ranking),
        "margin": ({"prompt": "Hi", "chosen": "a", "rejected": "b", "margin": value}, Preference),
        "p_chosen": ({"prompt": "Hi", "chosen": "a", "rejected": "b", "p_chosen": value}, Preference),
        "Q": ({"instruction": "Hi", "output": [{"step": "a", "Q": value}]}, Steps),
    }
    record, kind = records[key]
    with pytest.raises(BadRow, match=rf"r:1: .*{key}(\[1\])?: too large for float32: expected at most 3\.403e\+38"):
        parse(record, (kind,), "r:1")


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_reward_that_is_read_is_finite_in_float32(value: float) -> None:
    try:
        row = parse({"text": [*HI, *HELLO], "reward": value}, (Scored,), "r:1")
    except BadRow:
        assert abs(value) > 3.4028234e38
    else:
        assert isinstance(row, Scored) and torch.tensor(row.reward, dtype=torch.float32).isfinite()


@pytest.mark.parametrize(("label", "expected"), [(True, True), (0, False), ("true", True), ("False", False)])
def test_a_label_can_be_written_in_several_ways(label: object, expected: bool) -> None:
    record = {"prompt": "Hi", "completion": "Hello", "label": label}
    assert parse(record, (Labelled,), "k.jsonl:1") == Labelled(HI, HELLO, expected, "k.jsonl:1")


@pytest.mark.parametrize("label", ["good", 2, 0.5])
def test_any_other_label_is_refused(label: object) -> None:
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
def test_errors_in_steps_name_their_key(output: object, message: str) -> None:
    with pytest.raises(BadRow, match=r"s\.jsonl:1: " + message):
        parse({"instruction": "2 + 3 * 4 = ?", "output": output}, (Steps,), "s.jsonl:1")


# --- columns -------------------------------------------------------------------------------------------------------

ANSWERS = {"chosen": "a", "rejected": "b"}
RANKED = {"prompt": "Hi", "completions": ["a", "b"]}
# A row of every shape with every column that the shape reads.
FULL: dict[str, dict[str, Any]] = {
    "text": {"text": "Once"},
    "messages": {"messages": [*HI, *HELLO], "system": "s"},
    "sharegpt": {"conversations": [*HI, *HELLO], "system": "s"},
    "prompt_completion": {"prompt": "Hi", "completion": "Hello", "system": "s"},
    "openrlhf": {"prompt": [*HI, *HELLO], "system": "s"},
    "alpaca": {"instruction": "Hi", "output": "Hello", "input": "i", "system": "s", "history": [["a", "b"]]},
    "openorca": {"question": "Hi", "response": "Hello", "system_prompt": "s"},
    "preference": {"prompt": "Hi", **ANSWERS, "system": "s", "margin": 1, "p_chosen": 0.5},
    "pair": {
        "chosen": [*HI, *HELLO],
        "rejected": [*HI, {"role": "assistant", "content": "b"}],
        "system": "s",
        "margin": 1,
    },
    "continued": {"messages": [*HI], **ANSWERS, "system": "s", "margin": 1, "p_chosen": 0.5},
    "continued_sharegpt": {"conversations": [*HI], **ANSWERS, "system": "s", "margin": 1, "p_chosen": 0.5},
    "alpaca_preference": {
        "instruction": "Hi",
        **ANSWERS,
        "input": "i",
        "history": [["a", "b"]],
        "system": "s",
        "margin": 1,
        "p_chosen": 0.5,
    },
    "ultrafeedback": {
        "instruction": "Hi",
        "completions": [{"response": "a", "overall_score": 1}, {"response": "b", "overall_score": 2}],
        "system": "s",
        "models": ["a", "b"],
        "correct_answers": [],
        "incorrect_answers": [],
    },
    "ranks": RANKED | {"ranks": [1, 2], "system": "s"},
    "scores": RANKED | {"scores": [1, 2], "system": "s"},
    "prompt": {"prompt": "Hi", "system": "s"},
    "alpaca_prompt": {"instruction": "Hi", "input": "i", "history": [["a", "b"]], "system": "s"},
    "query": {"query": "Hi", "system": "s"},
    "labelled": {"prompt": "Hi", "completion": "Hello", "label": True, "system": "s"},
    "labelled_messages": {"messages": [*HI, *HELLO], "label": True, "system": "s"},
    "labelled_sharegpt": {"conversations": [*HI, *HELLO], "label": True, "system": "s"},
    "labelled_alpaca": {
        "instruction": "Hi",
        "output": "Hello",
        "label": True,
        "input": "i",
        "history": [["a", "b"]],
        "system": "s",
    },
    "scored_text": {"text": [*HI, *HELLO], "reward": 1, "system": "s"},
    "scored": {"messages": [*HI, *HELLO], "reward": 1, "system": "s"},
    "steps": {"instruction": "1 + 1", "output": [{"step": "2", "Q": 1}], "system": "s"},
}
WRITTEN = (
    "finish_reason",
    "logprob",
    "logprob_mean",
    "step",
    "kind",
    "score",
)  # by burnish generate, and in samples.jsonl
KEPT = ("id", "source", "meta", "seed", "finish_reason", "round", "rewards", "verdicts", "P", *WRITTEN)
OTHERS = [shape for shape in SHAPES if shape.kind is not Prompt]


def test_every_shape_is_tested_here() -> None:
    assert set(FULL) == {shape.name for shape in SHAPES}


@given(
    st.sampled_from(OTHERS),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12),  # as recipes can hold
    st.one_of(st.booleans(), st.integers(), st.text(), st.lists(st.integers())),
)
def test_a_column_is_read_or_kept_or_an_error(shape: Any, column: str, value: Any) -> None:
    record = FULL[shape.name]
    row = parse(record, (shape.kind,), "r.jsonl:7", shape.name)
    if column in {*record, *KEPT, "tools", *(name for other in SHAPES for name in other.may)}:
        return
    with pytest.raises(BadRow) as caught:
        parse(record | {column: value}, (shape.kind,), "r.jsonl:7", shape.name)
    message = str(caught.value)
    assert message.startswith(f"r.jsonl:7: {UserError(column)}: unknown column: ")  # as any text in a message
    assert read(re.findall(r"data.(keep: \[.*\])", message)[0], "message").value == {"keep": [column]}
    for harmless, keep in (({column: value}, (column,)), ({column: None}, ()), (dict.fromkeys(KEPT, value), ())):
        assert parse(record | harmless, (shape.kind,), "r.jsonl:7", shape.name, keep=keep) == row


@pytest.mark.parametrize("shape", OTHERS, ids=lambda shape: shape.name)
def test_a_column_of_another_shape_is_not_read(shape: Any) -> None:
    known = {column for other in SHAPES for column in (*other.needs, *other.may)}
    for column in sorted(known.difference(shape.needs, shape.may)):
        with pytest.raises(BadRow, match=rf"r:1: {column}: unknown column"):
            parse(FULL[shape.name] | {column: "x"}, (shape.kind,), "r:1", shape.name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_row_with_messages_carries_its_tools(shape: Any) -> None:
    record, add = FULL[shape.name], {"name": "add", "parameters": {"type": "object", "properties": {}}}
    without = parse(record, (shape.kind,), "r:1", shape.name)
    for tools in (None, [], "[]"):
        assert parse(record | {"tools": tools}, (shape.kind,), "r:1", shape.name) == without
    if shape.kind in (Text, Steps):
        with pytest.raises(BadRow, match=r"r:1: tools: unknown column"):
            parse(record | {"tools": [add]}, (shape.kind,), "r:1", shape.name)
    else:
        schema = {"type": "function", "function": add}
        for tools in ([add], [schema], json.dumps([schema])):
            row = parse(record | {"tools": tools}, (shape.kind,), "r:1", shape.name)
            assert row == replace(without, tools=(schema,))
        with pytest.raises(
            BadRow, match=r"r:1: tools\[0\]: not a tool: expected a JSON schema with a name or a function"
        ):
            parse(record | {"tools": [{"parameters": {}}]}, (shape.kind,), "r:1", shape.name)
        with pytest.raises(BadRow, match=r"r:1: tools\[1\]: two tools have this name: 'add'"):
            parse(record | {"tools": [add, schema]}, (shape.kind,), "r:1", shape.name)
    parse(record | {"tools": ["add"]}, (shape.kind,), "r:1", shape.name, keep=["tools"])


def test_a_tool_may_be_a_function_beside_the_data(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: one number.\n'
        '        b: another number.\n    """\n    return a + b\n\n\ndef bare(a):\n    return a\n'
    )
    place = f"{tmp_path}/chat.jsonl:3"
    row = parse({"prompt": "1 + 1", "tools": ["my_tools.py:add"]}, (Prompt,), place)
    assert isinstance(row, Prompt) and row.columns == {}
    number = {"type": "integer", "description": "one number."}
    properties = {"a": number, "b": number | {"description": "another number."}}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    (schema,) = row.tools
    assert schema["type"] == "function" and schema["function"]["parameters"] == parameters
    assert schema["function"]["name"] == "add" and schema["function"]["description"] == "Add two numbers."
    for reference, message in {
        "my_tools.py:ad": "did you mean 'add'",
        "other.py:add": "no such file",
        "my_tools.py:bare": "a function without a schema",
        "add": "expected a JSON schema or a function 'file.py:name'",
    }.items():
        with pytest.raises(BadRow, match=r"chat.jsonl:3: tools\[0\]: ") as caught:
            parse({"prompt": "1 + 1", "tools": [reference]}, (Prompt,), place)
        assert message in str(caught.value)


CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_messages_may_have_tool_calls_and_reasoning() -> None:
    calls = [
        CALL | {"id": "c1"},
        CALL["function"],
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"name": "now", "arguments": None},
    ]
    record = {
        "messages": [
            HI[0],
            {"role": "assistant", "content": None, "tool_calls": calls, "thinking": "Hm."},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add", "tool_calls": None},
            {"role": "tool", "content": ""},
            {"role": "assistant", "content": "2", "reasoning_content": "So.", "reasoning": "So."},
        ]
    }
    now = {"type": "function", "function": {"name": "now", "arguments": {}}}
    expected: Any = (
        *HI,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [calls[0], CALL, CALL, now]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "2", "reasoning_content": "So."},
    )
    for one in (record, {"messages": json.dumps(record["messages"])}):
        assert parse(one, (Conversation,), "r:1") == Conversation(expected, None, "r:1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "retrieval"}, r"tools\[0\].type: not a function: expected 'function', got str \"retrieval\""),
        ({"description": 3}, r"tools\[0\].function.description: not text"),
        ({"parameters": "a: integer"}, r"tools\[0\].function.parameters: not a JSON schema: .*got str"),
        ({"properties": ["a"]}, r"parameters.properties: not an object: expected a schema for each name, got list"),
        ({"properties": {"a": "integer"}}, r"parameters.properties.a: not a JSON schema: .*got str \"integer\""),
        ({"properties": {"a": {"items": []}}}, r"parameters.properties.a.items: not a JSON schema: .*got list"),
        ({"required": "a"}, r"parameters.required: not a list: expected a list of names, got str \"a\""),
        (
            {"required": ["first", "secnd"]},
            r"required\[1\]: unknown name: got str \"secnd\" \(did you mean 'second'\?\)",
        ),
    ],
)
def test_malformed_tools_are_named(changes: dict[str, Any], message: str) -> None:
    of_tool = {key: value for key, value in changes.items() if key == "type"}
    of_function = {key: value for key, value in changes.items() if key in ("description", "parameters")}
    of_parameters = {key: value for key, value in changes.items() if key in ("properties", "required")}
    number = {"type": "integer", "description": None}
    parameters = {"type": "object", "properties": {"first": number, "second": number}, "items": None}
    function = {"name": "add", "description": None, "parameters": parameters | of_parameters} | of_function
    tools = [{"type": "function", "function": function} | of_tool]
    with pytest.raises(BadRow, match=f"^chat.jsonl:3: .*{message}"):
        parse({"prompt": "1 + 1", "tools": tools}, (Prompt,), "chat.jsonl:3")
    parse(
        {"prompt": "1 + 1", "tools": [{**function, "parameters": parameters, "description": "Add."}]}, (Prompt,), "r:1"
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"tool_call_id": "c3"}, r"messages\[2\].tool_call_id: no call before it has this id: 'c3'"),
        (
            {"tool_call_id": "c2", "name": "sub"},
            r"messages\[2\].name: not the tool of this call: got 'sub', expected 'add'",
        ),
        ({"name": 1}, r"messages\[2\].name: not text"),
        ({"content": {"sum": 2}}, r"messages\[2\].content: not text: expected a string, got dict"),
        ({"content": None}, r"messages\[2\].content: not text"),
    ],
)
def test_results_that_belong_to_no_call_are_named(result: dict[str, Any], message: str) -> None:
    calls = [CALL | {"id": id} for id in ("c1", "c2")]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2"},
        *HELLO,
    ]
    for known in ({}, {"tool_call_id": "c2"}, {"tool_call_id": "c1", "name": "add"}):
        parse({"messages": [*messages[:2], messages[2] | known, messages[3]]}, (Conversation,), "r:1")
    with pytest.raises(BadRow, match=f"^chat.jsonl:3: {message}"):
        parse({"messages": [*messages[:2], messages[2] | result, messages[3]]}, (Conversation,), "chat.jsonl:3")
    calls[1]["id"] = "c1"
    with pytest.raises(BadRow, match=r"r:1: messages\[1\].tool_calls: two calls have this id: 'c1'"):
        parse({"messages": messages}, (Conversation,), "r:1")


@pytest.mark.parametrize("column", HIDDEN)
def test_a_prompt_has_no_column_that_the_model_would_have_to_see(column: str) -> None:
    record = {"prompt": "Hi", column: [{"x": 1}]}
    with pytest.raises(BadRow, match=rf"^r:1: {column}: unknown column: the model would not see it.* \[{column}\]"):
        parse(record, (Prompt,), "r:1")
    assert parse(record, (Prompt,), "r:1", keep=[column]) == Prompt(HI, {column: [{"x": 1}]}, "r:1")
    parse(record | {column: []}, (Prompt,), "r:1")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tool_calls": [1]}, r"tool_calls\[0\]: not an object"),
        ({"tool_calls": "add"}, r"tool_calls: not a list"),
        ({"tool_calls": [{"name": "add"}]}, r"tool_calls\[0\].arguments: missing key|missing key: has keys 'name'"),
        ({"tool_calls": [{"name": "", "arguments": {}}]}, r"tool_calls\[0\].name: empty text"),
        ({"tool_calls": [{"name": "add", "arguments": [1]}]}, r"arguments: not an object: expected keys and values"),
        ({"tool_calls": [{"name": "add", "arguments": "{a"}]}, r"arguments: not an object: got text that is not JSON"),
        ({"tool_calls": [CALL | {"type": "code"}]}, r"tool_calls\[0\].type: not a function call"),
        ({"tool_calls": [CALL | {"idx": 1}]}, r"tool_calls\[0\].idx: key that is not read"),
        ({"tool_calls": [{"function": CALL["function"] | {"x": 1}}]}, r"function.x: key that is not read"),
        ({"reasoning_content": 5}, "reasoning_content: not text"),
        ({"reasoning_content": "a", "thinking": "b"}, "thinking: two reasonings"),
    ],
)
def test_bad_tool_calls_and_reasoning_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=r"r:1: messages\[1\]\." + ".*" + f"({message})"):
        parse({"messages": [*HI, {"role": "assistant", "content": "a"} | keys]}, (Conversation,), "r:1")


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({"prompt": "Hi", "completion": "a", "label": True}, Conversation, "r:1: label: unknown column"),
        (
            {"prompt": "Hi", **ANSWERS, "margn": 1},
            Preference,
            r"margn: unknown column: remove it, .* \(did you mean 'margin'\?\)",
        ),
        (
            {"prompt": "Hi", **ANSWERS, "score_chosen": 2, "id": 1, "score_rejected": 1},
            Preference,
            r"score_chosen: unknown column: .*data\.keep: \[score_chosen, score_rejected\]",
        ),
        ({"prompt": "Hi", **ANSWERS, "scor_chosen": 2}, Preference, r"did you mean 'score_chosen'\?"),
        ({"question": "Hi", "response": "a", "system": "s"}, Conversation, "did you mean 'system_prompt'?"),
    ],
)
def test_an_unread_column_is_named_with_the_most_similar_known_one(
    record: dict[str, Any], kind: type, message: str
) -> None:
    with pytest.raises(BadRow, match=message):
        parse(record, (kind,), "r:1", keep=["score_chosen"] if "scor_chosen" in record else [])


def test_kept_columns_of_a_prompt_reach_the_rewards() -> None:
    row = parse({"prompt": "Hi", "system": "s", "tools": [1], "n": 2}, (Prompt,), "r:1", keep=["tools", "system"])
    assert row == Prompt(HI, {"system": "s", "tools": [1], "n": 2}, "r:1")


def test_a_renamed_column_is_read() -> None:
    record = {"question": "Hi", "answer": "Hello", "label": 1}
    keys = {"prompt": "question", "completion": "answer"}
    assert parse(record, (Labelled,), "r:1", keys=keys) == Labelled(HI, HELLO, True, "r:1")
    with pytest.raises(BadRow, match=r"r:1: label: unknown column"):
        parse(record, (Conversation,), "r:1", keys=keys)


@pytest.mark.parametrize(
    ("role", "key"),
    [
        *(("assistant", key) for key in ("tool_call_id", "name", "weight", "contnt")),
        *(("user", key) for key in ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")),
        ("tool", "reasoning_content"),
    ],
)
def test_other_keys_of_a_message_are_refused(role: str, key: str) -> None:
    def record(value: Any) -> dict[str, Any]:
        return {"messages": [*HI, {"role": role, "content": "Hello", key: value}, *HELLO]}

    with pytest.raises(BadRow, match=rf"r:1: messages\[1\]\.{key}: key that is not read: '{key}' would be lost"):
        parse(record("x"), (Conversation,), "r:1")
    expected = Conversation((*HI, {"role": role, "content": "Hello"}, *HELLO), None, "r:1")
    for value in (None, "", [], {}):
        assert parse(record(value), (Conversation,), "r:1") == expected
    as_text = {"messages": json.dumps(record("x")["messages"])}
    for row in (record("x"), as_text):
        assert parse(row, (Conversation,), "r:1", keep=[key]) == expected


def test_steps_may_have_the_output_of_their_code() -> None:
    steps = [{"step": " <code>3*4</code>\n", "output": "\n12\n", "Q": 0.5}, {"step": "so 12", "Q": 1}]
    row = parse({"instruction": "3 * 4?", "output": steps}, (Steps,), "r:1")
    assert row == Steps(({"role": "user", "content": "3 * 4?"},), ("<code>3*4</code>", "so 12"), (0.5, 1.0), "r:1",
                        ("\n12\n", ""))  # fmt: skip
    without = parse({"instruction": "3 * 4?", "output": [one | {"output": None} for one in steps]}, (Steps,), "r:1")
    assert isinstance(without, Steps) and without.outputs == ()
    with pytest.raises(UserError, match=r"r:1: output\[0\].output: not text: expected a string, got int 12"):
        parse({"instruction": "3 * 4?", "output": [steps[0] | {"output": 12}, steps[1]]}, (Steps,), "r:1")


def test_messages_and_steps_may_carry_provenance_keys() -> None:
    record = {"messages": [{**HI[0], "id": 1, "meta": {"a": 1}}, {**HELLO[0], "weight": 1, "finish_reason": "stop"}]}
    assert parse(record, (Conversation,), "r:1") == Conversation(HI + HELLO, None, "r:1")
    step = {"step": "2", "Q": 1, "P": 0.5}
    steps = parse({"instruction": "1 + 1", "output": [step]}, (Steps,), "r:1")
    assert steps == parse({"instruction": "1 + 1", "output": [{"step": "2", "Q": 1}]}, (Steps,), "r:1")
    with pytest.raises(BadRow, match=r"r:1: output\[0\]\.depth: key that is not read: 'depth' would be lost"):
        parse({"instruction": "1 + 1", "output": [step | {"depth": 3}]}, (Steps,), "r:1")
    assert parse({"instruction": "1 + 1", "output": [step | {"depth": 3}]}, (Steps,), "r:1", keep=["depth"]) == steps


def test_rows_with_unread_columns_can_be_skipped() -> None:
    rows = [{"text": "a"}, {"text": "b", "titel": "c"}, {"text": "d", "lang": "en"}]
    result = load(rows, (Text,), on_bad_row="skip", keep=["lang"])
    assert [row.source for row in result.rows] == ["row 1", "row 3"]
    assert result.reasons == {"unknown column": 1}
