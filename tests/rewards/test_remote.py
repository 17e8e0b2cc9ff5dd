"""The client of a reward service, against services that fail in every way."""

from __future__ import annotations

import asyncio
import datetime
import gc
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from burnish.config.resolve import remote_reward
from burnish.config.schema import RewardFromURL
from burnish.errors import UserError
from burnish.rewards import remote
from burnish.rewards.functions import NamedReward
from burnish.rewards.remote import RemoteReward
from burnish.rewards.scoring import Scorer, score
from burnish.serving.http import listening
from burnish.types import Trajectory
from services import TOKEN, completions

Handler = Callable[[list[dict[str, Any]]], Response | None]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)


class Stub:
    """A service in a few lines, which answers request number i as ``handler`` says, or with the columns ``answer``."""

    def __init__(self, handler: Handler = lambda _: None) -> None:
        self.handler = handler
        self.sizes: list[int] = []
        self.tokens: set[str | None] = set()
        self.busy = self.busiest = 0

    async def score(self, request: Request) -> Response:
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        try:
            rows = (await request.json())["trajectories"]
            self.sizes.append(len(rows))
            self.tokens.add(request.headers.get("authorization"))
            if (answer := self.handler(rows)) is not None:
                return answer
            await asyncio.sleep(0.02)
            return JSONResponse({"scores": [row["columns"]["answer"] for row in rows]})
        finally:
            self.busy -= 1

    @contextmanager
    def running(self) -> Iterator[str]:
        with listening(Starlette(routes=[Route("/score", self.score, methods=["POST"])]), grace=1) as url:
            yield url


def scored(url: str, rows: list[Trajectory], token: str | None = None, **settings: Any) -> Any:
    reward = RemoteReward(url, token, **settings)
    try:
        return score(rows, [NamedReward("served", 1.0, reward, url, 1e6)]).by_name["served"]
    finally:
        reward.close()


def refused(handler: Handler, rows: int = 3, **settings: Any) -> str:
    """The error of a run whose service answers like this."""
    with Stub(handler).running() as url, pytest.raises(UserError) as error:
        scored(url, completions(rows), **settings)
    return str(error.value).replace(url, "URL")


def test_batches_and_concurrency() -> None:
    stub = Stub()
    with stub.running() as url:
        assert scored(url, completions(23), TOKEN, batch=4, concurrency=2) == list(range(23))
    assert sorted(stub.sizes) == [3, 4, 4, 4, 4, 4]
    assert stub.busiest == 2
    assert stub.tokens == {f"Bearer {TOKEN}"}


def test_a_service_without_a_token() -> None:
    stub = Stub()
    with stub.running() as url:
        assert scored(f"{url}/", completions(2)) == [0, 1]
    assert stub.tokens == {None}


@pytest.mark.parametrize("fault", [408, 429, 500, 502, 503, "hang", "close"])
def test_faults_that_pass_are_retried(fault: int | str) -> None:
    chance = random.Random(0)

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        if fault == "hang":
            await asyncio.sleep(0.3)
            return
        raise ConnectionError("closes the connection without an answer")

    def handler(_: Any) -> Any:
        if chance.random() < 0.3:
            return hang if isinstance(fault, str) else PlainTextResponse("no", fault)
        return None

    stub = Stub(handler)
    logging.getLogger("uvicorn.error").disabled = True
    try:
        with stub.running() as url:
            assert scored(url, completions(40), batch=2, timeout=0.15, retries=8) == list(range(40))
    finally:
        logging.getLogger("uvicorn.error").disabled = False
    assert len(stub.sizes) > 20


def test_a_service_that_stays_down_is_one_clear_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError) as error:
            scored(url, completions(8), TOKEN, batch=1, retries=3)
    assert str(error.value).startswith(f"reward url: the service at {url} is down: ")
    assert "(tried 4 times in 0 seconds)" in str(error.value)
    assert str(error.value).endswith("start the service, and run the same command again to resume")
    assert len([record for record in caplog.records if "trying again" in record.message]) == 1


