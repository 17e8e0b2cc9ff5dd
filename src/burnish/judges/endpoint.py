"""A model behind an OpenAI-compatible API as a judge."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import hashlib
import json
import math
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from burnish.errors import UserError
from burnish.judges.protocol import Judge, NoVerdictError, Question, Verdict
from burnish.judges.questions import after_reasoning, reasoning_question
from burnish.judges.replies import BadReplyError, NoLogprobsError, Read, Reply, hidden, read_choices, read_reply, vote
from burnish.judges.settings import JudgeSettings
from burnish.types import Messages

RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that are worth another try. All from 500 on are too."""
REFUSED = frozenset({*range(300, 400), 401, 402, 403, 404, 405})
"""Statuses that every question would get: the key, the address or the name of the model is wrong."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two tries, unless the endpoint asks for more."""
LONGEST_RETRY_AFTER = 600.0
"""Maximum seconds that an endpoint can ask for."""
OPEN = 0.01
"""Share of the probability that may be lost because the reply does not show whether "1" becomes "10"."""
HIDDEN = 0.05
"""Largest share of the probability that choices may have that are not among the likeliest tokens."""
TRIES_TO_SEE = 8
"""Further samples of a reply, to see what follows such a token."""
SHOWN = 300
"""Characters of a refusal that messages show."""
MILLION = 1e6
RAISE_IT = "raise it and run the same command again, which asks only the questions without a verdict"

T = TypeVar("T")
Progress = tuple[int, Verdict | NoVerdictError]


class _FailedError(Exception):
    """A call got no reply: whether to retry, and the seconds to wait at least."""

    def __init__(self, message: str, *, retry: bool = True, wait: float = 0.0) -> None:
        super().__init__(message)
        self.retry, self.wait = retry, wait


class LimitReachedError(UserError):
    """A limit on the calls or the cost of a judge is reached."""


