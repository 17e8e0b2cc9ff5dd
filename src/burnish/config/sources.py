"""Reads a stage's rows: from one source or a mixture, all at once or as a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from burnish.config.schema import Data, Part, Recipe, Stage, StageData, method_spec
from burnish.data import mixing, selection
from burnish.data import readers as rows
from burnish.data.selection import Select
from burnish.data.streaming import RowStream, Source
from burnish.errors import UserError
from burnish.files import expanded
from burnish.types import Config, Conversation, Prompt, Row, Scored, Steps, Text


def data_reference(source: str | Config, folder: Path) -> str:
    """A data source as a file, a folder or a hub id."""
    if isinstance(source, StageData):
        return str(folder / source.stage / "data" / source.file)
    return str(expanded(str(source))) if str(source).startswith("~") else str(source)


def references(data: Data, split: str, folder: Path) -> list[str]:
    """The files, folders and hub ids of a split."""
    return [data_reference(part.source, folder) for part in data.parts(split)]


def overlap(data: Data, folder: Path) -> str | None:
    """A warning if ``data.train`` also reads ``data.eval``, otherwise None."""
    if data.eval is None:
        return None
    ((held_out,), trained) = references(data, "eval", folder), references(data, "train", folder)
    if not any(_same(held_out, name) for name in trained):
        return None
    return (
        f"warning: data.eval is {held_out}, which data.train reads too: its results measure how well the model learned "
        "these rows, not how well it generalizes"
    )


def in_training(rows_read: list[Row], recipe: Recipe, stage: Stage) -> str | None:
    """A warning if earlier stages train on the prompts or texts of these rows, otherwise None.

    Training rows are read from the files that exist now. Data sets on the hub are not compared. With an environment, a
    prompt is the same if its columns are, too, because they decide what the environment does.
    """
    asked_in = partial(_asked, columns=stage.acts)
    held_out = {asked_in(row): row.source for row in reversed(rows_read)}
    found: dict[tuple[str, str], set[bytes]] = {}
    by_stage: dict[str, set[bytes]] = {}
    for earlier in takewhile(lambda one: one.name != stage.name, recipe.stages):
        if earlier.method is None or earlier.makes_rows or earlier.data is None:
            continue
        data, kinds = earlier.data, method_spec(earlier.method.name).kinds
        for part, name in zip(data.parts("train"), references(data, "train", recipe.folder), strict=True):
            settings = _settings(data, part)
            key = (name, repr((kinds, settings)))
            if key not in found and rows.files_of(name):
                found[key] = set()
                with suppress(UserError):  # the stage has read it; what was changed since is not compared
                    again = rows.read(name, kinds, number=_number(data), **settings)
                    found[key] |= {
                        asked
                        for row in again
                        if not isinstance(row, rows.Skipped) and (asked := asked_in(row)) in held_out
                    }
            by_stage.setdefault(earlier.name, set()).update(found.get(key, ()))
    seen = set().union(*by_stage.values())
    if not seen:
        return None
    count = sum(asked_in(row) in seen for row in rows_read)
    names = [name for name, asked in by_stage.items() if asked]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    first = next(row.source for row in rows_read if asked_in(row) in seen)
    return (
        f"warning: {count:,} of {len(rows_read):,} rows have a prompt or text that is among the training rows of "
        f"{', '.join(names[:3])}{more}, the first is {first}: on these rows, the results measure how well the model "
        "learned them, not how well it generalizes"
    )


def _asked(row: Row, columns: bool) -> bytes:
    """A digest of a row's prompt: its messages before the first assistant turn. Of a text, that of the whole text.

    With ``columns``, the digest of a prompt includes its columns.
    """
    if isinstance(row, Text):
        prompt: Any = row.text
    elif columns and isinstance(row, Prompt):
        prompt = [list(row.messages), dict(row.columns)]
    elif isinstance(row, Conversation | Scored | Prompt):
        prompt = list(takewhile(lambda message: message["role"] != "assistant", row.messages))
    else:
        prompt = list(row.question if isinstance(row, Steps) else row.prompt)
    return hashlib.blake2b(json.dumps(prompt, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _same(one: str, other: str) -> bool:
    """Whether two references name the same file, folder or hub id."""
    if Path(one).exists() and Path(other).exists():
        return Path(one).samefile(other)
    return one.removesuffix(":train") == other.removesuffix(":train")


def read(
    data: Data,
    split: str,
    folder: Path,
    kinds: tuple[type[Any], ...],
    seed: int,
    *,
    records: bool = False,
    any_column: bool = False,
) -> rows.Rows:
    """Read the rows of a split, with their records if these are wanted. Several sources are mixed by their weights.

    With ``any_column``, rows may have columns that nothing reads.

    Raises:
        UserError: if a source cannot be read or has no valid row, or if a row is invalid and must not be skipped.
    """
    parts, names = data.parts(split), references(data, split, folder)
    select = None if split == "eval" else data.select
    number = _number(data) if select is not None else None
    reads = [
        rows.Rows([], [])
        if split != "eval" and _made_empty(part, name)
        else rows.load(
            name,
            kinds,
            records=records or number is not None,
            number=number,
            any_column=any_column,
            **_settings(data, part),
        )
        for part, name in zip(parts, names, strict=True)
    ]
    skipped = [one for read in reads for one in read.skipped]
    left_out: Mapping[str, int] = {}
    if select is not None:
        reads, left_out = _selected(reads, select)
    used = [(read, part, name) for read, part, name in zip(reads, parts, names, strict=True) if read.rows]
    weights = [part.weight for _, part, _ in used if part.weight is not None]
    if len(used) > 1:
        whole = mixing.mix([read for read, _, _ in used], [name for _, _, name in used], weights or None, seed)
    else:
        whole = used[0][0] if used else rows.Rows([], [])
    return replace(whole, skipped=skipped, left_out=left_out)


def _made_empty(part: Part, name: str) -> bool:
    """Whether an earlier stage has made no row, for example because a filter let none pass."""
    return isinstance(part.source, StageData) and Path(name).is_file() and not Path(name).stat().st_size


def _number(data: Data) -> str | None:
    """The column of scores that ``data.select`` reads, if it reads any."""
    return data.select.key if data.select is not None and data.select.reads_scores else None


def _selected(reads: list[rows.Rows], select: Select) -> tuple[list[rows.Rows], Mapping[str, int]]:
    """Select from the rows of all sources together. Each source keeps its own."""
    everything = [row for read in reads for row in read.rows]
    scores = [float(record[select.key]) for read in reads for record in read.records] if select.reads_scores else []
    kept, left_out = selection.select(everything, scores, select)
    chosen, parts, start = set(kept), [], 0
    for read in reads:
        mine = [i - start for i in range(start, start + len(read.rows)) if i in chosen]
        records = tuple(read.records[i] for i in mine) if read.records else ()
        parts.append(replace(read, rows=[read.rows[i] for i in mine], records=records))
        start += len(read.rows)
    return parts, left_out


def stream(data: Data, folder: Path, kinds: tuple[type[Any], ...]) -> RowStream:
    """Open the training rows as a stream."""
    sources = []
    for part, name in zip(data.parts("train"), references(data, "train", folder), strict=True):
        again: partial[Iterator[Any]] = partial(rows.read, name, kinds, streaming=True, **_settings(data, part))
        sources.append(Source(name, again, part.weight, rows.Unchanged(name)))
    return RowStream(sources, data.shuffle_buffer)


def _settings(data: Data, part: Part) -> dict[str, Any]:
    shared = {"keep": data.keep, "on_bad_row": data.on_bad_row}
    return {"format": part.format, "keys": part.keys, "limit": part.limit} | shared
