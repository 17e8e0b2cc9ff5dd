"""A recipe with ``{url:}``: the scores of its service, and a run that goes on after the service was down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from burnish.config import load, row_stage
from burnish.config import run as pipeline
from burnish.errors import UserError
from burnish.rewards import remote
from burnish.rewards.functions import NamedReward
from burnish.serving.http import listening
from burnish.serving.reward import reward_service
from burnish.types import Trajectory
from services import TOKEN, model_reward, running
from tiny_runs import entries, json_rows

RECIPE = """
name: served
threads: 1
stages:
  - name: sample
    method: {{name: sample}}
    model: base
    data: {{rows: prompts.jsonl}}
    reward: [{{url: "{url}", token: REWARD_TOKEN, retries: 1, name: served}}]
    generation: {{samples: 2, max_new_tokens: 5}}
"""


class Faulty:
    """An app around a service, which refuses to score from some request on."""

    def __init__(self, app: Any) -> None:
        self.app, self.scored, self.limit = app, 0, 10**9
        self.digest: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/score":
            self.scored += 1
            if self.scored > self.limit:
                await PlainTextResponse("broken", 500)(scope, receive, send)
                return
        if scope["path"] == "/health" and self.digest is not None:
            await JSONResponse({"digest": self.digest})(scope, receive, send)
            return
        await self.app(scope, receive, send)


@pytest.fixture
def service(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """A running service, and the recipe that uses it in the working folder."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(row_stage, "CHUNK", 4)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    made = reward_service(NamedReward("tiny", 1.0, model_reward()), TOKEN, digest="first")
    faulty = Faulty(made.app)
    with running(made, faulty) as url:
        Path("r.yaml").write_text(RECIPE.format(url=url))
        Path("prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}+1=", "answer": i}) + "\n" for i in range(10))
        )
        yield faulty


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "sample/data").iterdir()}


def test_scores_are_those_of_the_model(service: Faulty) -> None:
    folder = pipeline.run(load("r.yaml"))
    samples = json_rows(folder / "sample/data/samples.jsonl")
    groups = [samples[start : start + 8] for start in range(0, len(samples), 8)]  # 4 prompts in a chunk
    for group in groups:
        trajectories = [
            Trajectory.from_text(row["completion"], ({"role": "user", "content": row["prompt"]},)) for row in group
        ]
        assert [row["score"] for row in group] == model_reward()(trajectories)
    assert len(samples) == 20 and service.scored == 3
    written = "".join(
        path.read_text("utf-8") for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md")
    )
    assert TOKEN not in written and "REWARD_TOKEN" in written
    assert "first" in entries(folder)["sample"]["inputs"].values()


def test_a_run_whose_service_breaks_stops_and_resumes_with_the_same_bytes(service: Faulty) -> None:
    whole = bytes_of(pipeline.run(load("r.yaml", ["out=whole"])))
    service.scored, service.limit = 0, 2
    with pytest.raises(
        UserError, match=r"is down: 500 broken \(tried 2 times in 0 seconds\): start the service, and run"
    ):
        pipeline.run(load("r.yaml", ["out=broken"]))
    assert not Path("broken/sample/data").exists()
    assert json.loads(Path("broken/sample/progress.json").read_text())["done"] == 8
    service.scored, service.limit = 0, 10**9
    assert bytes_of(pipeline.run(load("r.yaml", ["out=broken"]))) == whole
    assert service.scored == 1


def test_a_run_does_not_resume_with_another_model(service: Faulty) -> None:
    service.limit = 1
    with pytest.raises(UserError, match="is down"):
        pipeline.run(load("r.yaml"))
    service.digest = "another"
    with pytest.raises(UserError, match="the service of reward served has changed since sample started"):
        pipeline.run(load("r.yaml"))


def test_a_run_resumes_with_a_service_at_another_address(service: Faulty) -> None:
    whole = bytes_of(pipeline.run(load("r.yaml", ["out=whole"])))
    service.scored, service.limit = 0, 1
    with pytest.raises(UserError, match="is down"):
        pipeline.run(load("r.yaml", ["out=moved"]))
    service.limit = 10**9
    with listening(service, grace=1) as url:
        change = [f"stages.sample.reward.0.{key}" for key in (f"url={url}", "timeout=90.0", "retries=3")]
        assert bytes_of(pipeline.run(load("r.yaml", ["out=moved", *change]))) == whole
    assert json.loads(Path("moved/manifest.json").read_text())["recipe"]["stages"][0]["reward"][0]["url"] == url
    with pytest.raises(UserError, match=r"holds a run of another recipe: stages\.0\.reward\.0\.batch was 64 and is 32"):
        pipeline.run(load("r.yaml", ["out=moved", "stages.sample.reward.0.batch=32"]))


def test_a_missing_token_is_found_before_anything_runs(service: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(UserError, match="the environment variable REWARD_TOKEN is not set"):
        pipeline.run(load("r.yaml"))
    assert not Path("runs").exists()


def test_a_wrong_token(service: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "not-the-token-of-it")
    with pytest.raises(UserError, match=r"the service refuses the token \(401\)") as error:
        pipeline.run(load("r.yaml"))
    assert "not-the-token-of-it" not in str(error.value)
