"""The recipe `constitution` as it ships, with a seed for which no setting was chosen, and with a judge over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from burnish import config
from burnish.config.run import run
from burnish.models.loaded import load
from burnish.recipes.constitution import polite
from burnish.serving.chat import Chat, chat_service
from burnish.types import Trajectory
from services import TOKEN, running
from tiny_runs import json_rows

pytestmark = pytest.mark.acceptance
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, run once."""
    return run(config.load("constitution", [f"out={tmp_path_factory.mktemp('constitution') / 'run'}", "seed=1"]))


def ppo_results(folder: Path, record_property: Record) -> dict[str, dict[str, float]]:
    """The results of the stage `ppo`, which are also recorded."""
    stages = {stage["name"]: stage for stage in json.loads((folder / "manifest.json").read_text("utf-8"))["stages"]}
    results = stages["ppo"]["results"]
    for name in ("score", "reward_polite", "reward_exact"):
        before, after = (results[side][f"eval_{name}"] for side in ("before", "after"))
        low, high = (results["after"][f"eval_{name}_change_{end}"] for end in ("low", "high"))
        record_property(f"PPO, {name}", f"{before:.3f} -> {after:.3f}, change in [{low:+.3f}, {high:+.3f}]")
    return results


def test_answers_become_polite_by_a_constitution_and_a_judge(folder: Path, record_property: Record) -> None:
    answers = {row["id"]: row["answer"] for row in json_rows(folder / "revise/data/revisions.jsonl")}
    revised = {row["id"]: row["completion"] for row in json_rows(folder / "revise/data/revised.jsonl")}
    first, last = [answers[name] for name in revised], list(revised.values())
    before, after = (fmean(polite([Trajectory.from_text(text) for text in texts])) for texts in (first, last))
    record_property("polite after two revisions", f"{before:.3f} -> {after:.3f} of {len(revised):,} answers")
    results = ppo_results(folder, record_property)
    assert after > before + 0.2
    assert results["after"]["eval_reward_polite_change_low"] > 0
    assert results["after"]["eval_reward_exact"] > results["before"]["eval_reward_exact"] - 0.05


class BadNetwork:
    """A service in front of another one: a fifth of the calls fail, 5 % get no answer, and 5 % get garbage."""

    def __init__(self, app: Any) -> None:
        self.app, self.chance = app, random.Random(0)
        self.faults: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()  # of each question

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        drawn = self.chance.random()
        fault = "failed" if drawn < 0.2 else "stalled" if drawn < 0.25 else "garbage" if drawn < 0.3 else "none"
        self.faults[fault] += 1
        if fault == "failed":
            await PlainTextResponse("injected", self.chance.choice([429, 500, 503]))(scope, receive, send)
        elif fault == "stalled":
            await asyncio.sleep(60)
        elif fault == "garbage":
            await PlainTextResponse('{"choices": [{"message": {"content": "Perhaps')(scope, receive, send)
        else:
            body = b""

            async def read() -> Any:
                nonlocal body
                message = await receive()
                body += message.get("body", b"")
                return message

            await self.app(scope, read, send)
            self.answered[body.decode()] += 1


RECIPE = """\
name: over-http
threads: 1
seed: 1
stages:
  - name: judge
    method:
      name: judge
      principles: [Prefer the more polite reply.]
      judge:
        {{url: "{url}/v1", name: judge, key: JUDGE_KEY, top_logprobs: 64, concurrency: {calls}, timeout: 4, retries: 12,
         backoff: 0.1}}
    data: {{rows: {run}/revise/data/pairs.jsonl}}
  - name: reward
    method: {{name: reward}}
    model: {run}/student
    data: {{train: {{stage: judge, file: pairs.jsonl}}}}
    trainer: {{per_device_train_batch_size: 64, num_train_epochs: 4, learning_rate: 1.5e-3, warmup_steps: 10}}
  - name: ppo
    method: {{name: ppo, kl_coef: 0.3, epochs: 2, mini_batches: 2, score_scale: 0.2, critic: {{learning_rate: 1.0e-3}}}}
    model: {run}/sft
    reward:
      - {{model: {{stage: reward}}}}
      - {{function: "burnish.recipes.constitution:polite", weight: 0, name: polite}}
      - {{function: "burnish.recipes.constitution:exact", weight: 0, name: exact}}
    data: {{train: {run}/prepare/data/prompts.jsonl, eval: {run}/prepare/data/prompts-eval.jsonl}}
    generation: {{max_new_tokens: 6}}
    trainer: {{per_device_train_batch_size: 128, learning_rate: 3.0e-4}}
"""
CALLS = 8


def burnish(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "JUDGE_KEY": TOKEN}
    arguments = [sys.executable, "-m", "burnish", "run", *command]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_same_with_a_judge_behind_a_bad_network(folder: Path, tmp_path: Path, record_property: Record) -> None:
    local = json_rows(folder / "judge" / "data" / "pairs.jsonl")
    service = chat_service(Chat(load(str(folder / "student" / "model")), "judge"), TOKEN)
    network = BadNetwork(service.app)
    path, out = tmp_path / "recipe.yaml", tmp_path / "run"
    with running(service, network) as url:
        path.write_text(RECIPE.format(url=url, calls=CALLS, run=folder), "utf-8")
        killed = burnish(str(path), f"out={out}")
        while network.answered.total() < len(local):  # half of the questions
            assert killed.poll() is None, killed.communicate()
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        resumed = burnish(str(path), f"out={out}")
        said, _ = resumed.communicate(timeout=3600)
        assert resumed.returncode == 0, said[-4000:]
        faults, answered = dict(network.faults), Counter(network.answered)
        network.faults.clear()
        limited = burnish(str(path), f"out={tmp_path / 'limited'}", "stages.judge.method.judge.max_calls=30")
        said, _ = limited.communicate(timeout=600)
        assert limited.returncode == 2 and "max_calls" in said, said[-4000:]
        assert network.faults.total() <= 30

    mine = json_rows(out / "judge" / "data" / "pairs.jsonl")
    gaps = [abs(one["p_chosen"] - other["p_chosen"]) for one, other in zip(mine, local, strict=True)]
    repeated = sum(answered.values()) - len(answered)
    record_property("calls", ", ".join(f"{count} {what}" for what, count in faults.items()))
    record_property("labels", f"{len(mine)}, which differ by at most {max(gaps):.1e}")
    record_property("asked again after kill -9", repeated)
    results = ppo_results(out, record_property)
    assert max(gaps) < 1e-6
    assert [(one["chosen"], one["rejected"]) for one in mine] == [(one["chosen"], one["rejected"]) for one in local]
    calls = sum(faults.values())
    assert faults["failed"] > 0.15 * calls and faults["stalled"] > 0.03 * calls and faults["garbage"] > 0.03 * calls
    assert repeated <= CALLS
    assert results["after"]["eval_reward_polite_change_low"] > 0
