"""Runs of ``burnish run`` in processes of their own, what they have written, and how tests kill them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.report.metrics import is_timing

PATIENCE = 600  # seconds; a process that takes longer hangs
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run"]
TWO_OF_TORCHRUN = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m"]
TWO = "parallel.processes=2"


class Run:
    """``burnish run``: ``Run("tiny", "out=a", TWO)``, or ``Run("tiny", launcher=TWO_OF_TORCHRUN, cwd=folder)``."""

    def __init__(
        self, *arguments: str, launcher: list[str] = PYTHON, cwd: Path | None = None, **variables: str
    ) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONHASHSEED": "random",
            "PYTHONPATH": str(Path(burnish.__file__).parents[1]),
        }
        self._log, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._log)
        self.process = subprocess.Popen(
            [*launcher, "burnish", "run", *arguments],
            cwd=cwd,
            env=environment | variables,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        """What the run has shown so far."""
        return os.pread(self._log, os.fstat(self._log).st_size, 0).decode("utf-8", "replace")

    def until(self, condition: str | Callable[[], bool]) -> None:
        """Wait for a pattern in the output, or until something holds. It is a failure if the run ends before."""
        holds = condition if callable(condition) else lambda: re.search(condition, self.output) is not None
        end = time.monotonic() + PATIENCE
        while not holds():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                pytest.fail(f"the run ended or hangs before {condition}: {self.output[-5000:]}")
            time.sleep(0.002)

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stop()
            pytest.fail(f"the run hangs: {self.output[-5000:]}")

    def stop(self) -> None:
        """Kill the run, and with its first process all others."""
        self.process.kill()
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        ranks: dict[int, int] = {}
        for process in descendants(self.process.pid):
            if "RANK" in (environment := environment_of(process)):
                ranks.setdefault(int(environment["RANK"]), process)  # its children come later
        return ranks


def finished(*arguments: str, **options: Any) -> Run:
    """A run that has ended without an error."""
    run = Run(*arguments, **options)
    assert run.end() == 0, run.output[-5000:]
    return run


def descendants(process: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        children += [int(child) for child in path.read_text().split()]
    return [*children, *(inner for child in children for inner in descendants(child))]


def environment_of(process: int) -> Mapping[str, str]:
    """The variables with which a process was started."""
    try:
        text = Path(f"/proc/{process}/environ").read_text()
    except OSError:  # it has just ended
        return {}
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)  # type: ignore[misc]


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what runs have written ---------------------------------------------------------------------------------------


def found(folder: Path) -> list[Path]:
    """All files and folders of the runs. Unlike a glob, this may pass a folder that is renamed meanwhile."""
    walked = os.walk(folder / "runs")
    return [Path(parent) / name for parent, folders, names in walked for name in (*folders, *names)]


def lines(folder: Path) -> int:
    """Lines of metrics that the stages have written."""
    return sum(path.read_bytes().count(b"\n") for path in found(folder) if path.name == "metrics.jsonl")


def chunks(folder: Path) -> set[int]:
    """The times of the last chunk of every stage that makes rows, in nanoseconds."""
    return {path.stat().st_mtime_ns for path in found(folder) if path.name == "progress.json"}


def unfinished(folder: Path) -> set[tuple[str, int]]:
    """Folders that are being written, or were when a process was killed, each with its last change in nanoseconds."""
    contents = set()
    for path in found(folder):
        if not (path.name.startswith(".") and path.name.endswith(".partial")):
            continue
        try:
            contents.add((path.name, path.stat().st_mtime_ns))
        except FileNotFoundError:  # it took its name in between
            continue
    return contents


def wait(process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    """Until something holds, or the process has ended or hangs."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and not until() and time.monotonic() < deadline:
        time.sleep(0.002)


def results(folder: Path) -> dict[str, Any]:
    """What must be equal: all files of data, models and adapters, samples, metrics and the manifest without timings."""
    (run,) = folder.glob("runs/*")
    contents: dict[str, Any] = {}
    for kind in ("data/**/*", "model/**/*", "adapter/**/*", "samples.jsonl"):
        for path in sorted(path for path in run.glob(f"**/{kind}") if path.is_file()):
            contents[str(path.relative_to(run))] = path.read_bytes()
    for path in sorted(run.glob("**/metrics.jsonl")):
        values = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        contents[str(path.relative_to(run))] = without_timings(values)
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    del manifest["checksums"]  # they are known by the times when files changed
    contents["manifest.json"] = without_timings(manifest)
    return contents


def without_timings(value: Any) -> Any:
    """Plain values without what may differ between two equal runs."""
    if isinstance(value, dict):
        return {key: without_timings(item) for key, item in value.items() if not is_timing(key)}
    return [without_timings(item) for item in value] if isinstance(value, list) else value


def table(folder: Path) -> dict[str, float]:
    """The numbers of a run's table of results."""
    stages = json.loads((folder / "manifest.json").read_text("utf-8"))["stages"]
    return {
        f"{stage['name']} {side} {name}": value
        for stage in stages
        for side, values in stage.get("results", {}).items()
        for name, value in values.items()
        if not is_timing(name)
    }


# --- kills --------------------------------------------------------------------------------------------------------


def kill(run: Run, whom: str) -> None:
    """Kill ``rank N``, ``all`` ranks or the ``launcher``, and check that all processes of the run end."""
    ranks = run.ranks()
    of_rank = {f"rank {rank}": [process] for rank, process in ranks.items()}
    for victim in ({"launcher": [run.process.pid], "all": [*ranks.values()]} | of_rank)[whom]:
        os.kill(victim, signal.SIGKILL)
    assert run.end() != 0, run.output[-5000:]
    end = time.monotonic() + 30
    while any(map(is_running, ranks.values())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, ranks.values())), f"{whom} was killed, but other processes still run"
