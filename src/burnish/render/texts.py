"""The texts in messages and tools: which of them may say anything, and which the template may depend on.

Contents, reasoning, the values of arguments and the ids of calls may say anything. The names of tools and arguments,
and the schemas of tools, are fixed: most rows of a file share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from burnish.types import Message, Messages, Tools

Change = Callable[[Any], Any]


def texts_of(messages: Messages) -> list[str]:
    """The texts in messages that may say anything, in a fixed order."""
    texts: list[str] = []

    def collect(value: Any) -> Any:
        if isinstance(value, str):
            texts.append(value)
        return value

    for message in messages:
        _changed(message, collect, collect)
    return texts


def with_texts(messages: Messages, texts: list[str]) -> Messages:
    """The messages with other texts, in the order of ``texts_of``."""
    remaining = iter(texts)

    def replace(value: Any) -> Any:
        return next(remaining) if isinstance(value, str) else value

    return tuple(_changed(message, replace, replace) for message in messages)


def outline(messages: Messages, letter: str) -> Messages:
    """The messages with a letter for each text and 0 for each number. Ids keep their length, which templates check."""
    shorten = _shorten(letter)
    return tuple(_changed(message, shorten, lambda id: letter * len(id)) for message in messages)


def outline_key(message: Message) -> str:
    """What the outline of a message depends on: ``"user"``, or its repr if the message has more than a content."""
    if len(message) == 2 and message["content"]:
        return message["role"]
    return repr(_changed(message, _shorten("x"), lambda id: ""))


def _shorten(letter: str) -> Change:
    def shorten(value: Any) -> Any:
        if isinstance(value, str):
            return letter if value else ""
        return value if isinstance(value, bool) or value is None else 0

    return shorten


def fixed_texts(messages: Messages, tools: Tools) -> list[str]:
    """The names of tools and arguments in messages, and all texts of the schemas."""
    texts = list(_strings(list(tools)))
    for message in messages:
        texts += [message["name"]] if "name" in message else []
        for call in message.get("tool_calls", ()):
            texts += [call["function"]["name"], *_keys(call["function"]["arguments"])]
    return texts


def _changed(message: Message, change: Change, change_id: Change) -> Message:
    """The message with its texts and numbers changed; ids of calls by ``change_id``."""
    if len(message) == 2:
        return {"role": message["role"], "content": change(message["content"])}
    changed: Message = {**message, "content": change(message["content"])}
    if "reasoning_content" in message:
        changed["reasoning_content"] = change(message["reasoning_content"])
    if "tool_calls" in message:
        changed["tool_calls"] = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = _leaves(function["arguments"], change)
            new = {**call, "function": {"name": function["name"], "arguments": arguments}}
            if "id" in call:
                new["id"] = change_id(call["id"])
            changed["tool_calls"].append(new)  # pyright: ignore[reportArgumentType]
    if "tool_call_id" in message:
        changed["tool_call_id"] = change_id(message["tool_call_id"])
    return changed


def _leaves(value: Any, change: Change) -> Any:
    if isinstance(value, dict):
        return {key: _leaves(item, change) for key, item in value.items()}
    return [_leaves(item, change) for item in value] if isinstance(value, list | tuple) else change(value)


def _strings(value: Any) -> Iterator[str]:
    """All texts in a schema, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _keys(value: Any) -> Iterator[str]:
    """The keys of arguments, on every level."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _keys(item)
