"""Recognizes the shape of a record by its keys."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from burnish.data.formats import (
    PROVENANCE,
    ROLES,
    SHAPES,
    At,
    BadRow,
    Record,
    Shape,
    empty,
    flow_list,
    flow_map,
    missing,
    shown,
)
from burnish.data.tools import read_tools
from burnish.errors import UserError, closest, did_you_mean
from burnish.types import Prompt, Row, Steps, Text

NO_SHAPE = "fits no shape"
NOT_READ = {
    "segments": "text with a loss mask of its own, as in axolotl's input_output: write messages, and choose what is "
    "learned with method.learn"
}
"""Columns of other tools that no shape can have."""
IN_MESSAGES = frozenset({"role", "content"})
OF_NAMES = frozenset(
    {
        "missing key",
        NO_SHAPE,
        "fits several shapes",
        "unknown column",
        "key that is not read",
        "not a transcript",
    }
)
"""Reasons of bad rows that other names of columns could help against."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "query", "input", "problem", "article", "context_messages"),
    "completion": ("response", "output", "answer", "solution", "reply", "target", "summary"),
    "output": ("response", "completion", "answer"),
    "messages": ("conversation", "dialogue", "dialog", "chat", "context_messages", "input", "prompt"),
    "chosen": ("chosen_response", "response_chosen", "preferred", "winner"),
    "rejected": ("rejected_response", "response_rejected", "dispreferred", "loser"),
    "completions": ("responses", "answers", "outputs", "candidates"),
    "scores": ("ratings", "score"),
    "ranks": ("rank", "ranking"),
    "label": ("kto_tag", "score"),
    "reward": ("score", "rating"),
    "text": ("content", "document", "body", "input"),
}
"""Names that other tools and data sets give to our columns."""
NOT_IGNORED = frozenset(
    {"tools", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking", "train", "train_detail"}
    | {"weight", "history", "images", "image", "videos", "audios", "segments"}
)
"""Columns and keys whose loss would change what is learned. No message proposes to ignore them."""
HIDDEN = ("tool_calls", "functions", "function_call", "history", "images", "image", "videos", "audios")
"""Columns that belong to what a model is asked, and not to what its answer is compared with."""


def parse(
    record: Any,
    kinds: tuple[type[Any], ...],
    source: str,
    format: str | None = None,
    keys: Mapping[str, str] | None = None,
    keep: Collection[str] = (),
    number: str | None = None,
    any_column: bool = False,
) -> Row:
    """Convert a record to a row.

    A mistake in the names of columns comes with the lines of a recipe that would read the row, if there are any.

    Args:
        record: a mapping, such as a line of a JSON lines file.
        kinds: the row classes to choose from, such as ``(Preference, Ranking)``.
        source: the place of the record, for messages: ``"chat.jsonl:17"``.
        format: the name of a shape (``alpaca``, ``sharegpt``, ...), needed if the keys fit several.
        keys: maps our names of keys to the file's names, ``{"prompt": "question"}``. The names ``role`` and ``content``
            are those of the keys in messages.
        keep: keys to ignore, in the record and in its messages and steps. Prompts keep them among their columns.
        number: a column that the caller reads. A shape may read it too.
        any_column: ignore all columns that the shape does not read.

    Raises:
        BadRow: the record fits no shape, has a column that nothing reads, or has a wrong value. The message names the
            key and the most similar known one.
        UserError: no shape for ``kinds`` is named ``format``.
    """
    if not isinstance(record, Mapping):
        raise BadRow(source, "", "not a record", f"expected an object with keys, got {shown(record)}")
    try:
        return _parse(record, kinds, source, format, keys or {}, keep, number, any_column)
    except BadRow as bad:
        kept = keep if number is None else [*keep, number]
        lines = None if keys or bad.reason not in OF_NAMES else _lines(record, kinds, format, kept)
        if lines is None or lines in bad.detail:
            raise
        if bad.reason in (NO_SHAPE, "missing key") and "[" not in bad.key:
            bad = BadRow(source, "", NO_SHAPE, missing(record, ()))
        raise BadRow(bad.source, bad.key, bad.reason, f"{bad.detail}; to read it, set {lines}") from None


def _parse(
    record: Record,
    kinds: tuple[type[Any], ...],
    source: str,
    format: str | None,
    keys: Mapping[str, str],
    keep: Collection[str],
    number: str | None = None,
    any_column: bool = False,
) -> Row:
    names = (keys.get("role", "role"), keys.get("content", "content")) if IN_MESSAGES & keys.keys() else None
    if columns := {name: column for name, column in keys.items() if name not in IN_MESSAGES}:
        record = _renamed(record, columns, source)
    kept = {name: record[name] for name in keep if name in record}
    if kept:
        record = {name: value for name, value in record.items() if name not in kept}
    present = frozenset(key for key, value in record.items() if value is not None)
    fitting = _fitting(present, kinds, format)
    at = At(source, keep=frozenset(keep), names=names)
    given = record.get("tools")
    without_tools = {name: value for name, value in record.items() if name != "tools"}
    if len(fitting) > 1 and len({shape.needs for shape in fitting}) == 1:
        fitting = tuple(shape for shape in fitting if _reads(shape, without_tools, at)) or fitting
    if len(fitting) == 1:
        row = fitting[0].read(without_tools, at)
        if isinstance(row, Prompt) and not any_column:
            _nothing_hidden(record, fitting[0], at)
        elif not any_column:
            there = present - {"tools"} if empty(given) else present
            _nothing_unread(record, there, fitting[0], kinds, at, number)
        if not empty(given) and not isinstance(row, Text | Steps):
            row = replace(row, tools=read_tools(given, at.inside("tools")))
        return replace(row, columns={**row.columns, **kept}) if kept and isinstance(row, Prompt) else row
    if fitting:
        names = ", ".join(shape.name for shape in fitting)
        raise BadRow(source, "", "fits several shapes", f"{names}: choose one with data.format")
    for name, hint in NOT_READ.items():
        if name in present:
            raise BadRow(source, name, "not supported", hint)
    shapes = _shapes(kinds, format)
    name, detail = _nearest(record, present, shapes)
    choices = " | ".join(" + ".join(shape.needs) for shape in shapes)
    raise BadRow(source, name, "missing key" if name else NO_SHAPE, f"{detail} (shapes: {choices})")


def _reads(shape: Shape, record: Record, at: At) -> bool:
    """Whether a shape reads a record. A list in ``prompt`` that ends with the assistant is no prompt, for example."""
    try:
        shape.read(record, at)
    except BadRow:
        return False
    return True


def _renamed(record: Record, keys: Mapping[str, str], source: str) -> Record:
    for name, column in keys.items():
        if column not in record:
            raise BadRow(
                source,
                column,
                "missing key",
                f"it should be {name!r} according to keys, but the row {missing(record, (column,))}",
            )
        if name in record and name not in keys.values():
            detail = f"keys reads {column!r} as {name!r}: rename this one with {name}_original: {name}"
            raise BadRow(source, name, "two columns have this name", detail)
    rest = {name: value for name, value in record.items() if name not in keys.values()}
    return rest | {name: record[column] for name, column in keys.items()}


def _nothing_unread(
    record: Record,
    present: frozenset[str],
    shape: Shape,
    kinds: tuple[type[Any], ...],
    at: At,
    number: str | None,
) -> None:
    """Raise a BadRow for the first column that nothing reads."""
    unread = _unread(present, shape) - {number}
    if not unread:
        return
    names = [str(name) for name in record if name in unread]  # in the order of the file
    known = {name for shape in _shapes(kinds, None) for name in (*shape.needs, *shape.may)} | at.keep
    hint = did_you_mean(names[0], sorted(known - present))
    detail = f"remove it, or ignore it with data.keep: {flow_list(names)}{hint}"
    raise at.inside(names[0]).bad("unknown column", detail)


def _nothing_hidden(record: Record, shape: Shape, at: At) -> None:
    """Raise a BadRow for a column of a prompt that the model would have to see. Rewards read the others."""
    for name in HIDDEN:
        if name not in shape.may and not empty(record.get(name)):
            detail = (
                f"the model would not see it: write it into the prompt, or keep it for rewards: data.keep: [{name}]"
            )
            raise at.inside(name).bad("unknown column", detail)


@functools.lru_cache(maxsize=1024)
def _unread(present: frozenset[str], shape: Shape) -> frozenset[str]:
    return present - PROVENANCE - {*shape.needs, *shape.may}


@functools.cache
def _shapes(kinds: tuple[type[Any], ...], format: str | None) -> tuple[Shape, ...]:
    shapes = tuple(shape for shape in SHAPES if shape.kind in kinds)
    if format is None:
        return shapes
    names = [shape.name for shape in shapes]
    if format not in names:
        hint = did_you_mean(format, names) or f"; expected one of {', '.join(names)}"
        rows = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"format: {format!r} is not a shape of {rows} rows{hint}")
    return tuple(shape for shape in shapes if shape.name == format)


