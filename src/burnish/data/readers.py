"""Reads files into rows. Every row knows the file and line that it came from.

JSON, JSON lines and csv are read with the standard library, because ``datasets`` changes values: ``1`` next to ``2.5``
becomes ``1.0``, the text ``"2024-01-01"`` a timestamp, and ``"007"`` in a csv file the number 7. It also adds the keys
of other rows and does not know line numbers. Parquet and Arrow files, saved data sets and data sets of the hub store
their types, so ``datasets`` reads them; their rows have numbers instead of lines.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from burnish.data.formats import (
    DEEPEST,
    DUPLICATE,
    BadRow,
    BeyondLimits,
    Decoder,
    check_record,
    column_number,
    end_of_value,
    shown,
)
from burnish.data.recognition import parse
from burnish.errors import UserError, did_you_mean
from burnish.types import Row

__all__ = ["READERS", "BadRow", "Mixed", "Rows", "Skipped", "Unchanged", "load", "parse", "raw_records", "read"]

Located = tuple[str, Any]  # the place of a record, and the record
HUB = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?")
FIELD_LIMIT = 2**31 - 1
LONGEST_LINE = 2**28
OF_A_ROW = {"empty text", "empty conversation", "equal to chosen", "equal to another completion", "no assistant turn"}
"""Reasons of bad rows that a data set may have a few of."""
NOTHING_AFTER = "nothing after it can be read"


class Skipped(NamedTuple):
    """A row that was skipped: ``Skipped("chat.jsonl:17", "unknown role", "chat.jsonl:17: messages[0]: ...")``."""

    source: str
    reason: str
    message: str


class Mixed(NamedTuple):
    """A source of a mixture, its number of rows, and its draws in an epoch: ``Mixed("a.jsonl", 100, 250)``."""

    source: str
    rows: int
    drawn: int


@dataclass(frozen=True)
class Rows:
    """Rows that were read and rows that were skipped: ``Rows([Text("Once", "books.jsonl:1")], [])``."""

    rows: list[Row]
    skipped: list[Skipped]
    mixed: tuple[Mixed, ...] = ()
    """The sources, if there are several."""
    records: tuple[Mapping[str, Any], ...] = ()
    """All columns of each row, if ``load`` was asked for them."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many rows a selection has left out, by reason."""

    @property
    def reasons(self) -> Counter[str]:
        """Number of skipped rows by reason: ``{"unknown role": 2}``."""
        return Counter(skipped.reason for skipped in self.skipped)


def load(source: Any, kinds: tuple[type[Any], ...], *, records: bool = False, **options: Any) -> Rows:
    """Read all rows of a source.

    Args:
        source: as in ``read``.
        kinds: as in ``read``.
        records: also keep all columns of every row.
        options: further arguments of ``read``, such as ``on_bad_row="skip"``.

    Raises:
        UserError: as in ``read``, or the source has no good row.
    """
    name = str(source) if isinstance(source, str | Path) else "the rows"
    rows: list[Row] = []
    skipped: list[Skipped] = []
    columns: list[Mapping[str, Any]] = []
    for row, record in read_records(source, kinds, **options):
        if isinstance(row, Skipped):
            skipped.append(row)
            continue
        rows.append(row)
        if records:
            columns.append(record)
    if not rows:
        reason = (
            f": all {len(skipped)} rows were skipped, the first one because of {skipped[0].message}" if skipped else ""
        )
        raise UserError(f"{name}: no rows{reason}")
    return Rows(rows, skipped, records=tuple(columns))


def read(source: Any, kinds: tuple[type[Any], ...], **options: Any) -> Iterator[Row | Skipped]:
    """Iterate over the rows of a source, with skipped rows in their places; the arguments are those of read_records."""
    return (row for row, _ in read_records(source, kinds, **options))


