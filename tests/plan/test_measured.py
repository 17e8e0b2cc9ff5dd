"""The planned memory of a run is what it takes. The other runs are in tests/acceptance/test_plan.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from plan.measured import measured_and_planned, write


@pytest.mark.slow
def test_sft_takes_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    measured, planned = measured_and_planned("sft", tmp_path)
    assert planned == pytest.approx(measured, rel=0.15)
