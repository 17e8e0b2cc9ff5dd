"""PPO of ``tiny`` and GRPO learn as much with continuous batching as with the local generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.report.metrics import read_metrics

pytestmark = pytest.mark.acceptance

STAGES = {"tiny": ("ppo", "eval_reward_exact"), "grpo": ("grpo", "eval_score")}


def run(recipe: str, out: Path, seed: int, generator: str) -> tuple[dict[str, float], list[float], bytes]:
    """Results after the last stage, the mismatch of every iteration, and the weights."""
    stage, _ = STAGES[recipe]
    options = [f"out={out}", f"seed={seed}", f"stages.{stage}.generator.name={generator}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "burnish", "run", recipe, *options]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=1800)
    stages = {entry["name"]: entry for entry in json.loads((out / "manifest.json").read_text())["stages"]}
    lines: list[dict[str, Any]] = read_metrics(out / stage)
    mismatch = [line["sampler_mismatch"] for line in lines if "sampler_mismatch" in line]
    weights = (out / stage / "model" / "model.safetensors").read_bytes()
    return stages[stage]["results"]["after"], mismatch, weights


@pytest.mark.parametrize("recipe", STAGES)
def test_accuracy_is_the_same_with_continuous_batching(recipe: str, tmp_path: Path, record_property: Any) -> None:
    _, metric = STAGES[recipe]
    weights = {}
    for seed in range(3):
        ours, _, _ = run(recipe, tmp_path / f"local{seed}", seed, "local")
        theirs, mismatch, weights[seed] = run(recipe, tmp_path / f"continuous{seed}", seed, "continuous")
        record_property(
            f"local {seed}", f"{ours[metric]:.3f} [{ours[f'{metric}_low']:.3f}, {ours[f'{metric}_high']:.3f}]"
        )
        low, high = theirs[f"{metric}_low"], theirs[f"{metric}_high"]
        record_property(f"continuous {seed}", f"{theirs[metric]:.3f} [{low:.3f}, {high:.3f}]")
        record_property(f"mismatch {seed}", f"{max(mismatch):.1g}")
        assert low <= ours[f"{metric}_high"] and ours[f"{metric}_low"] <= high
        assert max(mismatch) < 0.01
    assert run(recipe, tmp_path / "again", 0, "continuous")[2] == weights[0], "equal plans, equal bytes"