def read_records(
    source: Any,
    kinds: tuple[type[Any], ...],
    *,
    format: str | None = None,
    keys: Mapping[str, str] | None = None,
    keep: Collection[str] = (),
    on_bad_row: Literal["error", "skip"] | None = None,
    limit: int | None = None,
    streaming: bool = False,
    number: str | None = None,
    any_column: bool = False,
) -> Iterator[tuple[Row | Skipped, Any]]:
    """Iterate over the rows of a source and the records that they were read from, with skipped rows in their places.

    JSON lines, csv and parquet files are read lazily, as are hub ids if ``streaming`` is set. A JSON list and a saved
    data set are read whole at the start.

    Args:
        source: a .jsonl, .json or .csv file (also .gz) or a .parquet file; a folder of such files, or one that
            ``datasets`` saved; a hub id, ``owner/name`` or ``owner/name/config``; or a list of dicts, or a
            ``datasets.Dataset``. A folder or hub id may end in ``:split``; the default is train.
        kinds: the row classes to read, such as ``(Preference, Ranking)``.
        format: the name of a shape, needed if the keys fit several.
        keys: maps our names of keys to the file's names, ``{"prompt": "question"}``.
        keep: columns to ignore. Without this, a column that nothing reads is an error. Prompts keep all columns.
        on_bad_row: ``skip`` yields a ``Skipped`` for a bad row; ``error`` stops at the first one, with the advice to
            set ``skip`` if that would help; None, where no such setting exists, stops without it. If a file breaks in
            the middle (a damaged .gz, a JSON list or the quotes of a csv file that are not closed), ``skip`` reads the
            rows before, and one ``Skipped`` says where it broke.
        limit: maximum number of good rows to read.
        streaming: read hub ids lazily.
        number: a column that must hold a number. It is not one of those that nothing reads.
        any_column: rows may have any columns, because the caller reads the records.

    Raises:
        UserError: the source cannot be read or changes while it is read, or a row is bad and ``on_bad_row`` is
            not ``skip``.
    """
    good = 0
    with Unchanged(source):
        for place, record in _records(source, streaming):
            if limit is not None and good >= limit:
                break
            try:
                if isinstance(record, BadRow):
                    raise record
                row = parse(record, kinds, place, format, keys, keep, number, any_column)
                if number is not None:
                    column_number(record, number, place)
            except BadRow as bad:
                if on_bad_row != "skip":
                    hint = "on_bad_row: skip skips such rows" if on_bad_row and bad.reason in OF_A_ROW else ""
                    raise BadRow(bad.source, bad.key, bad.reason, "; ".join(filter(None, (bad.detail, hint)))) from None
                yield Skipped(place, bad.reason, str(bad)), record
                continue
            good += 1
            yield row, record


def raw_records(source: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the records of a source with their places, before they are read as rows.

    Raises:
        UserError: as in ``read_records``, or a record is not an object with keys.
    """
    with Unchanged(source):
        for place, record in _records(source):
            if isinstance(record, BadRow):
                raise record
            if not isinstance(record, Mapping):
                raise BadRow(place, "", "not a record", f"expected an object with keys, got {shown(record)}")
            yield place, record


def _records(source: Any, streaming: bool = False) -> Iterator[Located]:
    """The records of a source with their places. An unreadable line gives a ``BadRow`` in place of a record."""
    if not isinstance(source, str | Path):
        return _numbered(source, "row ")
    path = Path(source)
    if path.is_file():
        return _file(path)
    place, split = _place(source)
    if Path(place).is_dir():
        return _folder(Path(place), split or "train")
    hub = HUB.fullmatch(place)
    if hub and Path(place).suffix not in (*READERS, ".gz"):
        return _hub(hub["path"], hub["config"], split or "train", streaming)
    hint = did_you_mean(path.name, [sibling.name for sibling in path.parent.glob("*")])
    raise UserError(f"{source}: no such file, folder or data set{hint}")


def _place(source: str | Path) -> tuple[str, str]:
    """A folder or hub id, and the split named after it: ``("owner/name", "test")``; ``""`` if none is named."""
    if Path(source).exists() or ":" not in str(source):
        return str(source), ""
    place, _, split = str(source).rpartition(":")
    return place, split


def files_of(source: Any) -> list[Path]:
    """The files that rows are read from; none for rows in memory or on the hub."""
    if not isinstance(source, str | Path):
        return []
    path = Path(_place(source)[0])
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (*READERS, ".gz", ".arrow"))


class Unchanged:
    """Checks that the files of a source do not change while they are read.

    Files are compared by inode, size and modification time. As a context manager, it checks them at the end, even
    after a UserError, which may be due to a file that was only half written.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.before = self._stamps()

    def _stamps(self) -> dict[Path, tuple[int, int, int]]:
        stats = [(file, file.stat()) for file in files_of(self.source)]
        return {file: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats}

    def __enter__(self) -> Unchanged:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, UserError):
            self.check()

    def check(self) -> None:
        """Raise a UserError for the first file that was changed, removed or added."""
        try:
            now = self._stamps()
        except OSError:  # a file was removed between the listing and its stat
            now = {}
        for file in sorted(self.before.keys() | now.keys()):
            if self.before.get(file) != now.get(file):
                raise UserError(
                    f"{file} changed while it was being read, so the rows may be a mixture of old and new ones: start "
                    "again when no other program writes to it"
                )


