"""Judges behind a real HTTP server: failures, limits, votes, kills, and what replies may contain."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.config import load
from burnish.config import run as pipeline
from burnish.errors import UserError
from burnish.judges.endpoint import EndpointJudge, LimitReachedError
from burnish.judges.protocol import NoVerdictError, Question, Verdict
from burnish.judges.questions import GRADES
from burnish.judges.replies import (
    Alternative,
    BadReplyError,
    NoLogprobsError,
    WrittenToken,
    hidden,
    read_choices,
    read_reply,
    vote,
)
from burnish.judges.settings import JudgeSettings
from burnish.judges.store import StoredJudge, VerdictStore
from burnish.rewards.functions import NamedReward, close
from burnish.rewards.judge import JudgeReward
from burnish.rewards.scoring import Scorer
from burnish.types import Message, Trajectory
from tiny_runs import entries, json_rows

# --- replies: by hand ----------------------------------------------------------------------------------------------


def token(text: str, p: float, **others: float) -> WrittenToken:
    """A written token with the probability p, and others in its place; ``_`` stands for a space."""
    names = {text: p, **{name.replace("_", " "): q for name, q in others.items()}}
    return WrittenToken(
        token=text,
        logprob=math.log(p),
        top_logprobs=[Alternative(token=name, logprob=math.log(q)) for name, q in names.items()],
    )


def test_all_spellings_of_a_choice_count() -> None:
    read = read_choices([token("A", 0.5, _A=0.1, B=0.2, C=0.05)], ("A", "B"))
    assert read.probabilities == pytest.approx([0.6, 0.2])
    assert read.open == 0


def test_the_choice_after_white_space_counts_as_much_as_the_white_space() -> None:
    read = read_choices([token("\n", 0.6, A=0.3), token("B", 0.5, A=0.25)], ("A", "B"))
    assert read.probabilities == pytest.approx([0.3 + 0.6 * 0.25, 0.6 * 0.5])


def test_what_follows_1_decides_between_1_and_10() -> None:
    written = [token("1", 0.5, **{"7": 0.25}), token("0", 0.8, **{"5": 0.1, ".": 0.1})]
    read = read_choices(written, GRADES)
    assert read.probabilities[9] == pytest.approx(0.4)  # 0.5 * 0.8
    assert read.probabilities[0] == pytest.approx(0.05)  # 0.5 (1 - 0.8 - 0.1): 15 is no grade
    assert read.probabilities[6] == pytest.approx(0.25)
    assert read.open == 0
    assert read_choices([token("1", 0.5)], GRADES).probabilities[0] == 0.5  # the reply ends after it


def test_1_is_open_unless_10_is_one_token() -> None:
    read = read_choices([token("7", 0.5, **{"1": 0.25})], GRADES)
    assert (read.probabilities[0], read.open) == (0, pytest.approx(0.25))
    read = read_choices([token("7", 0.5, **{"1": 0.25, "10": 0.125})], GRADES)
    assert (read.probabilities[0], read.probabilities[9], read.open) == (pytest.approx(0.25), pytest.approx(0.125), 0)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({"x": 0.3, "B": 0.1}, 0),  # nothing is unseen
        ({"x": 0.3, "y": 0.1}, 0.1),  # B has at most as much as y
        ({"x": 0.3, "y": 0.19}, 0.01),  # and at most what the others leave
    ],
)
def test_what_an_unseen_choice_can_have_at_most(shown: dict[str, float], expected: float) -> None:
    written = [token("A", 0.5, **shown)]
    assert hidden(written, read_choices(written, ("A", "B"))) == pytest.approx(expected)


def test_probabilities_above_one_are_refused() -> None:
    with pytest.raises(BadReplyError, match="exceed 1"):
        read_choices([token("A", 0.7, B=0.6)], ("A", "B"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("A", 0), (" B.\n", 1), ("**A**", 0), ("(B)", 1), ("A or B", None), ("A good answer is B", None), ("", None)],
)
def test_a_vote_names_a_choice_and_nothing_else(text: str, expected: int | None) -> None:
    assert vote(text, ("A", "B")) == expected


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>", "JSON"),
        (b"{}", "choices: Field required"),
        (b'{"choices": []}', "choices: List should have at least 1 item"),
        (b'{"choices": [{}]}', "choices.0.message"),
        (
            b'{"choices": [{"message": {"content": "A"}, "logprobs": {"content": [{"token": "A", "logprob": NaN}]}}]}',
            "logprob",
        ),
        (
            b'{"choices": [{"message": {"content": "A"}, "logprobs": {"content": [{"token": "A", "logprob": 1}]}}]}',
            "logprob",
        ),
    ],
)
def test_a_reply_that_is_not_valid_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(BadReplyError, match=says):
        read_reply(body)


def test_a_reply_without_log_probabilities_says_so() -> None:
    with pytest.raises(NoLogprobsError):
        _ = read_reply(b'{"choices": [{"message": {"content": "A"}, "logprobs": null}]}').written


# --- a server ------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """An OpenAI-compatible server whose model prefers A with a probability that follows from the question."""

    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    trouble: Callable[[int, dict[str, Any]], Response | float | None] = lambda number, body: None
    """What goes wrong with the n-th request: another response, or seconds to wait first."""
    usage: bool = True
    choices: int | None = None
    """The number of samples of a reply; None is what was asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0.002)
            trouble = self.trouble(number, body)
            if isinstance(trouble, Response):
                return trouble
            if trouble:
                await asyncio.sleep(trouble)
            return JSONResponse(self.reply(body))
        finally:
            self.in_flight -= 1

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        p = p_of(body["messages"])
        one: dict[str, Any] = {"message": {"role": "assistant", "content": "A" if p > 0.5 else "B"}}
        if body.get("logprobs"):
            top = [{"token": text, "logprob": math.log(q)} for text, q in (("A", 0.9 * p), (" B", 0.9 * (1 - p)))]
            one["logprobs"] = {"content": [{**top[p <= 0.5], "top_logprobs": top}]}
        n = self.choices or body.get("n", 1)
        if "n" in body:
            texts = [f"{'A' if k < p * n else 'B'}" for k in range(n)]
            replies = [{"message": {"role": "assistant", "content": text}} for text in texts]
        else:
            replies = [one]
        usage = {"usage": {"prompt_tokens": 100, "completion_tokens": n}} if self.usage else {}
        return {"choices": replies, **usage}


