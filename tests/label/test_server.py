"""The server: who is let in, what is stored and shown, and a real one that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from burnish.cli import app as command_line
from burnish.data import readers
from burnish.errors import UserError
from burnish.label.access import LARGEST_REQUEST, cookie_name
from burnish.label.server import Refused, app, clean_name, serve
from burnish.label.store import Store
from burnish.label.tasks import Task
from burnish.types import Messages, Preference, Ranking

TOKEN = "secret-token"
BASE = "http://127.0.0.1:8123"
HOSTILE = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "plain"]


def task(number: int, texts: list[str] | None = None) -> Task:
    texts = texts or [f"{letter} of {number}" for letter in "abc"]
    completions: tuple[Messages, ...] = tuple(({"role": "assistant", "content": text},) for text in texts)
    return Task(({"role": "user", "content": f"prompt {number}"},), completions, f"rows.jsonl:{number}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "answers.sqlite")
    store.show_only([task(0, HOSTILE), task(1), task(2, ["left", "right"])])
    return store


def client(store: Store, rater: str | None = "Ann", raters: int | None = None) -> TestClient:
    """A browser that opened the address with the token and typed a name."""
    browser = TestClient(app(store, TOKEN, raters=raters), base_url=BASE, headers={"Origin": BASE})
    assert browser.get("/", params={"token": TOKEN}).status_code == 200
    if rater is not None:
        assert browser.post("/api/rater", json={"name": rater}).status_code == 200
    return browser


def answer(browser: TestClient, ranks: list[int] | None, **more: Any) -> dict[str, Any]:
    shown = browser.get("/api/state").json()["task"]
    response = browser.post("/api/answer", json={"task": shown["id"], "ranks": ranks, **more})
    assert response.status_code == 200, response.text
    return response.json()


# --- who is let in ------------------------------------------------------------------------------------------------


def test_the_token_becomes_a_strict_cookie_and_leaves_the_address(store: Store) -> None:
    browser = TestClient(app(store, TOKEN), base_url=BASE)
    entered = browser.get("/", params={"token": TOKEN})
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith(f"{cookie_name(TOKEN)}={TOKEN};")
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert 'content="0; url=/"' in entered.text and TOKEN not in entered.text
    assert "Rank completions" in browser.get("/").text


@pytest.mark.parametrize(
    "path", ["/", "/progress", "/api/state", "/api/progress", "/export/ranking.jsonl", "/static/page.js"]
)
def test_nothing_is_shown_without_the_token(store: Store, path: str) -> None:
    browser = TestClient(app(store, TOKEN), base_url=BASE)
    assert browser.get(path).status_code == 403
    assert browser.get("/", params={"token": "guess"}).status_code == 403
    browser.cookies.set(cookie_name(TOKEN), "guess")
    refused = browser.get(path)
    assert refused.status_code == 403 and TOKEN not in refused.text and "prompt 0" not in refused.text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8123", "127.0.0.1.evil.example", "10.0.0.1", "", "[", "localhost.evil"]
)
def test_a_foreign_host_name_is_refused_even_with_the_token(store: Store, host: str) -> None:
    browser = client(store)
    assert browser.get("/api/state", headers={"Host": host}).status_code == 403
    assert browser.get("/", params={"token": TOKEN}, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:9000", "[::1]:8123"])
def test_the_loopback_names_are_served_on_any_port_as_by_a_tunnel(store: Store, host: str) -> None:
    assert client(store).get("/api/state", headers={"Host": host}).status_code == 200


def test_another_address_to_listen_at_may_be_named_in_digits(store: Store) -> None:
    browser = TestClient(app(store, TOKEN, host="0.0.0.0"), base_url="http://10.0.0.1:8123")
    assert browser.get("/", params={"token": TOKEN}).status_code == 200
    assert browser.get("/", headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "https://127.0.0.1:8123"},
        {"Origin": "", "Referer": "http://evil.example/http://127.0.0.1:8123"},
        {"Origin": ""},
    ],
)
@pytest.mark.parametrize("path", ["/api/answer", "/api/undo", "/api/rater"])
def test_posts_of_other_sites_are_refused(store: Store, headers: dict[str, str], path: str) -> None:
    browser = client(store)
    shown = browser.get("/api/state").json()["task"]
    body = {"task": shown["id"], "ranks": [1, 2, 3]}
    assert browser.post(path, json=body, headers=headers).status_code == 403
    assert store.revisions() == []


def test_a_referer_of_the_page_is_as_good_as_its_origin(store: Store) -> None:
    browser = client(store)
    headers = {"Origin": "", "Referer": f"{BASE}/"}
    assert browser.post("/api/rater", json={"name": "Ben"}, headers=headers).status_code == 200


def test_every_response_has_the_headers_that_keep_scripts_out(store: Store) -> None:
    browser = client(store)
    for path in ("/", "/progress", "/api/state", "/static/page.js", "/nothing"):
        headers = browser.get(path).headers
        assert "default-src 'none'; script-src 'self';" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "same-origin"


def test_large_requests_are_refused(store: Store) -> None:
    browser = client(store)
    shown = browser.get("/api/state").json()["task"]
    body = {"task": shown["id"], "ranks": [1, 2, 3], "comment": "x" * LARGEST_REQUEST}
    assert browser.post("/api/answer", json=body).status_code == 413
    # chunked, so that its length is not known
    assert browser.post("/api/answer", content=iter([b"{}"])).status_code == 413
    body["comment"] = "x" * 10_001
    assert browser.post("/api/answer", json=body).json() == {
        "error": "comment: String should have at most 10000 characters"
    }
    assert store.revisions() == []


# --- what is stored and shown -------------------------------------------------------------------------------------


def test_hostile_text_reaches_the_page_as_data_only(store: Store) -> None:
    browser = client(store)
    state = browser.get("/api/state")
    assert state.headers["content-type"] == "application/json"
    assert sorted(text for ((_, text),) in state.json()["task"]["completions"]) == sorted(HOSTILE)
    for path in ("/", "/progress"):
        assert "alert(1)" not in browser.get(path).text


def test_ranks_and_highlights_are_stored_in_the_order_of_the_task(store: Store) -> None:
    browser = client(store)
    shown = browser.get("/api/state").json()["task"]
    texts = [text for ((_, text),) in shown["completions"]]
    mark = {"completion": 1, "part": 0, "start": 0, "end": 4}
    answer(browser, [3, 1, 2], comment=" fine ", highlights=[mark])
    (stored,) = store.answers()
    assert stored.ranks is not None
    by_text = dict(zip(texts, [3, 1, 2], strict=True))
    assert [by_text[text] for text in HOSTILE] == list(stored.ranks)
    (highlight,) = stored.highlights
    assert (HOSTILE[highlight.completion], highlight.text) == (texts[1], texts[1][:4])
    assert (stored.rater, stored.comment) == ("Ann", "fine")
    assert stored.seconds is not None and 0 <= stored.seconds < 60
    # undone, the page gets back what was said, in the order shown
    again = browser.post("/api/undo", json={}).json()["task"]
    assert again["id"] == shown["id"] and again["completions"] == shown["completions"]
    assert (again["ranks"], again["comment"]) == ([3, 1, 2], "fine")
    assert [{key: one[key] for key in mark} for one in again["highlights"]] == [mark]


def test_skip_undo_and_the_end(store: Store) -> None:
    browser = client(store)
    assert browser.post("/api/undo", json={}).json() == {"error": "there is nothing to undo"}
    assert answer(browser, None)["answered"] == 1
    answer(browser, [1, 1, 1])
    done = answer(browser, [2, 1])
    assert (done["task"], done["answered"], done["tasks"]) == (None, 3, 3)
    assert [stored.ranks is None for stored in store.answers()] == [True, False, False]


@pytest.mark.parametrize(
    "body",
    [
        {"ranks": [1, 2]},
        {"ranks": [1, 2, 0]},
        {"ranks": "123"},
        {"ranks": [1, 2, 3], "rater": "Ben"},
        {"ranks": [1, 2, 3], "highlights": [{"completion": 3, "part": 0, "start": 0, "end": 1}]},
        {"ranks": [1, 2, 3], "highlights": [{"completion": 0, "part": 0, "start": 0, "end": 999}]},
        {"task": "unknown", "ranks": [1, 2, 3]},
        {},
    ],
)
def test_wrong_answers_are_refused_with_a_reason(store: Store, body: dict[str, Any]) -> None:
    browser = client(store)
    shown = browser.get("/api/state").json()["task"]
    response = browser.post("/api/answer", json={"task": shown["id"], **body})
    assert response.status_code == 400 and response.json()["error"]
    assert store.revisions() == []


def test_a_task_that_was_not_shown_cannot_be_answered(store: Store) -> None:
    response = client(store).post("/api/answer", json={"task": task(2).id, "ranks": [1, 2]})
    assert response.json() == {"error": "this task was not shown to you: reload the page"}


def test_names() -> None:
    assert clean_name("  Zoë \n  Müller ") == "Zoë Müller"
    for wrong in ("", " ", "x" * 65, "a\x1b[2Jb", "a\u202eb"):
        with pytest.raises(Refused):
            clean_name(wrong)


def test_two_raters_and_their_agreement(store: Store) -> None:
    ann, ben = client(store), client(store, "Ben")
    empty = ann.get("/api/progress").json()
    assert (empty["alpha"], empty["interval"], empty["compared"]) == (None, None, 0)
    for browser in (ann, ben):
        for _ in range(3):
            shown = browser.get("/api/state").json()["task"]
            texts = [text for ((_, text),) in shown["completions"]]
            answer(browser, [sorted(texts).index(text) + 1 for text in texts])
    progress = ann.get("/api/progress").json()
    assert (progress["alpha"], progress["interval"], progress["compared"]) == (1, [1, 1], 3)
    assert [(one["rater"], one["ranked"]) for one in progress["raters"]] == [("Ann", 3), ("Ben", 3)]
    assert client(store, None).get("/api/state").json() == {"rater": None}


def test_the_page_gives_the_rows(store: Store, tmp_path: Path) -> None:
    browser = client(store)
    answer(browser, [1, 2, 2])
    for kind, row in (("ranking", Ranking), ("preference", Preference)):
        response = browser.get(f"/export/{kind}.jsonl")
        assert response.headers["content-disposition"] == f'attachment; filename="{kind}.jsonl"'
        (tmp_path / "rows.jsonl").write_text(response.text, "utf-8")
        assert len(readers.load(tmp_path / "rows.jsonl", (row,)).rows) == {"ranking": 1, "preference": 3}[kind]
    assert browser.get("/export/other.jsonl").status_code == 400


# --- a real server ------------------------------------------------------------------------------------------------


@contextmanager
def visitor(address: str, rater: str) -> Iterator[httpx2.Client]:
    """A client that has entered a real server."""
    base = address.partition("/?")[0]
    with httpx2.Client(base_url=base, headers={"Origin": base}, timeout=20) as browser:
        assert browser.get(address).status_code == 200
        assert browser.post("/api/rater", json={"name": rater}).status_code == 200
        yield browser


def rank(browser: httpx2.Client) -> str:
    shown = browser.get("/api/state").json()["task"]
    ranks = list(range(1, len(shown["completions"]) + 1))
    assert browser.post("/api/answer", json={"task": shown["id"], "ranks": ranks}).status_code == 200
    return shown["id"]


def test_serve_in_a_thread_until_there_are_enough_answers(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tasks = [task(number) for number in range(3)]
    with serve(tasks, tmp_path / "a.sqlite", raters=1, on_progress=lambda done, all: seen.append((done, all))) as page:
        assert page.address.startswith("http://127.0.0.1:") and not page.wait(0)
        with visitor(page.address, "Ann") as ann, visitor(page.address, "Ben") as ben:
            for browser in (ann, ben, ann):
                assert not page.wait(0)
                rank(browser)
            assert page.wait(5)
            assert ann.post("/api/undo", json={}).status_code == 200
            assert not page.wait(0)
            rank(ann)
        assert page.wait(5)
        assert {answer.rater for answer in page.store.answers()} == {"Ann", "Ben"}
        port = int(page.address.split(":")[2].split("/")[0])
        with pytest.raises(UserError, match=f"port {port}.*choose another --port"):
            serve(tasks, tmp_path / "b.sqlite", port=port)
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3), (2, 3), (3, 3)]
    with serve(tasks, tmp_path / "a.sqlite", raters=1) as page:
        assert page.wait(0)  # a restart asks nobody again


def test_a_killed_command_loses_nothing_and_exports(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "completions": ["a", "b"], "topic": i} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    ranked = []
    for raters in (2, 3):
        command = [sys.executable, "-m", "burnish", "label", "rows.jsonl"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                address = next(match[1] for line in process.stdout if (match := re.search(r"rank at (\S+)", line)))
                with visitor(address, "Ann") as browser:
                    ranked += [rank(browser) for _ in range(raters)]
                if raters == 3:
                    process.send_signal(signal.SIGINT)
                    assert "5 of 6 tasks answered" in process.stdout.read()
                    assert process.wait(20) == 0
            finally:
                process.kill()
    with Store(tmp_path / "rows.labels.sqlite") as store:
        assert [answer.task for answer in store.answers()] == ranked and len(set(ranked)) == 5
    out = tmp_path / "pairs.jsonl"
    arguments = ["label", str(tmp_path / "rows.jsonl"), "--export", "preference", "-o", str(out)]
    done = CliRunner().invoke(command_line, arguments)
    assert done.exit_code == 0, done.output
    assert f"5 rows in {out}, from 5 of 6 tasks" in done.output
    made = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["meta"] for row in made] == [{"topic": i, "raters": 1} for i in range(5)]
    assert {row["p_chosen"] for row in made} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "ranking"], "--export and --output belong together"),
        (["--samples", "2", "--temperature", "1"], "--samples, --temperature would have no effect without --model"),
        (["--export", "ranking", "-o", "out.jsonl"], "nothing to export: nobody has ranked a task"),
        (["--export", "ranking", "-o", "rows.jsonl"], "--output would overwrite FILE"),
        (["--export", "ranking", "-o", "out.jsonl", "--port", "8123"], "--port would have no effect with --export"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, monkeypatch: Any, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "p", "completions": ["a", "b"]}\n', "utf-8")
    done = CliRunner().invoke(command_line, ["label", "rows.jsonl", *arguments])
    assert done.exit_code == 2 and message in done.output, done.output
