"""A reward model and functions behind a service: the same scores as in this process."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from burnish.rewards.functions import NamedReward
from burnish.rewards.protocol import ScoreRequest, score_request
from burnish.rewards.remote import RemoteReward
from burnish.serving.reward import reward_service
from burnish.types import Trajectory, Turn
from services import TOKEN, completions, get, model_reward, post, running

HEADERS = {"authorization": f"Bearer {TOKEN}"}
PROMPT = [{"role": "user", "content": "12 + 30 ="}]
ANSWER = [{"role": "assistant", "content": "42"}]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_reward()


@pytest.fixture(scope="module")
def url(model: Any):
    service = reward_service(NamedReward("tiny", 1.0, model), TOKEN, digest="d1", joins=True)
    with running(service) as url:
        yield url


def served(function: Any):
    return running(reward_service(NamedReward("mine", 1.0, function, "mine.py:mine"), TOKEN))


def remote(url: str, **settings: Any) -> RemoteReward:
    return RemoteReward(url, TOKEN, **settings)


def scores_of(reward: RemoteReward, trajectories: list[Trajectory]) -> Any:
    try:
        return asyncio.run(reward(trajectories))  # type: ignore[arg-type]
    finally:
        reward.close()


def test_a_batch_has_exactly_the_scores_of_this_process(url: str, model: Any) -> None:
    rows = completions(40)
    assert scores_of(remote(url, batch=64), rows) == model(rows)
    parts = [rows[start : start + 16] for start in (0, 16, 32)]
    assert scores_of(remote(url, batch=16), rows) == [score for part in parts for score in model(part)]


def test_requests_that_wait_are_scored_together_without_changing_their_scores(model: Any) -> None:
    service = reward_service(NamedReward("tiny", 1.0, model), TOKEN, joins=True)
    rows = completions(30, seed=1)
    bodies = [score_request([row], "test").replace(b'"alone": true', b'"alone": false') for row in rows]

    def ask(body: bytes) -> float:
        response = post(f"{url}/score", content=body, headers=HEADERS, timeout=30)
        return response.json()["scores"][0]

    with running(service) as url, ThreadPoolExecutor(15) as threads:
        joined = list(threads.map(ask, bodies))
        calls = service.worker.calls
        alone = scores_of(remote(url, batch=1), rows)
    assert calls < 30
    assert alone == [model([row])[0] for row in rows]
    assert joined == pytest.approx(alone, rel=0, abs=1e-6)


def test_health(url: str) -> None:
    assert get(f"{url}/health", headers=HEADERS).json() == {
        "service": "reward",
        "version": 1,
        "name": "tiny",
        "digest": "d1",
    }
    reward = remote(url)
    assert reward.digest() == "d1"
    reward.close()


def test_a_function_sees_what_it_sees_in_this_process() -> None:
    seen: list[Trajectory] = []

    def watch(trajectories: list[Trajectory]) -> list[float]:
        seen.extend(trajectories)
        return [float(len(t.tokens)) + t.columns["answer"] for t in trajectories]

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
    turns: Any = (
        Turn("<tool>add</tool>", "stop", {"role": "assistant", "content": "", "tool_calls": [call]}, (call,),  # type: ignore[arg-type, list-item]
             ({"role": "tool", "content": "42", "name": "add"},)),
        Turn(" 42", "length"),
    )  # fmt: skip
    (sent,) = completions(3)[2:]
    tools: Any = ({"type": "function", "function": {"name": "add"}},)
    sent = Trajectory(sent.prompt, turns, sent.sequences, "length", sent.columns, sent.source, tools=tools)
    with served(watch) as url:
        assert scores_of(remote(url), [sent]) == [2 + 2]
    (got,) = seen
    for name in ("prompt", "messages", "text", "finish_reason", "columns", "source", "tools", "tool_calls"):
        assert getattr(got, name) == getattr(sent, name), name
    assert got.tokens.tolist() == sent.tokens.tolist() == [0, 1]
    assert [turn.text for turn in got.turns] == ["<tool>add</tool>", " 42"]


def test_the_protocol_asks_for_no_more_than_a_prompt_and_a_completion() -> None:
    request = ScoreRequest.model_validate({"version": 1, "trajectories": [{"prompt": PROMPT, "messages": ANSWER}]})
    got = request.trajectories[0].trajectory()
    assert (got.prompt_text, got.text, got.stopped, got.tokens.tolist()) == ("12 + 30 =", "42", True, [])


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        ({"prompt": PROMPT}, "trajectories.1.messages: this key is missing"),
        ({"prompt": PROMPT, "messages": PROMPT}, "begins with a message of the assistant"),
        ({"prompt": PROMPT, "messages": ANSWER, "texts": []}, "texts: got 0 for 1 messages"),
        ({"prompt": PROMPT, "messages": [{"role": "robot", "content": ""}]}, "messages.0.role: expected"),
        ({"prompt": PROMPT, "messages": ANSWER, "tokens": [2**70]}, "trajectories.1"),
        ({"prompt": PROMPT, "messages": ANSWER, "score": 1}, "trajectories.1.score: unknown key"),
    ],
)
def test_a_wrong_trajectory_is_named_by_its_row(url: str, trajectory: Any, message: str) -> None:
    body = {"version": 1, "trajectories": [{"prompt": PROMPT, "messages": ANSWER}, trajectory]}
    response = post(f"{url}/score", json=body, headers=HEADERS)
    error = response.json()["error"]
    assert (response.status_code, error["kind"], error["row"]) == (400, "invalid", 1)
    assert message in error["message"]


def test_another_version_of_the_protocol(url: str) -> None:
    response = post(f"{url}/score", json={"version": 2, "trajectories": []}, headers=HEADERS)
    assert response.status_code == 400 and "version: expected 1" in response.json()["error"]["message"]


def test_a_completion_that_the_model_cannot_score_is_named_by_its_row(url: str) -> None:
    rows = completions(3)
    long = Trajectory.from_text("x" * 400, rows[1].prompt, source="prompts.jsonl:2")
    response = post(f"{url}/score", content=score_request([rows[0], long, rows[2]], "test"), headers=HEADERS)
    error = response.json()["error"]
    assert (response.status_code, error["kind"], error["row"]) == (422, "failed", 1)
    assert "prompts.jsonl:2" in error["message"]


def test_a_function_that_fails_is_reported_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    def fails(trajectories: list[Trajectory]) -> list[float]:
        return [t.columns["anwser"] for t in trajectories]

    with served(fails) as url, pytest.raises(Exception, match=r"did not score a batch.*no column 'anwser'"):
        scores_of(remote(url), completions(2))
    assert "in fails" in caplog.text


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "1.5", None])
def test_what_a_function_returns_is_checked(wrong: Any) -> None:
    with served(lambda rows: [1.0, wrong, 2.0][: len(rows)]) as url, pytest.raises(Exception, match=r"prompts.jsonl:2"):
        scores_of(remote(url), completions(3))


def test_scores_of_tokens() -> None:
    with served(lambda rows: [[0.5] * len(t.tokens) for t in rows]) as url:
        assert scores_of(remote(url), completions(4)) == [[], [0.5], [0.5] * 2, [0.5] * 3]


def test_random_numbers_of_a_function_depend_only_on_the_batch() -> None:
    import random

    with served(lambda rows: [random.random() for _ in rows]) as url:
        first, second, other = (scores_of(remote(url), completions(2, seed)) for seed in (0, 0, 1))
    assert first == second != other


def test_a_coroutine(tmp_path: Path) -> None:
    async def later(trajectories: list[Trajectory]) -> list[float]:
        await asyncio.sleep(0.01)
        return [float(t.columns["answer"]) for t in trajectories]

    with served(later) as url:
        assert scores_of(remote(url, batch=2), completions(5)) == [0, 1, 2, 3, 4]


def test_many_clients_get_their_own_scores(url: str, model: Any) -> None:
    rows = completions(100, seed=2)

    def ask(part: tuple[Trajectory, ...]) -> list[float]:
        return scores_of(remote(url), list(part))

    parts = [tuple(rows[start : start + 2]) for start in range(0, 100, 2)]
    with ThreadPoolExecutor(50) as threads:
        got = list(itertools.chain(*threads.map(ask, parts)))
    assert got == [score for part in parts for score in model(list(part))]