def p_of(messages: list[dict[str, str]]) -> float:
    """The probability of A, between 0.1 and 0.9."""
    return 0.1 + 0.8 * int.from_bytes(hashlib.sha256(messages[-1]["content"].encode()).digest()[:2], "big") / 65535


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server()
    app = Starlette(routes=[Route("/v1/chat/completions", serving.answer, methods=["POST"])])
    running = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.005)
    serving.port = running.servers[0].sockets[0].getsockname()[1]
    yield serving
    running.should_exit = True
    thread.join()


def questions(n: int) -> list[Question]:
    return [Question((Message(role="user", content=f"question {i}"),), ("A", "B")) for i in range(n)]


def settings(server: Server, **changes: Any) -> JudgeSettings:
    return JudgeSettings(**({"url": server.url, "name": "m", "backoff": 0.001, "timeout": 0.5} | changes))


def asked(judge: EndpointJudge, n: int) -> list[Verdict]:
    try:
        return judge.ask(questions(n))
    finally:
        judge.close()


# --- verdicts ------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_read_and_usage_is_counted(server: Server) -> None:
    verdicts = asked(EndpointJudge(settings(server, input_price=2.0, output_price=5.0, concurrency=3)), 20)
    for question, verdict in zip(questions(20), verdicts, strict=True):
        p = p_of([dict(message) for message in question.messages])  # type: ignore[arg-type]
        assert verdict.probabilities == pytest.approx((p, 1 - p))
        assert verdict.mass == pytest.approx(0.9)
        assert (verdict.calls, verdict.tokens) == (1, 101)
        assert verdict.cost == pytest.approx((100 * 2 + 5) / 1e6)
    assert 1 < server.most_in_flight <= 3
    assert server.requests[0]["model"] == "m" and server.requests[0]["top_logprobs"] == 20


