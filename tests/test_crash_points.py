"""Promise 2 at every point where a process can end: a run resumes from any state that its folder was in.

One run is recorded: before and after each rename, removal and fsync in its folder, the folder is copied. That is what a
killed process leaves there. A second copy has what a power failure leaves: files that were not synced since they were
written are as they were when they were, or empty. From each copy that differs from the others the run is started again,
in this process, and must end with the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from burnish.config import load, row_stage
from burnish.config import run as pipeline
from burnish.report.display import Display
from burnish.report.metrics import is_timing, read_metrics

RECIPE = """
name: crash
stages:
  - {name: made, run: "make.py:rows"}
  - name: sft
    method: {name: sft}
    model: base
    adapter: {r: 2}
    data: {train: {stage: made, file: chat.jsonl}, eval: {stage: made, file: chat.jsonl}, max_length: 32}
    trainer: {per_device_train_batch_size: 2, save_steps: 1, max_steps: 2, learning_rate: 0.01}
  - name: ppo
    method: {name: ppo, epochs: 1, critic: shared, mini_batches: 2}
    model: {stage: sft}
    reward: [{function: "make.py:short"}]
    data: {train: {stage: made, file: prompts.jsonl}, eval: {stage: made, file: prompts.jsonl}}
    generation: {max_new_tokens: 3}
    trainer: {per_device_train_batch_size: 2, save_steps: 2, max_steps: 4, learning_rate: 0.01}
"""
LOOP = """
name: crash
stages:
  - {name: made, run: "make.py:rows"}
  - name: loop
    rounds: 2
    stages:
      - name: grow
        method: {name: sample}
        model: {stage: sft, initial: base}
        reward: [{function: "make.py:noise"}]
        generation: {max_new_tokens: 3, samples: 2}
        data: {rows: {stage: made, file: prompts.jsonl}}
      - name: kept
        method: {name: filter, function: "make.py:coin"}
        data: {rows: {stage: grow, file: samples.jsonl, from_rounds: all}}
      - name: sft
        method: {name: sft}
        model: {stage: sft, initial: base}
        data: {train: {stage: kept, file: rows.jsonl}, select: {distinct: true, best: 1}}
        trainer: {per_device_train_batch_size: 2, max_steps: 1, learning_rate: 0.01}
      - name: check
        method: {name: eval, against: {stage: sft}, resamples: 20}
        model: base
        data: {rows: {stage: made, file: chat.jsonl}}
"""
CODE = """
import random
import json

