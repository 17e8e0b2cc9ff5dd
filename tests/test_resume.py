"""Promise 2: a pipeline that is killed at any moment and run again ends with the bytes of one that never was."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.training.metrics import is_timing

SMALL = [
    "stages.prepare.with={rows: 256, pairs: 128, prompts: 64, held_out: 16, corrupted: 0.4}",
    *(f"stages.{stage}.trainer.save_steps=3" for stage in ("sft", "reward", "ppo")),
    "stages.sft.trainer.num_train_epochs=2",
    "stages.sft.trainer.per_device_train_batch_size=16",
    "stages.reward.trainer.num_train_epochs=2",
    "stages.reward.trainer.per_device_train_batch_size=16",
    "stages.ppo.trainer.per_device_train_batch_size=16",
    "stages.ppo.trainer.num_train_epochs=2",
    "stages.ppo.method={name: ppo, epochs: 2, mini_batches: 2, kl_target: 1.0, kl_horizon: 500, target_kl: 0.01}",
]


def command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "burnish", "run", "tiny", f"out={folder}", *SMALL, *overrides]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "random"}


def progress(folder: Path) -> int:
    """Lines of metrics that the stages have written."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/metrics.jsonl"))


def results(folder: Path) -> dict[str, object]:
    """What must be equal: every weight, the critic among them, the samples, and the metrics but for their timings."""
    found: dict[str, object] = {}
    for path in sorted(folder.glob("*/model/**/*.safetensors")) + sorted(folder.glob("*/samples.jsonl")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    for path in sorted(folder.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(folder))] = [
            {key: value for key, value in line.items() if not is_timing(key)} for line in lines
        ]
    return found


@pytest.mark.slow
def test_killed_at_ten_moments_ends_with_the_same_bytes(tmp_path):
    folder = tmp_path / "run"  # the same for both: rows are named by the file that they came from
    subprocess.run(command(folder), check=True, env=environment(), capture_output=True, timeout=300)
    expected = results(folder)
    lines = progress(folder)
    shutil.rmtree(folder)
    assert {
        "sft/model/model.safetensors",
        "reward/model/model.safetensors",
        "ppo/model/critic/model.safetensors",
        "ppo/model/model.safetensors",
    } <= set(expected)
    moments = random.Random(time.time_ns())
    targets = sorted(moments.uniform(0, lines) for _ in range(10))
    kills = 0
    for target in targets:
        process = subprocess.Popen(
            command(folder), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and progress(folder) < target:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills == 10, "some runs had ended before they were killed"
    subprocess.run(command(folder), check=True, env=environment(), capture_output=True, timeout=300)
    got = results(folder)
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name] == value, name
