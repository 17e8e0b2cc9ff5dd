"""The outline that ``burnish inspect`` prints of a recipe with loops, and the rows of stages that make rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish import cli
from burnish.commands.outline import outline
from burnish.config import load
from burnish.recipes.tiny import prepare

RECIPE = """
name: rest
seed: 7
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
  - name: loop
    rounds: 20
    until: {stage: grow, metric: score, above: 0.9}
    stages:
      - name: grow
        method: {name: sample}
        model: {stage: improve, initial: {stage: prepare}}
        reward: [{model: {stage: prepare}}]
        generation: {samples: 3, max_new_tokens: 4}
        data: {rows: {stage: prepare, file: prompts.jsonl}}
      - name: few
        method: {name: filter, function: "mine.py:short"}
        data: {rows: {stage: prepare, file: sft.jsonl}, limit: 5}
      - name: improve
        method: {name: sft}
        model: {stage: improve, initial: {stage: prepare}}
        data:
          train:
            - {from: {stage: grow, file: samples.jsonl, from_rounds: all}, weight: 1}
            - {from: {stage: prepare, file: sft.jsonl}, weight: 2}
          select: {distinct: true, above: 0.2}
        by_round: {trainer.learning_rate: RATES}
  - name: last
    method: {name: sft}
    model: {stage: improve}
    data: {train: {stage: grow, file: samples.jsonl}}
"""
OUTLINE = """\
prepare: burnish.recipes.tiny:prepare, seed 7
loop: 20 rounds, or until score of grow is above 0.9; keeps the models of the last round
  round 1 of 20
    loop/1/grow: sample, seed 7
      model: prepare
      reward: prepare
      rows: prepare/prompts.jsonl
    loop/1/few: filter, seed 7
      rows: prepare/sft.jsonl
    loop/1/improve: sft, seed 7
      model: prepare
      train: loop/1/grow/samples.jsonl (weight 1), prepare/sft.jsonl (weight 2)
      select: distinct, above 0.2
      trainer.learning_rate: 2e-05 (by_round)
  round 2 of 20
    loop/2/grow: sample, seed 1000010
      model: loop/1/improve
      reward: prepare
      rows: prepare/prompts.jsonl
    loop/2/few: filter, seed 1000010
      rows: prepare/sft.jsonl
    loop/2/improve: sft, seed 1000010
      model: loop/1/improve
      train: loop/1/grow/samples.jsonl, loop/2/grow/samples.jsonl (weight 0.5 each), prepare/sft.jsonl (weight 2)
      select: distinct, above 0.2
      trainer.learning_rate: 1e-05 (by_round)
  rounds 3 to 19: like round 2, but with other rows, models and settings
  round 20 of 20
    loop/20/grow: sample, seed 19000064
      model: loop/19/improve
      reward: prepare
      rows: prepare/prompts.jsonl
    loop/20/few: filter, seed 19000064
      rows: prepare/sft.jsonl
    loop/20/improve: sft, seed 19000064
      model: loop/19/improve
      train: loop/1 to 20/grow/samples.jsonl (weight 0.05 each), prepare/sft.jsonl (weight 2)
      select: distinct, above 0.2
      trainer.learning_rate: 1e-05 (by_round)
last: sft, seed 7
  model: loop/20/improve
  train: loop/20/grow/samples.jsonl
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text("def short(row):\n    return True\n")
    (tmp_path / "rest.yaml").write_text(RECIPE.replace("RATES", str([2e-5] + [1e-5] * 19)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inspect(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["inspect", "rest.yaml", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_outline_names_what_every_stage_of_a_round_reads(folder: Path) -> None:
    assert "".join(f"{line}\n" for line in outline(load("rest.yaml"))) == OUTLINE


@pytest.mark.parametrize(("rounds", "left_out"), [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)])
def test_rounds_between_the_second_and_the_last_are_left_out(folder: Path, rounds: int, left_out: int) -> None:
    rates = f"stages.loop.stages.improve.by_round={{trainer.learning_rate: {[1e-5] * rounds}}}"
    lines = list(outline(load("rest.yaml", [f"stages.loop.rounds={rounds}", rates])))
    assert sum("like round 2" in line for line in lines) == left_out
    assert sum(f" of {rounds}" in line for line in lines) == min(rounds, 3)
    assert f"  model: loop/{rounds}/improve" in lines


def test_stages_whose_rows_are_not_there_yet_are_listed_once(folder: Path) -> None:
    shown = inspect()
    assert OUTLINE.splitlines()[3] in shown
    assert "needed by loop/1/grow, loop/1/few, loop/1/improve, loop/2/grow," in shown
    assert "loop/20/improve, last" in shown and "loop/3" not in shown


def test_the_input_of_stages_that_make_rows_is_shown(folder: Path) -> None:
    (folder / "runs/rest").mkdir(parents=True)
    prepare(folder / "runs/rest/prepare", seed=0, rows=16, pairs=2, prompts=10, held_out=8)
    shown = inspect("stages.loop.stages.grow.generation.samples=8")
    assert "completions  80" in shown
    assert "samples.jsonl, ranked.jsonl in runs/rest/loop/1/grow/data" in shown
    assert "rows.jsonl, failed.jsonl in runs/rest/loop/1/few/data" in shown
    assert "<bos>" in shown and "prompts.jsonl:2): 7 tokens" in shown
    assert '{"prompt": "' in shown and re.search(r"rows +5\b", shown)
    assert shown.count("reads the same rows as loop/1/grow") == 2
    assert "needed by loop/1/improve, loop/2/improve, loop/20/improve, last" in shown


def test_the_outline_names_environments_tools_and_limits(folder: Path) -> None:
    recipe = RECIPE.replace("RATES", str([1e-3] * 20))
    acts = 'tools: ["mine.py:short"]\n        environment: {class: "mine.py:short", max_tokens: 99}'
    acts += "\n        generation: {samples"
    Path("acts.yaml").write_text(recipe.replace("generation: {samples", acts), "utf-8")
    lines = "\n".join(outline(load("acts.yaml")))
    assert "environment: mine.py:short\n      tools: mine.py:short\n      limits: max_turns 8, max_tokens 99," in lines
