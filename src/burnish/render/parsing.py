# ruff: noqa: RUF001  # the special tokens of DeepSeek have full-width bars
"""Completions to messages: content, reasoning and tool calls.

The parser is transformers' own, with the tokenizer's ``response_template``. For tokenizers without one, a response
template of the family is used, which the chat template's own marks tell. Templates that know no tools are read in a
plain form: ``<tool>add(2, b=3)</tool>``, and blocks of Python if there is a tool called ``python``.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import UserError
from burnish.types import Message, ToolCall, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

REASON = 300  # characters of a reason
PREFILLED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # what chat templates write of the assistant's message


class Parsed(NamedTuple):
    """A completion as a message: ``Parsed({"role": "assistant", "content": "4"}, "")``.

    ``error`` says why the tool calls cannot be read, for the model to see. The message then has none, and its content
    is what the model wrote.
    """

    message: Message
    error: str


class Family(NamedTuple):
    """How models of a family call tools.

    Attributes:
        marks: the family's chat templates contain all of these.
        call: how a call begins. Where it is left in the content, the call could not be read.
        fields: those of transformers' response template.
    """

    marks: tuple[str, ...]
    call: str
    fields: dict[str, Any]


def _fields(tool_calls: dict[str, Any], **others: Any) -> dict[str, Any]:
    fields = {
        "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
        "tool_calls": {"repeats": True} | tool_calls,
        "content": {"repeats": True, "join": "\n"},
    }
    return fields | others


FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON = {"content": "json"}
PLAIN = Family(
    (),
    "<tool>",
    _fields(
        {
            "open_pattern": r"<tool>\s*(?P<name>[\w.]+)\s*\((?=.*?\)\s*</tool>)",
            "close_pattern": r"\)\s*</tool>\s*",
            "transform": NAMED,
        }
    ),
)
PLAIN_WITH_PYTHON = Family(
    (),
    "<tool>",
    _fields(
        {
            "open_pattern": PLAIN.fields["tool_calls"]["open_pattern"] + r"|```(?P<name>python)\n(?=.*?```)",
            "close_pattern": r"\)\s*</tool>\s*|\n?```\s*",
            "transform": NAMED,
        }
    ),
)
FAMILIES = {
    "gpt-oss": Family(
        ("<|channel|>",),
        "to=functions.",
        {
            "reasoning_content": {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                "open_pattern": r"(?: to=functions\.(?P<name>[\w-]+)<\|channel\|>\w+"
                r"|<\|channel\|>\w+ to=functions\.(?P<name>[\w-]+))\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
                "close_pattern": r"<\|(?:call|end)\|>(?:<\|start\|>assistant)?",
                "repeats": True,
                "transform": NAMED,
                **JSON,
            },
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)\s*<\|message\|>",
                "close_pattern": r"<\|(?:end|return)\|>(?:<\|start\|>assistant)?",
                "repeats": True,
                "join": "\n",
            },
        },
    ),
    "deepseek": Family(
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁begin｜>",
        _fields(
            {
                "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>"
                r"(?P<name>[^\n]+)\n```json\n",
                "close_pattern": r"\n```(?:<｜tool▁call▁end｜>|\Z)",
                "transform": NAMED,
                **JSON,
            },
            content={"close": "<｜tool▁calls▁end｜>", "repeats": True, "join": "\n"},
        ),
    ),
    "glm": Family(
        ("<arg_key>",),
        "<tool_call>",
        _fields(
            {
                "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<arg_key>|</tool_call>)",
                "close_pattern": r"</tool_call>\s*",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": NAMED,
            }
        ),
    ),
    "mistral": Family(
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        _fields(
            {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\[\s{]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "transform": NAMED,
                **JSON,
            }
        ),
    ),
    "mistral, lists of calls": Family(
        ("[TOOL_CALLS]",), "[TOOL_CALLS]", _fields({"open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)", **JSON})
    ),
    "qwen, xml": Family(
        ("<tool_call>", "<function="),
        "<tool_call>",
        _fields(
            {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>\s*",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
                "transform": NAMED,
            }
        ),
    ),
    "hermes": Family(
        ("<tool_call>",),
        "<tool_call>",
        _fields(
            {"open_pattern": r"\s*<tool_call>", "close_pattern": r"</tool_call>\s*", "transform": FUNCTION, **JSON}
        ),
    ),
    "phi": Family(
        ("<|tool_call|>",),
        "<|tool_call|>",
        _fields({"open_pattern": r"\s*<\|tool_call\|>", "close_pattern": r"<\|/tool_call\|>\s*", **JSON}),
    ),
    "llama": Family(
        ("<|start_header_id|>",),
        "<|python_tag|>",
        _fields(
            {
                "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*"
                r'(?=\{\s*"(?:name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)|type"\s*:\s*"function)")',
                **JSON,
            }
        ),
    ),
}
"""In this order: the first family whose marks a chat template contains."""


def family_of(chat_template: str, tools: Tools) -> Family:
    """The family that a chat template belongs to."""
    for family in FAMILIES.values():
        if all(mark in chat_template for mark in family.marks):
            return family
    return PLAIN_WITH_PYTHON if "python" in _parameters(tools) else PLAIN


def parse(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, prompt: Iterable[int], ids: Iterable[int], tools: Tools
) -> Parsed:
    """Parse a completion, given without the token that ended it.

    Raises:
        UserError: the tokenizer's own response template is not valid.
    """
    before, text = (
        str(tokenizer.decode([int(id) for id in part], skip_special_tokens=False)) for part in (prompt, ids)
    )
    own: dict[str, Any] | None = tokenizer.response_template
    if own is not None:
        try:
            template, family = _loaded(json.dumps(own)), None
        except (ValueError, TypeError) as error:
            raise UserError(f"{tokenizer.name_or_path}: response_template: {error}") from error
    else:
        family = family_of(chat_template, tools)
        template = _loaded(_spec(family.fields))
        prefilled = PREFILLED.search(before)
        before = prefilled[0] if prefilled else ""
    try:
        found = _run(template, text, before, tools)
        calls = [
            _tool_call(call, tools, family in (PLAIN, PLAIN_WITH_PYTHON)) for call in _flat(found.get("tool_calls"))
        ]
        message = _message(found, text, calls)
        if family is not None and family.call in message["content"]:
            raise ValueError(f"it is not complete, or not in the form that the model was taught: {message['content']}")
    except (ValueError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= REASON else reason[:REASON] + "..."
        return Parsed(_without_calls(family, text, before), f"the tool call cannot be read: {reason}")
    return Parsed(message, "")


def _spec(fields: dict[str, Any]) -> str:
    return json.dumps({"defaults": {"role": "assistant"}, "start_anchor_pattern": r"\A", "fields": fields})


@functools.lru_cache(maxsize=32)
def _loaded(spec: str) -> ResponseTemplate:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(json.loads(spec))


def _run(template: ResponseTemplate, text: str, before: str, tools: Tools) -> dict[str, Any]:
    from transformers.utils.chat_parsing import parse_response

    return parse_response(text, template, prefix=before, tools=list(tools))


def _message(found: dict[str, Any], text: str, calls: list[ToolCall]) -> Message:
    reasoning = next((found[key] for key in ("reasoning_content", "thinking", "reasoning") if found.get(key)), "")
    content = found.get("content") or ""
    if not (content or reasoning or calls):
        content = text.strip()  # it may stand in no channel
    message = Message(role="assistant", content=content.strip())
    if reasoning:
        message["reasoning_content"] = reasoning.strip()
    if calls:
        message["tool_calls"] = calls
    return message


def _without_calls(family: Family | None, text: str, before: str) -> Message:
    """The message with its calls as text."""
    if family is None or family.fields["content"].get("open_pattern"):
        return Message(role="assistant", content=text.strip())
    fields = {name: field for name, field in family.fields.items() if name != "tool_calls"}
    fields["content"] = {"repeats": True, "join": "\n"}
    return _message(_run(_loaded(_spec(fields)), text, before, ()), text, [])


# --- calls --------------------------------------------------------------------------------------------------------


def _flat(calls: Any) -> list[Any]:
    """The calls, which a template may give as one, as a list, or as lists in a list."""
    if isinstance(calls, list):
        return [call for item in calls for call in _flat(item)]
    return [] if calls is None else [calls]


def _tool_call(value: Any, tools: Tools, plain: bool) -> ToolCall:
    """A call in the form of a message.

    Raises:
        ValueError: it has no name, or its arguments are not an object.
    """
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"expected an object with a name and arguments, got {_shown(value)}")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"it names no tool: {_shown(function)}")
    name = name.strip()
    if plain:
        arguments = _python_arguments(name, str(arguments), tools)
    elif isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"expected the arguments of {name} as an object, got {_shown(arguments)}")
    call: ToolCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(id := value.get("id"), str):
        call["id"] = id
    try:
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # NaN, or half of a surrogate pair, which no tokenizer reads
        raise ValueError(f"a value of {name} cannot be written: {error}") from None
    return call


def _parameters(tools: Tools) -> dict[str, dict[str, Any]]:
    """The schema of each parameter of each tool."""
    functions = [tool.get("function", tool) for tool in tools]
    return {one["name"]: (one.get("parameters") or {}).get("properties") or {} for one in functions}


def _python_arguments(name: str, text: str, tools: Tools) -> dict[str, Any]:
    """The arguments of a call in the plain form, or the code of a block.

    Raises:
        ValueError: the text is not the arguments of a call with literal values.
    """
    parameters = _parameters(tools).get(name, {})
    only = next(iter(parameters)) if len(parameters) == 1 else None
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        values = [ast.literal_eval(value) for value in call.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        if only is None:
            raise ValueError(f"expected literal arguments of {name}, got ({text})") from None
        return {only: text}  # such as calculator(2 + 3), or a block of Python
    if only is not None and not named and parameters[only].get("type") == "string":
        return {only: values[0] if len(values) == 1 and isinstance(values[0], str) else text}
    if len(values) > len(parameters) or None in named:
        raise ValueError(f"{name} takes {len(parameters)} arguments in order, got ({text})")
    return dict(zip(parameters, values, strict=False)) | {str(key): value for key, value in named.items()}


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)
