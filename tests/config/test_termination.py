"""SIGTERM ends training with a checkpoint of the current step, and the run resumes with the same bytes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from burnish.config import load
from burnish.config import run as pipeline
from burnish.config.termination import Termination
from burnish.errors import Terminated
from burnish.report.metrics import is_timing, read_metrics
from burnish.training.trainer import Trainer

RECIPE = """
name: small
method: {name: sft}
model: base
data: {train: rows.jsonl, eval: rows.jsonl}
trainer: {per_device_train_batch_size: 2, max_steps: 5, learning_rate: 0.01, save_strategy: SAVE}
"""


def results(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    lines = [{k: v for k, v in line.items() if not is_timing(k)} for line in read_metrics(folder / "sft")]
    return (folder / "sft/model/model.safetensors").read_bytes(), lines


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_training_saves_a_checkpoint_and_resumes(
    strategy: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("small.yaml").write_text(RECIPE.replace("SAVE", f"'{strategy}'"))
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "completion": "{i + 1}"}}\n' for i in range(6)))
    whole = results(pipeline.run(load("small.yaml", ["out=whole"])))
    step = Trainer.training_step

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(Terminated, match="after saving a checkpoint of step 3; run"):
        patch.setattr(Trainer, "training_step", interrupted)
        pipeline.run(load("small.yaml"))
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in Path("runs/small/sft").glob("checkpoint-*")] == ["checkpoint-3"]
    assert results(pipeline.run(load("small.yaml"))) == whole


@pytest.mark.parametrize("during, message", [(0, "ended by SIGTERM; run"), (2, "a checkpoint of step 3; run")])
def test_an_evaluation_before_training_ends_at_once_and_one_in_training_saves(
    during: int, message: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("small.yaml").write_text(RECIPE.replace("SAVE", "steps, eval_strategy: steps, eval_steps: 2"))
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "completion": "{i + 1}"}}\n' for i in range(6)))
    whole = results(pipeline.run(load("small.yaml", ["out=whole"])))
    evaluate = Trainer.evaluate

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == during:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Terminated, match=message):
        patch.setattr(Trainer, "evaluate", interrupted)
        pipeline.run(load("small.yaml"))
    assert results(pipeline.run(load("small.yaml"))) == whole


ROWS = """
name: small
method: {name: filter, function: "kept.py:kept"}
data: {rows: rows.jsonl}
"""
KEPT = """
import os, signal

def kept(row):
    if row["prompt"] == "70" and "terminate" in os.listdir():
        os.remove("terminate")
        os.kill(os.getpid(), signal.SIGTERM)
    return True
"""


def test_a_stage_that_makes_rows_ends_in_code_of_the_user_and_resumes_after_its_last_chunk(run_folder: Path) -> None:
    Path("small.yaml").write_text(ROWS)
    Path("kept.py").write_text(KEPT)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "completion": "x"}}\n' for i in range(80)))
    whole = pipeline.run(load("small.yaml", ["out=whole"]))
    Path("terminate").touch()
    with pytest.raises(Terminated, match="ended by SIGTERM; run"):
        pipeline.run(load("small.yaml"))
    assert json.loads(Path("runs/small/filter/progress.json").read_text())["done"] == 64
    again = pipeline.run(load("small.yaml"))
    files = [(folder / "filter/data/rows.jsonl").read_bytes() for folder in (whole, again)]
    assert files[0] == files[1] and files[0].count(b"\n") == 80


def test_outside_of_training_it_ends_the_run_at_once() -> None:
    termination = Termination()
    with pytest.raises(Terminated, match="ended by SIGTERM; run the same command"), termination.handled():
        os.kill(os.getpid(), signal.SIGTERM)
    with termination.handled(), termination.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.requested
