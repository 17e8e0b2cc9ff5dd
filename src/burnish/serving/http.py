"""What every service has: a bearer token, limits of size and time, errors as JSON, and a thread that listens."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from burnish.errors import UserCodeError, UserError
from burnish.mistakes import dotted, mistakes
from burnish.rewards.remote import is_sendable
from burnish.serving.worker import Worker
from burnish.terminal import visible
from burnish.types import Config

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=Config)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
logger = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
"""Minimum number of characters of a token."""

HEADER_SECONDS = 10.0
"""Seconds in which the headers of a request must arrive."""

MOST_WAITING = 256
"""Maximum number of connections whose headers have not arrived. A further one closes the oldest of them."""

HEADER_BYTES = 16 * 2**10
"""Maximum size of the headers of a request."""

IDLE_SECONDS = 30
"""Seconds after which a connection without a request is closed."""


@dataclass(frozen=True)
class Limits:
    """Limits of requests: ``Limits(body_bytes=2**20, body_seconds=5.0, requests=8)``."""

    body_bytes: int = 32 * 2**20
    """Maximum size of a body."""
    body_seconds: float = 60.0
    """Seconds in which a body must arrive."""
    requests: int = 128
    """Maximum number of requests at the same time."""


class ServiceError(Exception):
    """A request that fails: ``ServiceError(413, "too_large", "a body has at most 33,554,432 bytes")``.

    ``row`` is the index of the trajectory that is wrong, if one is.
    """

    def __init__(self, status: int, kind: str, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.row = status, kind, message, row

    @property
    def response(self) -> Response:
        """The error as JSON: ``{"error": {"kind": "too_large", "message": "...", "row": null}}``."""
        headers = {"retry-after": "1"} if self.status == 503 else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        error = {"kind": self.kind, "message": self.message, "row": self.row}
        return JSONResponse({"error": error}, self.status, headers)


# --- the app --------------------------------------------------------------------------------------------------------


def application(routes: Sequence[BaseRoute], about: dict[str, Any], token: str, limits: Limits) -> Starlette:
    """An app with these routes and ``GET /health``, which needs the token for everything but a bare 200.

    Args:
        routes: what the service answers.
        about: what ``/health`` says to those who have the token.
        token: the bearer token of every request.
        limits: limits of requests.

    Raises:
        UserError: if the token is too short.
    """
    check_token(token)

    async def health(request: Request) -> Response:
        return JSONResponse(about if "authorization" in request.headers else {})

    return Starlette(
        routes=[Route("/health", health), *routes],
        middleware=[Middleware(_Guard, token=token, limits=limits)],
        exception_handlers={
            ServiceError: _service_error,
            ClientDisconnect: _gone,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
    )


def check_token(token: str, what: str = "the token") -> None:
    """Raise a UserError if a token is too short, or cannot be sent in a header."""
    if len(token) < SHORTEST_TOKEN:
        raise UserError(f"{what} has {len(token)} characters: expected at least {SHORTEST_TOKEN}")
    if not is_sendable(token):
        raise UserError(f"{what}: expected printable ASCII characters without spaces")


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(24)


class _Guard:
    """Lets requests with the token pass, up to a number at the same time. ``/health`` also passes without one."""

    def __init__(self, app: ASGIApp, token: str, limits: Limits) -> None:
        self.app, self.limits = app, limits
        self._expected = f"Bearer {token}".encode()
        self._busy = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        given = request.headers.get("authorization")
        health = request.url.path == "/health"
        # compares in constant time
        if not (health and given is None) and not hmac.compare_digest((given or "").encode(), self._expected):
            wrong = "the token is wrong" if given else "a token is needed"
            refused = ServiceError(401, "unauthorized", f"{wrong}: send the header Authorization: Bearer TOKEN")
            await refused.response(scope, receive, send)
            return
        if health:
            await self.app(scope, receive, send)
            return
        if self._busy >= self.limits.requests:
            refused = ServiceError(503, "busy", f"{self._busy} requests are in progress: try again")
            await refused.response(scope, receive, send)
            return
        self._busy += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._busy -= 1


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body of a request.

    Raises:
        ServiceError: if it is too large, which is known before all of it is read, or takes too long.
    """
    too_large = ServiceError(413, "too_large", f"a body has at most {limits.body_bytes:,} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        late = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise ServiceError(408, "timeout", late) from None
    return bytes(body)


def parsed(kind: type[ConfigT], body: bytes, rows: str = "") -> ConfigT:
    """Read the body of a request. ``rows`` is the key of the list whose index an error names.

    Raises:
        ServiceError: if the body is not JSON, or has unknown keys or wrong values.
    """
    value: Any = {}
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise ServiceError(400, "invalid", f"not JSON: {error.errors()[0]['msg']}") from None
        with contextlib.suppress(ValueError):  # a number with too many digits
            value = json.loads(body)
        path, text = mistakes(error, kind, value)[0]
        row = path[1] if len(path) > 1 and path[0] == rows and isinstance(path[1], int) else None
        raise ServiceError(400, "invalid", f"{dotted(path)}: {text}" if path else text, row) from None


async def answer(request: Request, result: Future[T]) -> T:
    """The result of a job. A job that has not begun is canceled if its client disconnects.

    Raises:
        ServiceError: if the model or the user's function refuses what was sent, or the service is stopping.
    """
    gone = asyncio.create_task(_disconnected(request))
    done = asyncio.wrap_future(result)
    try:
        await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        if done.cancelled():
            raise ServiceError(503, "busy", "the service is stopping")
        return done.result()
    except (UserError, UserCodeError) as error:
        if isinstance(error, UserCodeError):
            logger.error("%s", visible(f"{error.traceback}{error}"))
        raise ServiceError(422, "failed", str(error), getattr(error, "row", None)) from error
    finally:
        gone.cancel()
        done.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _service_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error.response


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
    return ServiceError(error.status_code, kind, str(error.detail)).response


async def _internal_error(_request: Request, _error: Exception) -> Response:
    return ServiceError(500, "internal", "an error in the service: its terminal shows the traceback").response


@dataclass(frozen=True)
class Service(Generic[ItemT, ResultT]):
    """An app, and the worker that does what the app is asked for: ``Service(worker, app)``."""

    worker: Worker[ItemT, ResultT]
    app: Starlette


# --- connections ----------------------------------------------------------------------------------------------------


class _Protocol(H11Protocol):
    """Closes a connection whose headers do not arrive in time, or that keeps sending a body that was refused."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        deadlines = {one: one._late.when() for one in self.connections if isinstance(one, _Protocol) and one._late}
        if len(deadlines) > MOST_WAITING:
            oldest = min(deadlines, key=deadlines.__getitem__)
            oldest._stop_waiting()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            self._expect_headers()  # the first byte of the next request
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._stop_waiting()
        if self.cycle.more_body:
            self._expect_headers()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


@contextlib.contextmanager
def listening(app: ASGIApp, host: str = "127.0.0.1", port: int = 0, grace: int = 10) -> Iterator[str]:
    """Serve an app in a thread of its own, and yield its address: ``http://127.0.0.1:8001``.

    Args:
        app: the app.
        host: the name or IP address to bind to.
        port: the port; 0 picks a free one.
        grace: seconds that requests in progress may take in the end.

    Raises:
        UserError: if the address is in use or does not exist on this machine.
    """
    bound = _bound(host, port)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=grace,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="burnish service", daemon=True)
    address, number = bound.getsockname()[:2]
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        assert server.started, "the thread that listens ended at once"
        yield f"http://[{address}]:{number}" if ":" in address else f"http://{address}:{number}"
    finally:
        server.should_exit = True
        thread.join()


def is_loopback(host: str) -> bool:
    """Whether a name or an IP address stands for this machine only."""
    try:
        return all(ipaddress.ip_address(str(found[4][0])).is_loopback for found in _addresses(host, 0))
    except ValueError:
        return False


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"--host {host}: not an address of this machine: {error.strerror}") from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = _addresses(host, port)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UserError(
            f"cannot listen on {host}, port {port}: {error.strerror}: choose another --port, or 0 for any free one"
        ) from error
    return bound
