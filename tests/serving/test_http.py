"""Tokens, limits, slow and disconnecting clients, against a real server."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.errors import UserError
from burnish.serving import http
from burnish.serving.http import Limits, Service, answer, application, is_loopback, listening, parsed, read_body
from burnish.serving.worker import Worker
from burnish.types import Config
from services import TOKEN, get, post, request, running

LIMITS = Limits(body_bytes=100_000, body_seconds=0.5, requests=60)
HEADERS = {"authorization": f"Bearer {TOKEN}"}


class Body(Config):
    seconds: float = 0.0
    rows: list[int] = Field([])


class Sleeper:
    """Answers with the number of bytes that it was sent, after the seconds that the body asks for."""

    def __init__(self) -> None:
        self.bodies: list[int] = []

    def work(self, items: list[Body]) -> list[float]:
        for item in items:
            time.sleep(item.seconds)
            if item.seconds > 1:
                raise UserError("too tired")
        self.bodies += [len(item.rows) for item in items]
        return [item.seconds for item in items]

    def service(self) -> Service[Body, float]:
        worker = Worker(self.work)

        async def sleep(request: Request) -> Response:
            body = parsed(Body, await read_body(request, LIMITS), "rows")
            return JSONResponse({"slept": await answer(request, worker.submit([body]))})

        async def bug(_: Request) -> Response:
            raise RuntimeError("a secret of the service")

        routes = [Route("/sleep", sleep, methods=["POST"]), Route("/bug", bug)]
        return Service(worker, application(routes, {"name": "sleeper"}, TOKEN, LIMITS))


@pytest.fixture(scope="module")
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture(scope="module")
def url(sleeper: Sleeper) -> Iterator[str]:
    with running(sleeper.service()) as url:
        yield url


def error_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["kind"]


@pytest.mark.parametrize("given", [None, "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, "Bearer é"])
@pytest.mark.parametrize("path", ["/sleep", "/nowhere", "/health"])
def test_a_request_needs_the_token(url: str, path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    method = "POST" if path == "/sleep" else "GET"
    response = request(method, url + path, headers=headers)  # type: ignore[arg-type]
    if path == "/health" and given is None:
        assert (response.status_code, response.json()) == (200, {})
        return
    assert error_of(response) == (401, "unauthorized")
    assert TOKEN not in response.text


def test_health_says_more_with_the_token(url: str) -> None:
    assert get(f"{url}/health", headers=HEADERS).json() == {"name": "sleeper"}


@pytest.mark.parametrize(
    ("body", "message", "row"),
    [
        (b"{", "not JSON", None),
        (b'{"secondss": 1}', "secondss: unknown key (did you mean 'seconds'?)", None),
        (b'{"rows": [1, 2, "3"]}', "rows.2: expected a whole number, got the text '3'", 2),
        (b"[]", "expected a block of keys", None),
        (b'{"seconds": "1", "rows": [1' + b"0" * 5000 + b"]}", "", None),
    ],
)
def test_what_does_not_follow_the_protocol(url: str, body: bytes, message: str, row: int | None) -> None:
    response = post(f"{url}/sleep", content=body, headers=HEADERS)
    assert error_of(response) == (400, "invalid")
    error = response.json()["error"]
    assert message in error["message"] and error["row"] == row


def test_other_errors_are_json_without_secrets(url: str) -> None:
    assert error_of(get(f"{url}/nowhere", headers=HEADERS)) == (404, "not_found")
    assert error_of(get(f"{url}/sleep", headers=HEADERS)) == (405, "method_not_allowed")
    bug = get(f"{url}/bug", headers=HEADERS)
    assert error_of(bug) == (500, "internal") and "secret" not in bug.text
    tired = post(f"{url}/sleep", content=b'{"seconds": 1.01}', headers=HEADERS)
    assert error_of(tired) == (422, "failed") and tired.json()["error"]["message"] == "too tired"


def test_a_large_body_is_refused_before_it_is_read(url: str) -> None:
    assert error_of(post(f"{url}/sleep", content=b" " * 100_001, headers=HEADERS)) == (413, "too_large")
    exact = b"{}".ljust(100_000)
    assert post(f"{url}/sleep", content=exact, headers=HEADERS).status_code == 200

    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 * 2**20:
            sent += 2**16
            yield b" " * 2**16

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection(address(url)) as client:
        client.sendall(
            b"POST /sleep HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n"
            + f"authorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        client.settimeout(5)
        try:
            for part in endless():
                client.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        except OSError:  # the service may close the connection
            pass
        assert client.recv(12) == b"HTTP/1.1 413"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 30 * 2**20, f"{grown:,} bytes for a body of {sent:,}"


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_clients_that_send_slowly_block_no_others_and_are_cut_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 1.0)
    head = f"POST /sleep HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {TOKEN}\r\n".encode()
    begun = {"nothing": b"", "headers": head, "body": head + b"content-length: 10\r\n\r\n{"}
    with contextlib.ExitStack() as stack:
        slow = [
            (kind, stack.enter_context(socket.create_connection(address(url)))) for kind in begun for _ in range(30)
        ]
        for kind, client in slow:
            client.sendall(begun[kind])
        began = time.monotonic()
        for _ in range(5):
            assert post(f"{url}/sleep", content=b"{}", headers=HEADERS).status_code == 200
        assert time.monotonic() - began < 0.9, "slow clients delay others"
        dripping = stack.enter_context(socket.create_connection(address(url)))
        dripping.sendall(head)
        with pytest.raises(OSError):  # a few bytes now and then do not help
            while time.monotonic() - began < 8:
                dripping.sendall(b"x: 1\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 4
        for kind, client in slow:
            client.settimeout(5)
            try:
                received = client.recv(12)
            except ConnectionResetError:
                received = b""
            assert received == (b"HTTP/1.1 408" if kind == "body" else b"")


def test_connections_that_say_nothing_do_not_use_up_all_there_are(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_WAITING", 20)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address(url))) for _ in range(30)]
        assert get(f"{url}/health").status_code == 200
        for client in silent[:10]:
            client.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.1 200"


def test_fifty_clients_at_once(url: str) -> None:
    def ask(i: int) -> int:
        return post(f"{url}/sleep", json={"rows": [0] * i}, headers=HEADERS).status_code

    with ThreadPoolExecutor(50) as threads:
        assert list(threads.map(ask, range(50))) == [200] * 50


def test_too_many_requests_are_told_to_come_back() -> None:
    sleeper = Sleeper()
    service = sleeper.service()
    service.app.user_middleware[0].kwargs["limits"] = Limits(requests=1)
    with running(service) as url, ThreadPoolExecutor(1) as threads:
        long = threads.submit(post, f"{url}/sleep", json={"seconds": 0.4}, headers=HEADERS)
        time.sleep(0.2)
        refused = post(f"{url}/sleep", json={}, headers=HEADERS)
        assert error_of(refused) == (503, "busy") and refused.headers["retry-after"] == "1"
        assert get(f"{url}/health").status_code == 200
        assert long.result().status_code == 200
        assert post(f"{url}/sleep", json={}, headers=HEADERS).status_code == 200


def test_work_for_a_client_that_left_is_not_done(url: str, sleeper: Sleeper) -> None:
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(post, f"{url}/sleep", json={"seconds": 0.4}, headers=HEADERS)
        time.sleep(0.1)
        with pytest.raises(httpx2.TimeoutException):
            post(f"{url}/sleep", json={"rows": [0] * 77}, headers=HEADERS, timeout=0.1)
        assert long.result().status_code == 200
    assert post(f"{url}/sleep", json={}, headers=HEADERS).status_code == 200  # after all that waited
    assert 77 not in sleeper.bodies


def test_a_request_in_progress_is_answered_when_the_service_stops() -> None:
    with ThreadPoolExecutor(1) as threads:
        with running(Sleeper().service()) as url:
            long = threads.submit(post, f"{url}/sleep", json={"seconds": 0.3}, headers=HEADERS)
            time.sleep(0.15)
        assert long.result().status_code == 200
    with pytest.raises(httpx2.ConnectError):
        get(f"{url}/health")


def test_a_request_after_the_worker_ended_is_told_so() -> None:
    service = Sleeper().service()
    service.worker.stop()
    service.worker.run()
    with listening(service.app) as url:
        assert error_of(post(f"{url}/sleep", json={}, headers=HEADERS)) == (503, "busy")


def test_a_port_in_use_and_a_host_that_is_not_here() -> None:
    app: Any = application([], {}, TOKEN, LIMITS)
    with listening(app) as url, pytest.raises(UserError, match="choose another --port"), listening(app, *address(url)):
        pass
    with pytest.raises(UserError, match="not an address of this machine"), listening(app, "no such host"):
        pass


@pytest.mark.parametrize("token", ["", "short", "with spaces in the middle", "with-a-line\nbreak-in-it"])
def test_a_service_without_a_good_token_does_not_start(token: str) -> None:
    with pytest.raises(UserError, match="token"):
        application([], {}, token, LIMITS)


def test_loopback() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("0.0.0.0")


def test_no_message_has_the_token(url: str) -> None:
    texts = [
        request(method, url + path, headers=HEADERS, content=content).text
        for method, path, content in [
            ("GET", "/health", b""), ("GET", "/bug", b""), ("POST", "/sleep", b"{"), ("POST", "/sleep", b"{}"),
        ]
    ]  # fmt: skip
    assert not re.search(re.escape(TOKEN), json.dumps(texts))
    assert threading.active_count() < 50
