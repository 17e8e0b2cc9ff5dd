"""What a run and a reward service send each other: trajectories and scores as JSON.

This module does not import torch, so that a service of one's own can use it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal

import numpy as np
from pydantic import Field

from burnish.errors import UserError
from burnish.types import Columns, Config, Message, Sequence, ToolCall, Trajectory, Turn

VERSION = 1
"""The version of the protocol."""


class SentFunction(Config):
    """The function of a tool call: ``{"name": "add", "arguments": {"a": 2, "b": 2}}``."""

    name: str
    arguments: dict[str, Any]


class SentCall(Config):
    """A call of a tool: ``{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}, "id": "c1"}``."""

    type: Literal["function"] = "function"
    function: SentFunction
    id: str | None = None


class SentMessage(Config):
    """One message: ``{"role": "user", "content": "12 + 30 ="}``."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> Message:
        """The message as rows have it."""
        return self.model_dump(exclude_none=True)  # pyright: ignore[reportReturnType]


class SentTrajectory(Config, use_attribute_docstrings=True):
    """A completion to score, with its prompt.

    ``{"prompt": [{"role": "user", "content": "12 + 30 ="}], "messages": [{"role": "assistant", "content": "42"}],
    "columns": {"answer": "42"}, "finish_reason": "stop", "tokens": [42, 2], "source": "prompts.jsonl:17"}``
    """

    prompt: list[SentMessage] = Field(min_length=1)
    messages: list[SentMessage] = Field(min_length=1)
    """The completion: messages of the assistant, and what an environment answered."""
    texts: list[str] | None = None
    """The text that the policy generated for each of its messages. Default: their contents."""
    tokens: list[int] = Field([])
    """The sampled token ids."""
    finish_reason: str = "stop"
    """Why generation ended: stop, length, context, turns, done or error."""
    tools: list[dict[str, Any]] = Field([])
    """JSON schemas of the tools that the policy may call."""
    columns: dict[str, Any] = Field({})
    """The other columns of the prompt's row."""
    source: str = ""
    """The file and line of the prompt's row, for messages."""

    def trajectory(self) -> Trajectory:
        """The trajectory.

        Raises:
            ValueError: if the completion does not begin with a message of the assistant, or the texts do not match.
        """
        own = [i for i, message in enumerate(self.messages) if message.role == "assistant"]
        if not own or own[0]:
            raise ValueError("messages: the completion begins with a message of the assistant")
        texts = [self.messages[i].content for i in own] if self.texts is None else self.texts
        if len(texts) != len(own):
            raise ValueError(f"texts: got {len(texts)} for {len(own)} messages of the assistant")
        turns = []
        for text, start, end in zip(texts, own, [*own[1:], len(self.messages)], strict=True):
            message, *replies = (one.message() for one in self.messages[start:end])
            calls: list[ToolCall] = message.get("tool_calls", [])
            reason = self.finish_reason if end == len(self.messages) else "stop"
            turns.append(Turn(text, reason, message, tuple(calls), tuple(replies)))
        ids = np.array([0, *self.tokens], np.int64)
        sequence = Sequence(ids, np.arange(len(ids)) > 0, self.source, {"sampler_logprobs": np.zeros(len(ids))})
        return Trajectory(
            tuple(message.message() for message in self.prompt),
            tuple(turns),
            (sequence,),
            self.finish_reason,
            Columns(self.columns),
            self.source,
            tools=tuple(self.tools),
        )


class ScoreRequest(Config, use_attribute_docstrings=True):
    """The body of ``POST /score``: ``{"version": 1, "trajectories": [...]}``."""

    version: Literal[1]
    trajectories: list[SentTrajectory] = Field(min_length=1)
    alone: bool = False
    """Score these trajectories in a call of their own, so that rounding does not depend on other requests."""


def score_request(trajectories: SequenceOf[Trajectory], what: str) -> bytes:
    """The body of a request to score trajectories in a call of their own. ``what`` names the receiver in messages.

    Raises:
        UserError: if a column of a row cannot be written as JSON. The message names it.
    """
    rows = ", ".join(_written(trajectory, what) for trajectory in trajectories)
    return f'{{"version": {VERSION}, "alone": true, "trajectories": [{rows}]}}'.encode()


def _written(trajectory: Trajectory, what: str) -> str:
    plain = {
        "prompt": trajectory.prompt,
        "messages": trajectory.messages,
        "texts": [turn.text for turn in trajectory.turns],
        "tokens": trajectory.tokens.tolist(),
        "finish_reason": trajectory.finish_reason,
        "tools": trajectory.tools,
        "columns": dict(trajectory.columns),
        "source": trajectory.source,
    }
    try:
        return _json(plain)
    except (TypeError, ValueError):
        for name, value in {**plain, **trajectory.columns}.items():
            try:
                _json({name: value})
            except (TypeError, ValueError) as error:
                if name != "columns":
                    raise UserError(
                        f"{trajectory.source}: {name}: {type(value).__name__} {value!r:.60} cannot be sent to {what} "
                        "as JSON: remove the column, or convert it to text"
                    ) from error
        raise


def _json(value: Any) -> str:
    """JSON text. A text that is not valid Unicode is a ``ValueError``."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
