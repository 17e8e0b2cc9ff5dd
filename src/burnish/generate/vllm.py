"""A generator on a vLLM server, which runs in its own environment and is reached over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import peft
import torch.distributed as dist
from torch import Tensor

from burnish.errors import UserError
from burnish.generate.local import check_requests
from burnish.generate.nccl import Broadcast, NcclBroadcast
from burnish.generate.protocol import Completion, Handle, Request
from burnish.generate.sampling import Sampling
from burnish.generate.vllm_completion import AnswerError, LostError, Sizes, body, read, room
from burnish.generate.vllm_server import VERSION, NotFoundError, ServerGoneError, VllmServer, version_of
from burnish.generate.vllm_weights import AdapterFiles, BroadcastTensors, FromFirstProcess, Target, Transfer
from burnish.models.forward import unwrap

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""The generator gives up after the server has failed this often in a row without progress."""
PAUSE = 0.5
"""Seconds before the second attempt. They double each time."""
COLDEST = 0.01
"""Minimum temperature above 0. vLLM would raise a lower one to this."""
TEXT = "Burnish counts 12 tokens,\nnot words."
"""What the server's tokenizer has to split like ours."""

T = TypeVar("T")


class VllmGenerator:
    """Generates on a vLLM server. It does not import vllm.

    Every completion is a request of its own with its own seed. The server batches requests as they arrive, so equal
    plans send equal requests, but log-probabilities can differ by rounding, and then tokens too, unless the server is
    started with ``VLLM_BATCH_INVARIANT=1``. Log-probabilities are those of the processed distribution, in which the pad
    id has probability 0, and end-of-sequence ids before ``min_new_tokens``.

    If the server dies, the generator waits for it, sends the weights again, and repeats the unfinished requests. In a
    run of several processes, the first one sends the weights, and a server that dies is an error.

    Args:
        model: a causal language model, whose weights the server gets. If it is a ``peft.PeftModel``, the server gets
            only its adapter, as files.
        tokenizer: as in ``LocalGenerator``.
        slots: maximum number of requests in flight.
        url: address of the server, such as ``http://127.0.0.1:8000``.
        key: NAME of the environment variable with the server's API key, if it has one.
        timeout: seconds to wait for an answer.
        wait: seconds to wait for a server that does not answer.
        folder: where adapters are saved; the server must see it. By default, a temporary folder of this machine.
        group: makes the group of processes for the broadcast of weights.

    Raises:
        UserError: if the server does not answer, or does not suit the model.
    """

    overlaps = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        slots: int = 256,
        *,
        url: str,
        key: str | None = None,
        timeout: float = 600.0,
        wait: float = 600.0,
        folder: str | None = None,
        group: Callable[[], Broadcast] = NcclBroadcast,
    ) -> None:
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.version = 0
        self.server = VllmServer(url, key, timeout, wait)
        config = unwrap(model).config.get_text_config(decoder=True)
        pad = None if tokenizer is None else tokenizer.pad_token_id
        self._sizes = Sizes(config.vocab_size, getattr(config, "max_position_embeddings", None), pad)
        self._target: Target | None = None  # None: the server does not have the weights
        self._requests: dict[Handle, Request] = {}  # those without a completion
        self._calls: dict[Handle, Future[Any]] = {}
        self._answered: queue.SimpleQueue[Handle] = queue.SimpleQueue()
        self._submitted = 0
        self._free = asyncio.Semaphore(slots)
        self._attempts, self._given = ATTEMPTS, False
        try:
            base, self._longest = self._checked_server()
            self._transfer: Transfer = (
                AdapterFiles(self.server, model, folder)
                if isinstance(model, peft.PeftModel)
                else BroadcastTensors(self.server, model, base, group)
            )
        except BaseException:
            self.server.close()
            raise

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Send weights, or make the server load an adapter's folder, and wait until it has them.

        All processes of a run call this together.
        """
        if dist.is_initialized() and dist.get_world_size() > 1 and not isinstance(self._transfer, FromFirstProcess):
            # Processes that notice the death of the server at different times cannot send the weights together.
            self._transfer, self._attempts = FromFirstProcess(self._transfer), 1
        self._update(version, weights)

    def _update(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        self.drop_cache()
        self._transfer.keep(weights)
        self.version, self._target, self._given = version, None, True
        self._with_server(lambda: None)

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Send a plan of requests, at most ``slots`` at a time.

        Raises:
            UserError: if the server cannot serve a request.
        """
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        self._check(requests)
        if not self._given:  # the weights are those of the model
            self._update(version, ())
        handles = list(range(self._submitted, self._submitted + len(requests)))
        self._submitted += len(requests)
        self._requests.update(zip(handles, requests, strict=True))
        if requests:
            self._with_server(lambda: None)
        return handles

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Return completions that have arrived. Waits at most ``timeout`` seconds for the first."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._requests:
            return []
        return self._with_server(lambda: self._receive(None if end is None else max(0.0, end - time.monotonic())))

    def drop_cache(self) -> None:
        """Check that no request is in flight. The server drops its cache when it gets new weights."""
        if self._requests:
            raise RuntimeError("requests are in flight: poll them all first")

    def close(self) -> None:
        """Cancel all requests, remove the adapter from the server, and close the connections."""
        self._cancel()
        self._requests.clear()
        self._transfer.end()
        self.server.close()

    # --- the server -----------------------------------------------------------------------------------------------

    def _with_server(self, action: Callable[[], T]) -> T:
        """Run an action while the server has the weights and all requests. If the server fails, wait and try again."""
        last: Exception | None = None
        for attempt in range(self._attempts):
            try:
                if last is not None:
                    time.sleep(PAUSE * 2 ** (attempt - 1))
                    self.server.until_it_answers()
                self._send()
                return action()
            except (ServerGoneError, LostError) as error:
                logger.warning("the vLLM server at %s failed: %s", self.server.url, error)
                self._cancel()
                self._transfer.disconnect()
                self._target, last = None, error
            except BaseException:
                self._cancel()
                self._requests.clear()
                self._target = None
                raise
        self._requests.clear()
        raise UserError(
            f"{self.server.url}: the vLLM server has failed ({self._attempts} attempts), last with: {last}: see its "
            "log, start it again, and run the same command again to resume"
        )

    def _send(self) -> None:
        """Send the weights if the server does not have them, and the requests that it does not have."""
        if self._target is None:
            self._target = self._transfer.send()
        new = self._requests.keys() - self._calls.keys() if len(self._calls) < len(self._requests) else ()
        for handle in sorted(new):
            request = self._requests[handle]
            call = self.server.start(self._complete(body(request, self._target, self._sizes)))
            self._calls[handle] = call
            call.add_done_callback(partial(_report, self._answered, handle))

    async def _complete(self, asked: dict[str, object]) -> Any:
        async with self._free:
            return await self.server.complete(asked)

    def _cancel(self) -> None:
        """Cancel what is in flight. Completions that have already arrived are requested again."""
        for call in self._calls.values():
            call.cancel()
        self._calls, self._answered = {}, queue.SimpleQueue()

    def _receive(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Completions that have arrived, after waiting for the first."""
        done: list[tuple[Handle, Completion]] = []
        with contextlib.suppress(queue.Empty):
            handle = self._answered.get(timeout=timeout)
            while True:
                try:
                    done.append((handle, self._result(handle)))
                except BaseException:
                    if not done:
                        raise
                    self._answered.put(handle)  # for the next call
                    break
                handle = self._answered.get_nowait()
        return done

    def _result(self, handle: Handle) -> Completion:
        request, target = self._requests[handle], self._target
        assert target is not None
        try:
            completion = self._read(self._calls[handle].result(), request, target)
        except NotFoundError as error:
            raise LostError(str(error)) from None
        del self._requests[handle], self._calls[handle]
        return completion

    def _read(self, answer: Any, request: Request, target: Target) -> Completion:
        try:
            return read(answer, request, target, self._sizes, self.tokenizer, self.version)
        except AnswerError as error:
            raise AnswerError(f"{self.server.url}: the vLLM server's answer is wrong: {error}") from None

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check(self, requests: SequenceOf[Request]) -> None:
        """Raise a UserError if the server cannot serve a request."""
        if any(request.return_values for request in requests):
            raise UserError("the vllm generator returns no values: remove return_values")
        check_requests(requests, self.model, self.tokenizer, critic=None)
        for index, request in enumerate(requests):
            if 0 < request.sampling.temperature < COLDEST:
                raise UserError(
                    f"generation.temperature: vLLM would sample at {COLDEST:g} instead of "
                    f"{request.sampling.temperature:g}: set 0 or at least {COLDEST:g}"
                )
            if (needed := len(request.tokens) + room(request, self._sizes.context)) > self._longest:
                raise UserError(
                    f"request {index}: a prompt of {len(request.tokens)} tokens and its completion need {needed} "
                    f"tokens, but the server at {self.server.url} has room for {self._longest}: start it with "
                    f"--max-model-len {needed}, or lower generation.max_new_tokens"
                )

    def _checked_server(self) -> tuple[str, int]:
        """The name of the server's model, and its maximum number of tokens, after a check that both suit this model.

        Raises:
            UserError: if they do not, or the server does not report log-probabilities as it should.
        """
        server = self.server
        try:
            server.until_it_answers()
            version = server.get("/version")["version"]
            models = server.get("/v1/models")["data"]
            expected = ".".join(map(str, VERSION))
            if (found := version_of(version) or VERSION) < VERSION:
                raise UserError(f"{server.url} runs vLLM {version}: expected at least {expected}")
            if found > VERSION:
                logger.warning("%s runs vLLM %s: Burnish was written for %s", server.url, version, expected)
            base = next(entry for entry in models if entry.get("parent") is None)
            name, longest = base["id"], base["max_model_len"]
            if self.tokenizer is not None:
                self._check_tokenizer(name)
            if not dist.is_initialized() or dist.get_rank() == 0:  # only the first process pauses the server
                self._resume()
            self._check_logprobs(name)
        except (ServerGoneError, NotFoundError) as error:
            raise UserError(f"generator.url: {server.url}{error}: expected the address of a vLLM server") from error
        except (KeyError, TypeError, StopIteration) as error:
            raise UserError(f"generator.url: {server.url} does not answer as a vLLM server does: {error!r}") from error
        return name, longest

    def _resume(self) -> None:
        """Resume a server that a trainer left paused when it died. Only one in development mode can be paused."""
        with contextlib.suppress(NotFoundError):
            if self.server.get("/is_paused")["is_paused"]:
                self.server.post("/resume")

    def _check_tokenizer(self, name: str) -> None:
        ours = self.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        asked = {"model": name, "prompt": TEXT, "add_special_tokens": False}
        if (theirs := self.server.post("/tokenize", asked)["tokens"]) != ours:
            raise UserError(
                f"{self.server.url} serves {name}, whose tokenizer is not the model's: it makes {theirs} of {TEXT!r}, "
                f"expected {ours}: start the server with the model that the stage trains"
            )

    def _check_logprobs(self, name: str) -> None:
        """Sample one token from the likeliest one. Its probability is 1 if the server reports processed ones."""
        request = Request((self._sizes.vocabulary - 1,), 0, Sampling(max_new_tokens=1, top_k=1))
        target = Target(name, None)
        answer = self.server.start(self.server.complete(body(request, target, self._sizes))).result()
        if self._read(answer, request, target).logprobs[0] < -1e-6:
            raise UserError(
                f"{self.server.url} reports log-probabilities from before temperature, top-k and top-p: start the "
                "server with --logprobs-mode processed_logprobs"
            )


def _report(answered: queue.SimpleQueue[Handle], handle: Handle, call: Future[Any]) -> None:
    """Note that a call has ended."""
    answered.put(handle)
