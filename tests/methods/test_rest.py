"""ReST as a recipe: what its thresholds mean, and what each Improve starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config import load
from burnish.config import run as pipeline
from tiny_runs import entries

RECIPE = """
name: rest
threads: 1
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 24, pairs: 2, prompts: 12, held_out: 8}
  - name: original
    method: {name: score}
    model: {stage: prepare}
    reward: [{function: "burnish.recipes.tiny:constant"}, {function: "mine.py:even"}]
    data: {rows: {stage: prepare, file: sft.jsonl}}
  - name: improve
    method: {name: sft}
    model: {stage: prepare}
    data: {train: {stage: original, file: scored.jsonl}}
    trainer: {per_device_train_batch_size: 4, learning_rate: 1.0e-3}
"""
EM = """
name: em
threads: 1
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 24, pairs: 2, prompts: 12, held_out: 8}
  - name: loop
    rounds: 2
    stages:
      - name: grow
        method: {name: sample}
        model: {stage: improve, initial: {stage: prepare}}
        reward: [{function: "mine.py:even"}]
        generation: {samples: 4, max_new_tokens: 4}
        data: {rows: {stage: prepare, file: prompts.jsonl}}
      - name: improve
        method: {name: sft}
        model: {stage: prepare}
        data: {train: {stage: grow, file: samples.jsonl}, select: {above: 0, at_most: 2}}
        trainer: {per_device_train_batch_size: 4, learning_rate: 1.0e-3}
"""
MINE = """
def even(trajectories):
    return [float(t.text[-1:] in tuple("02468")) for t in trajectories]
"""
WEIGHTS = "model/model.safetensors"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "rest.yaml").write_text(RECIPE)
    (folder / "em.yaml").write_text(EM)
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def plain(home: Path) -> Path:
    """SFT on all rows."""
    return pipeline.run(load(home / "rest.yaml", [f"out={home / 'plain'}"]))


def test_a_threshold_of_minus_infinity_is_plain_sft(home: Path, plain: Path) -> None:
    select = ["stages.improve.data.select={above: -.inf}", f"out={home / 'all'}"]
    everything = pipeline.run(load(home / "rest.yaml", select))
    assert (everything / "improve" / WEIGHTS).read_bytes() == (plain / "improve" / WEIGHTS).read_bytes()
    assert pipeline.run(load(home / "rest.yaml", select)) == everything  # the manifest reads back as the same recipe


def test_a_binary_reward_is_sft_on_the_correct_rows(home: Path, plain: Path) -> None:
    scored = [json.loads(line) for line in (plain / "original/data/scored.jsonl").read_text().splitlines()]
    correct = [row for row in scored if row["rewards"]["even"] == 1]
    assert 0 < len(correct) < len(scored) == 24
    (home / "correct.jsonl").write_text("".join(json.dumps(row) + "\n" for row in correct))
    chosen = pipeline.run(load(home / "rest.yaml", ["stages.improve.data.select={above: 1}", f"out={home / 'chosen'}"]))
    given = [f"stages.improve.data.train={home / 'correct.jsonl'}", f"out={home / 'given'}"]
    assert (chosen / "improve" / WEIGHTS).read_bytes() == (
        pipeline.run(load(home / "rest.yaml", given)) / "improve" / WEIGHTS
    ).read_bytes()
    assert entries(chosen)["improve"]["rows"]["train"]["left_out"] == {"not above 1": 24 - len(correct)}


def test_a_threshold_that_no_row_reaches_ends_the_stage_and_not_the_run(home: Path, plain: Path) -> None:
    select = "stages.improve.data.select={distinct: true, above: 5}"
    result = CliRunner().invoke(app, ["run", str(home / "rest.yaml"), select, f"out={home / 'none'}"])
    assert result.exit_code == 0
    assert "data.select leaves no row to train on (24 not above 5): the model stays as it is" in result.output
    before = entries(home / "none")["prepare"]["files"][WEIGHTS]
    assert entries(home / "none")["improve"]["files"][WEIGHTS] == before


def test_every_improve_of_rest_em_starts_from_the_bytes_of_the_base(home: Path) -> None:
    made = entries(pipeline.run(load(home / "em.yaml", [f"out={home / 'em'}"])))
    base = made["prepare"]["files"][WEIGHTS]
    read = [made[f"loop/{number}/improve"]["inputs"][f"prepare/{WEIGHTS}"] for number in (1, 2)]
    assert read == [base, base]
    assert made["loop/2/grow"]["inputs"][f"loop/1/improve/{WEIGHTS}"] == made["loop/1/improve"]["files"][WEIGHTS]
    for number in (1, 2):
        assert made[f"loop/{number}/improve"]["rows"]["train"]["left_out"]["not above 0"] > 0
