"""Runs of two processes, with whole and with sharded weights, and comparisons with one process: ``sharded_job.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

JOB = Path(__file__).parent / "training" / "sharded_job.py"
spec = spec_from_file_location("sharded_job", JOB)
assert spec is not None and spec.loader is not None
job = module_from_spec(spec)
spec.loader.exec_module(job)

TIMES = ("runtime", "per_second", "seconds")


def launch(kind: str, out: Path, cases: list[str]) -> Any:
    """The results of two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, kind, out]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([*map(str, command), *cases], env=environment, timeout=900, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return torch.load(out / "results.pt")


def tolerance(case: str) -> float:
    return 1e-9 if case.endswith("float64") else 1e-5


def check(case: str, one: dict[str, Any], several: dict[str, Any]) -> None:
    """Check that several processes logged and learned what one process did."""
    within = tolerance(case)
    # an evaluation, the steps, the run, an evaluation
    assert len(one["metrics"]) == len(several["metrics"]) == job.STEPS.get(case, 3) + 3
    for expected, measured in zip(one["metrics"], several["metrics"], strict=True):
        assert expected.keys() == measured.keys()
        for metric in (m for m in expected if not m.endswith(TIMES)):
            # transformers adds up losses in float32
            near = max(within, 1e-6) if metric in ("loss", "train_loss") else within
            assert measured[metric] == pytest.approx(expected[metric], rel=near, abs=near), metric
    assert all(log["grad_norm"] > 0 for log in several["metrics"] if "grad_norm" in log)
    assert one["without_gradient"] == several["without_gradient"]
    if case.startswith("ppo"):  # in the first step only the critic learns
        learned = [n for n in one["trained"] if n.startswith("policy.")]
        assert learned and one["without_gradient"][0] == learned
    for weight, expected in one["weights"].items():
        torch.testing.assert_close(several["weights"][weight], expected, atol=within, rtol=within, msg=weight)


def check_saved(case: str, results: dict[str, Any]) -> None:
    """Check that a sharded network loaded what it had saved, and that its frozen models are sharded too."""
    assert results["frozen"] or "lora" in case or not case.startswith(("dpo", "distill"))
    assert all(results["frozen"])
    assert results["loaded"].keys() == results["weights"].keys()
    for name, weight in results["weights"].items():
        assert torch.equal(results["loaded"][name], weight), name
