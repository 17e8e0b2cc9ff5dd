"""Recipes with rounds on two-digit sums: what they gain on 1,000 held-out questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from burnish.config import loading
from burnish.math.statistics import bootstrap

pytestmark = pytest.mark.acceptance

WEIGHTS = "model/model.safetensors"
OFFLINE_STEPS = 120  # as many as in the three rounds of the recipe online-dpo


def run(recipe: str | Path, out: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """Run a recipe and return the manifest's stages by name."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "burnish", "run", str(recipe), f"out={out}", *overrides]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, timeout=1500, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {stage["name"]: stage for stage in json.loads((out / "manifest.json").read_text())["stages"]}


def values(folder: Path, measure: str) -> dict[str, float]:
    """A measure of every row of an evaluation."""
    rows = map(json.loads, (folder / "data/measures.jsonl").read_text("utf-8").splitlines())
    return {row["source"]: row["values"][measure] for row in rows}


def paired(before: dict[str, float], after: dict[str, float]) -> tuple[float, float, float]:
    """The mean difference after - before over rows, with its 95 % bootstrap interval."""
    assert before.keys() == after.keys() and len(before) == 1000
    differences = torch.tensor([[after[source] - before[source]] for source in before], dtype=torch.float64)
    ((low, high),) = bootstrap(differences, lambda means: means[:, :1], 2000, 0)
    return differences.mean().item(), low, high


def shown(mean: float, low: float, high: float) -> str:
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def test_rest_gains_in_both_rounds(tmp_path: Path, record_property: Any) -> None:
    stages = run("rest", tmp_path / "rest")
    results = [stages[f"loop/{number}/held-out"]["results"]["after"] for number in (1, 2)]
    start = stages["loop/1/held-out"]["results"]["before"]["eval_reward_gold"]
    record_property("accuracy", " -> ".join(f"{x:.3f}" for x in [start, *(r["eval_reward_gold"] for r in results)]))
    for number, result in enumerate(results, 1):
        change = [result[f"eval_reward_gold_change_{end}"] for end in ("low", "high")]
        record_property(f"after round {number}, against sft", f"[{change[0]:+.3f}, {change[1]:+.3f}]")
        assert change[0] > 0
    second = paired(*(values(tmp_path / f"rest/loop/{number}/held-out", "reward_gold") for number in (1, 2)))
    record_property("round 2 against round 1", shown(*second))
    assert second[1] > 0
    first, last = (stages[f"loop/2/improve-{number}"]["rows"]["train"] for number in (1, 2))
    assert last["rows"] < first["rows"]  # the threshold rises
    assert "gold (weight 0)" in (tmp_path / "rest/report.html").read_text("utf-8")


def test_every_improve_of_rest_em_starts_from_the_base(tmp_path: Path, record_property: Any) -> None:
    stages = run("rest-em", tmp_path / "rest-em")
    base = stages["base"]["files"][WEIGHTS]
    started = [stages[f"loop/{number}/improve"]["inputs"][f"base/{WEIGHTS}"] for number in (1, 2)]
    record_property("sha256 of the base and of the starts", ", ".join(sha[:12] for sha in [base, *started]))
    assert started == [base, base]
    result = stages["loop/2/held-out"]["results"]
    accuracy = [result[side]["eval_score"] for side in ("before", "after")]
    record_property("accuracy", " -> ".join(f"{x:.3f}" for x in accuracy))
    assert result["after"]["eval_score_change_low"] > 0


def test_online_dpo_against_dpo_on_the_pairs_of_the_first_round(tmp_path: Path, record_property: Any) -> None:
    """Reports the difference, whichever way it falls. Both arms take 120 optimizer steps from the same policy."""
    recipe = YAML(typ="safe").load(loading.RECIPES / "online-dpo.yaml")
    _, dpo, held_out = recipe["stages"][-1]["stages"]
    differences = []
    for seed in range(3):
        online = tmp_path / f"online-{seed}"
        stages = run("online-dpo", online, f"seed={seed}")
        steps = sum(json.loads((online / f"loop/{k}/dpo/metrics.jsonl").read_text().splitlines()[-1])["step"]
                    for k in (1, 2, 3))  # fmt: skip
        assert steps == OFFLINE_STEPS
        offline = {
            **dpo,
            "model": str(online / "sft"),
            "data": {"train": str(online / "loop/1/samples/data/ranked.jsonl")},
            "trainer": {**dpo["trainer"], "max_steps": OFFLINE_STEPS},
        }
        measured = {
            **held_out,
            "method": {"name": "eval"},
            "reward": [{"function": "burnish.recipes.tiny:exact"}],
            "data": {"rows": str(online / "prepare/data/prompts-eval.jsonl")},
        }
        sources = {"online": str(online / "loop/3/dpo"), "offline": {"stage": "dpo"}, "sft": str(online / "sft")}
        evals = [{**measured, "name": name, "model": source} for name, source in sources.items()]
        path = tmp_path / f"offline-{seed}.yaml"
        YAML(typ="safe").dump({"name": "offline", "seed": seed, "threads": 1, "stages": [offline, *evals]}, path)
        run(path, tmp_path / f"offline-{seed}")
        scores = {name: values(tmp_path / f"offline-{seed}" / name, "score") for name in sources}
        assert stages["loop/3/held-out"]["state"] == "done"
        difference = paired(scores["offline"], scores["online"])
        accuracy = ", ".join(f"{name} {fmean(scores[name].values()):.3f}" for name in ("sft", "offline", "online"))
        record_property(f"seed {seed}", f"{accuracy}, difference {shown(*difference)}")
        differences.append(difference[0])
    record_property("mean difference online - offline", f"{fmean(differences):+.3f}")
