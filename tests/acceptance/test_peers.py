"""The first step of each method against TRL's, in an environment that has TRL."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import burnish

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers"


@pytest.mark.acceptance
def test_first_steps_equal_those_of_trl(record_property: Callable[[str, object], None]) -> None:
    if not (PEERS / "installed").is_file():
        pytest.skip("no environment with TRL: `make peers` makes it")
    command = [str(PEERS / "bin" / "python"), "-m", "pytest", "-q", "-m", "peers", "tests/peers"]
    environment = os.environ | {"PYTHONPATH": str(Path(burnish.__file__).parents[1])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])}
    record_property("compared", counts.get("passed", 0))
    assert counts.get("passed") and not counts.get("skipped"), done.stdout[-5000:]
