"""What ``precision: auto`` means for a stage, and that a stage that resumes keeps it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import files, machine
from burnish.config import load
from burnish.config.stage import TrainingStage
from burnish.models.precision import WIDE
from burnish.training.checkpoint import RESUME_STATE, ResumeState

RECIPE = """
name: wide
stages:
  - {name: sft, method: {name: sft}, model: wide-model, data: {train: rows.jsonl}}
"""


@pytest.mark.parametrize(
    "width, begun, expected",
    [(WIDE, None, "bf16"), (32, None, "float32"), (WIDE, "no", "float32"), (32, "bf16", "bf16")],
)
def test_auto_follows_the_model_unless_the_stage_resumes(
    run_folder: Any, monkeypatch: pytest.MonkeyPatch, width: int, begun: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "has_bf16", lambda: True)
    Path("wide-model").mkdir()
    Path("wide-model/config.json").write_text(f'{{"model_type": "llama", "hidden_size": {width}}}')
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("run.yaml").write_text(RECIPE)
    if begun is not None:
        checkpoint = Path("runs/wide/sft/checkpoint-3")
        checkpoint.mkdir(parents=True)
        state = {field.name: None for field in fields(ResumeState)} | {"precision": begun}
        torch.save(state, checkpoint / RESUME_STATE)
        files.seal(checkpoint)
    recipe = load(Path("run.yaml"))
    stage = TrainingStage(recipe, recipe.stages[0])
    assert stage.precision_from(stage.start) == expected
