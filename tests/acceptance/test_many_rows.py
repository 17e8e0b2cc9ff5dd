"""100,000 sampled rows: memory stays flat, the time left is shown, and a stop in the middle loses nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROWS = 100_000
RECIPE = f"""
name: many
threads: 1
stages:
  - {{name: sums, run: "burnish.recipes.tiny:prepare", with: {{rows: 512, pairs: 2, prompts: {ROWS}, held_out: 8}}}}
  - name: sft
    method: {{name: sft}}
    model: {{stage: sums}}
    data: {{train: {{stage: sums, file: sft.jsonl}}}}
    trainer: {{per_device_train_batch_size: 64, learning_rate: 4.0e-3}}
  - name: many
    method: {{name: sample}}
    model: {{stage: sft}}
    reward: [{{function: "burnish.recipes.tiny:exact"}}]
    generation: {{max_new_tokens: 4}}
    data: {{rows: {{stage: sums, file: prompts.jsonl}}}}
"""
PATIENCE = 1800


def _with_ctrl_c() -> None:
    """Let Ctrl-C interrupt this process, also if the tests run in the background, where a shell ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Watched:
    """``burnish run`` with its memory over time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "burnish", "run", "many.yaml"],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_with_ctrl_c,
            )
        self.memory: list[tuple[int, float]] = []
        """Rows written and resident memory in MB."""

    def until(self, rows: int) -> None:
        """Wait until this many rows are written, or the process has ended."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and self.written() < rows and time.monotonic() < deadline:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            if resident := re.search(r"VmRSS:\s+(\d+)", status):
                self.memory.append((self.written(), int(resident[1]) / 1024))
            time.sleep(0.5)

    def written(self) -> int:
        """Rows in the output so far."""
        found = list(self.folder.glob("runs/many/many/*/samples.jsonl"))
        return sum(path.read_bytes().count(b"\n") for path in found)


@pytest.mark.acceptance
def test_many_rows(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    (tmp_path / "many.yaml").write_text(RECIPE)
    first = Watched(tmp_path)
    first.until(ROWS // 2)
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(60) == 130
    stopped = first.written()
    assert ROWS // 2 <= stopped < ROWS * 0.6
    second = Watched(tmp_path)
    second.until(ROWS + 1)
    assert second.process.wait(60) == 0, second.log.read_text()[-3000:]

    log = second.log.read_text()
    assert "stopped; run the same command again to resume" in log
    assert (going_on := re.search(r"rows: 100,000, resuming at row ([\d,]+)", log))
    assert int(going_on[1].replace(",", "")) >= ROWS // 2
    assert re.search(r"sample rows [\d,]+/100,000, .* left", log), "no time left is shown"
    prompts = (tmp_path / "runs/many/sums/data/prompts.jsonl").read_text().count("\n")
    (entry,) = re.findall(r"100,000 rows read: (.*)", log)
    counts = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= made| skipped)", entry)]
    assert prompts == ROWS == sum(counts) and second.written() == counts[0]

    for name, watched in (("before", first), ("after", second)):
        sampling = [memory for rows, memory in watched.memory if rows > (0 if name == "before" else stopped) + 5000]
        early, late = sampling[: len(sampling) // 4], sampling[-(len(sampling) // 4) :]
        growth = max(late) - max(early)
        record_property(f"memory {name} the stop", f"{max(early):.0f} MB, then {growth:+.0f} MB")
        assert growth < 32, f"memory grew from {max(early):.0f} to {max(late):.0f} MB"
