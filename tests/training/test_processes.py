"""Runs of two processes: they resume exactly, each process with its own random state."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import files
from burnish.training.checkpoint import RESUME_STATE

JOB = Path(__file__).with_name("resume_job.py")
WARMUP_JOB = Path(__file__).with_name("warmup_job.py")


def run(kind: str, *arguments: object, processes: int = 2, job: Path = JOB) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, job, kind, *map(str, arguments)], env=environment, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    return torch.load(Path(str(arguments[0])) / "end.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "stream", "kto"])
def test_two_processes_resume_with_the_same_bytes(kind, tmp_path):
    straight = run(kind, tmp_path / "straight")
    folder = tmp_path / "straight" / "checkpoint-2"
    names = {path.name for path in folder.iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= names
    assert files.damage(folder) is None
    assert not [path for path in (tmp_path / "straight").iterdir() if path.name.startswith(".")]
    again = run(kind, tmp_path / "again", folder)
    assert all(torch.equal(value, again[name]) for name, value in straight.items())
    ends = [sorted((tmp_path / run).glob("checkpoint-*"))[-1] / RESUME_STATE for run in ("straight", "again")]
    states = [torch.load(path, weights_only=True) for path in ends]
    assert states[0] == states[1]
    # a single process resumes with the same order and the same rows per step
    alone = run(kind, tmp_path / "alone", folder, processes=1)
    if kind == "stream":  # dropout needs no random state; the noise of rows is drawn from that of each process
        assert all(torch.allclose(value, alone[name], atol=1e-4) for name, value in straight.items())
    made = {path.name for path in (tmp_path / "alone").glob("checkpoint-*")}
    assert made == {f"checkpoint-{step}" for step in range(3, 5 if kind == "rows" else 9)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_critic_warmup_leaves_the_policy_unchanged_on_two_processes(kind, tmp_path):
    """If missing gradients became zeros, Adam would count a step and decay the weights."""
    folders = [tmp_path / str(processes) for processes in (1, 2)]
    for folder in folders:
        folder.mkdir()
    one, two = (run(kind, folder, processes=n, job=WARMUP_JOB) for n, folder in enumerate(folders, start=1))
    assert len(one) == len(two) == 12
    for step, (expected, actual) in enumerate(zip(one, two, strict=True)):
        for name, weight in expected.items():
            torch.testing.assert_close(actual[name], weight, atol=1e-9, rtol=1e-9, msg=f"{step}: {name}")
            if name.startswith("policy."):
                assert torch.equal(weight, one[0][name]) == (step < 8) and torch.equal(actual[name], two[0][name]) == (
                    step < 8
                ), f"{step}: {name}"
