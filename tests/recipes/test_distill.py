"""The full recipe: a student of 0.07 million weights comes closer to its teacher, and adds better."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_student_halves_its_divergence_from_the_teacher(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "burnish", "run", "distill", f"out={tmp_path / 'run'}"]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=900)
    stages = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))["stages"]
    before, after = (stages[-1]["results"][when] for when in ("before", "after"))
    for name in ("reverse_kl", "forward_kl", "reward_exact"):
        record_property(name, f"{before[f'eval_{name}']:.3f} -> {after[f'eval_{name}']:.3f}")
    for name in ("reverse_kl", "forward_kl"):
        assert after[f"eval_{name}"] < before[f"eval_{name}"] / 2
        assert after[f"eval_{name}_high"] < before[f"eval_{name}_low"] / 2
    assert after["eval_reward_exact_low"] > before["eval_reward_exact_high"] + 0.2
