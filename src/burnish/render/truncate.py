"""Rows that are too long: what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from burnish.errors import UserError
from burnish.types import Config, Example, Labelled, Messages, Preference, Prompt, Ranking, Row, Sequence, Steps

TooLong = Literal["error", "drop", "truncate_left", "truncate_right", "split"]
ToExamples = Callable[[list[Any]], list[Example]]
"""Converts rows to one example each, without truncation. Raises a UserError if any row cannot be encoded."""


class Truncation(Config):
    """The maximum length of sequences, and how to handle longer ones. Each change is counted and reported.

    Truncation never adds an end token to what is left. If a preference, a ranking, a labelled answer or a prompt is too
    long, only its prompt is truncated, and only by ``truncate_left``: its oldest turns first, then the beginning of its
    last turn, but never a system message or an answer. A solution in steps loses only whole steps, by
    ``truncate_right``.
    """

    max_length: int | None = Field(default=None, ge=2, description="tokens of the longest sequence; none: any length")
    too_long: TooLong | list[TooLong] | None = Field(
        default=None,
        description="error stops; drop leaves the row out; truncate_left and truncate_right keep its end and its "
        "beginning; split makes pieces that overlap by one token, so that every token is still a target; a list is "
        "tried in order, so [truncate_left, drop] drops what does not fit without its prompt; default: error, and "
        "split for pretraining",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="error stops at a row that cannot be read or encoded; skip leaves it out and names it; rows that "
        "are too long are left to too_long",
    )

    @field_validator("too_long")
    @classmethod
    def _in_order(cls, ways: TooLong | list[TooLong] | None) -> TooLong | list[TooLong] | None:
        if not isinstance(ways, list):
            return ways
        if not ways or len(set(ways)) < len(ways):
            raise ValueError(f"expected one or more different ways, got {', '.join(ways) or 'none'}")
        if useless := [after for before, after in pairwise(ways) if before in ("error", "drop")]:
            raise ValueError(f"{useless[0]} is never tried: error and drop always end the list")
        return ways


class ModelTruncation(Truncation):
    """Truncation settings with the limit of the model: ``ModelTruncation(max_length=512, model_limit=512)``."""

    model_limit: int | None = Field(
        default=None, repr=False, description="tokens of the longest sequence that the model reads; none: any length"
    )


class _DoesNotFitError(UserError):
    """A row cannot be shortened enough in this way."""


def fit(
    row: Row, example: Example, function: ToExamples, truncation: Truncation, completion: int = 0
) -> tuple[list[Example], str]:
    """The examples of one row, shortened if necessary, and a description of what was shortened ("" if nothing was).

    Args:
        row: the row.
        example: the encoded row.
        function: encodes the row again, with a shorter prompt.
        truncation: the maximum length, and how to handle longer rows.
        completion: tokens of the maximum length that are kept free for the completion of a prompt.

    Raises:
        UserError: if the row is too long and must not be truncated, or has nothing left to learn.
    """
    if truncation.max_length is None:
        return [example], ""
    limit, ways = truncation.max_length - completion, truncation.too_long or "error"
    if (longest := _longest(example)) <= limit:
        return [example], ""
    reserved = f" and {completion} for the completion" if completion else ""
    what = f"{longest} tokens{reserved}, max_length {truncation.max_length}"
    model_limit = truncation.model_limit if isinstance(truncation, ModelTruncation) else None
    beyond_model = model_limit is not None and longest + completion > model_limit
    otherwise = f"use a model that reads more than {model_limit} tokens" if beyond_model else "raise max_length"
    in_order: list[TooLong] = ways if isinstance(ways, list) else [ways]
    *first, last = in_order
    for way in first:
        with suppress(_DoesNotFitError):
            return _shortened(row, example, function, way, limit, what, otherwise)
    return _shortened(row, example, function, last, limit, what, otherwise)


def _shortened(
    row: Row, example: Example, function: ToExamples, too_long: TooLong, limit: int, what: str, otherwise: str
) -> tuple[list[Example], str]:
    """The examples of a row with more than ``limit`` tokens, shortened in one way, and a description.

    ``what`` and ``otherwise`` are parts of messages: how long the row is, and what would make room for all of it.
    """
    has_prompt = isinstance(row, Preference | Ranking | Labelled | Prompt)
    if too_long == "error":
        ways = "drop or truncate_left" if has_prompt else "drop, truncate_left, truncate_right or split"
        ways = "drop or truncate_right" if isinstance(row, Steps) else ways
        raise UserError(f"{row.source}: {what}: set too_long: {ways}, or {otherwise}")
    if too_long == "drop":
        return [], f"drop: {what}"
    if has_prompt:
        if too_long != "truncate_left":
            detail = "would truncate the answer; only the prompt may be truncated"
            raise UserError(f"{row.source}: {what}: too_long: {too_long} {detail}: set truncate_left or drop")
        shorter, left_out = _truncate_prompt(row, function, limit, what, otherwise)
        return [shorter], f"truncate_left: {what}: {left_out}"
    if isinstance(row, Steps):
        (sequence,) = example.sequences
        if too_long != "truncate_right":
            detail = "would separate steps from their question; only the last steps may be left out"
            raise UserError(f"{row.source}: {what}: too_long: {too_long} {detail}: set truncate_right or drop")
        shorter, left_out = _whole_steps(sequence, limit, what, otherwise)
        return [Example((shorter,))], f"truncate_right: {what}: {left_out}"
    pieces = [
        _part(sequence, start, end)
        for sequence in example.sequences
        for start, end in ([(0, len(sequence))] if len(sequence) <= limit else _spans(len(sequence), limit, too_long))
    ]
    learned = [piece for piece in pieces if piece.loss_mask.any()]
    if not learned:
        detail = f"{too_long} leaves nothing to learn: {_or_drop(too_long, otherwise)}"
        raise _DoesNotFitError(f"{row.source}: {what}: {detail}")
    without = len(pieces) - len(learned)
    note = f", now {len(pieces)} sequences" + (f", {without} of them with nothing to learn" if without else "")
    return [Example((piece,)) for piece in learned], f"{too_long}: {what}" + (note if len(pieces) > 1 else "")


def _or_drop(too_long: TooLong, otherwise: str) -> str:
    return f"drop such rows with too_long: [{too_long}, drop], or {otherwise}"


def _longest(example: Example) -> int:
    return max(len(sequence) for sequence in example.sequences)


def _spans(size: int, limit: int, too_long: str) -> list[tuple[int, int]]:
    if too_long == "truncate_left":
        return [(size - limit, size)]
    if too_long == "truncate_right":
        return [(0, limit)]
    return [(start, min(start + limit, size)) for start in range(0, size - 1, limit - 1)]


def _part(sequence: Sequence, start: int, end: int) -> Sequence:
    """Tokens ``start`` to ``end``. The first one is not learned, because it has no predecessor."""
    return Sequence(
        sequence.tokens[start:end],
        sequence.loss_mask[start:end] & (np.arange(end - start) > 0),
        sequence.source,
        {name: values[start:end] for name, values in sequence.arrays.items()},
    )


def _whole_steps(sequence: Sequence, limit: int, what: str, otherwise: str) -> tuple[Sequence, str]:
    """The sequence up to the end of its last whole step, and how many steps were left out."""
    ends = np.flatnonzero(sequence.arrays["outcomes"]).tolist()
    kept = [t for t in ends if t < limit]
    if not kept:
        detail = f"not one step fits: {_or_drop('truncate_right', otherwise)}"
        raise _DoesNotFitError(f"{sequence.source}: {what}: {detail}")
    lost = len(ends) - len(kept)
    left_out = f"{lost} of {len(ends)} steps left out" if lost else "the end token left out"
    return _part(sequence, 0, kept[-1] + 1), left_out


def _truncate_prompt(
    row: Preference | Ranking | Labelled | Prompt, function: ToExamples, limit: int, what: str, otherwise: str
) -> tuple[Example, str]:
    """The example of the row with as much of its prompt as fits, and what was left out."""

    def with_prompt(messages: Messages) -> Example | None:
        changed = replace(row, messages=messages) if isinstance(row, Prompt) else replace(row, prompt=messages)
        (example,) = function([changed])
        return example if _longest(example) <= limit else None

    prompt = row.messages if isinstance(row, Prompt) else row.prompt
    first = 1 if prompt[0]["role"] == "system" else 0
    head, turns = prompt[:first], prompt[first:]
    # Many templates refuse a conversation that begins with an answer, so the prompt is cut before a user's turn.
    starts = [i for i in range(1, len(turns)) if turns[i]["role"] == "user"]
    for start in starts:
        if fitting := with_prompt(head + turns[start:]):
            return fitting, f"{start} of {len(turns)} turns of the prompt left out"
    start = starts[-1] if starts else 0
    if not turns or turns[start]["role"] == "assistant":
        detail = f"there is no turn of the prompt to cut: {_or_drop('truncate_left', otherwise)}"
        raise _DoesNotFitError(f"{row.source}: {what}: {detail}")
    whole = turns[start]["content"]

    def without(characters: int) -> Example | None:
        return with_prompt((*head, {**turns[start], "content": whole[characters:].lstrip()}, *turns[start + 1 :]))

    low, high = 0, len(whole) - 1  # at least one character is kept
    fitting = without(high)
    if fitting is None:
        detail = f"it does not fit even without its prompt: {_or_drop('truncate_left', otherwise)}"
        raise _DoesNotFitError(f"{row.source}: {what}: {detail}")
    while low < high:
        middle = (low + high) // 2
        if shorter := without(middle):
            fitting, high = shorter, middle
        else:
            low = middle + 1
    dropped = f"{start} of {len(turns)} turns and " if start else ""
    return fitting, f"{dropped}{low} of {len(whole)} characters of the last turn left out"
