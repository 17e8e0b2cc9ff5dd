"""PPO with the value model of three rounds of search, against one that never saw the policy's own mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.acceptance
def test_values_of_rounds_raise_accuracy_more_than_those_of_another_solver(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    recipe = Path(__file__).with_name("chains_rounds.yaml")
    command = [sys.executable, "-m", "burnish", "run", str(recipe), f"out={tmp_path / 'run'}"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, timeout=3600, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    stages = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))["stages"]
    low, high = {}, {}
    for stage in ("with-solver", "with-rounds"):
        (results,) = (each["results"] for each in stages if each["name"] == stage)
        before, after = results["before"], results["after"]
        low[stage], high[stage] = after["eval_score_change_low"], after["eval_score_change_high"]
        change = after["eval_score"] - before["eval_score"]
        record_property(stage, f"{before['eval_score']:.3f} -> {after['eval_score']:.3f}")
        record_property(f"{stage}, change", f"{change:+.3f} [{low[stage]:+.3f}, {high[stage]:+.3f}]")
    assert low["with-rounds"] > 0
    assert low["with-rounds"] > high["with-solver"]
