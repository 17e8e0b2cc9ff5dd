"""The times of a finished run, read from its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from burnish import UserError, cli
from burnish.commands.plan import counts
from burnish.config.manifest import FORMAT, MANIFEST
from burnish.plan.profile import iterations, read_profile
from burnish.plan.simulation import Profile

LINES: list[dict[str, Any]] = [
    {"step": 0, "eval_score": 0.5},
    {"step": 1, "seconds": 12.0, "generation_seconds": 9.0},
    {"step": 2, "seconds": 2.0},
    {"step": 3, "seconds": 9.0, "generation_seconds": 6.0},
    {"step": 4, "seconds": 1.0},
    {"step": 5, "seconds": 8.0, "generation_seconds": 6.0},
    {"step": 6, "seconds": 2.0},
]


def stage(name: str = "ppo", **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "method": {"name": "ppo", "max_staleness": 0, **settings},
        "generator": {"name": "local"},
        "generation": {"samples": 2},
        "trainer": {"per_device_train_batch_size": 4},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", [stage()])


def write(folder: Path, stages: list[dict[str, Any]], number: Any = FORMAT) -> Path:
    entries = [{"name": one["name"], "state": "done", "seconds": 1.0, "files": {}, "processes": 2} for one in stages]
    manifest = {
        "format": number,
        "name": "run",
        "state": "done",
        "recipe": {"stages": stages},
        "versions": {},
        "machine": {},
        "stages": entries,
        "checksums": {},
    }
    for one in stages:
        (folder / one["name"]).mkdir(parents=True)
        (folder / one["name"] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_the_time_of_an_iteration_is_that_of_its_steps() -> None:
    assert iterations(LINES) == ([9.0, 6.0, 6.0], [5.0, 4.0, 4.0])


def test_the_first_iteration_is_left_out(run: Path) -> None:
    expected = Profile(sampling=(6.0, 6.0), updating=(4.0, 4.0), workers=2, trainers=2, rollouts=8)
    assert read_profile(run) == ("ppo", expected)


def test_the_command_simulates_workers_and_staleness(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "my.py").write_text("def passes(): ...\n")
    (tmp_path / "run.yaml").write_text('method: {name: filter, function: "my.py:passes"}\ndata: {rows: rows.jsonl}\n')
    recipe, *options = f"{tmp_path}/run.yaml --profile {run} --gpus 6 --memory 80".split()
    recipe_and_rows = [recipe, f"data.rows={tmp_path}/rows.jsonl"]
    words = ["plan", *recipe_and_rows, *options, "--rollout-workers", "2,4", "--staleness", "0,1"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit() and "%" in line]
    # two workers take 6 s and four 3 s; four processes train in 2 s and two in 4 s
    assert rows == [
        ["2", "4", "0", "8", "1.25", "75%"],
        ["2", "4", "1", "6", "1.67", "67%"],
        ["4", "2", "0", "7", "1.43", "43%"],
        ["4", "2", "1", "4", "2.50", "1%"],
    ]
    none_left = CliRunner().invoke(cli.app, [*words, "--rollout-workers", "6"])
    assert none_left.exit_code == 2 and "no GPU of 6 is left for training" in none_left.stderr


def test_what_cannot_be_profiled_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sampled while it trained, .*max_staleness: 0"):
        read_profile(write(tmp_path / "stale", [stage(max_staleness=1)]))
    with pytest.raises(UserError, match="several stages sample while they train: stages that do are a, b"):
        read_profile(write(tmp_path / "two", [stage("a"), stage("b")]))
    assert read_profile(tmp_path / "two", "b")[0] == "b"
    with pytest.raises(UserError, match="stage c does not while they train"):
        read_profile(tmp_path / "two", "c")
    with pytest.raises(UserError, match="another version"):
        read_profile(write(tmp_path / "old", [stage()], number=0))
    with pytest.raises(UserError, match="not the folder of a run"):
        read_profile(tmp_path)


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "x", "0", "1.5"])
def test_lists_of_numbers(text: str) -> None:
    assert counts("--rollout-workers", "8,16", 1) == [8, 16]
    with pytest.raises(UserError, match=r"--rollout-workers .*: expected numbers of at least 1, separated by commas"):
        counts("--rollout-workers", text, 1)
