"""What people rank, what they answer, and the JSON in which both are stored."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from burnish.errors import UserError
from burnish.types import Message, Messages, Tools


@dataclass(frozen=True)
class Task:
    """A prompt and the completions to rank.

    ``Task(({"role": "user", "content": "Name a color."},), (({"role": "assistant", "content": "Blue."},),
    ({"role": "assistant", "content": "Seven."},)), source="colors.jsonl:1")``
    """

    prompt: Messages
    completions: tuple[Messages, ...]
    source: str
    tools: Tools = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    details: tuple[Mapping[str, Any], ...] = ()
    """What the row says of each completion, such as ``({"score": 0.5}, {"score": -1.0})``; () if it says nothing."""

    @cached_property
    def id(self) -> str:
        """A hash of the prompt, the tools and the completions, so that equal rows are one task."""
        content = json.dumps([self.prompt, self.tools, self.completions], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The task as JSON, for the database.

        Raises:
            UserError: a column has a value that JSON cannot hold, such as a date or NaN.
        """
        plain = {name: getattr(self, name) for name in FIELDS}
        try:
            return json.dumps(plain, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.source}: a column has a value that JSON cannot hold: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The inverse of ``to_json``."""
        plain = json.loads(text)
        completions = tuple(tuple(completion) for completion in plain["completions"])
        prompt, tools, details = (tuple(plain[name]) for name in ("prompt", "tools", "details"))
        return cls(prompt, completions, plain["source"], tools, plain["meta"], details)


FIELDS = ("prompt", "completions", "source", "tools", "meta", "details")


@dataclass(frozen=True)
class Highlight:
    """A span of a completion that a rater marked: ``Highlight(completion=1, part=0, start=4, end=9, text="Seven")``.

    ``completion`` counts the completions of the task, and ``part`` what ``parts`` gives for one. ``start`` and ``end``
    count characters.
    """

    completion: int
    part: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Answer:
    """What one rater says about one task.

    ``Answer("9f86d081884c7d65", "Ann", (1, 2), comment="The second one is no color.", seconds=7.5)``
    """

    task: str
    rater: str
    ranks: tuple[int, ...] | None
    """The rank of each completion, in the order of the task: 1 is best, and equal ranks are ties. None if skipped."""
    comment: str = ""
    highlights: tuple[Highlight, ...] = ()
    seconds: float | None = None
    """From when the page showed the task until the answer arrived; None for answers from another tool."""
    at: float = 0.0
    """When it was stored, in seconds since 1970."""

    def highlights_json(self) -> str:
        """The highlights as JSON, for the database."""
        return json.dumps([asdict(highlight) for highlight in self.highlights], ensure_ascii=False)


def dense(ranks: Iterable[float]) -> tuple[int, ...]:
    """The same order and the same ties with the ranks 1, 2, 3, ...: ``(7, 2, 7)`` gives ``(2, 1, 2)``."""
    given = list(ranks)
    order = {rank: place for place, rank in enumerate(sorted(set(given)), start=1)}
    return tuple(order[rank] for rank in given)


def pairwise(tasks: Iterable[Task]) -> list[Task]:
    """Every pair of completions of each task as a task of its own. Equal pairs become one."""
    pairs: dict[str, Task] = {}
    for task in tasks:
        for i, j in itertools.combinations(range(len(task.completions)), 2):
            details = (task.details[i], task.details[j]) if task.details else ()
            both = (task.completions[i], task.completions[j])
            pair = Task(task.prompt, both, task.source, task.tools, task.meta, details)
            pairs.setdefault(pair.id, pair)
    return list(pairs.values())


def parts(messages: Messages) -> list[tuple[str, str]]:
    """Messages as labeled texts for people to read: ``[("assistant", "Let me add."), ("call", "add({...})")]``."""
    shown: list[tuple[str, str]] = []
    for message in messages:
        if reasoning := message.get("reasoning_content"):
            shown.append(("reasoning", reasoning))
        if message["content"] or not message.get("tool_calls"):
            shown.append((_label(message), message["content"]))
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            shown.append(("call", f"{call['function']['name']}({arguments})"))
    return shown


def _label(message: Message) -> str:
    return f"tool {message['name']}" if message["role"] == "tool" and "name" in message else message["role"]
