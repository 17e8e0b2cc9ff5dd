"""Promise 1: the gradient of an optimizer step does not depend on how it is laid out in memory or over processes."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).with_name("gradient_job.py")
spec = spec_from_file_location("gradient_job", JOB)
assert spec is not None and spec.loader is not None
job = module_from_spec(spec)
spec.loader.exec_module(job)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
LAYOUTS = [
    {"token_budget": 1},
    {"shared_prompts": False},
    {"shared_prompts": False, "packed": True},
    {"token_budget": 40},
    {"token_budget": 100, "padding_side": "left"},
    {"padding_side": "left"},
    {"pad_to": 40},
    {"pad_to": 40, "padding_side": "left"},
    {"packed": True},
    {"packed": True, "token_budget": 40},
    {"packed": True, "padding_side": "left", "pad_to": 300},
]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("straight"))
    return {dtype: job.gradients(folder, dtype) for dtype in TOLERANCE}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_does_not_change_the_gradient(layout, dtype, straight, tmp_path):
    for name, gradient in job.gradients(str(tmp_path), dtype, **layout).items():
        assert gradient.norm() > 1e-3, name
        assert distance(gradient, straight[dtype][name]) < TOLERANCE[dtype], name


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What two processes found."""
    folder = tmp_path_factory.mktemp("both")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(list(map(str, command)), check=True, env=environment, timeout=300, capture_output=True)
    return torch.load(folder / "gradients.pt")


def test_two_processes_give_the_gradient_of_one(straight, both):
    for dtype, tolerance in TOLERANCE.items():
        for name, gradient in both[str(dtype)].items():
            assert distance(gradient, straight[dtype][name]) < tolerance, (dtype, name)


def test_what_has_no_gradient_in_one_process_has_none_in_two(both, tmp_path):
    """Zeros instead would count as a step of Adam, and decay."""
    for name, weights in job.partial_steps(str(tmp_path)).items():
        for part, weight in weights.items():
            torch.testing.assert_close(both["weights"][name][part], weight, atol=1e-9, rtol=1e-6, msg=f"{name}: {part}")
