"""What a stage that samples advises on a GPU."""

from pathlib import Path
from typing import Any

import pytest

from burnish.config import load
from burnish.config.stage import TrainingStage

RECIPE = """
name: advice
stages:
  - name: rl
    method: {name: METHOD}
    model: base
    data: {train: rows.jsonl}
    GENERATOR
"""
REWARD = "reward: [{function: rewards.py:length}]\n    generation: {samples: 2}\n    "


@pytest.mark.parametrize(
    ("device", "method", "generator", "advised"),
    [
        ("cuda", "grpo", "generator: {name: local}", True),
        ("cuda", "grpo", "generator: {name: continuous}", False),
        ("cpu", "grpo", "generator: {name: local}", False),
        ("cuda", "sft", "", False),
    ],
)
def test_local_on_a_gpu_is_advised_against(
    device: str, method: str, generator: str, advised: bool, run_folder: Any
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    Path("rewards.py").write_text("def length(trajectories):\n    return [1.0 for t in trajectories]\n")
    text = RECIPE.replace("METHOD", method).replace("GENERATOR", (REWARD if generator else "") + generator)
    Path("run.yaml").write_text(text)
    recipe = load(Path("run.yaml"))
    stage = TrainingStage(recipe, recipe.stages[0])
    stage.device = device
    assert (stage.advice is not None) == advised
    assert not advised or "stages.rl.generator: on a GPU, consider {name: continuous}" in str(stage.advice)
