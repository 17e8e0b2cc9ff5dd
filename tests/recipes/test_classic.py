"""The classic pipeline with a small random model: its parts fit together, and merging into a wrong base is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow


def burnish(*arguments: object, code: int = 0) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "burnish", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, dictionary: Path, tiny_folder: Path) -> Path:
    """A run of the recipe on the few nouns of the small dictionary."""
    out = tmp_path_factory.mktemp("classic") / "run"
    burnish(
        *("run", "classic", f"out={out}", "threads=1", f"stages.sft.model={tiny_folder}"),
        f"stages.prepare.with={{dictionary: {dictionary}, rows: 4, pairs: 2, prompts: 2, held_out: 1}}",
        *("stages.sft.trainer.num_train_epochs=40", "stages.sft.trainer.learning_rate=1e-2"),
        *("stages.ppo.trainer.per_device_train_batch_size=2", "stages.ppo.generation.max_new_tokens=4"),
    )
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_loss_on_unseen_nouns_falls(chain: Path) -> None:
    results = {
        stage["name"]: stage.get("results") for stage in json.loads((chain / "manifest.json").read_text())["stages"]
    }
    assert results["sft"]["after"]["eval_loss"] < results["sft"]["before"]["eval_loss"] - 0.5


def test_every_folder_loads_with_transformers_and_peft_alone(chain: Path, artifacts: Any) -> None:
    for logits in artifacts(*(chain / name for name in ("sft", "reward", "ppo"))).values():
        assert logits["model"] == pytest.approx(logits["adapter"], abs=1e-4)


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_burnish_merge_reproduces_the_model_of_the_stage(stage: str, chain: Path, tmp_path: Path) -> None:
    burnish("merge", chain / stage / "adapter", "--output", tmp_path / "merged")
    merged, model = weights(tmp_path / "merged"), weights(chain / stage / "model")
    assert merged.keys() == model.keys()
    assert max((merged[name] - model[name]).abs().max().item() for name in model) < 1e-5


def test_the_adapter_of_ppo_is_not_merged_into_the_raw_model(chain: Path, tiny_folder: Path, tmp_path: Path) -> None:
    said = burnish("merge", chain / "ppo" / "adapter", "--base", tiny_folder, "--output", tmp_path / "merged", code=2)
    assert str(tiny_folder) in said and "Traceback" not in said
    assert not (tmp_path / "merged").exists()


def test_the_outcome_answers_with_sampled_beams(chain: Path) -> None:
    options = ("--beams", 4, "--sample", "--top-k", 10, "--temperature", 0.6, "--max-new-tokens", 8)
    first = burnish("generate", chain / "ppo", *options, 'Define "anchor".')
    assert first.strip() and first == burnish("generate", chain / "ppo", *options, 'Define "anchor".')
