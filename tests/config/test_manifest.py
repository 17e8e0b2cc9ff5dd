"""The manifest is valid JSON whatever numbers it holds, and a run resumes only with the settings that it records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from burnish.config import load
from burnish.config.manifest import MANIFEST, open_manifest, read_manifest, write_manifest
from burnish.config.schema import Recipe
from burnish.errors import UserError

RECIPE = """
name: numbers
stages:
  - {name: prepare, run: "burnish.recipes.tiny:prepare", with: {high: .inf, unknown: .nan}}
  - name: loop
    rounds: 2
    until: {stage: tune, metric: loss, below: 0.5}
    stages:
      - name: tune
        method: {name: sft}
        model: {stage: prepare}
        data: {train: {stage: prepare, file: sft.jsonl}, select: {above: -.inf}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def recipe(*changes: str) -> Recipe:
        (tmp_path / "numbers.yaml").write_text(RECIPE)
        return load(tmp_path / "numbers.yaml", [f"out={tmp_path / 'run'}", *changes])

    return recipe


def written(recipe: Recipe) -> dict[str, Any]:
    """Write a new manifest of the recipe, and read it as strict JSON."""
    manifest = open_manifest(recipe)
    recipe.folder.mkdir()
    manifest["stages"][1] |= {"state": "done", "files": {}}
    manifest["stages"][1]["results"] = {"after": {"eval_loss": math.nan, "eval_loss_low": -math.inf}}
    write_manifest(recipe.folder, manifest)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((recipe.folder / MANIFEST).read_text("utf-8"), parse_constant=refuse)


def test_numbers_that_are_not_finite_are_valid_json_and_read_back(run: Any) -> None:
    manifest = written(run())
    assert manifest["recipe"]["stages"][1]["data"]["select"]["above"] == "-Infinity"
    assert manifest["recipe"]["stages"][0]["with"] == {"high": "Infinity", "unknown": "NaN"}
    after = read_manifest(run().folder / MANIFEST)["stages"][1]["results"]["after"]
    assert math.isnan(after["eval_loss"]) and after["eval_loss_low"] == -math.inf


def test_a_run_resumes_with_the_same_numbers_only(run: Any) -> None:
    written(run())
    before = (run().folder / MANIFEST).read_bytes()
    write_manifest(run().folder, open_manifest(run()))
    assert (run().folder / MANIFEST).read_bytes() == before
    with pytest.raises(UserError, match=r"data\.select\.above was '-Infinity' and is 0.5; start over"):
        open_manifest(run("stages.loop.stages.tune.data.select.above=0.5"))


def test_the_manifest_records_how_a_loop_ends(run: Any) -> None:
    assert written(run())["loops"] == {
        "loop": {
            "rounds": 2,
            "until": {"stage": "tune", "metric": "loss", "above": None, "below": 0.5},
            "keep": "last",
        }
    }
    with pytest.raises(UserError, match=r"loops\.loop\.until\.below was 0.5 and is 0.25"):
        open_manifest(run("stages.loop.until.below=0.25"))
