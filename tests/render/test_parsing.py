"""Completions of ten families, read back as the messages that the chat templates wrote, and what cannot be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from burnish.errors import UserError
from burnish.render.parsing import Parsed
from burnish.render.renderer import Renderer
from burnish.types import Conversation, Message, Messages, ToolCall, Tools
from chat_families import FAMILIES, PHI, Family


def schema(name: str, **types: str) -> dict[str, Any]:
    properties = {parameter: {"type": type} for parameter, type in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": parameters}}


def call(name: str, **arguments: Any) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: str, *calls: ToolCall, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


TOOLS: Tools = (schema("add", a="integer", b="number"), schema("up", s="string"))
ASKED: Messages = ({"role": "user", "content": "Hi"},)
WITH_REASONING, WITH_IDS, ONE_CALL = ("qwen 3", "glm", "gpt-oss"), ("mistral",), ("gpt-oss", "llama 3")
WITH_TOOLS = sorted(set(FAMILIES) - {"gemma"})


def completion(family: str, message: Message) -> Parsed:
    """What is read of a turn: its learned tokens, as the template writes them."""
    renderer = Renderer(FAMILIES[family].tokenizer())
    tools = () if family == "gemma" else TOOLS
    ((sequence,),) = renderer.learned_turns([Conversation((*ASKED, message), None, "a:1", tools)])
    start = int(np.flatnonzero(sequence.loss_mask)[0])
    return renderer.parse(sequence.tokens[:start], sequence.tokens[sequence.loss_mask], tools)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_what_a_template_writes_is_read_back(family: str) -> None:
    calls = [call("add", a=2, b=3.5), call("up", s='a "b" {c}\n\\d <x>')]
    messages = [says("4, say."), *(says("", one) for one in calls)]
    if family not in ONE_CALL:
        messages.append(says("", *calls))
    if family in ("chatml", "qwen 2.5", "qwen 3", "glm", "deepseek r1", "phi"):
        messages.append(says("Let me see.", *calls))
    for number, message in enumerate(messages):
        if family in WITH_REASONING:
            message["reasoning_content"] = "So\n\nit is."
        for one in message.get("tool_calls", ()):
            if family in WITH_IDS:
                one["id"] = f"call0000{number}"
        assert completion(family, message) == Parsed(message, "")


def test_a_template_without_tools_has_the_plain_form() -> None:
    assert completion("gemma", says("Hi.")) == Parsed(says("Hi."), "")


def read(text: str, tools: Tools = TOOLS, family: Family = FAMILIES["gemma"], prompt: str = "") -> Parsed:
    tokenizer = family.tokenizer()
    return Renderer(tokenizer).parse(tokenizer.encode(prompt), tokenizer.encode(text), tools)


PYTHON = (schema("python", code="string"), schema("calculator", expression="string"), *TOOLS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool>add(2, 3.5)</tool>", says("", call("add", a=2, b=3.5))),
        (
            "First.\n<tool>add(2, b=3)</tool>\n<tool> up ( 'x)' ) </tool>",
            says("First.", call("add", a=2, b=3), call("up", s="x)")),
        ),
        ("<tool>calculator(2 + 3)</tool>", says("", call("calculator", expression="2 + 3"))),
        ("<tool>calculator('2 + 3')</tool>", says("", call("calculator", expression="2 + 3"))),
        ("<tool>calculator(42)</tool>", says("", call("calculator", expression="42"))),
        (
            "<think>Hm.</think>So:\n```python\nx = 1\nprint(x)\n```",
            says("So:", call("python", code="x = 1\nprint(x)"), reasoning="Hm."),
        ),
        (
            "```python\nprint(1)\n``` and <tool>add(1, 2)</tool>",
            says("and", call("python", code="print(1)"), call("add", a=1, b=2)),
        ),
        ("<think>\nHm", says("", reasoning="Hm")),
        ("", says("")),
    ],
)
def test_the_plain_form(text: str, expected: Message) -> None:
    assert read(text, PYTHON) == Parsed(expected, "")


def test_a_block_of_python_is_text_without_such_a_tool() -> None:
    text = "```python\nprint(1)\n```"
    assert read(text) == Parsed(says(text), "")


def xml(template: str) -> Family:
    return Family(template, ("<|im_start|>", "<|im_end|>"))


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            xml("{{ messages }}<tool_call><function=x>"),
            "Ok.\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>",
            says("Ok.", call("add", a=2, b=3)),
        ),
        (
            xml("{{ messages }}[TOOL_CALLS][ARGS]"),
            'Ok.[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 2}[TOOL_CALLS]up[ARGS]{"s": "x"}',
            says("Ok.", call("add", a=2), call("up", s="x")),
        ),
        (
            FAMILIES["gpt-oss"],
            '<|channel|>commentary to=functions.up <|constrain|>json<|message|>{"s": "x"}<|call|>',
            says("", call("up", s="x")),
        ),
        (FAMILIES["gpt-oss"], "It is 4.", says("It is 4.")),
        (
            FAMILIES["llama 3"],
            '<|python_tag|>{"type": "function", "name": "up", "parameters": {"s": "x"}}<|eot_id|>',
            says("", call("up", s="x")),
        ),
        (FAMILIES["llama 3"], '{"answer": 4}', says('{"answer": 4}')),
        (
            FAMILIES["qwen 3"],
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
            says("", call("add", a=2)),
        ),
        (
            FAMILIES["glm"],
            "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
            says("", call("add", a=7)),
        ),
    ],
)
def test_other_forms_of_calls(family: Family, text: str, expected: Message) -> None:
    assert read(text, family=family) == Parsed(expected, "")


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    text = "Hm.</think>\n\n4"
    assert read(text, prompt="<|im_start|>assistant\n<think>\n", family=FAMILIES["qwen 3"]).message == says(
        "4", reasoning="Hm."
    )
    earlier = "<think>\nA</think>\n\n<tool_call>{}</tool_call><|im_end|>\n<|im_start|>assistant\n"
    assert read("4", prompt=earlier, family=FAMILIES["qwen 3"]) == Parsed(says("4"), "")


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("qwen 3", "<tool_call>{a}</tool_call>", "could not parse region as JSON"),
        ("qwen 3", '<tool_call>{"name": "add", "argum', "could not parse region as JSON"),
        ("qwen 3", "<tool_call>[]</tool_call>", "expected an object with a name and arguments"),
        ("qwen 3", '<tool_call>{"arguments": {}}</tool_call>', 'it names no tool: {"arguments": {}}'),
        (
            "qwen 3",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "expected the arguments of add as an object",
        ),
        ("qwen 3", '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "Expecting value"),
        ("qwen 3", "<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion"),
        ("glm", "<tool_call>\n</tool_call>", "it is not complete, or not in the form"),
        ("mistral", "[TOOL_CALLS] add", "it is not complete, or not in the form"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"', "could not parse region as JSON"),
        ("phi", "<|tool_call|>add<|/tool_call|><|end|>", "could not parse region as JSON"),
        ("deepseek r1", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add", "it is not complete"),  # noqa: RUF001
        ("llama 3", "<|python_tag|>add(1)", "it is not complete, or not in the form"),
        ("gpt-oss", "<|channel|>commentary to=functions.up<|message|>x<|call|>", "could not parse region as JSON"),
        ("gemma", "<tool>add(1", "it is not complete, or not in the form"),
        ("gemma", "<tool>add(1, 2, 3)</tool>", "add takes 2 arguments in order, got (1, 2, 3)"),
        ("gemma", "<tool>add(open('x'), 1)</tool>", "expected literal arguments of add"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_reason_and_no_exception(family: str, text: str, reason: str) -> None:
    thinks = "" if family in ("gpt-oss", "llama 3") else "<think>Hm.</think>"
    parsed = read(thinks + text, family=FAMILIES[family])
    assert parsed.error.startswith("the tool call cannot be read: ") and reason in parsed.error
    assert len(parsed.error) < 400
    text = text.removesuffix("<|end|>").removesuffix("<|call|>")
    assert parsed.message == says(text, reasoning="Hm." if thinks else "")


def test_the_tokenizers_own_response_template_comes_first() -> None:
    tokenizer = FAMILIES["qwen 3"].tokenizer()
    own = {"open": "(", "close": ")", "content": "json", "repeats": True}
    tokenizer.response_template = {"start_anchor": "assistant\n", "fields": {"tool_calls": own, "content": {}}}
    ids = tokenizer.encode('4 ({"name": "up", "arguments": {"s": "x"}})')
    assert Renderer(tokenizer).parse(tokenizer.encode("assistant\n"), ids).message == says("4", call("up", s="x"))
    bad = Renderer(tokenizer).parse([], tokenizer.encode("4 (x)"))
    assert "could not parse" in bad.error and bad.message == says("4 (x)")
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(UserError, match=r"response_template: .*fields must be a non-empty dict"):
        Renderer(tokenizer).parse([], ids)


def test_the_end_of_a_turn_is_not_read() -> None:
    tokenizer = Family(PHI, FAMILIES["phi"].special).tokenizer()
    for end in ("<|end|>", "<|endoftext|>", ""):
        assert Renderer(tokenizer).parse([], tokenizer.encode(f"4{end}")).message == says("4")
