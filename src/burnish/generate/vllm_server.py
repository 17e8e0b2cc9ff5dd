"""HTTP calls to a vLLM server. The routes and their answers are those of vLLM 0.33."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from burnish.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = (0, 33)
"""The version of vLLM whose routes this module calls. Older versions lack some of them."""
RETRIES = 3
"""How often a completion is requested again after the connection broke. Its seed makes that safe."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the first repetition, which double each time, and their maximum."""
LEAVE_SECONDS = 10.0
"""Seconds to wait for an answer that does not matter."""
SHOWN = 300
"""Characters of an answer that messages show."""


class ServerGoneError(Exception):
    """The server does not answer, or reports an internal error, so it may have lost its weights and its requests."""


class NotFoundError(Exception):
    """The server does not have a route, a model or an adapter."""


class VllmServer:
    """Calls to one server, which run on a thread of their own.

    Args:
        url: address of the server, without ``/v1``.
        key: NAME of the environment variable with the server's API key, if it has one.
        timeout: seconds to wait for an answer.
        wait: seconds to wait for a server that does not answer, at first or in between.

    Raises:
        UserError: if the environment variable is not set.
    """

    def __init__(self, url: str, key: str | None, timeout: float, wait: float) -> None:
        self.url, self.timeout, self.wait = url.rstrip("/"), timeout, wait
        self._secret = os.environ.get(key, "") if key else ""
        if key and not self._secret:
            raise UserError(f"generator.key: the environment variable {key} is not set")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="burnish vllm", daemon=True)
        self._thread.start()
        self._client = self.start(self._open()).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the thread of the calls."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def get(self, path: str) -> Any:
        """The JSON answer to a GET request. Raises the same errors as ``request``."""
        return self.start(self.request("GET", path)).result()

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """The JSON answer to a POST request. Raises the same errors as ``request``."""
        return self.start(self.request("POST", path, body)).result()

    def leave(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Send a last POST request. Whether it succeeds does not matter, and a server that hangs has no time for it."""
        call = self.start(self.request("POST", path, body))
        with contextlib.suppress(ServerGoneError, NotFoundError, UserError, TimeoutError):
            call.result(LEAVE_SECONDS)

    def until_it_answers(self) -> None:
        """Wait for the server.

        Raises:
            UserError: if it does not answer within ``wait`` seconds.
        """
        end, pause = time.monotonic() + self.wait, FIRST_PAUSE
        while True:
            try:
                self.get("/health")
                return
            except ServerGoneError as error:
                left = end - time.monotonic()
                if left <= 0:
                    raise UserError(
                        f"generator.url: {self.url} has not answered for {self.wait:g} s ({error}): start the vLLM "
                        "server and run the same command again; if it takes longer to start, raise generator.wait"
                    ) from None
            if pause == FIRST_PAUSE:
                logger.warning("waiting for the vLLM server at %s", self.url)
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        if self._thread.is_alive():
            self.start(self._shut()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- on the thread of the calls -------------------------------------------------------------------------------

    async def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """The JSON answer to a request, or None if it is empty or no JSON.

        Raises:
            ServerGoneError: if the connection fails, or the server reports an internal error.
            NotFoundError: if the server has no such route or model.
            UserError: if the server refuses the request, or needs longer than ``timeout``.
        """
        try:
            response = await self._client.request(method, self.url + path, json=body)
        except httpx2.ReadTimeout:
            raise UserError(
                f"{self.url}{path}: no answer in {self.timeout:g} s: raise generator.timeout, or lower generator.slots"
            ) from None
        except httpx2.InvalidURL as error:
            raise UserError(f"generator.url: {self.url} is not an address: {error}") from error
        except httpx2.HTTPError as error:
            raise ServerGoneError(f"{path}: {error or type(error).__name__}") from error
        if response.is_success:
            try:
                return response.json()
            except ValueError:
                return None
        said = f"{path}: status {response.status_code}: {self._excerpt(response)}"
        if response.status_code >= 500:
            raise ServerGoneError(said)
        if response.status_code == 404:
            raise NotFoundError(said)
        if response.status_code in (401, 403):
            raise UserError(f"{self.url}{said}: set generator.key to the NAME of the variable with the server's key")
        raise UserError(f"{self.url}{said}")

    async def complete(self, body: Mapping[str, object]) -> Any:
        """The answer to a completion request, which is repeated if the connection fails. Raises as ``request``."""
        for attempt in range(RETRIES):
            try:
                return await self.request("POST", "/v1/completions", body)
            except ServerGoneError:
                await asyncio.sleep(FIRST_PAUSE * 2**attempt)
        return await self.request("POST", "/v1/completions", body)

    def _excerpt(self, response: httpx2.Response) -> str:
        """What the server says, without the key, should it repeat that."""
        try:
            text = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = response.text
        if self._secret:
            text = text.replace(self._secret, "***")
        return " ".join(text.split())[:SHOWN] or "no message"

    async def _open(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._secret}"} if self._secret else {},
            timeout=httpx2.Timeout(self.timeout, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=None),
        )

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


def version_of(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version: (0, 33) of ``0.33.1``. None for a text that is not a version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))
