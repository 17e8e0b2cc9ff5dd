"""A reward that asks a service over HTTP. Requests run in a thread of their own, while the run continues."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import logging
import os
import random
import ssl
import threading
import time
import weakref
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx2

from burnish.errors import UserError
from burnish.rewards.protocol import score_request
from burnish.types import Scoring, Trajectory

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, which double with each further one, and their limit."""

RETRIED = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request is repeated."""


class RemoteReward:
    """Scores from a service that follows the protocol of docs/serving.md.

    ``await RemoteReward("http://127.0.0.1:8001")(trajectories)`` returns ``[1.7, -0.3]``.

    Connection errors, time-outs, and answers that say that the service is busy or broken are retried with exponential
    back-off. A service that stays down is an error. The token appears in no message.

    Args:
        url: the address of the service.
        token: the bearer token, if the service needs one.
        timeout: seconds that one request may take.
        retries: how often a request is repeated.
        batch: maximum number of trajectories in a request.
        concurrency: maximum number of requests at the same time.
        name: the name of the reward in messages.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 60.0,
        retries: int = 5,
        batch: int = 64,
        concurrency: int = 8,
        name: str = "url",
    ) -> None:
        self.url, self.name = url.rstrip("/"), name
        self.timeout, self.retries, self.batch, self.concurrency = timeout, retries, batch, concurrency
        self._token = token
        self._chance = random.Random()  # the run's own random numbers must not depend on the network
        self._down = False

    async def __call__(self, trajectories: list[Trajectory], /) -> Scoring:
        """Score trajectories.

        Raises:
            UserError: if the service stays down, refuses the request, or returns another number of scores.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._scores(trajectories), self._line.loop))

    def digest(self) -> str | None:
        """What identifies the service's model and settings; None if it has no ``/health``, or does not say.

        Raises:
            UserError: if the service stays down, or refuses the token.
        """
        return asyncio.run_coroutine_threadsafe(self._digest(), self._line.loop).result()

    def close(self) -> None:
        """Close the connections."""
        if "_line" in vars(self):
            self._line.close()
            del self._line

    @cached_property
    def _line(self) -> _Line:
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        client = httpx2.AsyncClient(
            headers={**headers, "content-type": "application/json"},
            timeout=None,
            verify=_certificates(),
            trust_env=not _is_here(self.url),  # a proxy cannot reach this machine's own services
            limits=httpx2.Limits(max_connections=self.concurrency),
        )
        line = _Line(client, self.concurrency)
        weakref.finalize(self, line.close)
        return line

    # --- in the thread of the connections ---------------------------------------------------------------------------

    async def _scores(self, trajectories: list[Trajectory]) -> list[Any]:
        parts = [trajectories[start : start + self.batch] for start in range(0, len(trajectories), self.batch)]
        tasks = [asyncio.create_task(self._scores_of(part)) for part in parts]
        try:
            return [score for scores in await asyncio.gather(*tasks) for score in scores]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _scores_of(self, part: list[Trajectory]) -> list[Any]:
        response = await self._ask("POST", "/score", score_request(part, f"reward {self.name}"))
        if response.status_code != 200:
            raise self._refused(response, part)
        scores = _of(response, "scores")
        if not isinstance(scores, list):
            raise UserError(
                f'{self._who}: expected {{"scores": [...]}} as its answer to POST /score, got {self._shown(response)}'
            )
        if len(scores) != len(part):
            raise UserError(
                f"{self._who} returned {len(scores)} scores for {len(part)} trajectories, starting with "
                f"{part[0].source}: expected one per trajectory"
            )
        return scores

    async def _digest(self) -> str | None:
        response = await self._ask("GET", "/health", None)
        if response.status_code in (401, 403):
            raise self._refused(response, [])
        digest = _of(response, "digest") if response.status_code == 200 else None
        return digest if isinstance(digest, str) else None

    async def _ask(self, method: str, path: str, content: bytes | None) -> httpx2.Response:
        """The answer to a request, which is repeated while the service is down or busy."""
        began, trouble = time.monotonic(), ""
        for attempt in range(self.retries + 1):
            wanted = None
            async with self._line.turns:
                try:
                    async with asyncio.timeout(self.timeout):
                        response = await self._line.client.request(method, self.url + path, content=content)
                except TimeoutError:
                    trouble = f"no answer within {self.timeout:g} seconds: try a larger timeout:"
                except httpx2.RequestError as error:
                    trouble = self._hidden(str(error) or type(error).__name__)
                else:
                    if response.status_code not in RETRIED:
                        self._down = False
                        return response
                    trouble, wanted = self._shown(response), _seconds(response.headers.get("retry-after"))
            if attempt < self.retries:
                wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * self._chance.uniform(0.5, 1.0)
                if not self._down:
                    logger.warning("%s: %s; trying again", self._who, trouble)
                self._down = True
                await asyncio.sleep(wait if wanted is None else min(wanted, LONGEST_WAIT))
        tries = f"{self.retries + 1} times" if self.retries else "once"
        raise UserError(
            f"{self._who} is down: {trouble} (tried {tries} in {time.monotonic() - began:.0f} seconds): "
            "start the service, and run the same command again to resume"
        )

    # --- messages ---------------------------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"reward {self.name}: the service at {self.url}"

    def _refused(self, response: httpx2.Response, part: list[Trajectory]) -> UserError:
        if response.status_code in (401, 403):
            why = "the service refuses the token" if self._token else "the service needs a token"
            advice = "name the environment variable that holds the service's token: token: NAME"
            return UserError(f"reward {self.name}: {self.url}: {why} ({response.status_code}): {advice}")
        if response.status_code == 413:
            return UserError(f"{self._who} refuses {len(part)} trajectories as too large: set a smaller batch:")
        row = _of(response, "error", "row")
        named = isinstance(row, int) and 0 <= row < len(part)
        what = f"the completion of {part[row].source}" if named else f"a batch that starts with {part[0].source}"
        return UserError(f"{self._who} did not score {what}: {self._shown(response)}")

    def _shown(self, response: httpx2.Response) -> str:
        """The status of an answer and its message, shortened."""
        text = _of(response, "error", "message") or " ".join(response.text.split())
        return f"{response.status_code} {self._hidden(str(text))[:500]}".strip()

    def _hidden(self, text: str) -> str:
        """The text without the token, which a service may repeat."""
        return text.replace(self._token, "***") if self._token else text


class _Line:
    """A client and its connections, in a thread with an event loop of its own."""

    def __init__(self, client: httpx2.AsyncClient, concurrency: int) -> None:
        self.client, self.turns = client, asyncio.Semaphore(concurrency)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="burnish reward service", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._end())
        finally:
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.client.aclose()

    def close(self) -> None:
        """Close the connections and end the thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=5)


def token_of(variable: str | None, key: str) -> str | None:
    """The token in an environment variable; None without a variable. ``key`` is the setting, for messages.

    Raises:
        UserError: if the variable is not set, or its value cannot be sent in a header.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise UserError(f"{key}: the environment variable {variable} is not set: set it to the service's token")
    if not is_sendable(token):
        raise UserError(f"{key}: the environment variable {variable} is not a token: it has spaces or other characters")
    return token


def is_sendable(token: str) -> bool:
    """Whether a token can be sent in a header."""
    return token.isascii() and token.isprintable() and " " not in token


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The certificates of the system, which take 0.1 seconds to read."""
    return httpx2.create_ssl_context()


def _of(response: httpx2.Response, *keys: str) -> Any:
    """A value in the JSON of an answer; None if it has none."""
    try:
        value = json.loads(response.content)
    except ValueError:
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None


def _is_here(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
