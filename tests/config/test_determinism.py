"""``full_determinism`` holds from the first computation of a stage, and while it samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config import load, run
from burnish.config.stage import TrainingStage
from burnish.generate.local import LocalGenerator

RECIPE = """
name: exact
stages:
  - name: grpo
    method: {name: grpo}
    model: base
    data: {train: rows.jsonl}
    reward: [{function: rewards.py:length}]
    generation: {max_new_tokens: 4, samples: 2}
    trainer: {per_device_train_batch_size: 2, max_steps: 1, full_determinism: FULL}
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, "")
    for name in ("HCCL_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("full", [True, False])
def test_it_is_on_before_a_model_is_loaded_and_in_sampling(full: bool, run_folder: Path, monkeypatch: Any) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    Path("rewards.py").write_text(
        "def length(trajectories):\n    return [float(len(t.tokens)) for t in trajectories]\n"
    )
    Path("run.yaml").write_text(RECIPE.replace("FULL", str(full).lower()))
    seen: dict[str, tuple[bool, str]] = {}

    def watched(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] = torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watched(TrainingStage, "_load")
    watched(TrainingStage, "_rewards")
    watched(LocalGenerator, "poll")
    run.run(load(Path("run.yaml")))
    assert seen.keys() == {"_load", "_rewards", "poll"}
    assert set(seen.values()) == {(True, ":16:8") if full else (False, "")}
