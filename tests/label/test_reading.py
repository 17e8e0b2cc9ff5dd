"""Rows of every shape become tasks, and the exports of other tools come with their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.errors import UserError
from burnish.label.reading import read
from burnish.label.tasks import Task, pairwise
from burnish.types import Message, Messages


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def texts(task: Task) -> list[str]:
    return [completion[0]["content"] for completion in task.completions]


def test_rankings_pairs_and_plain_completions(tmp_path: Path) -> None:
    given = read(
        write(
            tmp_path / "rows.jsonl",
            {"prompt": "p", "completions": ["a", "b"], "scores": [2, 1], "topic": "x", "meta": {"old": 1}},
            {"prompt": [user("q")], "completions": ["a", "b", "a", "c"]},  # "a" is shown once
            {"prompt": "r", "chosen": "a", "rejected": "b", "p_chosen": 0.75},
            {"instruction": "s", "input": "t", "chosen": "a", "rejected": "b"},
        )
    )
    assert [task.prompt for task in given.tasks] == [(user("p"),), (user("q"),), (user("r"),), (user("s\n\nt"),)]
    assert [texts(task) for task in given.tasks] == [["a", "b"], ["a", "b", "c"], ["a", "b"], ["a", "b"]]
    assert [task.meta for task in given.tasks] == [{"old": 1, "topic": "x"}, {}, {"p_chosen": 0.75}, {}]
    assert [task.details for task in given.tasks] == [({"score": 2.0}, {"score": 1.0}), (), (), ()]
    assert given.left_out == [] and given.answers == []


def test_samples_of_a_prompt_are_one_task_wherever_they_are(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "a", "score": 1.0, "id": "0-0", "meta": {"answer": "7"}},
        {"prompt": "q", "completion": "a", "score": 0.0, "id": "1-0", "meta": {"answer": "8"}},
        {"prompt": "p", "completion": "b", "score": 0.5, "id": "0-1", "meta": {"answer": "7"}},
        {"prompt": "p", "completion": "a", "score": 1.0, "id": "0-2", "meta": {"answer": "7"}},
    ]
    write(tmp_path / "stage" / "data" / "samples.jsonl", *rows)
    given = read(tmp_path / "stage")  # the folder of a stage
    (task,) = given.tasks
    assert texts(task) == ["a", "b"]  # the third sample is equal to the first
    assert task.meta == {"answer": "7"}
    assert task.details == ({"score": 1.0, "id": "0-0"}, {"score": 0.5, "id": "0-1"})
    place = f"{tmp_path}/stage/data/samples.jsonl:2"
    assert given.left_out == [(place, "1 distinct completion of the prompt")]


def test_equal_rows_are_shown_once_and_counted(tmp_path: Path) -> None:
    row = {"prompt": "p", "completions": ["a", "b"]}
    given = read(write(tmp_path / "rows.jsonl", row, row))
    assert len(given.tasks) == 1
    assert [reason for _, reason in given.left_out] == [f"equal to {tmp_path}/rows.jsonl:1"]


def test_every_pair_is_a_task_with_its_own_details(tmp_path: Path) -> None:
    given = read(write(tmp_path / "r.jsonl", {"prompt": "p", "completions": ["a", "b", "c"], "scores": [3, 2, 1]}))
    pairs = pairwise(given.tasks * 2)
    assert [texts(task) for task in pairs] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert pairs[2].details == ({"score": 2.0}, {"score": 1.0})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, "add --model"),
        ({"messages": [user("p"), {"role": "assistant", "content": "a"}]}, "add --model"),
        ({"prompt": "p", "completions": ["a", "a"]}, "nothing to rank: 1 distinct completion of the prompt"),
        ({"prompt": "p", "completions": ["a"], "scores": [1]}, "at least two"),
        ({"prompt": "p", "completions": []}, "at least two"),
        ({"prompt": "p", "completion": "a"}, "nothing to rank: 1 distinct completion of the prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "equal to chosen"),
    ],
)
def test_rows_without_completions_to_rank_are_errors_with_their_place(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read(write(tmp_path / "rows.jsonl", row))
    assert "rows.jsonl" in str(raised.value)


def test_a_column_that_json_cannot_hold_is_an_error_with_its_place() -> None:
    completions: tuple[Messages, ...] = (({"role": "assistant", "content": "a"},),)
    for value in (float("nan"), object()):
        with pytest.raises(UserError, match=r"a\.parquet: row 1: a column has a value that JSON cannot hold"):
            Task((user("p"),), completions, "a.parquet: row 1", meta={"day": value}).to_json()


def test_a_folder_without_completions_names_its_files(tmp_path: Path) -> None:
    write(tmp_path / "data" / "steps.jsonl", {})
    with pytest.raises(UserError, match=r"without data/samples\.jsonl and .*name one of its files: data/steps\.jsonl"):
        read(tmp_path)


# --- other tools --------------------------------------------------------------------------------------------------


def annotation(by: Any, selected: str | None, **more: Any) -> dict[str, Any]:
    value = {"type": "pairwise", "from_name": "pw", "to_name": "answer1,answer2", "value": {"selected": selected}}
    return {"completed_by": by, "result": [value] if selected else [], "lead_time": 8.5, **more}


def test_a_label_studio_export_comes_with_its_answers(tmp_path: Path) -> None:
    data = {"prompt": "p", "answer1": "a", "answer2": "b", "topic": "x"}
    path = tmp_path / "export.json"
    annotations = [
        annotation(1, "left"),
        annotation({"id": 2, "email": "ben@example.org"}, "right"),
        annotation(3, None),
        annotation(4, "left", was_cancelled=True),
    ]
    path.write_text(json.dumps([{"id": 1, "data": data, "annotations": annotations}]), "utf-8")
    given = read(path)
    (task,) = given.tasks
    assert (task.prompt, texts(task), task.meta) == ((user("p"),), ["a", "b"], {"topic": "x"})
    assert {answer.rater: answer.ranks for answer in given.answers} == {
        "Label Studio: 1": (1, 2),
        "Label Studio: ben@example.org": (2, 1),
        "Label Studio: 3": None,
        "Label Studio: 4": None,
    }
    assert {answer.task for answer in given.answers} == {task.id} and given.answers[0].seconds == 8.5


def test_label_studio_texts_without_known_names_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps([{"data": {"prompt": "p", "x": "a", "y": "b"}, "annotations": []}]), "utf-8")
    with pytest.raises(UserError, match=r"cannot tell the left text from the right one: .* got prompt, x, y"):
        read(path)


FIELDS = {"instruction": "p", "reply_1": "a", "reply_2": "b", "reply_3": "c"}
OF_ARGILLA_2 = {"ranking": [{"value": ["reply-2", "reply-3", "reply-1"], "user_id": "u1"}], "text": [{"value": "ok"}]}
OF_ARGILLA_1 = [
    {
        "user_id": "u1",
        "status": "submitted",
        "values": {"ranking": {"value": [{"rank": r, "value": f"reply-{i}"} for i, r in ((1, 3), (2, 1), (3, 2))]}},
    }
]


@pytest.mark.parametrize("responses", [OF_ARGILLA_2, OF_ARGILLA_1], ids=["2", "1"])
def test_an_argilla_export_comes_with_its_answers(tmp_path: Path, responses: Any) -> None:
    path = tmp_path / "export.json"
    unanswered = {"id": "2", "fields": {**FIELDS, "instruction": "q"}, "responses": type(responses)()}
    first = {"id": "1", "fields": FIELDS, "metadata": {"topic": "x"}, "responses": responses}
    path.write_text(json.dumps([first, unanswered]), "utf-8")
    given = read(path)
    assert [texts(task) for task in given.tasks] == [["a", "b", "c"]] * 2
    assert [task.prompt[0]["content"] for task in given.tasks] == ["p", "q"]
    assert given.tasks[0].meta == {"topic": "x"}
    assert [(a.rater, a.ranks, a.task) for a in given.answers] == [("Argilla: u1", (3, 1, 2), given.tasks[0].id)]
