"""Full runs of the recipes on sums: a reward makes the model better than its data, and a constant reward does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from burnish.config import loading

pytestmark = pytest.mark.slow


def run(recipe: str | Path, out: Path) -> dict[str, dict]:
    """Run a recipe and return the results of its stages."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "burnish", "run", str(recipe), f"out={out}"]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=900)
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    return {stage["name"]: stage["results"] for stage in stages if stage.get("results")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    folder = tmp_path_factory.mktemp("tiny") / "run"
    return folder, run("tiny", folder)


def test_ppo_is_more_accurate_than_its_initial_policy(tiny):
    _, results = tiny
    before, after = results["ppo"]["before"], results["ppo"]["after"]
    assert 0.5 < before["eval_reward_exact"] < 0.68  # 60 % of the answers that it learned from are right
    assert after["eval_reward_exact"] >= before["eval_reward_exact"] + 0.15
    assert after["eval_reward_exact_low"] > before["eval_reward_exact_high"]
    assert results["reward"]["after"]["eval_accuracy"] > 0.9


def test_every_folder_of_the_run_loads_without_burnish(tiny, artifacts):
    folder, _ = tiny
    for logits in artifacts(*(folder / name for name in ("sft", "reward", "ppo"))).values():
        last = max((name for name in logits if "-" in name), key=lambda name: int(name.partition("-")[2]))
        assert logits[last] == pytest.approx(logits["model"], abs=1e-6)


def test_a_constant_reward_leaves_accuracy_where_it_was(tiny, tmp_path):
    folder, _ = tiny
    stage = YAML(typ="safe").load(loading.RECIPES / "tiny.yaml")["stages"][-1]
    functions = loading.RECIPES / "tiny.py"
    stage |= {
        "model": str(folder / "sft" / "model"),
        "reward": [
            {"function": f"{functions}:constant"},
            {"function": f"{functions}:exact", "weight": 0, "name": "exact"},
        ],
        "data": {split: str(folder / "prepare" / "data" / file)
                 for split, file in (("train", "prompts.jsonl"), ("eval", "prompts-eval.jsonl"))},
    }  # fmt: skip
    recipe = tmp_path / "control.yaml"
    YAML(typ="safe").dump({"name": "control", "threads": 1, "stages": [stage]}, recipe)
    result = run(recipe, tmp_path / "run")["ppo"]
    before, after = result["before"], result["after"]
    assert before["eval_reward_exact_low"] <= after["eval_reward_exact"] <= before["eval_reward_exact_high"]


@pytest.mark.parametrize("name", ["reinforce", "grpo"])
def test_methods_without_a_critic_improve_accuracy(name, tmp_path):
    results = run(name, tmp_path / "run")[name]
    before, after = results["before"], results["after"]
    assert 0.5 < before["eval_score"] < 0.68
    assert after["eval_score"] >= before["eval_score"] + 0.15
    assert after["eval_score_low"] > before["eval_score_high"]
