"""``data.select``: rows of several files together, counts, missing scores, and nothing left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config import sources
from burnish.config.schema import Data
from burnish.errors import UserError
from burnish.types import Conversation, Preference, Ranking, Scored


def file(folder: Path, name: str, *scores: float | None) -> str:
    rows = [{"prompt": f"{name}{i}", "completion": "x", "score": score} for i, score in enumerate(scores)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.jsonl")


def read(folder: Path, train: Any, **settings: Any) -> Any:
    return sources.read(Data.model_validate({"train": train, **settings}), "train", folder, (Conversation,), 0)


def prompts(rows: Any) -> list[str]:
    return [row.messages[0]["content"] for row in rows.rows]


def test_rows_of_all_files_are_selected_together(tmp_path: Path) -> None:
    parts = [{"from": file(tmp_path, "a", 0.1, 0.9)}, {"from": file(tmp_path, "b", 0.2, 0.8, 0.7)}]
    read_ = read(tmp_path, parts, select={"percentile": 50})
    assert prompts(read_) == ["a1", "b1", "b2"]  # the median is 0.7
    assert read_.left_out == {"below percentile 50": 2}


def test_a_file_without_selected_rows_leaves_the_mixture(tmp_path: Path) -> None:
    parts = [{"from": file(tmp_path, "a", 0.1), "weight": 1}, {"from": file(tmp_path, "b", 0.9), "weight": 3}]
    assert prompts(read(tmp_path, parts, select={"above": 0.5})) == ["b0"]


def test_nothing_may_be_left(tmp_path: Path) -> None:
    read_ = read(tmp_path, file(tmp_path, "a", 0.1, 0.2), select={"above": 1})
    assert read_.rows == [] and read_.left_out == {"not above 1": 2}


def test_a_row_without_a_score_is_a_bad_row(tmp_path: Path) -> None:
    path = file(tmp_path, "a", 0.5, None)
    with pytest.raises(UserError, match=r"a\.jsonl:2: score: not a number: got NoneType null"):
        read(tmp_path, path, select={"above": 0})
    with pytest.raises(UserError, match=r"a\.jsonl:1: quality: no score to select by: has keys 'prompt', 'completion'"):
        read(tmp_path, path, select={"above": 0, "key": "quality"})
    read_ = read(tmp_path, path, select={"above": 0}, on_bad_row="skip")
    assert prompts(read_) == ["a0"] and len(read_.skipped) == 1


def test_any_numeric_column_can_be_the_score(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "x", "quality": 3}, {"prompt": "b", "completion": "x", "quality": 4}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    selected = read(tmp_path, str(tmp_path / "a.jsonl"), select={"best": 1, "above": 3, "key": "quality"})
    assert prompts(selected) == ["b"]


@pytest.mark.parametrize("settings", [{"distinct": True}, {"at_most": 1}])
def test_rows_are_selected_without_scores(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(2 * '{"prompt": "a", "completion": "x"}\n')
    read_ = read(tmp_path, str(tmp_path / "a.jsonl"), select=settings)
    assert prompts(read_) == ["a"] and sum(read_.left_out.values()) == 1


def test_a_column_can_be_both_the_score_and_part_of_the_row(tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "chosen": "x", "rejected": "y", "margin": margin} for margin in (0.5, 2.0)]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    scored = [{"messages": chat, "reward": reward} for reward in (0.0, 1.0)]
    for name, rows in (("pairs", pairs), ("scored", scored)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (pair,) = sources.read(
        Data.model_validate({"train": str(tmp_path / "pairs.jsonl"), "select": {"above": 1, "key": "margin"}}),
        "train", tmp_path, (Preference, Ranking), 0,
    ).rows  # fmt: skip
    assert isinstance(pair, Preference) and pair.margin == 2.0
    (row,) = sources.read(
        Data.model_validate({"train": str(tmp_path / "scored.jsonl"), "select": {"best": 1, "key": "reward"}}),
        "train", tmp_path, (Scored,), 0,
    ).rows  # fmt: skip
    assert isinstance(row, Scored) and row.reward == 1.0
