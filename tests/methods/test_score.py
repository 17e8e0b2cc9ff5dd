"""Scores of completions that exist: the same as those of sampled completions, and what rewards get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config import load
from burnish.config import run as pipeline
from burnish.data.readers import load as load_rows
from burnish.errors import UserError
from burnish.methods.score import _trajectory
from burnish.types import Conversation, Messages, Sequence
from tiny_runs import json_rows

MINE = """
def exact(trajectories):
    return [float(t.text == t.columns["answer"]) for t in trajectories]

def tokens(trajectories):
    return [float(len(t.tokens)) for t in trajectories]
"""
RECIPE = """
name: score
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 4, pairs: 2, prompts: 6, held_out: 8}
  - name: samples
    method: {name: sample}
    model: {stage: prepare}
    reward: &rewards [{function: "mine.py:exact"}, {function: "mine.py:tokens", weight: 0.1}]
    generation: {samples: 2, max_new_tokens: 4}
    data: {rows: {stage: prepare, file: prompts.jsonl}}
  - name: again
    method: {name: score}
    model: {stage: prepare}
    reward: *rewards
    data: {rows: {stage: samples, file: samples.jsonl}}
  - name: original
    method: {name: score}
    model: {stage: prepare}
    reward: *rewards
    data: {rows: own.jsonl}
"""
OWN = [
    {"prompt": "12+30", "completion": "42", "answer": "42"},
    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "3"}], "answer": "2"},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "score.yaml").write_text(RECIPE)
    (folder / "mine.py").write_text(MINE)
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in OWN))
    return folder


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        return home / pipeline.run(load("score.yaml"))


def test_samples_that_are_scored_again_have_the_same_scores(folder: Path) -> None:
    first, second = json_rows(folder / "samples/data/samples.jsonl"), json_rows(folder / "again/data/scored.jsonl")
    same = ("prompt", "completion", "meta", "finish_reason")
    assert [{key: row[key] for key in same} for row in first] == [{key: row[key] for key in same} for row in second]
    assert [row["rewards"]["exact"] for row in first] == [row["rewards"]["exact"] for row in second]
    # A random model also samples special tokens, which its text does not show.
    assert [row["rewards"]["tokens"] for row in second] == [len(row["completion"]) + 1 for row in second]


def test_rows_of_any_conversation_format_are_scored_with_their_columns(folder: Path) -> None:
    path = folder / "original/data/scored.jsonl"
    assert json_rows(path) == [
        {"prompt": "12+30", "completion": "42", "score": 1.3, "rewards": {"exact": 1.0, "tokens": 3.0},
         "finish_reason": "stop", "meta": {"answer": "42"}},
        {"prompt": "1+1", "completion": "3", "score": 0.2, "rewards": {"exact": 0.0, "tokens": 2.0},
         "finish_reason": "stop", "meta": {"answer": "2"}},
    ]  # fmt: skip
    assert len(load_rows(path, (Conversation,)).rows) == 2
    results = json.loads((folder / "manifest.json").read_text())["stages"][3]["results"]["after"]
    assert results["eval_score"] == 0.75 and results["eval_reward_exact"] == 0.5


def test_what_cannot_be_scored_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(UserError, match="reward missing; a stage with method 'score' needs model, reward, data"):
        load("score.yaml", ["stages.original.reward=[]"])
    turns = [
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "3"},
    ]
    (home / "own.jsonl").write_text(json.dumps({"prompt": "1+1", "completion": turns, "answer": "2"}) + "\n")
    with pytest.raises(UserError, match=r"own.jsonl:1: the completion has 3 messages: expected one"):
        pipeline.run(load("score.yaml", ["out=refused"]))


@pytest.mark.parametrize(
    ("meta", "columns"), [({"a": 1}, {"a": 1}), ("text", {"meta": "text"}), (None, {}), ({}, {}), (0, {"meta": 0})]
)
def test_any_meta_is_a_column(meta: Any, columns: dict[str, Any]) -> None:
    messages: Messages = ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"})
    sequence = Sequence(np.array([3, 4]), (False, True), "chat.jsonl:1")
    assert dict(_trajectory(Conversation(messages, 1, "chat.jsonl:1"), {"meta": meta}, sequence).columns) == columns