def test_a_bad_network_gives_the_same_verdicts(server: Server) -> None:
    """20 % of the calls fail, 5 % stall until the time limit, and 5 % return garbage."""
    clean = asked(EndpointJudge(settings(server)), 200)
    server.requests.clear()
    garbage = [b"<html>", b"{}", b'{"choices": [{"message": {"content": "A"}}]}', b'{"choices": NaN}']

    def trouble(number: int, body: dict[str, Any]) -> Response | float | None:
        kind = number % 20
        if kind in (0, 5, 10, 15):
            return Response("overloaded", (500, 503, 429, 408)[kind // 5])
        if kind == 7:
            return 0.7  # longer than the time limit
        return Response(garbage[number // 20 % 4]) if kind == 13 else None

    server.trouble = trouble
    found = asked(EndpointJudge(settings(server, concurrency=16, retries=8, timeout=0.2, connect_timeout=0.2)), 200)
    assert len(server.requests) > 260
    assert [v.probabilities for v in found] == [v.probabilities for v in clean]
    assert sum(v.calls for v in found) == len(server.requests)


def test_what_cannot_be_retried_is_not(server: Server) -> None:
    server.trouble = lambda number, body: JSONResponse({"error": "too long"}, 400) if number == 1 else None
    judge = EndpointJudge(settings(server, concurrency=1))
    ((_, first),), ((index, second),), ((_, third),) = judge.each(questions(3))
    judge.close()
    assert isinstance(first, Verdict) and isinstance(third, Verdict) and isinstance(second, NoVerdictError)
    assert (index, second.index, second.calls, len(server.requests)) == (1, 1, 1, 3)
    assert "status 400" in str(second) and "too long" in str(second)


def test_after_the_last_retry_the_reason_is_given_and_no_label_is_made_up(server: Server) -> None:
    server.trouble = lambda number, body: JSONResponse({"choices": [{"message": {"content": "who knows"}}]})
    with pytest.raises(UserError, match="gives no log-probabilities: set votes: 16"):
        asked(EndpointJudge(settings(server, retries=2)), 1)
    assert len(server.requests) == 3

    def neither(number: int, body: dict[str, Any]) -> Response:
        top = {"token": "Well", "logprob": -0.1}
        logprobs = {"content": [{**top, "top_logprobs": [top]}]}
        return JSONResponse({"choices": [{"message": {"content": "Well, "}, "logprobs": logprobs}]})

    server.trouble = neither
    with pytest.raises(NoVerdictError, match=r"no verdict after 3 calls in .* none of the likeliest tokens is A or B"):
        asked(EndpointJudge(settings(server, retries=2)), 1)


def test_retry_after_is_respected(server: Server) -> None:
    server.trouble = lambda number, body: Response("", 429, {"retry-after": "0.4"}) if number == 0 else None
    began = time.monotonic()
    asked(EndpointJudge(settings(server)), 1)
    assert time.monotonic() - began >= 0.4


def test_an_endpoint_that_is_not_there_is_a_clear_error(server: Server) -> None:
    gone = JudgeSettings(url="http://127.0.0.1:9/v1", name="m", retries=1, backoff=0)
    with pytest.raises(NoVerdictError, match=r"127.0.0.1:9/v1: no verdict after 2 calls .* no connection"):
        asked(EndpointJudge(gone), 1)


# --- votes and reasoning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [None, 1])
def test_votes_are_counted_whether_or_not_a_reply_can_have_several(server: Server, samples: int | None) -> None:
    server.choices = samples
    (verdict,) = asked(EndpointJudge(settings(server, votes=10)), 1)
    calls = 1 if samples is None else 10
    assert verdict.calls == len(server.requests) == calls
    assert len({body["seed"] for body in server.requests}) == calls
    p = p_of(server.requests[0]["messages"])
    expected = math.ceil(p * 10) / 10 if samples is None else 1.0  # one sample is always A
    assert verdict.probabilities[0] == pytest.approx(expected)
    assert "logprobs" not in server.requests[0]


def test_votes_that_name_no_choice_are_lost_mass_and_an_error_if_there_are_no_others(server: Server) -> None:
    def mixed(number: int, body: dict[str, Any]) -> Response:
        return JSONResponse({"choices": [{"message": {"content": text}} for text in ("A", "Hm", "B", "A")]})

    server.trouble = mixed
    (verdict,) = asked(EndpointJudge(settings(server, votes=4)), 1)
    assert verdict.probabilities == pytest.approx((2 / 3, 1 / 3))
    assert verdict.mass == 0.75
    server.trouble = lambda number, body: JSONResponse({"choices": [{"message": {"content": "Hm"}}] * 4})
    with pytest.raises(NoVerdictError, match=r"none of 8 votes is A or B, the last one is 'Hm'"):
        asked(EndpointJudge(settings(server, votes=4, retries=1)), 1)


def test_reasoning_is_a_call_of_its_own(server: Server) -> None:
    server.trouble = lambda number, body: (
        JSONResponse({"choices": [{"message": {"content": " because "}}]}) if "logprobs" not in body else None
    )
    (verdict,) = asked(EndpointJudge(settings(server, reasoning=True, max_reasoning_tokens=7)), 1)
    first, second = server.requests
    assert first["max_tokens"] == 7
    assert first["messages"][-1]["content"].endswith("explain your reasoning in a few sentences.")
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == verdict.reasoning == "because"
    assert verdict.calls == 2


def test_another_sample_shows_what_follows_1(server: Server) -> None:
    """The likeliest grade is 7, so only a sample that begins with 1 shows that 10 is likelier than 1."""

    def grades(number: int, body: dict[str, Any]) -> Response:
        top = [{"token": "7", "logprob": math.log(0.5)}, {"token": "1", "logprob": math.log(0.5)}]
        if number < 3:
            content = [{**top[0], "top_logprobs": top}]
        else:
            after = [{"token": "0", "logprob": math.log(0.75)}]
            content = [{**top[1], "top_logprobs": top}, {**after[0], "top_logprobs": after}]
        return JSONResponse({"choices": [{"message": {"content": "?"}, "logprobs": {"content": content}}]})

    server.trouble = grades
    judge = EndpointJudge(settings(server))
    (verdict,) = judge.ask([Question((Message(role="user", content="?"),), GRADES)])
    judge.close()
    assert verdict.calls == len(server.requests) == 4
    assert len({body["seed"] for body in server.requests}) == 4
    assert verdict.probabilities[0] == pytest.approx(0.125)
    assert verdict.probabilities[9] == pytest.approx(0.375)


# --- the key -------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_shown_nowhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sk-very-secret-123"
    monkeypatch.setenv("MY_KEY", key)
    judge = EndpointJudge(settings(server, key="MY_KEY", retries=0))
    stored = StoredJudge(judge, VerdictStore(tmp_path / "v.sqlite"))
    stored.ask(questions(2))
    assert server.keys == [f"Bearer {key}"] * 2
    texts = [judge.identity, repr(judge.settings), caplog.text]
    for status in (401, 400, 500):
        server.trouble = lambda number, body, status=status: Response(f"wrong key {key}", status)
        with pytest.raises(UserError) as error:
            stored.ask(questions(4))
        texts.append(str(error.value))
        assert "wrong key ***" in str(error.value)
    stored.close()
    assert not any(key in text for text in texts)
    assert key.encode() not in (tmp_path / "v.sqlite").read_bytes()


def test_a_refused_key_stops_at_once(server: Server) -> None:
    server.trouble = lambda number, body: Response("no", 401)
    with pytest.raises(UserError, match="the model 'm' was refused with status 401") as error:
        asked(EndpointJudge(settings(server, concurrency=1)), 50)
    assert not isinstance(error.value, NoVerdictError)
    assert len(server.requests) == 1


# --- limits --------------------------------------------------------------------------------------------------------


def test_max_calls_holds_under_concurrency_and_keeps_what_was_judged(server: Server, tmp_path: Path) -> None:
    server.trouble = lambda number, body: Response("", 500) if number % 3 == 0 else None
    store = VerdictStore(tmp_path / "v.sqlite")
    judge = EndpointJudge(settings(server, max_calls=30, concurrency=16))
    stored = StoredJudge(judge, store)
    with pytest.raises(LimitReachedError, match="max_calls: the judge has used its 30 calls: raise it"):
        stored.ask(questions(100))
    assert len(server.requests) == 30
    (calls, _), known = store.spent(judge.identity), len(store.get([stored._key(q) for q in questions(100)]))
    assert known == 20  # every call that succeeded is stored
    assert calls == 30  # also those of questions that the limit has interrupted
    judge.close()
    more = StoredJudge(EndpointJudge(settings(server, max_calls=35), *store.spent(judge.identity)), store)
    with pytest.raises(LimitReachedError):
        more.ask(questions(100))
    assert len(server.requests) == 35
    more.close()


def test_max_cost_holds_under_concurrency(server: Server) -> None:
    """A call costs 100 tokens of input and 1 of output, so 0.001 is enough for 9 calls at prices of 1 and 10."""
    prices = {"input_price": 1.0, "output_price": 10.0}
    judge = EndpointJudge(settings(server, max_cost=0.001, concurrency=16, **prices))
    with pytest.raises(LimitReachedError, match="max_cost: the judge has cost"):
        judge.ask(questions(50))
    judge.close()
    # A call may cost as much as a token for each byte, and 3 tokens of output: it starts only if that is left.
    assert judge._budget.cost == pytest.approx(len(server.requests) * 110 / 1e6)
    assert judge._budget.cost <= 0.001
    assert 7 <= len(server.requests) <= 9


def test_without_usage_a_call_costs_the_most_that_it_can(server: Server) -> None:
    server.usage = False
    (verdict,) = asked(EndpointJudge(settings(server, input_price=1.0, output_price=1.0)), 1)
    assert verdict.tokens == 0
    assert verdict.cost > 10 / 1e6  # the question has 10 bytes


# --- a reward ------------------------------------------------------------------------------------------------------


def test_the_reward_grades_several_groups_at_the_same_time(server: Server, tmp_path: Path) -> None:
    """Each group takes 0.4 s, and four of them together take less than two one after the other."""

    def graded(number: int, body: dict[str, Any]) -> float:
        return 0.4

    server.trouble = graded
    server.reply = lambda body: {  # type: ignore[method-assign]
        "choices": [
            {
                "message": {"content": "4"},
                "logprobs": {
                    "content": [{"token": "4", "logprob": 0.0, "top_logprobs": [{"token": "4", "logprob": 0.0}]}]
                },
            }
        ]
    }
    stored = StoredJudge(EndpointJudge(settings(server, timeout=5.0)), VerdictStore(tmp_path / "v.sqlite"))
    reward = NamedReward("judge", 1.0, JudgeReward(stored, waits=True))
    began = time.monotonic()
    with Scorer([reward]) as scorer:
        for group in range(4):
            prompt = (Message(role="user", content=f"prompt {group}"),)
            scorer.add(group, [Trajectory.from_text("x", prompt, source=f"p.jsonl:{group}")])
        scores = scorer.finish()
    assert time.monotonic() - began < 0.8
    assert [scores[group].totals for group in range(4)] == [[pytest.approx(-1 / 3)]] * 4
    server.trouble = lambda number, body: Response("no", 400)
    with pytest.raises(UserError, match=r"p\.jsonl:9: no verdict on the completion 'y'"), Scorer([reward]) as scorer:
        scorer.add(0, [Trajectory.from_text("y", prompt, source="p.jsonl:9")])
        scorer.finish()
    close([reward])


# --- a kill --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from burnish.judges.endpoint import EndpointJudge
from burnish.judges.protocol import Question
from burnish.judges.settings import JudgeSettings
from burnish.judges.store import StoredJudge, VerdictStore
judge = EndpointJudge(JudgeSettings(url=sys.argv[1], name="m", concurrency=4, backoff=0.001))
stored = StoredJudge(judge, VerdictStore(Path(sys.argv[2])))
questions = [Question(({"role": "user", "content": f"question {i}"},), ("A", "B")) for i in range(60)]
print(*(verdict.probabilities[0] for verdict in stored.ask(questions)))
stored.close()
"""


def test_after_kill_9_no_stored_verdict_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.trouble = lambda number, body: 0.02
    command = [sys.executable, "-c", SCRIPT, server.url, str(tmp_path / "v.sqlite")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment)
    while len(server.requests) < 25:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(server.requests)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seen = Counter(json.dumps(body["messages"]) for body in server.requests)
    assert 25 <= before < 60
    assert len(seen) == 60
    assert sum(seen.values()) - 60 <= 4  # at most the calls in flight are repeated
    expected = [p_of([{"content": f"question {i}"}]) for i in range(60)]
    assert list(map(float, done.stdout.split())) == pytest.approx(expected)


# --- a recipe ------------------------------------------------------------------------------------------------------


def test_a_recipe_with_an_endpoint_and_a_bad_network(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", "sk-very-secret-123")
    rows = [{"prompt": f"prompt {i}", "chosen": f"x{i}", "rejected": f"y{i}"} for i in range(70)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = f"{{url: '{server.url}', name: m, key: MY_KEY, backoff: 0.001, timeout: 0.3, retries: 9, concurrency: 16}}"
    Path("r.yaml").write_text(
        f"name: r\nmethod: {{name: judge, judge: {judge}}}\ndata: {{rows: pairs.jsonl}}\nout: clean\n"
    )
    pipeline.run(load("r.yaml"))
    server.trouble = lambda number, body: Response("busy", 503) if number % 4 == 0 else None
    pipeline.run(load("r.yaml", ["out=bad"]))
    clean, bad = (json_rows(Path(name) / "judge/data/pairs.jsonl") for name in ("clean", "bad"))
    assert clean == bad and len(clean) == 70
    after = [entries(Path(name))["judge"]["results"]["after"] for name in ("clean", "bad")]
    assert [one["eval_calls"] for one in after] == [140, len(server.requests) - 140]
    assert 0.2 < after[0]["eval_position_bias"] == after[1]["eval_position_bias"] < 0.8  # the server knows no replies
    assert 0 < after[0]["eval_agreement"] < 1
    assert set(server.keys) == {"Bearer sk-very-secret-123"}
    for path in [path for path in Path("clean").rglob("*") if path.is_file()]:
        assert b"sk-very-secret" not in path.read_bytes(), path
