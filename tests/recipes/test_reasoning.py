"""Questions of reasoning-gym as rows: without it an error, with it rows that do not repeat."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from burnish.data.readers import load
from burnish.errors import UserError
from burnish.recipes import reasoning
from burnish.recipes.reasoning import check, prepare
from burnish.search.answers import Answers
from burnish.search.settings import AnswerSettings
from burnish.types import Prompt
from tiny_runs import json_rows

installed = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")


class Small:
    """A task with three different questions."""

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": f"{index % 3} + 1?", "answer": str(index % 3 + 1)}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01 if answer else 0.0


def test_without_reasoning_gym_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning._dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="reasoning_gym is not installed: pip install reasoning-gym"):
        prepare(tmp_path, 0, task="chain_sum")


def test_no_question_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "_dataset", lambda entry: Small())
    prepare(tmp_path, 0, task="small", size=2, held_out=1)
    rows = [json_rows(tmp_path / "data" / name) for name in ("questions.jsonl", "held-out.jsonl")]
    assert [[row["prompt"] for row in of] for of in rows] == [["0 + 1?", "1 + 1?"], ["2 + 1?"]]
    with pytest.raises(UserError, match="small: only 3 different questions, expected 4: ask for fewer"):
        prepare(tmp_path, 0, task="small", size=3, held_out=1)
    with pytest.raises(UserError, match="size of at least 1"):
        prepare(tmp_path, 0, task="small", size=0)


def test_only_the_highest_score_is_correct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "_dataset", lambda entry: Small())
    prepare(tmp_path, 0, task="small", size=2, held_out=0)
    row = json_rows(tmp_path / "data" / "questions.jsonl")[1]
    assert [check(answer, row) for answer in ("2", "3", "")] == [True, False, False]
    with pytest.raises(UserError, match="this version of reasoning-gym generates other questions"):
        check("2", row | {"answer": "7"})
    with pytest.raises(UserError, match="no column entry"):
        check("2", {"answer": "2"})


@installed
def test_rows_of_a_real_task(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        prepare(tmp_path / folder, 3, task="chain_sum", size=20, held_out=5, options={"max_terms": 3})
    prepare(tmp_path / "c", 4, task="chain_sum", size=20, held_out=5, options={"max_terms": 3})
    questions = {name: (tmp_path / name / "data" / "questions.jsonl").read_bytes() for name in "abc"}
    assert questions["a"] == questions["b"] != questions["c"]
    rows = load(str(tmp_path / "a" / "data" / "questions.jsonl"), (Prompt,)).rows
    answers = Answers(AnswerSettings(find="last_line", check="burnish.recipes.reasoning:check"))
    assert len(rows) == 20
    for row in rows:
        assert isinstance(row, Prompt)
        assert answers.check(row.columns["answer"], row.columns) is True
        assert answers.check("a million", row.columns) is False


@installed
def test_mistakes_in_a_real_task(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no task 'chain_sun' \(did you mean 'chain_sum'\?\)"):
        prepare(tmp_path, 0, task="chain_sun")
    with pytest.raises(UserError, match=r"options of chain_sum: .*'terms'"):
        prepare(tmp_path, 0, task="chain_sum", options={"terms": 3})
    with pytest.raises(UserError, match="options of chain_sum: min_terms must be positive"):
        prepare(tmp_path, 0, task="chain_sum", options={"min_terms": -1})
