"""PPO of ``tiny`` and GRPO learn as much with continuous batching as with the local generator."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from burnish.report.metrics import read_metrics

pytestmark = pytest.mark.acceptance

RECIPES = Path(__file__).parents[2] / "src" / "burnish" / "recipes"
METRICS = {"tiny": "reward_exact", "grpo": "score"}
TIMEOUT = 3600


def run(name: str, folder: Path, seed: int, generators: dict[str, str]) -> Path:
    """Run a shipped recipe whose last stage is repeated: once for each name, with that generator."""
    yaml = YAML()
    recipe = yaml.load(RECIPES / f"{name}.yaml")
    last = recipe["stages"].pop()
    for stage, generator in generators.items():
        recipe["stages"].append(copy.deepcopy(last) | {"name": stage, "generator": {"name": generator}})
    folder.mkdir()
    shutil.copy(RECIPES / "tiny.py", folder)
    yaml.dump(recipe, folder / "recipe.yaml")
    command = [sys.executable, "-m", "burnish", "run", folder / "recipe.yaml", f"seed={seed}", f"out={folder / 'run'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(list(map(str, command)), check=True, env=environment, capture_output=True, timeout=TIMEOUT)
    return folder / "run"


@pytest.mark.parametrize("recipe", METRICS)
@pytest.mark.parametrize("seed", range(3))
def test_accuracy_is_the_same_with_continuous_batching(
    recipe: str, seed: int, tmp_path: Path, record_property: Any
) -> None:
    generators = {"local": "local", "continuous": "continuous"} | ({"again": "continuous"} if seed == 0 else {})
    folder = run(recipe, tmp_path / "work", seed, generators)
    stages = {entry["name"]: entry for entry in json.loads((folder / "manifest.json").read_text())["stages"]}
    intervals = {}
    for name in generators:
        after, metric = stages[name]["results"]["after"], f"eval_{METRICS[recipe]}"
        mean, *intervals[name] = (after[metric + suffix] for suffix in ("", "_low", "_high"))
        record_property(name, "{:.3f} [{:.3f}, {:.3f}]".format(mean, *intervals[name]))
    mismatches = [
        line["sampler_mismatch"] for line in read_metrics(folder / "continuous") if "sampler_mismatch" in line
    ]
    record_property("largest mismatch", f"{max(mismatches):.1g}")
    (low, high), (low_continuous, high_continuous) = intervals["local"], intervals["continuous"]
    assert low <= high_continuous and low_continuous <= high
    assert max(mismatches) < 0.01
    if seed == 0:
        weights = {name: (folder / name / "model" / "model.safetensors").read_bytes() for name in generators}
        assert weights["again"] == weights["continuous"], "equal plans, equal bytes"
