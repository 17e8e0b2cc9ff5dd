"""A pipeline with adapters leaves folders that load with transformers alone: policy and critic are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from burnish import recipe
from burnish.pipeline import run

SMALL = [
    "stages.prepare.with={rows: 128, pairs: 64, prompts: 32, held_out: 8, corrupted: 0.4}",
    "stages.sft.trainer.num_train_epochs=1",
    "stages.reward.trainer.num_train_epochs=1",
    "stages.ppo.trainer.per_device_train_batch_size=16",
    "stages.ppo.adapter={r: 4}",
]


@pytest.mark.slow
def test_policy_and_critic_load_without_peft(tmp_path: Path) -> None:
    folder = run(recipe.load("tiny", [f"out={tmp_path / 'run'}", *SMALL]))
    classes: dict[str, Any] = {"": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
    for part, auto in classes.items():
        model, info = auto.from_pretrained(folder / "ppo" / "model" / part, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        start = AutoModelForCausalLM.from_pretrained(folder / ("reward" if part else "sft") / "model")
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(model.state_dict()[name], start.state_dict()[name])
        name = "model.embed_tokens.weight"  # which has no adapter
        assert torch.equal(model.state_dict()[name], start.state_dict()[name])
