"""Recognizes the shape of a record by its keys."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from burnish.data.formats import PROVENANCE, SHAPES, At, BadRow, Record, Shape, empty, missing, shown
from burnish.errors import UserError, closest, did_you_mean
from burnish.types import Prompt, Row


def parse(
    record: Any,
    kinds: tuple[type[Any], ...],
    source: str,
    format: str | None = None,
    keys: Mapping[str, str] | None = None,
    keep: Collection[str] = (),
) -> Row:
    """Convert a record to a row.

    Args:
        record: a mapping, such as a line of a JSON lines file.
        kinds: the row classes to choose from, such as ``(Preference, Ranking)``.
        source: the place of the record, for messages: ``"chat.jsonl:17"``.
        format: the name of a shape (``alpaca``, ``sharegpt``, ...), needed if the keys fit several.
        keys: maps our names of keys to the file's names, ``{"prompt": "question"}``.
        keep: keys to ignore, in the record and in its messages and steps. Prompts keep them among their columns.

    Raises:
        BadRow: the record fits no shape, has a column that nothing reads, or has a wrong value. The message names the
            key and the most similar known one.
        UserError: no shape for ``kinds`` is named ``format``.
    """
    if not isinstance(record, Mapping):
        raise BadRow(source, "", "not a record", f"expected an object with keys, got {shown(record)}")
    record = _renamed(record, keys, source) if keys else record
    kept = {name: record[name] for name in keep if name in record}
    if kept:
        record = {name: value for name, value in record.items() if name not in kept}
    present = frozenset(key for key, value in record.items() if value is not None)
    fitting = _fitting(present, kinds, format)
    if len(fitting) == 1:
        at = At(source, keep=frozenset(keep))
        row = fitting[0].read(record, at)
        if not empty(record.get("tools")):
            detail = "the model would not see them; remove the column, or ignore it with data.keep: [tools]"
            raise at.inside("tools").bad("tools are not supported yet", detail)
        if not isinstance(row, Prompt):
            _nothing_unread(record, present, kinds, format, at)
        return replace(row, columns={**row.columns, **kept}) if kept and isinstance(row, Prompt) else row
    if fitting:
        names = ", ".join(shape.name for shape in fitting)
        raise BadRow(source, "", "fits several shapes", f"{names}: choose one with format")
    shapes = _shapes(kinds, format)
    name, detail = _nearest(record, present, shapes)
    choices = " | ".join(" + ".join(shape.needs) for shape in shapes)
    raise BadRow(source, name, "missing key" if name else "fits no shape", f"{detail} (shapes: {choices})")


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
    record: Record, present: frozenset[str], kinds: tuple[type[Any], ...], format: str | None, at: At
) -> None:
    """Raise a BadRow for the first column that nothing reads."""
    unread = _unread(present, kinds, format)
    if not unread:
        return
    names = [str(name) for name in record if name in unread]  # in the order of the file
    known = {name for shape in _shapes(kinds, None) for name in (*shape.needs, *shape.may)} | at.keep
    hint = did_you_mean(names[0], sorted(known - present))
    detail = f"remove it, or ignore it with data.keep: [{', '.join(names)}]{hint}"
    raise at.inside(names[0]).bad("unknown column", detail)


@functools.lru_cache(maxsize=1024)
def _unread(present: frozenset[str], kinds: tuple[type[Any], ...], format: str | None) -> frozenset[str]:
    (shape,) = _fitting(present, kinds, format)
    return present - PROVENANCE - {"tools", *shape.needs, *shape.may}


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
