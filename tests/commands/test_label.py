"""Completions that are sampled for the ranking page: stored as they are made, and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.commands import generate as inference
from burnish.commands import label
from burnish.errors import UserError
from burnish.label.store import Store

OPTIONS = {"template": None, "precision": "auto", "seed": 0, "samples": 3, "temperature": None, "max_new_tokens": 4}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}", "answer": n}) + "\n" for n in range(4)), "utf-8")
    return path


def sample(prompts: Path, database: Path, model: Path, pairs: bool = False, **options: Any) -> list[str]:
    said: list[str] = []
    label.sample(prompts, database, pairs, str(model), OPTIONS | options, said.append)
    return said


def test_stopped_sampling_resumes_with_the_same_tasks(
    prompts: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "AT_ONCE", 3)  # one prompt at a time
    said = sample(prompts, tmp_path / "whole.sqlite", tiny_folder)
    assert said[0] == "sampling 3 completions of 4 prompts"
    with Store(tmp_path / "whole.sqlite") as store:
        whole = store.tasks()
    assert [task.prompt[0]["content"] for task in whole] == ["0+0", "1+1", "2+2", "3+3"]
    assert [task.meta for task in whole] == [{"answer": n} for n in range(4)]
    assert all(2 <= len(task.completions) <= 3 for task in whole)

    completions = inference.completions

    def stops(*arguments: Any, **options: Any) -> Iterator[Any]:
        for i, chunk in enumerate(completions(*arguments, **options)):
            if i == 2:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(inference, "completions", stops)
    with pytest.raises(KeyboardInterrupt):
        sample(prompts, tmp_path / "parts.sqlite", tiny_folder)
    monkeypatch.setattr(inference, "completions", completions)
    assert sample(prompts, tmp_path / "parts.sqlite", tiny_folder)[0] == "sampling 3 completions of 2 prompts"
    with Store(tmp_path / "parts.sqlite") as store:
        assert store.tasks(shown_only=True) == whole
    # nothing is left to sample, and other settings are not mixed with these
    assert sample(prompts, tmp_path / "parts.sqlite", tiny_folder) == [f"4 tasks in {tmp_path}/parts.sqlite"]
    with pytest.raises(UserError, match=r"parts\.sqlite: has other completions.*name another file with --database"):
        sample(prompts, tmp_path / "parts.sqlite", tiny_folder, seed=1)


def test_pairs_of_samples(prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    sample(prompts, tmp_path / "pairs.sqlite", tiny_folder, pairs=True)
    with Store(tmp_path / "pairs.sqlite") as store:
        assert {len(task.completions) for task in store.tasks()} == {2} and len(store.tasks()) > 4


def test_rows_that_are_gone_are_named_and_keep_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": "p", "completions": ["a", "b", str(n)]}) + "\n" for n in range(3)]
    said: list[str] = []
    path.write_text("".join(rows) + rows[0], "utf-8")
    label.fill(path, tmp_path / "a.sqlite", False, said.append)
    assert said == [f"3 tasks from {path}", f"left out: {path}:4: equal to {path}:1"]
    path.write_text(rows[1], "utf-8")
    label.fill(path, tmp_path / "a.sqlite", False, said.append)
    assert said[-1] == f"2 other tasks of {tmp_path}/a.sqlite are not shown; their answers are kept"
    with Store(tmp_path / "a.sqlite") as store:
        assert len(store.tasks(shown_only=True)) == 1 and len(store.tasks()) == 3


def test_the_database_is_beside_the_input(tmp_path: Path) -> None:
    assert label.default_database(tmp_path / "ranked.jsonl") == tmp_path / "ranked.labels.sqlite"
    (tmp_path / "stage").mkdir()
    assert label.default_database(tmp_path / "stage") == tmp_path / "stage.labels.sqlite"