@functools.lru_cache(maxsize=1024)
def _fitting(present: frozenset[str], kinds: tuple[type[Any], ...], format: str | None) -> tuple[Shape, ...]:
    """The shapes whose keys are all present, except those that need only some keys of another such shape."""
    shapes = [shape for shape in _shapes(kinds, format) if present.issuperset(shape.needs)]
    return tuple(s for s in shapes if not any(set(s.needs) < set(other.needs) for other in shapes))


def _nearest(record: Record, present: frozenset[str], shapes: tuple[Shape, ...]) -> tuple[str, str]:
    """The missing keys of the shape that the record probably has with misspelled keys, and a message about them.

    This is the shape with the fewest missing keys; of several, the one with the most present keys.
    """

    def missing_keys(shape: Shape) -> tuple[str, ...]:
        return tuple(name for name in shape.needs if name not in present)

    def rank(shape: Shape) -> tuple[int, int]:
        lacking = len(missing_keys(shape))
        return lacking, lacking - len(shape.needs)

    for names in map(missing_keys, sorted(shapes, key=rank)):
        if all(closest(name, map(str, record)) for name in names):
            return ", ".join(names), missing(record, names)
    return "", missing(record, ())


# --- advice -------------------------------------------------------------------------------------------------------


def _lines(record: Record, kinds: tuple[type[Any], ...], format: str | None, keep: Collection[str]) -> str | None:
    """The settings that would read the record: ``data.keys: {prompt: question} and data.keep: [lang]``, or None.

    Of several, those with the fewest columns to ignore, and then with the fewest names.
    """
    found = [
        settings for shape in _shapes(kinds, format) if (settings := _settings(record, kinds, shape, keep)) is not None
    ]
    found = [settings for settings in found if settings[0] or settings[1]]  # a format alone is the user's to choose
    if not found:
        return None
    keys, kept, chosen = min(found, key=lambda settings: (len(settings[1]), len(settings[0])))
    parts = [f"data.keys: {flow_map(keys)}"] if keys else []
    parts += [f"data.keep: {flow_list([*keep, *kept])}"] if kept else []
    return " and ".join(parts + ([f"data.format: {chosen}"] if chosen and not format else []))