@dataclass
class _Used:
    """What a question has used so far."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class _Budget:
    """Counts calls and cost, and never lets calls in flight exceed the limits.

    A call reserves the most that it can cost, and settles what it did cost. If the limit leaves no room for it, it
    waits for calls in flight to settle.
    """

    def __init__(self, max_calls: int | None, max_cost: float | None, calls: int, cost: float) -> None:
        self.max_calls, self.max_cost = max_calls, max_cost
        self.calls, self.cost = calls, cost
        self.in_flight, self.reserved = 0, 0.0
        self.settled = asyncio.Event()

    @contextlib.asynccontextmanager
    async def call(self, most: float, used: _Used) -> AsyncIterator[_Used]:
        """One call that costs at most ``most``. The caller adds its cost to what is yielded; else it counts in full."""
        while True:
            if self.max_calls is not None and self.calls >= self.max_calls:
                raise LimitReachedError(f"max_calls: the judge has used its {self.max_calls:,} calls: {RAISE_IT}")
            if self.max_cost is None or self.cost + self.reserved + most <= self.max_cost:
                break
            if not self.in_flight:
                raise LimitReachedError(
                    f"max_cost: the judge has cost {self.cost:.6g} of {self.max_cost:.6g}, and the next call could "
                    f"cost {most:.2g}: {RAISE_IT}"
                )
            self.settled.clear()
            await self.settled.wait()
        self.calls += 1
        self.in_flight += 1
        self.reserved += most
        used.calls += 1
        this = _Used(cost=most)
        try:
            yield this
        finally:
            used.cost += this.cost
            used.tokens += this.tokens
            self.in_flight -= 1
            self.reserved = self.reserved - most if self.in_flight else 0.0
            self.cost += this.cost
            self.settled.set()


class _Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="judge", daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class EndpointJudge(Judge):
    """Reads the log-probabilities of the choices from an endpoint, or counts sampled votes.

    ``EndpointJudge(JudgeSettings(url="http://127.0.0.1:8000/v1", name="my-model", key="MY_KEY"))``

    Requests run in a thread of their own, ``concurrency`` at a time. Connection errors, time-outs, replies that are not
    valid, and the statuses 408, 409, 425, 429 and 5xx are retried with exponential back-off and jitter; ``Retry-After``
    is respected. Limits on calls and cost hold at every moment.

    Args:
        settings: settings with a ``url``.
        calls: calls that the judge has already used of ``max_calls``.
        cost: cost that it has already used of ``max_cost``.

    Raises:
        UserError: the environment variable of the key is not set.
    """

    def __init__(self, settings: JudgeSettings, calls: int = 0, cost: float = 0.0) -> None:
        assert settings.url is not None and settings.name is not None
        self.settings, self.url, self.model = settings, settings.url, settings.name
        self._key = read_key(settings.key)
        self._before = calls, cost
        self._background: _Background | None = None
        self._starting = threading.Lock()
        self._lost = _Used()
        self._jitter = random.Random()

    @property
    def identity(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The address, the name of the model, and the settings on which verdicts depend."""
        return identity(self.settings)

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """The verdicts on questions, in their order.

        Raises:
            NoVerdictError: a question has no verdict after all retries.
            LimitReachedError: a limit on calls or cost is reached.
            UserError: the endpoint refuses the key, the address or the model, or gives no log-probabilities.
        """
        verdicts: dict[int, Verdict] = {}
        for index, verdict in (one for some in self.each(questions) for one in some):
            if isinstance(verdict, NoVerdictError):
                raise verdict
            verdicts[index] = verdict
        return [verdicts[i] for i in range(len(questions))]

    def each(self, questions: Sequence[Question]) -> Iterator[list[tuple[int, Verdict | NoVerdictError]]]:
        """The verdicts on questions, each as soon as it is known. Ending the iteration early cancels the others.

        Raises:
            UserError: as in ``ask``. Calls that are in flight then finish first.
        """
        background = self._started()
        done: queue.SimpleQueue[tuple[Progress, asyncio.Event] | None] = queue.SimpleQueue()
        running = background.submit(self._all(questions, done.put))
        running.add_done_callback(lambda _: done.put(None))
        try:
            while (one := done.get()) is not None:
                progress, taken = one
                try:
                    yield [progress]
                finally:
                    background.loop.call_soon_threadsafe(taken.set)
            running.result()
        finally:
            running.cancel()

    def lost(self) -> tuple[int, float]:
        """The calls and the cost of questions that were interrupted, since this was last asked."""
        lost, self._lost = self._lost, _Used()
        return lost.calls, lost.cost

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        with self._starting:
            if self._background is not None:
                self._background.submit(self._shut()).result()
                self._background.stop()
                self._background = None

    def _started(self) -> _Background:
        with self._starting:
            if self._background is None:
                self._background = _Background()
                self._background.submit(self._open()).result()
            return self._background

    # --- in the thread of the event loop --------------------------------------------------------------------------

    async def _open(self) -> None:
        settings = self.settings
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(settings.timeout, connect=settings.connect_timeout, pool=None),
            limits=httpx2.Limits(max_connections=settings.concurrency),
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._budget = _Budget(settings.max_calls, settings.max_cost, *self._before)

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _all(
        self, questions: Sequence[Question], report: Callable[[tuple[Progress, asyncio.Event]], None]
    ) -> None:
        """Ask all questions. After an error that concerns all of them, no other one starts.

        A question keeps its slot until its verdict is taken, and so stored: a kill loses at most ``concurrency`` of
        them.
        """
        errors: list[UserError] = []

        async def one(index: int) -> None:
            async with self._slots:
                if errors:
                    return
                used, taken = _Used(), asyncio.Event()
                try:
                    report(((index, await self._answer(questions[index], index, used)), taken))
                    await taken.wait()
                except BaseException as error:
                    if not taken.is_set():  # nobody has stored what it has used
                        self._lost.calls += used.calls
                        self._lost.cost += used.cost
                    if not isinstance(error, UserError):
                        raise
                    errors.append(error)

        async with asyncio.TaskGroup() as tasks:
            for index in range(len(questions)):
                tasks.create_task(one(index))
        if errors:
            raise errors[0]

    async def _answer(self, question: Question, index: int, used: _Used) -> Verdict | NoVerdictError:
        try:
            return await self._question(question, used)
        except NoVerdictError as error:
            return NoVerdictError(str(error), index, used.calls, used.cost)

    async def _question(self, question: Question, used: _Used) -> Verdict:
        began, reasoning, settings = time.monotonic(), "", self.settings
        if settings.reasoning:
            asked = reasoning_question(question).messages
            most = settings.max_reasoning_tokens
            options = {"temperature": 0.0, "max_tokens": most}
            reasoning = await self._request(asked, options, most, lambda reply: reply.texts[0].strip(), used)
        asked = after_reasoning(question, reasoning)
        probabilities, mass = await (self._votes(asked, used) if settings.votes else self._logprobs(asked, used))
        seconds = time.monotonic() - began
        return Verdict(probabilities, mass, reasoning, used.calls, used.tokens, seconds, used.cost)

    async def _logprobs(self, question: Question, used: _Used) -> tuple[tuple[float, ...], float]:
        """The probabilities of the choices from log-probabilities."""
        choices = question.choices

        def read(reply: Reply) -> Read:
            found = read_choices(reply.written, choices)
            if not math.fsum(found.probabilities) > 0:
                raise BadReplyError(f"none of the likeliest tokens is {_listed(choices)}, but {reply.texts[0]!r:.60}")
            if hidden(reply.written, found) > HIDDEN * math.fsum(found.probabilities):
                raise BadReplyError(
                    f"the likeliest tokens do not show how likely each of {_listed(choices)} is; the answer was "
                    f"{reply.texts[0]!r:.60}: set votes: 16 or more top_logprobs in the judge"
                )
            return found

        several = any(a != b and b.startswith(a) for a in choices for b in choices)
        room = 2 + max(len(choice) for choice in choices)
        best: Read | None = None
        for k in range(1 + TRIES_TO_SEE * several):
            options = {
                "max_tokens": room,
                "temperature": 1.0,
                "seed": _seed(question, k),
                "logprobs": True,
                "top_logprobs": self.settings.top_logprobs,
            }
            now = await self._request(question.messages, options, room, read, used)
            best = now if best is None or now.open < best.open else best
            if best.open <= OPEN * (math.fsum(best.probabilities) + best.open):
                break
        assert best is not None
        mass = math.fsum(best.probabilities)
        return tuple(p / mass for p in best.probabilities), min(mass, 1.0)

    async def _votes(self, question: Question, used: _Used) -> tuple[tuple[float, ...], float]:
        """The shares of sampled answers that name each choice."""
        choices, wanted, texts = question.choices, self.settings.votes, list[str]()
        room = 8 + max(len(choice) for choice in choices)
        for round_ in range(1 + self.settings.retries):
            while len(texts) < wanted * (round_ + 1):
                n = wanted - len(texts) % wanted
                options = {"max_tokens": room, "temperature": 1.0, "seed": _seed(question, len(texts)), "n": n}
                texts += await self._request(question.messages, options, n * room, lambda reply: reply.texts, used)
            named = Counter(found for text in texts if (found := vote(text, choices)) is not None)
            if named:
                total = named.total()
                return tuple(named[i] / total for i in range(len(choices))), total / len(texts)
        last = f"the last one is {texts[-1]!r:.60}"
        raise NoVerdictError(f"{self.url}: none of {len(texts)} votes is {_listed(choices)}, {last}")

    async def _request(
        self, messages: Messages, options: Mapping[str, object], most: int, read: Callable[[Reply], T], used: _Used
    ) -> T:
        """One reply, retried until it is valid.

        Args:
            messages: the conversation.
            options: further keys of the request.
            most: the number of tokens that the endpoint may write.
            read: what to read from a reply. It raises a BadReplyError if the reply is not valid.
            used: what the question has used, to which this adds.

        Raises:
            NoVerdictError: it is not valid after all retries.
            UserError: the endpoint refuses every question, or a limit is reached.
        """
        retries, began = self.settings.retries, time.monotonic()
        body = {"model": self.model, "messages": messages, **options}
        problem: Exception | None = None
        for attempt in range(1 + retries):
            pause = min(self.settings.backoff * 2**attempt, LONGEST_WAIT) * self._jitter.uniform(0.5, 1.0)
            async with self._budget.call(self._most(messages, most), used) as this:
                try:
                    reply = await self._reply(body, this)
                    return read(reply)
                except BadReplyError as error:
                    problem = error
                except _FailedError as error:
                    if not error.retry:
                        raise NoVerdictError(f"{self.url}: {error}") from error
                    problem, pause = error, max(pause, error.wait)
            if attempt < retries:
                await asyncio.sleep(pause)
        if isinstance(problem, NoLogprobsError):
            raise UserError(
                f"{self.url}: the model {self.model!r} gives no log-probabilities: set votes: 16 in the judge, which "
                "samples answers and counts them"
            )
        tries = f"{1 + retries} calls in {time.monotonic() - began:.0f} s"
        text = self._without_key(str(problem))
        raise NoVerdictError(f"{self.url}: no verdict after {tries}; the last one: {text}")

    async def _reply(self, body: Mapping[str, object], this: _Used) -> Reply:
        """The reply to one call. What it cost is added to ``this``: if that is not known, the most that it can cost.

        Raises:
            BadReplyError: it is not valid.
            _FailedError: there is none.
            UserError: the endpoint refuses every question.
        """
        settings = self.settings
        try:
            async with asyncio.timeout(settings.connect_timeout + settings.timeout):
                response = await self._client.post(f"{self.url}/chat/completions", json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            this.cost = 0.0
            raise _FailedError(f"no connection: {error or type(error).__name__}") from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise _FailedError(f"no answer in {settings.timeout:g} s") from error
        except httpx2.HTTPError as error:
            raise _FailedError(f"{type(error).__name__}: {error}") from error
        except httpx2.InvalidURL as error:
            raise UserError(f"{self.url}: not an address: {error}") from error
        status = response.status_code
        if status < 300:
            reply = read_reply(response.content)
            if reply.usage is not None:
                this.tokens = reply.usage.prompt_tokens + reply.usage.completion_tokens
                this.cost = self._price(reply.usage.prompt_tokens, reply.usage.completion_tokens)
            return reply
        this.cost = 0.0
        excerpt = self._without_key(" ".join(response.text.split()))[:SHOWN] or "an empty reply"
        if status in REFUSED:
            raise UserError(f"{self.url}: the model {self.model!r} was refused with status {status}: {excerpt}")
        wait = _retry_after(response.headers.get("retry-after"))
        raise _FailedError(f"status {status}: {excerpt}", retry=status >= 500 or status in RETRIED, wait=wait)

    def _most(self, messages: Messages, written: int) -> float:
        """The most that a call can cost: a token is at least one byte, and templates add a few tokens a message."""
        read = 64 + sum(32 + len(message["content"].encode("utf-8", "surrogatepass")) for message in messages)
        return self._price(read, written)

    def _price(self, read: int, written: int) -> float:
        return ((self.settings.input_price or 0.0) * read + (self.settings.output_price or 0.0) * written) / MILLION

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def identity(settings: JudgeSettings) -> str:
    """The identity of an endpoint: its address, the name of its model, and the settings that change verdicts."""
    changing = ("url", "name", "votes", *(() if settings.votes else ("top_logprobs",)))
    parts = {key: getattr(settings, key) for key in changing}
    return json.dumps({"judge": "endpoint", **parts, "reasoning": settings.reasoning and settings.max_reasoning_tokens})


def read_key(name: str | None) -> str:
    """The key in an environment variable; "" if there is no name.

    Raises:
        UserError: the variable is not set, or has characters that no key can have.
    """
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise UserError(f"judge: key: the environment variable {name} is not set: export {name}=...")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"judge: key: the environment variable {name} has characters that no key can have")
    return key


def _retry_after(value: str | None) -> float:
    """The seconds that an endpoint asks to wait, from a number or a date; 0 if it does not ask."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER) if math.isfinite(seconds) else 0.0


def _seed(question: Question, k: int) -> int:
    """The seed of the k-th sample of an answer, a number that every API accepts."""
    text = json.dumps([question.messages, question.choices, k])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _listed(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
