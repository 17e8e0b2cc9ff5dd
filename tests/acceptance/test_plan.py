"""The plan against reality: the memory of runs on a CPU, and the time with batches that are sampled ahead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.plan.profile import read_profile
from burnish.plan.simulation import simulate
from burnish.report.metrics import read_metrics
from plan.measured import RECIPES, measured_and_planned, write

pytestmark = pytest.mark.acceptance

WITHIN = 0.15


@pytest.mark.parametrize("name", RECIPES)
def test_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    measured, planned = measured_and_planned(name, tmp_path)
    record_property("measured MB", measured // 10**6)
    record_property("planned MB", planned // 10**6)
    assert planned == pytest.approx(measured, rel=WITHIN)


PPO = """
name: {name}
threads: 1
method: {{name: grpo, max_staleness: {staleness}}}
model: model
data: {{train: prompts.jsonl}}
reward: [{{function: 'my_reward.py:score'}}]
generation: {{max_new_tokens: 32, samples: 2}}
generator: {{name: process}}
token_budget: 128
trainer: {{per_device_train_batch_size: 8, num_train_epochs: 5}}
"""


def test_time_with_batches_that_are_sampled_ahead(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Needs two idle cores: one for the generator's process and one for the trainer."""
    write(tmp_path)
    seconds = {}
    for staleness in (0, 1):
        name = f"s{staleness}"
        (tmp_path / f"{name}.yaml").write_text(PPO.format(name=name, staleness=staleness))
        command = [sys.executable, "-m", "burnish", "run", f"{name}.yaml"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=900)
        lines = [line for line in read_metrics(tmp_path / "runs" / name / "grpo") if "seconds" in line]
        seconds[staleness] = sum(line["seconds"] for line in lines[1:]) / len(lines[1:])
    _, profile = read_profile(tmp_path / "runs" / "s0")
    planned = simulate(profile.sampling, profile.updating, 1).seconds_per_iteration
    for key, value in {"s=0": seconds[0], "s=1": seconds[1], "planned": planned}.items():
        record_property(key, round(value, 2))
    assert seconds[1] < seconds[0]
    assert planned == pytest.approx(seconds[1], rel=0.25)
