"""Selects rows by a score: above a threshold, the best of each prompt, without duplicates."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from burnish.errors import UserError
from burnish.types import Config, Conversation, Labelled, Preference, Prompt, Ranking, Row, Scored, Steps, Text


class Select(Config, use_attribute_docstrings=True):
    """Which rows to use: ``{distinct: true, above: 0.7, at_most: 4}``. The keys apply in the order below."""

    distinct: bool = False
    """Use a row only once if another one has the same prompt and the same completion."""
    above: float | None = Field(None, allow_inf_nan=True)
    """Use rows whose score is greater than this. ``-.inf`` uses all rows."""
    percentile: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """Use rows whose score is at least this percentile of the scores of the remaining rows."""
    per: Literal["all", "prompt"] = "all"
    """Whether to compute the percentile over all rows, or for each prompt over its own rows."""
    best: int | None = Field(None, gt=0)
    """Use this many rows of each prompt, those with the highest scores."""
    at_most: int | None = Field(None, gt=0)
    """Use at most this many rows of each prompt, the first in the file."""
    key: str = "score"
    """The column of the score."""

    @pydantic.model_validator(mode="after")
    def _fitting(self) -> Select:
        if self.above is not None and math.isnan(self.above):
            raise ValueError("above: expected a number, got nan")
        if self.per == "prompt" and self.percentile is None:
            raise ValueError("per: applies only with percentile")
        if "key" in self.model_fields_set and not self.reads_scores:
            raise ValueError("key: applies only with above, percentile or best, which compare scores")
        return self

    @property
    def reads_scores(self) -> bool:
        """Whether rows need a score."""
        return self.above is not None or self.percentile is not None or self.best is not None

    @property
    def reads_prompts(self) -> bool:
        """Whether rows need a prompt."""
        return self.per == "prompt" or self.best is not None or self.at_most is not None


class Selected(NamedTuple):
    """The indices of the rows that are used, in order, and how many rows were left out for each reason.

    ``Selected([0, 2, 3], {"duplicate": 1, "not above 0.7": 12})``
    """

    kept: list[int]
    left_out: dict[str, int]


def select(rows: Sequence[Row], scores: Sequence[float], settings: Select) -> Selected:
    """Select rows by the settings. Ties go to the rows that come first.

    Args:
        rows: the rows.
        scores: the score of each row; not read if no setting compares scores.
        settings: what to select.
    """
    left_out: Counter[str] = Counter()
    kept = list(range(len(rows)))

    def keep(chosen: list[int], reason: str) -> None:
        nonlocal kept
        left_out[reason] += len(kept) - len(chosen)
        kept = chosen

    if settings.distinct:
        keep(_first_of_each(kept, lambda i: _parts(rows[i])), "duplicate")
    if (above := settings.above) is not None:
        keep([i for i in kept if scores[i] > above], f"not above {above:g}")
    if (percentile := settings.percentile) is not None:
        groups = _by_prompt(rows, kept) if settings.per == "prompt" else [kept]
        lowest = {i: np.percentile([scores[j] for j in group], percentile) for group in groups for i in group}
        keep([i for i in kept if scores[i] >= lowest[i]], f"below percentile {percentile:g}")
    if (best := settings.best) is not None:
        ranked = [sorted(group, key=lambda i: -scores[i])[:best] for group in _by_prompt(rows, kept)]
        keep(sorted(i for group in ranked for i in group), f"not among the best {best} of its prompt")
    if (at_most := settings.at_most) is not None:
        first = [group[:at_most] for group in _by_prompt(rows, kept)]
        keep(sorted(i for group in first for i in group), f"beyond the first {at_most} of its prompt")
    return Selected(kept, {reason: count for reason, count in left_out.items() if count})


def _first_of_each(indices: list[int], key: Callable[[int], Hashable]) -> list[int]:
    seen: dict[Hashable, int] = {}
    for i in indices:
        seen.setdefault(key(i), i)
    return list(seen.values())


def _by_prompt(rows: Sequence[Row], indices: list[int]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in indices:
        groups[_parts(rows[i])[0]].append(i)
    return list(groups.values())


def _parts(row: Row) -> tuple[Hashable, Hashable]:
    """The prompt and the completion of a row, for comparison.

    Raises:
        UserError: the row is plain text, which has no prompt.
    """
    match row:
        case Text():
            raise UserError(f"{row.source}: select: plain text has no prompt and no completion")
        case Conversation():
            start = row.completion_start
            messages, start = row.messages, len(row.messages) - 1 if start is None else start
            prompt, completion = messages[:start], messages[start:]
        case Scored():
            prompt, completion = row.messages[:-1], row.messages[-1:]
        case Prompt():
            prompt, completion = row.messages, ()
        case Preference():
            prompt, completion = row.prompt, (row.chosen, row.rejected)
        case Ranking():
            prompt, completion = row.prompt, row.completions
        case Labelled():
            prompt, completion = row.prompt, row.completion
        case Steps():
            prompt, completion = row.question, (row.steps, row.outputs)
    return _hashable(prompt), _hashable(completion)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
