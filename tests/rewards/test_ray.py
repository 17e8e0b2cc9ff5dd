"""Rewards in actors of a Ray cluster give the scores of this process, also after one has died."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from burnish import PPO
from burnish import ray_cluster as clusters
from burnish.config import manifest
from burnish.config.resolve import named_reward
from burnish.config.schema import RewardFromFunction, RewardFromModel
from burnish.errors import UserCodeError, UserError
from burnish.ray_cluster import Actors
from burnish.rewards.functions import NamedReward, close
from burnish.rewards.scoring import Scores, score, values_of
from burnish.types import Trajectory

CODE = """
import os, random

def drawn(trajectories):
    return [len(t.text) + random.random() for t in trajectories]

def of_tokens(trajectories):
    return [[0.5] * len(t.tokens) for t in trajectories]

async def later(trajectories):
    import asyncio
    await asyncio.sleep(0.01)
    return drawn(trajectories)

def process(trajectories):
    return [os.getpid() for _ in trajectories]

def broken(trajectories):
    return 1 / 0

def dying(trajectories):
    os._exit(1)
"""
TWO = Actors(workers=2, cpus=1)


def answers(*texts: str) -> list[Trajectory]:
    prompt = ({"role": "user", "content": "Hi"},)
    return [
        Trajectory.from_text(text, prompt, tokens=(5,) * len(text), source=f"prompts.jsonl:{i + 1}")  # type: ignore[arg-type]
        for i, text in enumerate(texts)
    ]


@pytest.fixture
def code(tmp_path: Path) -> Any:
    """A recipe beside whose file the rewards are."""
    (tmp_path / "mine.py").write_text(CODE)
    return SimpleNamespace(locate=lambda reference: f"{tmp_path}/{reference}")


def function(code: Any, name: str, ray: Actors | None = None) -> NamedReward:
    return named_reward(RewardFromFunction(function=f"mine.py:{name}", ray=ray), code, Path(), "cpu")


def scored(reward: NamedReward, seed: int = 0) -> Scores:
    return score(answers("", "a", "bc"), [reward], (seed,))


def test_the_values_of_a_call_are_those_of_the_scorer(code: Any) -> None:
    whole = score(answers("a", "bc"), [function(code, "drawn")], (3, 1))
    assert values_of(function(code, "drawn"), answers("a", "bc"), (3, 1, 0)) == whole.totals
    assert values_of(function(code, "drawn"), answers("a", "bc"), (3, 1, 1)) != whole.totals


def test_a_run_may_resume_in_another_cluster() -> None:
    assert manifest.MAY_CHANGE.match("stages.2.reward.0.ray.address was ")
    assert not manifest.MAY_CHANGE.match("stages.2.reward.0.ray.cpus was ")


def test_a_missing_ray_names_the_reward(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^reward drawn: ray: Ray is not installed"):
        function(code, "drawn", TWO)


@pytest.mark.acceptance
def test_functions_score_in_actors_as_here(code: Any, ray_cluster: Any) -> None:
    for name in ("drawn", "of_tokens", "later"):
        reward, here = function(code, name, TWO), function(code, name)
        for seed in (1, 2):
            assert scored(reward, seed).totals == scored(here, seed).totals
            for ours, theirs in zip(scored(reward, seed).tokens or [], scored(here, seed).tokens or [], strict=True):
                assert np.array_equal(ours, theirs)
        close([reward])
    for name, error, message in (
        ("broken", UserCodeError, r"^reward broken \(mine.py:broken\) raised ZeroDivisionError on a batch of 3 "),
        ("missing", UserError, "has no missing"),
        ("dying", UserCodeError, "reward dying raised RuntimeError: 3 of its Ray actors died in a row, the last one: "),
    ):
        reward = function(code, name, Actors())
        with pytest.raises(error, match=message):
            scored(reward)
        close([reward])


@pytest.mark.acceptance
def test_an_actor_that_dies_is_replaced(code: Any, ray_cluster: Any) -> None:
    reward = function(code, "process", TWO)
    first, second = (int(scored(reward).totals[0]) for _ in range(2))
    assert len({first, second, os.getpid()}) == 3
    os.kill(first, signal.SIGKILL)
    third, fourth = (int(scored(reward).totals[0]) for _ in range(2))
    assert third not in (first, second, os.getpid()) and fourth == second
    close([reward])


@pytest.mark.slow
def test_a_model_scores_in_an_actor_as_here_and_starts_a_critic(
    code: Any, ray_cluster: Any, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    torch.manual_seed(0)
    shape = tiny_llama().config.to_dict() | {"num_labels": 1, "architectures": None}
    model = LlamaForSequenceClassification(LlamaConfig(**shape))
    model.save_pretrained(tmp_path / "reward")
    tiny_tokenizer.save_pretrained(tmp_path / "reward")

    def of(ray: Actors | None) -> NamedReward:
        return named_reward(RewardFromModel(model=str(tmp_path / "reward"), ray=ray), code, Path(), "cpu")

    here, there = of(None), of(TWO)
    assert scored(there).totals == scored(here).totals
    starts = []
    for reward in (here, there):
        method = PPO([reward], critic={"name": "separate"})
        starts.append(method.prepare(tiny_llama(), tiny_tokenizer).critic)
    assert all(torch.equal(a, b) for a, b in zip(starts[0].parameters(), starts[1].parameters(), strict=True))
    close([there])
