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


def test_two_processes_give_the_gradient_of_one(straight, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(JOB),
        str(tmp_path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True)
    both = torch.load(tmp_path / "gradients.pt")
    for dtype, tolerance in TOLERANCE.items():
        for name, gradient in both[str(dtype)].items():
            assert distance(gradient, straight[dtype][name]) < tolerance, (dtype, name)