def rows(folder, seed):
    (folder / "data").mkdir()
    chats = [{"prompt": str(i), "completion": str(i + seed)} for i in range(4)]
    (folder / "data" / "chat.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in chats))
    (folder / "data" / "prompts.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + chr(10) for i in range(4)))

def short(answers):
    return [-float(len(answer.tokens)) for answer in answers]

async def noise(answers):
    return [random.random() for answer in answers]

def coin(row):
    return random.random() < 0.8
"""
Tree = dict[str, bytes | None]


class Point(NamedTuple):
    """A moment of a run: ``Point("rename sft/.model.partial", "after", "killed", {"manifest.json": b"..."})``."""

    event: str
    side: str
    end: str
    tree: Tree

    @property
    def kind(self) -> str:
        """The kind of the moment, without the numbers of steps and the names of stages."""
        name = re.sub(r"\b(sft|ppo|made)\b", "STAGE", re.sub(r"\d+", "N", self.event))
        return f"{name} {self.side} {self.end}"


@pytest.fixture
def home(run_folder: Path) -> Path:
    """The folder of the run. The working folder contains its recipe, code and model."""
    Path("crash.yaml").write_text(RECIPE)
    Path("make.py").write_text(CODE)
    return run_folder / "runs" / "crash"


def run(*overrides: str, fresh: bool = False) -> None:
    with Display(Console(file=io.StringIO(), width=200)) as screen:
        pipeline.run(load("crash.yaml", overrides), fresh=fresh, display=screen)


def results(folder: Path) -> dict[str, Any]:
    """Every weight, adapter and sample, the metrics without timings, and the names of all files."""
    contents: dict[str, Any] = {"names": sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))}
    logs = [path for path in folder.rglob("*.jsonl") if path.name != "metrics.jsonl"]
    for path in [*folder.rglob("*.safetensors"), *logs, *folder.rglob("progress.json")]:
        contents[str(path.relative_to(folder))] = path.read_bytes()
    for path in folder.rglob("metrics.jsonl"):
        lines = read_metrics(path.parent)
        contents[str(path.relative_to(folder))] = [
            {k: v for k, v in line.items() if not is_timing(k)} for line in lines
        ]
    return contents


def restore(tree: Tree, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in tree.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class Recording:
    """Copies of a folder at every point. Equal copies are kept only once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = 0
        self.points: list[Point] = []
        there = [path for path in folder.rglob("*") if path.is_file()]
        self.synced = {path.stat().st_ino: path.read_bytes() for path in there}
        self.seen: set[bytes] = set()
        self.busy = False

    def at(self, event: str, side: str) -> None:
        """Copy the folder as a killed process and as a power failure would leave it."""
        self.events += 1
        killed: Tree = {}
        lost: Tree = {}
        for path in sorted(self.folder.rglob("*")) if self.folder.exists() else []:
            name = str(path.relative_to(self.folder))
            killed[name] = lost[name] = None
            if path.is_file():
                killed[name] = path.read_bytes()
                lost[name] = self.synced.get(path.stat().st_ino, b"")
        # a number that is free again may be given to another file
        living = {path.stat().st_ino for path in self.folder.rglob("*")} if self.folder.exists() else set()
        self.synced = {number: content for number, content in self.synced.items() if number in living}
        for end, tree in (("killed", killed), ("without power", lost)):
            digest = hashlib.sha256(repr(sorted(tree.items())).encode()).digest()
            if digest not in self.seen:
                self.seen.add(digest)
                self.points.append(Point(event, side, end, tree))

    def sync(self, handle: int) -> None:
        stat = os.fstat(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_file():
            self.synced[stat.st_ino] = path.read_bytes()


@contextmanager
def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """Record what happens in a folder for as long as the context lasts."""
    recording = Recording(folder)

    def inside(path: Any) -> str | None:
        whole = Path(os.path.abspath(os.fspath(path)))
        return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else None

    def around(name: str, function: Callable[..., Any], place: Callable[..., str | None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where = None if recording.busy else place(*args, **kwargs)
            if where is None:
                return function(*args, **kwargs)
            recording.at(f"{name} {where}", "before")
            done = function(*args, **kwargs)
            if name == "fsync":
                recording.sync(args[0])
            recording.at(f"{name} {where}", "after")
            return done

        return call

    def of_handle(handle: int) -> str | None:
        return inside(os.readlink(f"/proc/self/fd/{handle}"))

    def of_entry(path: Any, *, dir_fd: int | None = None) -> str | None:
        return inside(path if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", around("rename", os.rename, lambda source, *_, **__: inside(source)))
        patch.setattr(os, "replace", around("rename", os.replace, lambda source, *_, **__: inside(source)))
        patch.setattr(os, "fsync", around("fsync", os.fsync, of_handle))
        patch.setattr(os, "unlink", around("unlink", os.unlink, of_entry))
        patch.setattr(os, "rmdir", around("rmdir", os.rmdir, of_entry))
        patch.setattr(shutil, "rmtree", around("rmtree", shutil.rmtree, lambda path, *_, **__: inside(path)))
        yield recording


def replay(points: list[Point], folder: Path, expected: dict[str, Any], **options: Any) -> None:
    """Start again from each point, and compare the end."""
    for point in points:
        restore(point.tree, folder)
        run(**options)
        contents = results(folder)
        assert json.loads((folder / "manifest.json").read_text())["state"] == "done", point[:3]
        for name, value in expected.items():
            assert contents.get(name) == value, (name, *point[:3])


def one_of_a_kind(points: list[Point]) -> list[Point]:
    return list({point.kind: point for point in points}.values())


def record(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recording, dict[str, Any]]:
    with recorded(home, monkeypatch) as recording:
        run()
    return recording, results(home)


def record_fresh(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Point], dict[str, Any]]:
    """The points of removing a run of another recipe, and what the new run ends with."""
    run("seed=1")
    with recorded(home, monkeypatch) as recording:
        run(fresh=True)
    begun = next(i for i, p in enumerate(recording.points) if "made" in p.event and "partial" in p.event)
    return recording.points[:begun], results(home)


def test_resume_from_one_point_of_each_kind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, expected = record(home, monkeypatch)
    chosen = one_of_a_kind(recording.points)
    assert len(chosen) > 20 and any("checkpoint-N" in point.kind for point in chosen)
    replay(chosen[:: max(1, len(chosen) // 12)], home, expected)


def test_a_fresh_start_at_one_point_of_each_kind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, expected = record_fresh(home, monkeypatch)
    chosen = one_of_a_kind(points)
    replay(chosen[:: max(1, len(chosen) // 4)], home, expected, fresh=True)


@pytest.fixture
def loop(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with a loop, whose stages make rows in several chunks."""
    Path("crash.yaml").write_text(LOOP)
    monkeypatch.setattr(row_stage, "CHUNK", 2)
    return home


def test_a_loop_resumes_from_one_point_of_each_kind(loop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, expected = record(loop, monkeypatch)
    chosen = one_of_a_kind(recording.points)
    assert any("progress.json" in p.kind for p in chosen) and any(
        "removing" in p.kind or ".old" in p.kind for p in chosen
    )
    replay(chosen[:: max(1, len(chosen) // 8)], loop, expected)


@pytest.mark.acceptance
def test_a_loop_resumes_from_every_point(loop: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    recording, expected = record(loop, monkeypatch)
    record_property("different states", len(recording.points))
    replay(recording.points, loop, expected)


@pytest.mark.acceptance
def test_resume_from_every_point(home: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    recording, expected = record(home, monkeypatch)
    record_property("points", recording.events)
    record_property("different states", len(recording.points))
    replay(recording.points, home, expected)


@pytest.mark.acceptance
def test_resume_from_every_point_of_a_fresh_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    points, expected = record_fresh(home, monkeypatch)
    record_property("different states", len(points))
    replay(points, home, expected, fresh=True)
