"""Rows: every shape of a file, every error with its place, and no row or column lost silently."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from burnish.data.readers import BadRow, load, parse, read
from burnish.errors import UserError
from burnish.types import Conversation, Message, Preference, Prompt, Ranking, Text

USER: Message = {"role": "user", "content": "Hi"}
YES: Message = {"role": "assistant", "content": "Hello"}
NO: Message = {"role": "assistant", "content": "Go away"}
SYSTEM: Message = {"role": "system", "content": "Be kind"}


def parsed(*args: Any, **options: Any) -> Any:
    return parse(*args, **options)


def loaded(*args: Any, **options: Any) -> list[Any]:
    return list(load(*args, **options).rows)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "start"),
    [
        ({"messages": [USER, YES]}, None),
        ({"messages": json.dumps([USER, YES])}, None),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, None),
        ({"prompt": "Hi", "completion": "Hello"}, 1),
        ({"prompt": [USER], "completion": [YES]}, 1),
        ({"prompt": [USER], "completion": "Hello"}, 1),
        ({"prompt": [USER, YES]}, None),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, 1),
        ({"system_prompt": "", "question": "Hi", "response": "Hello", "id": 7}, 1),
    ],
)
def test_every_shape_of_a_conversation(record: dict[str, Any], start: int | None) -> None:
    assert parsed(record, (Conversation,), "a:1") == Conversation((USER, YES), start, "a:1")


def test_alpaca_input_and_system_prompts_are_kept() -> None:
    row = parsed({"instruction": "Add", "input": "1 2", "output": "3", "system": "Be kind"}, (Conversation,), "a:1")
    assert [message["content"] for message in row.messages] == ["Be kind", "Add\n\n1 2", "3"]
    assert row.completion_start == 2
    orca = parsed({"system_prompt": "Be kind", "question": "Hi", "response": "Hello"}, (Conversation,), "a:1")
    assert orca == Conversation((SYSTEM, USER, YES), 2, "a:1")
    share = {
        "system": "Be kind",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
    }
    assert parsed(share, (Conversation,), "a:1").messages == (SYSTEM, USER, YES)


@pytest.mark.parametrize(
    "record",
    [
        {"input": "Hi", "output": "Hello"},
        {"input": [USER], "output": [YES]},
    ],
)
def test_openrlhf_keys(record: dict[str, Any]) -> None:
    row = parsed(record, (Conversation,), "a:1", keys={"prompt": "input", "completion": "output"})
    assert row == Conversation((USER, YES), 1, "a:1")
    assert parsed({"input": [USER, YES]}, (Conversation,), "a:1", keys={"messages": "input"}).messages == (USER, YES)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "Hi", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"},
    ],
)
def test_every_shape_of_a_preference(record: dict[str, Any]) -> None:
    assert parsed(record, (Preference, Ranking), "a:1") == Preference((USER,), (YES,), (NO,), None, None, "a:1")


def test_transcripts_share_all_their_common_turns() -> None:
    head = "\n\nHuman: One?\n\nAssistant: Two.\nThree.\n\nHuman: Hi\n\nAssistant:"
    row = parsed({"chosen": head + " Hello", "rejected": head + " Go away"}, (Preference,), "a:1")
    assert [m["content"] for m in row.prompt] == ["One?", "Two.\nThree.", "Hi"]
    assert (row.chosen, row.rejected) == ((YES,), (NO,))


def test_margin_and_soft_label() -> None:
    record = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away", "margin": 2, "p_chosen": 0.75}
    row = parsed(record, (Preference,), "a:1")
    assert (row.margin, row.p_chosen) == (2.0, 0.75)


def test_rankings_by_rank_and_by_score() -> None:
    answers = {"prompt": "Hi", "completions": ["Hello", [NO]]}
    ranks = parsed(answers | {"ranks": [1, 2]}, (Preference, Ranking), "a:1")
    assert ranks == Ranking((USER,), ((YES,), (NO,)), (-1.0, -2.0), "a:1")
    scores = parsed(answers | {"scores": [0.5, -3]}, (Preference, Ranking), "a:1")
    assert scores.scores == (0.5, -3.0)


@pytest.mark.parametrize("key", ["prompt", "query"])
def test_prompts_keep_their_other_columns(key: str) -> None:
    columns = {"answer": 42, "when": "2024-01-01", "nested": {"a": None}}
    assert parsed({key: "Hi"} | columns, (Prompt,), "a:1") == Prompt((USER,), columns, "a:1")
    assert parsed({key: [SYSTEM, USER]}, (Prompt,), "a:1") == Prompt((SYSTEM, USER), {}, "a:1")


def test_text() -> None:
    assert parsed({"text": "Once"}, (Text,), "a:1") == Text("Once", "a:1")


CONVERSATIONS = (Conversation,)
PREFERENCES = (Preference, Ranking)


@pytest.mark.parametrize(
    ("record", "kinds", "place", "message"),
    [
        ({"promt": "Hi", "completion": "x"}, CONVERSATIONS, "prompt", "'promt', 'completion': did you mean 'prompt'?"),
        ({"instructon": "Hi", "output": "x"}, CONVERSATIONS, "instruction", "'instructon', 'output': did you mean 'in"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            CONVERSATIONS,
            "messages[0]",
            "did you mean 'assistant'",
        ),
        ({"messages": [{"rol": "user", "content": "x"}]}, CONVERSATIONS, "messages[0]", "did you mean 'role'"),
        ({"messages": []}, CONVERSATIONS, "messages", "empty conversation"),
        ({"messages": [USER]}, CONVERSATIONS, "messages", "no assistant turn"),
        ({"messages": [USER, YES, USER]}, CONVERSATIONS, "messages", "last message is not by the assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, CONVERSATIONS, "messages[1].content", "empty"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, CONVERSATIONS, "messages[1].content", "not text"),
        ({"messages": [USER, YES | {"tool_calls": [1]}]}, CONVERSATIONS, "messages[1].tool_calls[0]", "not an object"),
        ({"messages": [USER | {"tool_calls": [1]}, YES]}, CONVERSATIONS, "messages[0]", "'tool_calls' would be lost"),
        ({"prompt": "Hi"}, CONVERSATIONS, "completion", "missing key"),
        ({"messages": [USER, YES], "conversations": []}, CONVERSATIONS, "fits several", "messages, sharegpt"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, PREFERENCES, "rejected", "equal to chosen"),
        ({"chosen": [USER, YES], "rejected": [USER, YES]}, PREFERENCES, "rejected", "equal to chosen"),
        ({"chosen": "a", "rejected": "b"}, PREFERENCES, "chosen", "not a transcript"),
        ({"chosen": [YES], "rejected": [NO]}, PREFERENCES, "chosen", "no common prompt"),
        ({"chosen": [USER], "rejected": [USER, NO]}, PREFERENCES, "chosen", "no answer after the common prompt"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b", "margin": -1}, PREFERENCES, "margin", "below 0"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b", "p_chosen": 1.5}, PREFERENCES, "p_chosen", "outside [0, 1]"),
        ({"prompt": "Hi", "completions": ["a", "b"], "scores": [1, float("nan")]}, PREFERENCES, "scores[1]", "finite"),
        (
            {"prompt": "Hi", "completions": ["a", "b"], "scores": [1]},
            PREFERENCES,
            "scores",
            "2 completions and 1 scores",
        ),
        (
            {"prompt": "Hi", "completions": ["a", "a"], "ranks": [1, 2]},
            PREFERENCES,
            "completions[1]",
            "equal to another",
        ),
        ({"prompt": [USER, YES]}, (Prompt,), "prompt", "ends with the assistant"),
        (["Hi"], (Prompt,), "not a record", "an object with keys"),
    ],
)
def test_errors_name_the_place_and_the_key(record: Any, kinds: tuple[type, ...], place: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(record, kinds, "chat.jsonl:17")
    assert str(caught.value).startswith(f"chat.jsonl:17: {place}")
    assert message in str(caught.value)


def test_format_chooses_between_shapes_and_is_checked() -> None:
    record = {"messages": [USER, YES], "conversations": [USER, NO]}
    assert parsed(record, CONVERSATIONS, "a:1", format="sharegpt", keep=["messages"]).messages == (USER, NO)
    with pytest.raises(UserError, match=r"a:1: messages: unknown column"):
        parsed(record, CONVERSATIONS, "a:1", format="sharegpt")
    with pytest.raises(UserError, match=r"did you mean 'alpaca'"):
        parsed(record, CONVERSATIONS, "a:1", format="alpacca")


def test_renames_do_not_hide_a_column() -> None:
    record = {"question": "Hi", "prompt": "hidden"}
    with pytest.raises(UserError, match=r"a:1: prompt: two columns have this name"):
        parsed(record, (Prompt,), "a:1", keys={"prompt": "question"})
    row = parsed(record, (Prompt,), "a:1", keys={"prompt": "question", "old": "prompt"})
    assert row == Prompt((USER,), {"old": "hidden"}, "a:1")
    with pytest.raises(UserError, match=r"did you mean 'qestion'"):
        parsed(record, (Prompt,), "a:1", keys={"prompt": "qestion"})


# --- files --------------------------------------------------------------------------------------------------------


def test_blank_lines_count_in_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "Hi"}\r\n\n{"prompt": "a\u2028b", "n": 1}\n\n\n{"prompt": "Hi", "n": 2.5}')
    rows = loaded(path, (Prompt,))
    assert [row.source for row in rows] == [f"{path}:{line}" for line in (1, 3, 6)]
    assert rows[1].messages[0]["content"] == "a\u2028b"


def test_values_are_read_exactly_as_written(tmp_path: Path) -> None:
    columns = [
        {"n": 1, "when": "2024-01-01", "x": [1, "a"]},
        {"n": 2.5, "when": "2024-01-02", "x": {"k": 1}},
        {"n": "7"},
    ]
    path = write(tmp_path / "a.jsonl", *({"prompt": "Hi"} | record for record in columns))
    read = [row.columns for row in loaded(path, (Prompt,))]
    assert read == columns
    assert [type(record["n"]) for record in read] == [int, float, str]


def test_a_json_list_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n  {"text": "a"},\n  {\n    "text": "b"\n  }, {"text": "c"}\n]\n')
    assert [(row.text, row.source) for row in loaded(path, (Text,))] == [
        ("a", f"{path}:2"),
        ("b", f"{path}:3"),
        ("c", f"{path}:5"),
    ]
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [row.source for row in loaded(path, (Text,))] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    "text", ['[{"text": "a"},\n{"text" "b"}]', '[{"text": "a"}\n{"text": "b"}]', '[{"text": "a"}\n']
)
def test_a_broken_json_list_names_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a.json:2: not JSON"):
        load(path, (Text,))


def test_a_broken_line_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b"\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:3: not JSON"):
        load(path, (Text,))
    result = load(path, (Text,), on_bad_row="skip")
    assert [row.source for row in result.rows] == [f"{path}:1"]
    assert result.reasons == {"not JSON": 1, "not UTF-8": 1}


TWICE = '{"prompt": "Hi", "prompt": "Ho", "completion": "Hello"}'
NESTED = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "content": "b"}]}'
GOOD = '{"prompt": "Hi", "completion": "Hello"}'


@pytest.mark.parametrize(("bad", "key"), [(TWICE, "prompt"), (NESTED, "content")])
@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "json.gz"])
def test_a_duplicate_key_is_a_bad_row(tmp_path: Path, ending: str, bad: str, key: str) -> None:
    path = tmp_path / f"a.{ending}"
    lines = (GOOD, bad, GOOD)
    text = "[" + ",\n".join(lines) + "]" if ending.startswith("json.") or ending == "json" else "\n".join(lines)
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    with pytest.raises(BadRow, match=rf"a.{ending}:2: {key}: duplicate key"):
        load(path, CONVERSATIONS)
    result = load(path, CONVERSATIONS, on_bad_row="skip")
    assert [row.source for row in result.rows] == [f"{path}:1", f"{path}:3"]
    assert result.reasons == {"duplicate key": 1}


def test_a_duplicate_key_in_a_csv_cell_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cell = json.loads(NESTED)["messages"]
    text = NESTED.partition(": ")[2][:-1].replace('"', '""')
    path.write_text(f'messages\n"{text}"\n')
    assert json.loads(text.replace('""', '"')) == cell
    with pytest.raises(BadRow, match=r"a.csv:2: messages: duplicate key: 'content'"):
        load(path, CONVERSATIONS)


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "depth"])
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_json_beyond_the_limits_of_the_parser_is_named(tmp_path: Path, value: str, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    bad = f'{{"text": {value}}}'
    path.write_text(f'[{{"text": "a"}},\n{bad}]' if ending == "json" else f'{{"text": "a"}}\n{bad}\n')
    with pytest.raises(UserError, match=rf"a.{ending}:2: not JSON"):
        load(path, (Text,))


def test_a_column_of_mixed_types_names_line_and_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a"}, {"text": 3})
    with pytest.raises(UserError, match=r"a.jsonl:2: text: not text: expected a string, got int 3"):
        load(path, (Text,))


def test_skipped_rows_are_counted_and_listed(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "usr", "content": "x"}]}
    path = write(tmp_path / "a.jsonl", {"messages": [USER, YES]}, bad, {"messages": [USER]}, bad)
    result = load(path, CONVERSATIONS, on_bad_row="skip")
    assert len(result.rows) == 1
    assert result.reasons == {"unknown role": 2, "no assistant turn": 1}
    assert [skipped.source for skipped in result.skipped] == [f"{path}:{line}" for line in (2, 3, 4)]
    with pytest.raises(UserError, match=r"all 1 rows were skipped.*usr"):
        load([bad], CONVERSATIONS, on_bad_row="skip")


def test_csv_cells_are_text_and_lines_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer,hint\n"two\nlines",007,NA\n\nHi,,x\n')
    rows = loaded(path, (Prompt,))
    assert [(row.source, row.columns) for row in rows] == [
        (f"{path}:2", {"answer": "007", "hint": "NA"}),
        (f"{path}:5", {"answer": None, "hint": "x"}),
    ]
    path.write_text("prompt,answer\nHi\n")
    with pytest.raises(UserError, match=r"a.csv:2: wrong number of cells"):
        load(path, (Prompt,))


def test_parquet_gzip_folders_and_datasets_are_read(tmp_path: Path) -> None:
    records = [{"messages": [USER, YES]}, {"messages": [SYSTEM, USER, NO]}]
    expected = [(USER, YES), (SYSTEM, USER, NO)]
    rows = datasets.Dataset.from_list(records)
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", *records)
    write(tmp_path / "folder" / "test.jsonl", records[0])
    for source in (*(tmp_path / name for name in ("a.parquet", "saved", "a.jsonl.gz", "folder")), rows, records):
        assert [row.messages for row in loaded(source, CONVERSATIONS)] == expected
    assert loaded(tmp_path / "a.parquet", CONVERSATIONS)[1].source == f"{tmp_path}/a.parquet:2"
    assert loaded(rows, CONVERSATIONS)[1].source == "row 2"
    assert loaded(f"{tmp_path}/folder:test", CONVERSATIONS)[0].source == f"{tmp_path}/folder/test.jsonl:1"
    assert len(loaded(records, CONVERSATIONS, limit=1)) == 1
    with pytest.raises(UserError, match=r"no split 'dev'; it has train, test"):
        load(f"{tmp_path}/folder:dev", CONVERSATIONS)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "chat.jsonl", {"text": "a"})
    with pytest.raises(UserError, match=r"no such file.*did you mean .*chat.jsonl"):
        load(tmp_path / "caht.jsonl", (Text,))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"a.parquet: cannot be read"):
        load(tmp_path / "a.parquet", (Text,))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"suffix: expected one of .jsonl"):
        load(tmp_path / "a.txt", (Text,))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty.jsonl: no rows"):
        load(tmp_path / "empty.jsonl", (Text,))


def rewrite(path: Path) -> None:
    """The same text in place, at another time."""
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replace(path: Path) -> None:
    """Another file of the same size and time in its place."""
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


def append(path: Path) -> None:
    """More bytes, at the same time."""
    stat = path.stat()
    with path.open("ab") as file:
        file.write(b"\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [rewrite, replace, append, Path.unlink])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.parquet", "folder/train.jsonl"])
@pytest.mark.parametrize("limit", [None, 2])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, name: str, change: Callable[[Path], None], limit: int | None
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    records = [{"text": f"row {i}"} for i in range(3)]
    text = {"json": json.dumps(records), "csv": "text\na\nb\nc\n"}.get(name[2:], "\n".join(map(json.dumps, records)))
    if name == "a.parquet":
        datasets.Dataset.from_list(records).to_parquet(path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    source = path.parent if name.startswith("folder") else path
    assert len(loaded(source, (Text,), limit=limit)) == (limit or 3)
    rows = read(source, (Text,), limit=limit)
    next(rows)
    change(path)
    with pytest.raises(UserError, match=rf"{path} changed while it was being read"):
        list(rows)


def test_a_file_added_to_a_folder_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "train-1.jsonl", {"text": "a"})
    rows = read(tmp_path, (Text,))
    next(rows)
    write(tmp_path / "train-2.jsonl", {"text": "b"})
    with pytest.raises(UserError, match=r"train-2.jsonl changed while it was being read"):
        list(rows)


def test_a_prompt_is_told_apart_from_a_conversation_in_the_same_column() -> None:
    kinds = (Prompt, Conversation)
    assert parsed({"prompt": "Hi", "answer": "4"}, kinds, "a:1") == Prompt((USER,), {"answer": "4"}, "a:1")
    assert parsed({"prompt": [USER, YES, USER]}, kinds, "a:1") == Prompt((USER, YES, USER), {}, "a:1")
    assert parsed({"prompt": [USER, YES]}, kinds, "a:1") == Conversation((USER, YES), None, "a:1")
    assert parsed({"prompt": "Hi", "completion": "Hello"}, kinds, "a:1") == Conversation((USER, YES), 1, "a:1")
    with pytest.raises(UserError, match="a:1: answer: unknown column"):
        parsed({"prompt": [USER, YES], "answer": "4"}, kinds, "a:1")
