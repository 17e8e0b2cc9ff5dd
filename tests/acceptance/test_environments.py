"""Recipes with tools and environments: what reinforcement learning gains on 512 unseen questions or games."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from burnish.config import loading

pytestmark = pytest.mark.acceptance

NOISE = '''\
import random


def calculator(expression: str) -> str:
    """Add or multiply two numbers.

    Args:
        expression: such as 34+58 or 34*58.
    """
    return str(random.randint(20, 9801))
'''

Results = dict[str, dict[str, float]]


def run(recipe: str | Path, out: Path) -> dict[str, Results]:
    """Run a recipe and return the results of its stages."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "burnish", "run", str(recipe), f"out={out}"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, timeout=1500, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    return {stage["name"]: stage["results"] for stage in stages if stage.get("results")}


def change(results: Results, measure: str = "eval_score") -> tuple[float, float, float]:
    """The mean change of a measure with its paired 95 % interval."""
    before, after = results["before"], results["after"]
    return after[measure] - before[measure], after[f"{measure}_change_low"], after[f"{measure}_change_high"]


def shown(results: Results, measure: str = "eval_score") -> str:
    mean, low, high = change(results, measure)
    sides = " -> ".join(f"{results[side][measure]:.3f}" for side in ("before", "after"))
    return f"{sides}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]"


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Results]]:
    folder = tmp_path_factory.mktemp("calculator") / "run"
    return folder, run("calculator", folder)


def test_accuracy_and_calls_of_the_calculator_rise_together(
    calculator: tuple[Path, dict[str, Results]], record_property: Any
) -> None:
    _, results = calculator
    record_property("accuracy", shown(results["held-out"]))
    record_property("share of questions with a call", shown(results["held-out"], "eval_reward_called"))
    assert change(results["held-out"])[0] >= 0.25 and change(results["held-out"])[1] > 0
    assert change(results["held-out"], "eval_reward_called")[1] > 0


def test_without_the_calculator_accuracy_falls_back(
    calculator: tuple[Path, dict[str, Results]], record_property: Any
) -> None:
    _, results = calculator
    record_property("accuracy without the tool", shown(results["without"]))
    assert results["without"]["after"]["eval_reward_called"] == 0
    assert change(results["without"])[0] < 0.1
    gain = results["held-out"]["after"]["eval_score_low"] - results["without"]["after"]["eval_score_high"]
    assert gain > 0.25


def test_a_calculator_that_returns_noise_is_called_less_and_less(
    calculator: tuple[Path, dict[str, Results]], tmp_path: Path, record_property: Any
) -> None:
    folder, results = calculator
    (tmp_path / "noise.py").write_text(NOISE)
    stages = {stage["name"]: stage for stage in YAML(typ="safe").load(loading.RECIPES / "calculator.yaml")["stages"]}
    control = {"tools": ["noise.py:calculator"], "reward": [
        {"function": "burnish.recipes.calculator:exact"},
        {"function": "burnish.recipes.calculator:called", "weight": 0, "name": "called"},
    ]}  # fmt: skip
    training = stages["grpo"] | control | {
        "model": str(folder / "sft"),
        "data": {"train": str(folder / "prepare/data/prompts.jsonl")},
    }  # fmt: skip
    measuring = stages["held-out"] | control | {
        "method": {"name": "eval", "against": str(folder / "sft")},
        "data": {"rows": str(folder / "prepare/data/prompts-eval.jsonl")},
    }  # fmt: skip
    path = tmp_path / "noise.yaml"
    YAML(typ="safe").dump({"name": "noise", "threads": 1, "stages": [training, measuring]}, path)
    noise = run(path, tmp_path / "noise")["held-out"]
    record_property("share of questions with a call", shown(noise, "eval_reward_called"))
    lines = [json.loads(line) for line in (tmp_path / "noise/grpo/metrics.jsonl").read_text().splitlines()]
    shares = [line["reward_called"] for line in lines if "reward_called" in line]
    third = len(shares) // 3
    means = [sum(shares[k * third : (k + 1) * third]) / third for k in range(3)]
    record_property("in each third of training", ", ".join(f"{mean:.3f}" for mean in means))
    assert means[0] > means[2]
    assert change(noise, "eval_reward_called")[2] < 0
    assert noise["before"]["eval_reward_called"] == pytest.approx(
        results["held-out"]["before"]["eval_reward_called"], abs=0.05
    )


def test_more_games_are_won(tmp_path: Path, record_property: Any) -> None:
    results = run("guess", tmp_path / "run")
    record_property("games won", shown(results["held-out"]))
    assert change(results["held-out"])[1] > 0


def test_more_second_attempts_are_right(tmp_path: Path, record_property: Any) -> None:
    results = run("self-correct", tmp_path / "run")
    record_property("right after at most two attempts", shown(results["held-out"]))
    record_property("second attempts right, after the same wrong first answers", shown(results["second"]))
    assert change(results["held-out"])[1] > 0
    assert change(results["second"])[1] > 0
