"""Runs of two processes that are killed or terminated at any moment: they end together, and resume with the same bytes.

Started by Burnish or by torchrun, with whole and with sharded weights.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from run_processes import PYTHON, TWO, TWO_OF_TORCHRUN, Run, kill, lines, results, table, unfinished
from tiny_runs import json_rows

REWARDS = """\
import time
from pathlib import Path

def digits(answers):
    wanted = Path("hold").read_text() if Path("hold").exists() else ""
    if wanted and wanted in answers[0].source:  # until SIGTERM arrives
        Path("held").touch()
        time.sleep(5)
    return [sum(letter.isdigit() for letter in answer.text) - 3 for answer in answers]
"""


class Layout(NamedTuple):
    """How a run is started."""

    overrides: tuple[str, ...] = ()
    launcher: list[str] = PYTHON
    ended: int = 143
    """Exit code after SIGTERM."""


LAYOUTS = {
    "one": Layout(),
    "two": Layout((TWO,)),
    "fsdp2": Layout((TWO, "parallel.shard=fsdp2")),
    "torchrun": Layout(launcher=TWO_OF_TORCHRUN, ended=1),
}


def working_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "processes.yaml", folder / "recipe.yaml")
    (folder / "rewards.py").write_text(REWARDS, "utf-8")
    return folder


def start(folder: Path, layout: Layout) -> Run:
    cache = str(folder / "cache")
    return Run("recipe.yaml", *layout.overrides, launcher=layout.launcher, cwd=folder, BURNISH_CACHE=cache)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The working folder of a layout's uninterrupted run."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = working_folder(tmp_path_factory.mktemp(name) / "work")
            run = start(folder, LAYOUTS[name])
            assert run.end() == 0, run.output[-5000:]
            made[name] = folder
        return made[name]

    return of


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ["two", "fsdp2", "torchrun"])
def test_every_layout_gives_the_results_of_one_process(name: str, straight: Callable[[str], Path]) -> None:
    one, several = (straight(layout) / "runs" / "processes" for layout in ("one", name))
    assert len(table(one)) > 20 and table(several) == pytest.approx(table(one), rel=1e-4, abs=1e-4)
    samples = [
        [(row["prompt"], row["completion"]) for row in json_rows(folder / "rows/data/samples.jsonl")]
        for folder in (one, several)
    ]
    assert samples[0] == samples[1] and len(samples[0]) > 300
    files = [path.relative_to(one) for path in one.glob("*/model/**/*.safetensors")]
    assert Path("ppo/model/critic/model.safetensors") in files and len(files) == 5
    for path in files:
        expected, got = load_file(one / path), load_file(several / path)
        assert expected.keys() == got.keys()
        for weight, tensor in expected.items():
            torch.testing.assert_close(got[weight], tensor, atol=1e-4, rtol=0, msg=f"{path}: {weight}")


KILLS = [
    ("rank 1", "line"),
    ("rank 0", "write"),
    ("all", "write"),
    ("launcher", "line"),
    ("rank 1", "write"),
    ("launcher", "write"),
]


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ["two", "fsdp2"])
def test_a_run_killed_at_any_moment_resumes_with_the_same_bytes(
    name: str, straight: Callable[[str], Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    expected, total = results(straight(name)), lines(straight(name))
    folder, chance, writing = working_folder(tmp_path / "work"), random.Random(name), 0
    for number, (whom, moment) in enumerate(KILLS):
        target = total * (number + chance.uniform(0, 0.8)) / len(KILLS)
        before, old = lines(folder), unfinished(folder)
        run = start(folder, LAYOUTS[name])
        run.until(lambda before=before: lines(folder) != before)
        run.until(lambda target=target: lines(folder) >= target)
        if moment == "write":
            run.until(lambda old=old: bool(unfinished(folder) - old))
        kill(run, whom)
        writing += bool(unfinished(folder) - old)
        if whom.startswith("rank"):
            assert f"error: {whom} (process" in run.output and "was killed by SIGKILL" in run.output, run.output
            assert "Traceback" not in run.output, run.output
    record_property("kills", len(KILLS))
    record_property("while a folder was written", writing)
    again = start(folder, LAYOUTS[name])
    assert again.end() == 0, again.output
    got = results(folder)
    assert list(got) == list(expected)
    assert [file for file in expected if got[file] != expected[file]] == []
    assert writing >= 1, "no kill fell into the writing of a folder"


@pytest.mark.acceptance
def test_a_run_passes_through_all_layouts(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """With every change between two layouts, in the middle of training."""
    expected, total = straight("one") / "runs" / "processes", lines(straight("one"))
    folder = working_folder(tmp_path / "work")
    order, changes = ["one", "two", "fsdp2", "one", "fsdp2", "two", "one"], 0
    for number, name in enumerate(order):
        run = start(folder, LAYOUTS[name])
        if number == len(order) - 1:
            assert run.end() == 0, run.output[-5000:]
            break
        run.until(lambda number=number: lines(folder) > total * (number + 0.5) / len(order))
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 143, run.output[-5000:]
        changes += "results may differ in the last digits" in run.output
    assert changes >= 4  # the others fell between two stages
    assert table(folder / "runs" / "processes") == pytest.approx(table(expected), rel=1e-4, abs=1e-4)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_gets_sigterm_resumes_with_the_same_bytes(
    name: str, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    """In training, in an evaluation before training and one in it, and in a stage that makes rows."""
    expected, layout = results(straight(name)), LAYOUTS[name]
    folder = working_folder(tmp_path / "work")
    stages = folder / "runs" / "processes"

    def held(by: str, after: Callable[[], bool]) -> Callable[[Run], None]:
        """Wait until rewards hold the run, once something is true."""

        def until(run: Run) -> None:
            run.until(after)
            (folder / "held").unlink(missing_ok=True)
            (folder / "hold").write_text(by)
            run.until((folder / "held").exists)

        return until

    saves, ends = r"ended by SIGTERM after saving a checkpoint of step \d+; run", r"ended by SIGTERM; run"
    moments: list[tuple[Callable[[Run], None], str]] = [
        (lambda run: run.until(lambda: (stages / "sft" / "checkpoint-2").exists()), saves),
        (held("prompts-eval", lambda: True), ends),
        (held("prompts-eval", lambda: (stages / "ppo" / "checkpoint-3").exists()), saves),
        (lambda run: run.until(lambda: (stages / "ahead" / "checkpoint-3").exists()), saves),
        (held("prompts.jsonl", lambda: (stages / "rows" / "progress.json").exists()), ends),
    ]
    for until, message in moments:
        run = start(folder, layout)
        until(run)
        os.kill(run.process.pid, signal.SIGTERM)
        code = run.end()
        (folder / "hold").unlink(missing_ok=True)
        assert code == layout.ended, run.output[-5000:]
        (shown,) = [line for line in run.output.splitlines() if line.startswith("ended by")]
        assert re.match(message, shown), run.output
    again = start(folder, layout)
    assert again.end() == 0, again.output
    assert "resuming at row" in again.output
    got = results(folder)
    assert list(got) == list(expected)
    assert [file for file in expected if got[file] != expected[file]] == []
