"""The recipe `constitution` as it ships, with a seed for which no setting was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from burnish import config
from burnish.config.run import run
from burnish.recipes.constitution import polite
from burnish.types import Trajectory
from tiny_runs import json_rows


@pytest.mark.acceptance
def test_answers_become_polite_by_a_constitution_and_a_judge(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = run(config.load("constitution", [f"out={tmp_path / 'run'}", "seed=1"]))
    answers = {row["id"]: row["answer"] for row in json_rows(folder / "revise/data/revisions.jsonl")}
    revised = {row["id"]: row["completion"] for row in json_rows(folder / "revise/data/revised.jsonl")}
    first, last = [answers[name] for name in revised], list(revised.values())
    before, after = (fmean(polite([Trajectory.from_text(text) for text in texts])) for texts in (first, last))
    record_property("polite after two revisions", f"{before:.3f} -> {after:.3f} of {len(revised):,} answers")
    stages = {stage["name"]: stage for stage in json.loads((folder / "manifest.json").read_text("utf-8"))["stages"]}
    results = stages["ppo"]["results"]
    for name in ("score", "reward_polite", "reward_exact"):
        before_ppo, after_ppo = (results[side][f"eval_{name}"] for side in ("before", "after"))
        low, high = (results["after"][f"eval_{name}_change_{end}"] for end in ("low", "high"))
        record_property(f"PPO, {name}", f"{before_ppo:.3f} -> {after_ppo:.3f}, change in [{low:+.3f}, {high:+.3f}]")
    assert after > before + 0.2
    assert results["after"]["eval_reward_polite_change_low"] > 0
    assert results["after"]["eval_reward_exact"] > results["before"]["eval_reward_exact"] - 0.05