def _settings(
    record: Record, kinds: tuple[type[Any], ...], shape: Shape, keep: Collection[str]
) -> tuple[dict[str, str], list[str], str | None] | None:
    """The keys, the columns to ignore and the format that read the record in this shape, tried out; None if none do."""
    free = {
        str(name).lower().replace("-", "_"): str(name)
        for name, value in record.items()
        if value is not None and name not in (*shape.needs, *shape.may)
    }
    keys = {}
    for name in shape.needs:
        if record.get(name) is None:
            column = next((free.pop(alias) for alias in (name, *ALIASES.get(name, ())) if alias in free), None)
            if column is None:
                return None
            keys[name] = column
    read = {*keys.values(), *shape.needs, *shape.may, *PROVENANCE, *keep}
    prompt = shape.kind is Prompt
    kept = [] if prompt else [str(name) for name, value in record.items() if value is not None and name not in read]
    format = None
    while NOT_IGNORED.isdisjoint(kept):
        try:
            _parse(record, kinds, "", format, keys, [*keep, *kept])
        except BadRow as bad:
            name = bad.key.rpartition(".")[2]
            if bad.reason == "fits several shapes" and format is None:
                format = shape.name
            elif bad.reason == "key that is not read" and name not in kept:
                kept.append(name)
            elif bad.reason == "missing key" and "[" in bad.key and not IN_MESSAGES & keys.keys():
                if (names := _names_in_messages(record, keys, shape)) is None:
                    return None
                keys |= names
            else:
                return None
        else:
            return keys, kept, format
    return None


def _names_in_messages(record: Record, keys: Mapping[str, str], shape: Shape) -> dict[str, str] | None:
    """What messages call role and content: ``{"role": "speaker", "content": "text"}``."""
    for name in shape.needs:
        value = record.get(keys.get(name, name))
        if isinstance(value, list | tuple) and value and isinstance(message := value[0], Mapping):
            texts = {str(key): text for key, text in message.items() if isinstance(text, str)}
            roles = [key for key, text in texts.items() if text in ROLES]
            contents = [key for key in texts if key not in roles and key not in PROVENANCE]
            return {"role": roles[0], "content": contents[0]} if len(roles) == len(contents) == 1 else None
    return None