def _numbered(records: Iterable[Any], prefix: str) -> Iterator[Located]:
    if isinstance(records, Mapping):  # iterating over a DatasetDict gives the names of its splits
        raise UserError(f"rows must be a list or one split of a data set, got a mapping with keys {', '.join(records)}")
    places = ((f"{prefix}{number}", record) for number, record in enumerate(records, 1))
    return ((place, check_record(record, place)) for place, record in places)


# --- files --------------------------------------------------------------------------------------------------------


def _file(path: Path) -> Iterator[Located]:
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in READERS:
        raise UserError(f"{path}: {kind or 'no'} suffix: expected one of {', '.join(READERS)}, or these with .gz")
    return READERS[kind](path)


class Line(NamedTuple):
    """A line of a file, and what is wrong with its bytes: ``Line("a.csv:2", "caf?", BadRow("a.csv:2", ...))``."""

    place: str
    text: str
    bad: BadRow | None = None


def _lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[Line]:
    """The lines of a file. A compressed file that is damaged ends with a line that is bad.

    Raises:
        UserError: the operating system cannot read the file.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(longest), b""), 1):
                place = f"{path}:{number}"
                if len(line) == longest and not line.endswith(b"\n"):
                    while (rest := file.readline(longest)) and not rest.endswith(b"\n"):
                        pass
                    yield Line(place, "\n", BadRow(place, "", "line too long", f"more than {longest >> 20} MiB"))
                    continue
                try:
                    yield Line(place, line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except UnicodeDecodeError as error:
                    bad = BadRow(place, "", "not UTF-8", f"byte {error.start + 1} of the line")
                    yield Line(place, line.decode("utf-8", "replace"), bad)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        place = f"{path}:{number + 1}"
        yield Line(place, "", BadRow(place, "", "damaged file", f"{error}; {NOTHING_AFTER}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _jsonl(path: Path) -> Iterator[Located]:
    decoder = Decoder()
    for place, line, bad in _lines(path):
        if bad is not None:
            yield place, bad
        elif line.strip():
            try:
                yield place, _checked(decoder.decode(line), decoder, place, line)
            except json.JSONDecodeError as error:
                yield place, _not_json(place, line, error)


def _checked(record: Any, decoder: Decoder, place: str, text: str) -> Any:
    """The record that was just decoded from a text, or a ``BadRow`` if it has a duplicate key or a forbidden value."""
    if decoder.duplicates:
        return BadRow(place, decoder.duplicates[0], DUPLICATE, "write the key once")
    # Few texts need this check: those that may spell half of a surrogate pair, and those with many brackets.
    suspect = "\\ud" in text or "\\uD" in text or text.count("{") + text.count("[") > DEEPEST
    return check_record(record, place) if suspect else record


def _not_json(place: str, text: str, error: json.JSONDecodeError, note: str = "") -> BadRow:
    around = repr(text[max(0, error.pos - 20) : error.pos + 20])
    return BadRow(place, "", "not JSON", f"{error.msg} at column {error.colno}: {around}{note}")


def _json(path: Path) -> Iterator[Located]:
    """A list of records. A file that does not begin with ``[`` is read as JSON lines.

    If the list breaks off, the records before are read, and the break is a bad row.
    """
    text, broken = _whole(path)
    if not text.lstrip().startswith("["):
        yield from _jsonl(path)
        return
    decoder = Decoder()
    position, line, counted = text.index("[") + 1, 1, 0  # newlines before ``counted`` are in ``line``
    try:
        while True:
            position = _past_space(text, position)
            if text.startswith("]", position):
                break
            line, counted = line + text.count("\n", counted, position), position
            place = f"{path}:{line}"
            try:
                record, end = decoder.raw_decode(text, position)
                record = _checked(record, decoder, place, text[position:end])
            except BeyondLimits as error:
                record, end = _not_json(place, text, error), end_of_value(text, position)
            yield place, record
            position = _past_space(text, end)
            if not text.startswith(",", position):
                break
            position += 1
        if not text.startswith("]", position) or text[position + 1 :].strip():
            raise json.JSONDecodeError("Expecting ',' or the end of the list", text, position)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}"
        broken = broken or _not_json(place, text, error, f"; {NOTHING_AFTER}")
    if broken is not None:
        yield broken.source, broken


def _whole(path: Path) -> tuple[str, BadRow | None]:
    """The text of a file up to the first line that cannot be read, and what is wrong with that line."""
    pieces = []
    for place, line, bad in _lines(path, longest=-1):
        if bad is not None:
            rest = "" if NOTHING_AFTER in str(bad) else f"; {NOTHING_AFTER}"
            return "".join(pieces), BadRow(place, "", bad.reason, bad.detail + rest)
        pieces.append(line)
    return "".join(pieces), None


def _past_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _csv(path: Path) -> Iterator[Located]:
    """Rows of a csv file with a header. Cells are text, exactly as in the file; an empty cell is a missing value.

    After a mistake in its quotes, nothing is read, because every later line could be a part of a cell.
    """
    csv.field_size_limit(FIELD_LIMIT)
    bad: list[BadRow] = []  # of the lines of the current row

    def lines() -> Iterator[str]:
        for line in _lines(path):
            if line.bad is not None:
                bad.append(line.bad)
            # Rows may also end in a carriage return alone.
            yield from io.StringIO(line.text, newline="") if "\r" in line.text else (line.text,)

    reader = csv.reader(lines(), strict=True)
    try:
        header = next(reader, [])
        if bad:
            yield bad[0].source, bad[0]
            return
        duplicates = [name for name, count in Counter(header).items() if count > 1]
        if duplicates:
            raise UserError(f"{path}:1: {duplicates[0]}: two columns have this name")
        start = reader.line_num + 1
        for cells in reader:
            place, start = f"{path}:{start}", reader.line_num + 1
            if bad:
                yield place, bad[0]
                bad.clear()
            elif cells and len(cells) != len(header):
                yield place, BadRow(place, "", "wrong number of cells", f"{len(cells)}, the header has {len(header)}")
            elif cells:
                yield place, {name: cell or None for name, cell in zip(header, cells, strict=True)}
    except csv.Error as error:
        place = f"{path}:{reader.line_num}"
        yield place, bad[0] if bad else BadRow(place, "", "not csv", f"{error}; {NOTHING_AFTER}")


# --- datasets -----------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Located]:
    import datasets
    import pyarrow
    from datasets.exceptions import DatasetsError

    done = 0
    try:
        # Streaming reads the file itself, without a copy in the cache.
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for done, record in enumerate(rows, 1):
            yield f"{path}:{done}", check_record(record, f"{path}:{done}")
    except (OSError, ValueError, pyarrow.ArrowException, DatasetsError) as error:
        if done == 0:
            raise UserError(f"{path}: cannot be read: {error}") from error
        place = f"{path}:{done + 1}"
        yield place, BadRow(place, "", "damaged file", f"{error}; {NOTHING_AFTER}")


def _folder(path: Path, split: str) -> Iterator[Located]:
    import datasets
    from datasets.exceptions import DatasetsError

    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            saved = _one_of(saved, split, str(path))
        return _numbered(saved, f"{path}:")
    try:
        files = datasets.load_dataset_builder(str(path)).config.data_files
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"{path}: no rows: {error}") from error
    return itertools.chain.from_iterable(_file(Path(file)) for file in _one_of(files or {}, split, str(path)))


def _hub(path: str, config: str | None, split: str, streaming: bool) -> Iterator[Located]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(path, config, split=split, streaming=streaming)
    except (OSError, ValueError, DatasetsError) as error:
        offline = datasets.config.HF_HUB_OFFLINE  # pyright: ignore[reportAttributeAccessIssue]
        reason = "HF_HUB_OFFLINE is set, and it is not in the cache" if offline else error
        raise UserError(f"{path}: no such file or folder, and it could not be read from the hub: {reason}") from error
    return _numbered(rows, f"{path}:")


def _one_of(splits: Mapping[Any, Any], split: str, name: str) -> Any:
    if split not in splits:
        suggestion = f"{name}:{next(iter(splits))}" if splits else "another folder"
        raise UserError(f"{name}: no split {split!r}; it has {', '.join(map(str, splits)) or 'none'}: try {suggestion}")
    return splits[split]


READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