def test_a_service_that_hangs_is_given_up_after_the_time_limit() -> None:
    async def hang(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(2)

    began = time.monotonic()
    said = refused(lambda _: hang, timeout=0.1, retries=1)  # type: ignore[arg-type, return-value]
    assert "no answer within 0.1 seconds: try a larger timeout:" in said and "(tried 2 times in " in said
    assert time.monotonic() - began < 3


def test_a_service_may_say_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LONGEST_WAIT", 0.2)
    answers = iter([Response(status_code=429, headers={"retry-after": "60"})])
    began = time.monotonic()
    with Stub(lambda _: next(answers, None)).running() as url:
        assert scored(url, completions(1)) == [0]
    assert 0.2 < time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (JSONResponse({"scores": [1.0, 2.0]}), "returned 2 scores for 3 trajectories, starting with prompts.jsonl:1"),
        (JSONResponse({"scores": [1, 2, 3, 4]}), "returned 4 scores for 3 trajectories"),
        (Response('{"scores": [1, NaN, 3]}'), "reward served returned nan for prompts.jsonl:2, completion '"),
        (Response('{"scores": [1, 2, 1e999]}'), "reward served returned inf for prompts.jsonl:3"),
        (JSONResponse({"scores": [1, "2", 3]}), "reward served returned '2' for prompts.jsonl:2"),
        (JSONResponse({"scores": [1, None, 3]}), "returned None for prompts.jsonl:2"),
        (JSONResponse([1, 2, 3]), 'expected {"scores": [...]} as its answer to POST /score'),
        (PlainTextResponse("hello"), 'expected {"scores": [...]} as its answer to POST /score, got 200 hello'),
        (PlainTextResponse("not here", 404), "did not score a batch that starts with prompts.jsonl:1: 404 not here"),
        (Response(status_code=307, headers={"location": "http://elsewhere"}), "did not score a batch"),
        (Response(status_code=413), "refuses 3 trajectories as too large: set a smaller batch:"),
        (
            JSONResponse({"error": {"kind": "failed", "message": "too long", "row": 1}}, 422),
            "did not score the completion of prompts.jsonl:2: 422 too long",
        ),
        (Response(status_code=401), "URL: the service needs a token (401): name the environment variable"),
    ],
)
def test_wrong_answers_are_errors_that_are_not_retried(answer: Response, message: str) -> None:
    answers = iter([answer])
    assert message in refused(lambda _: next(answers))


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_no_message_has_the_token(status: int, caplog: pytest.LogCaptureFixture) -> None:
    said = refused(lambda _: PlainTextResponse(f"you sent {TOKEN}", status), token=TOKEN, retries=1)
    assert TOKEN not in said + caplog.text
    assert status == 401 or "you sent ***" in said


def test_a_column_that_is_not_json_is_named() -> None:
    row = Trajectory.from_text("a", ({"role": "user", "content": "b"},), columns={"when": datetime.date(2026, 1, 2)})
    with pytest.raises(UserError, match=r"when: date datetime.date\(2026, 1, 2\) cannot be sent to reward url as JSON"):
        scored("http://127.0.0.1:9", [row], retries=0)
    broken = Trajectory.from_text("\ud800", ({"role": "user", "content": "b"},), source="p.jsonl:4")
    with pytest.raises(UserError, match=r"p\.jsonl:4: messages: .* cannot be sent"):
        scored("http://127.0.0.1:9", [broken], retries=0)


def test_text_arrives_as_it_is() -> None:
    odd = 'é 漢 😀 "\\ \x00 </script>\n'
    seen: list[dict[str, Any]] = []
    row = Trajectory.from_text(odd, ({"role": "user", "content": odd},), columns={"answer": 1, odd: [None, 0.1, odd]})
    with Stub(lambda rows: seen.extend(rows)).running() as url:
        scored(url, [row])
    assert seen[0]["messages"] == [{"role": "assistant", "content": odd}]
    assert seen[0]["prompt"] == [{"role": "user", "content": odd}] and seen[0]["columns"][odd] == [None, 0.1, odd]


def test_scoring_continues_while_the_run_does_something_else() -> None:
    with Stub().running() as url:
        reward = RemoteReward(url, batch=1, concurrency=4)
        with Scorer([NamedReward("served", 1.0, reward)]) as scorer:
            scorer.add(0, completions(8))
            scorer.advance()
            time.sleep(0.5)  # no chance for an event loop of this thread
            began = time.monotonic()
            assert scorer.finish()[0].totals == list(range(8))
            took = time.monotonic() - began
        reward.close()
    assert took < 0.04, "the time of two requests, one after the other"


def test_the_random_numbers_of_the_run_stay_as_they_are() -> None:
    answers = iter([Response(status_code=500)])
    with Stub(lambda _: next(answers, None)).running() as url:
        random.seed(1)
        scored(url, completions(4))
        after = random.random()
    random.seed(1)
    assert after == random.random()


def test_a_reward_that_is_no_longer_used_ends_its_thread() -> None:
    before = threading.active_count()
    with Stub().running() as url:
        reward = RemoteReward(url)
        score(completions(1), [NamedReward("served", 1.0, reward)])
        assert threading.active_count() > before
        del reward
        gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    source = RewardFromURL(url="http://127.0.0.1:1", token="MY_TOKEN")
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(UserError, match="reward url: token: the environment variable MY_TOKEN is not set"):
        remote_reward(source)
    monkeypatch.setenv("MY_TOKEN", "two words")
    with pytest.raises(UserError, match="is not a token") as error:
        remote_reward(source)
    assert "two words" not in str(error.value)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    assert TOKEN not in json.dumps(source.model_dump()) + repr(remote_reward(source))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8001", "not the address of a service"),
        ("ftp://here", "not the address of a service"),
        ("http://", "not the address of a service"),
        ("http://here:99999", "not the address of a service"),
        ("http://me:secret@here", "without a password"),
        ("http://here/?token=secret", "without a password"),
    ],
)
def test_an_address_is_checked(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardFromURL(url=url)
