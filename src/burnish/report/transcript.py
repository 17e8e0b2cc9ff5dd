"""Episodes for people to read: who said what, which tools were called, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from burnish.report.metrics import FINISH_REASONS, number


class Line(NamedTuple):
    """A message: ``Line("assistant", "", "Let me see.", ("add(a=2, b=3)",), ("reward 0.5000",))``."""

    who: str
    """The role, and the name of a tool."""
    reasoning: str
    content: str
    calls: tuple[str, ...]
    """The tool calls, as they would be written in Python."""
    notes: tuple[str, ...]
    """The reward of the turn, its errors, and why it was cut off."""

    @property
    def text(self) -> str:
        """The message in one text."""
        said = " ".join(part for part in (self.content, *self.calls) if part)
        return f"{self.who}: {said}" + (f" ({', '.join(self.notes)})" if self.notes else "")


def transcript(messages: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The messages of an episode, as samples.jsonl has them."""
    return [
        Line(
            " ".join(part for part in (message["role"], message.get("name", "")) if part),
            message.get("reasoning_content", ""),
            message["content"],
            tuple(map(_call, message.get("tool_calls", ()))),
            tuple(_notes(message)),
        )
        for message in messages
    ]


def shortened(messages: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """The messages of an episode as at most ``most`` texts. Of a long episode, some in the middle are left out."""
    texts = [line.text for line in transcript(messages)]
    if len(texts) <= most:
        return texts
    end = most // 4
    left_out = len(texts) - most + 1
    return [*texts[: most - end - 1], f"... {left_out} more messages ...", *texts[len(texts) - end :]]


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in function["arguments"].items())
    return f"{function['name']}({', '.join(arguments)})"


def _notes(message: Mapping[str, Any]) -> list[str]:
    notes = [f"reward {number(float(message['reward']))}"] if message.get("reward") else []
    notes += [f"tool error: {kind}" for kind in message.get("errors", ())]
    cut = str(message.get("finish_reason", ""))
    return notes + ([FINISH_REASONS.get(cut, cut)] if cut else [])
