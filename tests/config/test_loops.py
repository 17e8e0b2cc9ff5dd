"""Loops that run: resume inside a round, old rounds that are thinned, and results that end a loop early."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config import load
from burnish.config import run as pipeline
from burnish.errors import UserError
from tiny_runs import entries, run_until

RECIPE = """
name: test
threads: 1
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 16, pairs: 2, prompts: 2, held_out: 8}
  - name: loop
    rounds: 3
    stages:
      - name: more
        run: burnish.recipes.tiny:prepare
        with: {rows: 8, pairs: 2, prompts: 2, held_out: 8}
      - name: tune
        method: {name: sft}
        model: {stage: tune, initial: {stage: prepare}}
        data:
          train: {stage: more, file: sft.jsonl, from_rounds: all}
          eval: {stage: prepare, file: sft-eval.jsonl}
        trainer: {per_device_train_batch_size: 8, save_steps: 1}
        by_round: {trainer.learning_rate: [1.0e-3, 5.0e-4, 1.0e-4]}
  - name: last
    method: {name: sft}
    model: {stage: tune}
    data: {train: {stage: prepare, file: sft.jsonl}}
    trainer: {per_device_train_batch_size: 8, max_steps: 1}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home") / "test.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    return pipeline.run(load(recipe, [f"out={recipe.parent / 'whole'}"]))


def test_rounds_build_on_one_another(whole: Path) -> None:
    made = entries(whole)
    assert len(made) == 8 and {entry["state"] for entry in made.values()} == {"done"}
    assert [made[f"loop/{k}/tune"]["rows"]["train"]["rows"] for k in (1, 2, 3)] == [8, 16, 24]
    assert made["loop/2/tune"]["model"]["source"] == str(whole / "loop/1/tune/model")
    assert made["last"]["model"]["source"] == str(whole / "loop/3/tune/model")
    rows = {(whole / f"loop/{k}/more/data/sft.jsonl").read_bytes() for k in (1, 2, 3)}
    assert len(rows) == 3  # each round has its seed


def test_models_of_old_rounds_are_removed_and_their_rows_kept(whole: Path) -> None:
    made = entries(whole)
    assert [made[f"loop/{k}/tune"].get("thinned", False) for k in (1, 2, 3)] == [True, True, False]
    assert [(whole / f"loop/{k}/tune/model").exists() for k in (1, 2, 3)] == [False, False, True]
    assert not list(whole.glob("loop/[12]/tune/checkpoint-*"))
    assert all((whole / f"loop/{k}/tune/metrics.jsonl").is_file() for k in (1, 2, 3))


def test_a_finished_loop_does_not_run_again(recipe: Path, whole: Path) -> None:
    before = (whole / "manifest.json").read_bytes()
    pipeline.run(load(recipe, [f"out={whole}"]))
    assert (whole / "manifest.json").read_bytes() == before


def test_a_run_that_was_killed_in_a_round_ends_with_the_same_bytes(
    recipe: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = recipe.parent / "resumed"
    kill = load(recipe, [f"out={resumed}"])
    run_until(lambda: pipeline.run(kill), "tune", 2, monkeypatch)  # round 1 has one step, so this is round 2
    assert entries(resumed)["loop/2/tune"]["state"] == "running"
    pipeline.run(load(recipe, [f"out={resumed}"]))
    for name in ("loop/3/tune/model/model.safetensors", "last/model/model.safetensors", "loop/3/more/data/sft.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_a_result_ends_a_loop_early(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    until = "stages.loop.until={stage: tune, metric: loss, below: 100}"
    folder = pipeline.run(load(recipe, [f"out={recipe.parent / 'early'}", until]))
    assert "loop ended after round 1 of 3: tune loss " in "".join(capfd.readouterr())
    made = entries(folder)
    assert {name: entry["state"] for name, entry in made.items() if name.startswith("loop")} == {
        "loop/1/more": "done", "loop/1/tune": "done", "loop/2/more": "skipped", "loop/2/tune": "skipped",
        "loop/3/more": "skipped", "loop/3/tune": "skipped",
    }  # fmt: skip
    assert made["last"]["model"]["source"] == str(folder / "loop/1/tune/model")


def test_a_metric_that_is_not_measured_cannot_end_a_loop(recipe: Path) -> None:
    until = "stages.loop.until={stage: tune, metric: win_rate, above: 0.5}"
    with pytest.raises(UserError, match=r"loop: until: stage tune has no metric 'win_rate'; its metrics are .*loss"):
        pipeline.run(load(recipe, [f"out={recipe.parent / 'wrong'}", until]))
