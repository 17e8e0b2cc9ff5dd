"""Files that are damaged, hostile or merely odd: every one is read, or refused in one message, in time and memory."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from burnish.data.formats import SHAPES
from burnish.data.readers import BadRow, Rows, load
from burnish.errors import UserError
from burnish.methods import METHODS
from burnish.types import Preference, Ranking, Scored, Steps, Text
from hostile import Record, examples, try_all

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS, HUGE = "9" * 5000, "9" * 400
PAIRS = (Preference, Ranking)
GOOD = '{"prompt": "Hi", "chosen": "a", "rejected": "b"}'
HI = '"prompt": "Hi", "chosen": "a", "rejected": "b"'
MESSAGES = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]'

# A bad row as JSON, the kinds of rows of the file, the reason of the bad row.
ROWS: dict[str, tuple[str, tuple[type, ...], str]] = {
    "depth": (f'{{"prompt": {DEEP}}}', PAIRS, "not JSON"),
    "depth of a row": (DEEP, PAIRS, "not JSON"),
    "depth within the limit of the parser": (f'{{"prompt": {"[" * 200 + "]" * 200}}}', PAIRS, "nested too deeply"),
    "digits": (f'{{{HI}, "margin": {DIGITS}}}', PAIRS, "not JSON"),
    "digits in text": (f'{{{HI}, "margin": "{DIGITS}"}}', PAIRS, "not a finite number"),
    "400 digits: margin": (f'{{{HI}, "margin": {HUGE}}}', PAIRS, "too large for float32"),
    "400 digits: rank": (
        f'{{"prompt": "Hi", "completions": ["a", "b"], "ranks": [1, {HUGE}]}}',
        PAIRS,
        "too large for float32",
    ),
    "400 digits: reward": (f'{{"messages": {MESSAGES}, "reward": -{HUGE}}}', (Scored,), "too large for float32"),
    "400 digits: Q": (
        f'{{"instruction": "Hi", "output": [{{"step": "a", "Q": {HUGE}}}]}}',
        (Steps,),
        "too large for float32",
    ),
    "an exponent of 400": (f'{{{HI}, "margin": 1e400}}', PAIRS, "not a finite number"),
    "half of a surrogate pair": ('{"prompt": "Hi \\ud800", "chosen": "a", "rejected": "b"}', PAIRS, "not Unicode"),
    "half of a pair in a column's name": (f'{{{HI}, "\\udfff": 1}}', PAIRS, "not Unicode"),
    "half of a pair in a role": ('{"chosen": [{"role": "\\ud800", "content": "b"}]}', PAIRS, "not Unicode"),
}


def a_list(lines: list[str]) -> str:
    return "[" + ",\n".join(lines) + "]"


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(("bad", "kinds", "reason"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_a_row_beyond_the_limits_is_one_message_and_can_be_skipped(
    tmp_path: Path, name: str, bad: str, kinds: tuple[type, ...], reason: str
) -> None:
    kinds = (*kinds, Preference)
    lines = [GOOD, bad, GOOD]
    path = write(tmp_path / name, "\n".join(lines) if "jsonl" in name else a_list(lines))
    with pytest.raises(BadRow, match=rf"{name}:2: .*{reason}"):
        load(path, kinds)
    rows = load(path, kinds, on_bad_row="skip")
    assert [row.source for row in rows.rows] == [f"{path}:1", f"{path}:3"]
    assert rows.reasons == {reason: 1}


def test_the_same_values_in_cells(tmp_path: Path) -> None:
    steps = json.dumps([{"step": "a", "Q": 1}]).replace('"', '""')
    cells = [steps, DEEP, "[" * 200 + "]" * 200, f"[{DIGITS}]", '[""\\ud800""]', steps]
    path = write(tmp_path / "a.csv", "instruction,output\n" + "".join(f'Hi,"{cell}"\n' for cell in cells))
    rows = load(path, (Steps,), on_bad_row="skip")
    assert [row.source for row in rows.rows] == [f"{path}:2", f"{path}:7"]
    assert rows.reasons == {"not a list": 2, "nested too deeply": 1, "not Unicode": 1}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "checksum"])
def test_a_damaged_gzip_file_is_read_up_to_the_damage(tmp_path: Path, name: str, damage: str) -> None:
    noise = random.Random(0)
    texts = [f"{noise.random()}" for _ in range(20_000)]
    records = [json.dumps({"text": text}) for text in texts]
    path = tmp_path / name
    whole = {"a.json.gz": a_list(records), "a.csv.gz": "text\n" + "\n".join(texts)}
    body = gzip.compress(whole.get(name, "\n".join(records)).encode())
    half = len(body) // 2
    path.write_bytes(
        {
            "cut": body[:half],
            "changed": body[:half] + bytes(64) + body[half + 64 :],
            "checksum": body[:-8] + bytes(4) + body[-4:],
        }[damage]
    )
    with pytest.raises(BadRow, match=rf"{name}:\d+: "):
        load(path, (Text,))
    rows = load(path, (Text,), on_bad_row="skip")
    good = [row.text for row in rows.rows if isinstance(row, Text)]
    assert rows.skipped[-1].reason == "damaged file" or damage == "changed"
    assert rows.skipped[-1].message.endswith("nothing after it can be read")
    if damage != "changed":
        assert good == texts[: len(good)] and len(good) > len(texts) // 4 and len(rows.skipped) == 1


def test_a_list_that_breaks_off_and_quotes_that_are_not_closed(tmp_path: Path) -> None:
    for name, text, line in (
        ("a.json", '[{"text": "a"},\n{"text": "b"} {"text": "c"}]', 2),
        ("a.csv", 'text\na\nb\n"c\nd\n', 5),
    ):
        path = write(tmp_path / name, text)
        with pytest.raises(BadRow, match=rf"{name}:{line}: "):
            load(path, (Text,))
        rows = load(path, (Text,), on_bad_row="skip")
        assert [row.text for row in rows.rows if isinstance(row, Text)] == ["a", "b"]
        assert [row.source for row in rows.skipped] == [f"{path}:{line}"]


def test_lines_that_are_not_utf8_can_be_skipped_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,id\n"a\nb",1\n' + "é,2\n".encode("latin-1") + b"c,3\r\nd,4")
    rows = load(path, (Text,), on_bad_row="skip")
    assert [row.text for row in rows.rows if isinstance(row, Text)] == ["a\nb", "c", "d"]
    assert rows.reasons == {"not UTF-8": 1} and rows.skipped[0].source == f"{path}:4"


def test_a_line_of_a_gigabyte_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.data.readers._lines.__defaults__", (2**20,))
    path = write(tmp_path / "a.jsonl.gz", '{"text": "a"}\n' + " " * 2**22 + '\n{"text": "b"}\n')
    rows = load(path, (Text,), on_bad_row="skip")
    assert len(rows.rows) == 2 and rows.reasons == {"line too long": 1}


# --- generated ----------------------------------------------------------------------------------------------------

COLUMNS = sorted({name for shape in SHAPES for name in (*shape.needs, *shape.may)} | {"id", "tools", "x", "", "P"})
KEYS = ["role", "content", "from", "value", "step", "Q", "response", "overall_score", "weight", "P", "x"]
ROLES = ["user", "assistant", "system", "human", "gpt", "tool", "usr"]
SCALARS = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 0.5, 10**400, -(10**308), float("nan"), float("inf"), 1e308]),
    st.sampled_from(
        ["", " ", "Hi", "\ud800", "\x1b[31m", "[]", "{}", "[[", "nan", "1e999", "[/bold]", "\n\nHuman: Hi"]
    ),
    st.sampled_from(["\n\nHuman: Hi\n\nAssistant: Yes", '[{"step": "a", "Q": 1}]', '[{"role": "user"}]', HUGE, DIGITS]),
    st.sampled_from(ROLES),
    st.text(st.characters(), max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": SCALARS})
PLAIN_MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.sampled_from(["Hi", "", "[]"])})
RECORD = st.dictionaries(st.sampled_from(COLUMNS), VALUES | st.lists(MESSAGE, max_size=3), max_size=5)
KINDS = st.sampled_from([spec.kinds for spec in METHODS.values()])


def read_in_every_way(path: Path, kinds: tuple[type, ...]) -> None:
    """Load a file, and skip its bad rows. Nothing but a UserError may be raised, with a message that can be printed."""
    for on_bad_row in ("error", "skip"):
        try:
            rows = load(path, kinds, on_bad_row=on_bad_row)
        except UserError as error:
            str(error).encode()
            assert "\x1b" not in str(error)
        else:
            assert isinstance(rows, Rows) and all(isinstance(row, kinds) for row in rows.rows)
            repr(rows.rows).encode()  # no text that a tokenizer or a file cannot take


CHANCES = st.randoms(use_true_random=False)


def text_file(records: list[dict[str, Any]], name: str, changes: int, chance: random.Random) -> tuple[str, bytes]:
    """A file of records whose bytes are changed in a few places."""
    if name.startswith("a.csv"):
        cells = [
            [key, value if isinstance(value, str) else json.dumps(value)] for r in records for key, value in r.items()
        ]
        columns = [[cell.replace('"', '""') for cell in column] for column in zip(*cells, strict=True)]
        text = "\n".join(",".join(f'"{cell}"' for cell in row) for row in columns)
    else:
        lines = [json.dumps(record) for record in records]
        text = "\n".join(lines) if "jsonl" in name else a_list(lines)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if name.endswith("gz"):
        data = bytearray(gzip.compress(data))
    for _ in range(changes):
        at = chance.randrange(len(data) + 1)
        piece = chance.choice([b"", b"\xff", b'"', b"\n", b"{", b"\r", b"[" * 2000, bytes(chance.randrange(9))])
        data[at : at + chance.choice([0, 1, 50])] = piece
    return name, bytes(data)


def parquet_file(columns: dict[str, Any], changes: int, chance: random.Random) -> tuple[str, bytes]:
    """A Parquet file whose bytes are changed in a few places."""
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    data = bytearray(buffer.getvalue())
    for _ in range(changes):
        at = chance.randrange(len(data))
        data[at : at + chance.choice([0, 1, 50])] = chance.choice([b"", b"\xff", bytes(9)])
    return "a.parquet", bytes(data)


TEXT_FILES = st.builds(
    text_file,
    st.lists(RECORD, min_size=1, max_size=4),
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.json.gz", "a.csv.gz"]),
    st.integers(0, 2),
    CHANCES,
)
COLUMN = st.one_of(
    st.lists(st.sampled_from(["Hi", "", "[]"]), min_size=2, max_size=2),
    st.lists(st.integers(-5, 5) | st.none(), min_size=2, max_size=2),
    st.lists(st.lists(PLAIN_MESSAGE, max_size=2), min_size=2, max_size=2),
)
PARQUET_FILES = st.builds(
    parquet_file,
    st.dictionaries(st.sampled_from(COLUMNS), COLUMN, min_size=1, max_size=4),
    st.integers(0, 1),
    CHANCES,
)


@examples(few=60, many=450)
def test_any_text_file_is_read_or_refused(tmp_path: Path, examples: int, record_property: Record) -> None:
    def check(inputs: tuple[tuple[str, bytes], tuple[type, ...]]) -> None:
        (name, content), kinds = inputs
        (tmp_path / name).write_bytes(content)
        read_in_every_way(tmp_path / name, kinds)

    try_all(st.tuples(TEXT_FILES, KINDS), check, examples, record_property)


@examples(few=30, many=100)
def test_any_parquet_file_is_read_or_refused(tmp_path: Path, examples: int, record_property: Record) -> None:
    def check(inputs: tuple[tuple[str, bytes], tuple[type, ...]]) -> None:
        (name, content), kinds = inputs
        (tmp_path / name).write_bytes(content)
        read_in_every_way(tmp_path / name, kinds)

    try_all(st.tuples(PARQUET_FILES, KINDS), check, examples, record_property)


@examples(few=60, many=150)
def test_any_rows_in_memory_are_read_or_refused(examples: int, record_property: Record) -> None:
    def check(inputs: tuple[list[dict[str, Any]], tuple[type, ...]]) -> None:
        records, kinds = inputs
        for on_bad_row in ("error", "skip"):
            try:
                load(records, kinds, on_bad_row=on_bad_row)
            except UserError as error:
                str(error).encode()

    rows = st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=4), min_size=1, max_size=3)
    try_all(st.tuples(rows, KINDS), check, examples, record_property)
