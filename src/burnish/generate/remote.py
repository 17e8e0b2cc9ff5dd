"""Generators in other processes: requests are split over workers, each of which has a ``LocalGenerator``.

A worker that dies is replaced, as every remote generator must do. The new one gets the weights and repeats the
unfinished requests, so results do not depend on whether and when a worker died.
"""

from __future__ import annotations

import queue
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from burnish.errors import UserError
from burnish.generate.local import LocalGenerator, check_requests
from burnish.generate.protocol import Completion, Handle, Request

ATTEMPTS = 3
"""The generator gives up after this many workers have died in a row in the same place without progress."""

Message = tuple[Any, ...]
"""What a worker receives: its kind, and the rest. ``serve`` lists the kinds."""
Answer = tuple[str, Any]
"""What a worker sends: ``done`` with completions, ``ready``, or ``user_error`` or ``error`` with a text."""


class LostWorkerError(Exception):
    """A worker has died. The message is what is known about its end."""


class Worker(Protocol):
    """A process that runs ``serve``, as seen by its generator."""

    def send(self, messages: SequenceOf[Message]) -> None:
        """Send messages.

        Raises:
            LostWorkerError: if the worker is dead.
        """
        ...

    def receive(self) -> Answer:
        """Wait for the next answer.

        Raises:
            LostWorkerError: if the worker is dead.
        """
        ...

    def end(self) -> None:
        """End the process, which has nothing to save."""
        ...


class Workplace(Protocol):
    """Where workers run."""

    def start(self, index: int) -> Worker:
        """Start the worker with this number. It need not be ready when this returns."""
        ...

    def wait(self, workers: list[Any], timeout: float | None) -> list[Any]:
        """The workers that have answered or died, after waiting for the first at most ``timeout`` seconds."""
        ...

    def keep(self, value: Any) -> Any:
        """A copy of a tensor or of other plain data, which can be sent to any number of workers."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


def shares(requests: int, workers: int) -> list[range]:
    """The requests of each worker: contiguous, and as many for each as possible. ``shares(5, 2)`` is 0..1 and 2..4.

    The samples of a prompt are adjacent, so most of them share a worker, which then computes the prompt once.
    """
    return [range(requests * i // workers, requests * (i + 1) // workers) for i in range(workers)]


class _Plan(NamedTuple):
    """A worker's requests of one ``submit``, the handle of the first, and the handles that are not completed yet."""

    first: Handle
    requests: list[Request]
    missing: set[Handle]


class RemoteGenerator:
    """Generates with copies of the model in workers. Which worker gets which requests follows from the requests alone.

    Args:
        model: a causal language model. Every ``update_weights`` keeps a copy of its tensors.
        tokenizer: as in ``LocalGenerator``.
        critic: as in ``LocalGenerator``.
        slots: as in ``LocalGenerator``, for each worker.
        place: where the workers run.
        workers: how many there are.
    """

    overlaps = True

    def __init__(self, model: Any, tokenizer: Any, critic: Any, slots: int, place: Workplace, workers: int) -> None:
        self.model, self.tokenizer, self.critic, self.slots = model, tokenizer, critic, slots
        self.version = 0
        self._place = place
        self._posts = [_Post(place, index) for index in range(workers)]
        self._tensors: dict[str, Any] = {}
        self._submitted = 0
        weakref.finalize(self, _close, self._posts, place)

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Send named tensors one by one, or the files of an adapter's folder, and wait until all workers have them."""
        self._check_idle()
        if isinstance(weights, Path):
            self._tensors = {}
            update: list[Message] = [("adapter", version, self._place.keep(_files(weights)))]
        else:
            self._tensors |= {name: self._place.keep(tensor.detach()) for name, tensor in weights}
            tensors = [("tensor", *named) for named in self._tensors.items()]
            update = [("update", version), *tensors, ("end",)]
        self.version = version
        for post in self._posts:
            post.update(update)
        self._wait_until_ready()

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Send requests to the workers. Raises the same errors as ``LocalGenerator.submit``."""
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        check_requests(requests, self.model, self.tokenizer, self.critic)
        first = self._submitted
        self._submitted += len(requests)
        for post, share in zip(self._posts, shares(len(requests), len(self._posts)), strict=True):
            if share:
                handles = {first + index for index in share}
                post.plans.append(_Plan(min(handles), [requests[index] for index in share], handles))
        self._guarded(self._supply)
        return list(range(first, self._submitted))

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Return completions that have arrived. Waits at most ``timeout`` seconds for the first."""
        end = None if timeout is None else time.monotonic() + timeout
        done: list[tuple[Handle, Completion]] = []
        while any(post.plans for post in self._posts):
            left = 0.0 if done else None if end is None else max(0.0, end - time.monotonic())
            arrived = self._guarded(lambda left=left: self._receive(left))
            done += arrived
            if not arrived and (done or left == 0):
                break
        return done

    def drop_cache(self) -> None:
        """Make the workers drop the keys and values of earlier requests."""
        self._check_idle()
        for post in self._posts:
            post.drop_cache()
        self._wait_until_ready()

    def close(self) -> None:
        """End the workers, and delete the copies of the model."""
        _close(self._posts, self._place)

    def _check_idle(self) -> None:
        if any(post.plans for post in self._posts):
            raise RuntimeError("requests are in flight: poll them all first")

    def _wait_until_ready(self) -> None:
        """Wait until all workers have done what they were told."""
        self._guarded(self._supply)
        while any(post.busy for post in self._posts):
            self._guarded(lambda: self._receive(None))

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """Run an action. After an error, a message may be incomplete, so the workers cannot be used again."""
        try:
            return action()
        except BaseException:
            for post in self._posts:
                post.reset()
            raise

    def _supply(self) -> None:
        """Start all workers at once, and then send them what they do not have."""
        busy = [post for post in self._posts if post.busy]
        for post in busy:
            post.start()
        for post in busy:
            post.supply()

    def _receive(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """The completions that have arrived, after waiting for the first answer of a worker."""
        self._supply()
        workers = {id(post.worker): post for post in self._posts if post.busy}
        answered = self._place.wait([post.worker for post in workers.values()], timeout)
        return [done for worker in answered for done in workers[id(worker)].receive()]


class _Post:
    """The place of one worker, with what it has to do. If it dies, another worker takes its place."""

    def __init__(self, place: Workplace, index: int) -> None:
        self.worker: Worker | None = None
        self.plans: list[_Plan] = []
        self._place, self._index = place, index
        self._update: list[Message] = []  # brings a new worker to the current weights
        self._updated, self._unread, self._sent, self._deaths = True, 0, 0, 0

    @property
    def busy(self) -> bool:
        """Whether the worker has to answer, or has not been sent the weights."""
        return bool(self.plans or self._unread or not self._updated)

    def update(self, update: list[Message]) -> None:
        """Set the messages with the current weights, which ``supply`` sends."""
        self._update, self._updated, self._deaths = update, False, 0

    def drop_cache(self) -> None:
        """Make the worker drop its cache, if there is one."""
        if self.worker is not None:
            try:
                self.worker.send([("drop_cache",)])
                self._unread += 1
            except LostWorkerError as error:
                self._replace(error)

    def start(self) -> None:
        """Start a worker, if there is none."""
        if self.worker is None:
            self.worker = self._place.start(self._index)
            self._updated, self._unread, self._sent = not self._update, 0, 0

    def supply(self) -> None:
        """Send the worker the weights and plans that it does not have. If it dies, start another one."""
        while True:
            self.start()
            assert self.worker is not None
            try:
                if not self._updated:
                    self.worker.send(self._update)
                    self._updated, self._unread = True, self._unread + 1
                for plan in self.plans[self._sent :]:
                    self.worker.send([("submit", plan.first, plan.requests)])
                    self._sent += 1
                return
            except LostWorkerError as error:
                self._replace(error)

    def receive(self) -> list[tuple[Handle, Completion]]:
        """The completions in the worker's next answer; none if it has died.

        Raises:
            UserError: if the worker raised one.
            RuntimeError: if the worker raised any other error, with its traceback; or too many workers have died.
        """
        assert self.worker is not None
        try:
            kind, content = self.worker.receive()
        except LostWorkerError as error:
            self._replace(error)
            return []
        if kind == "user_error":
            raise UserError(content)
        if kind == "error":
            raise RuntimeError(f"a worker of the generator failed:\n{content}")
        if kind == "ready":
            self._unread -= 1
            return []
        self._deaths = 0
        return self._completed(content)

    def reset(self) -> None:
        """End the worker, and forget its plans."""
        self.plans, self._unread, self._updated = [], 0, True
        self._end()

    def _completed(self, completions: list[tuple[Handle, Completion]]) -> list[tuple[Handle, Completion]]:
        """The completions that were missing: a new worker repeats a whole plan."""
        done = []
        for handle, completion in completions:
            plan = next(plan for plan in self.plans if 0 <= handle - plan.first < len(plan.requests))
            if handle in plan.missing:
                plan.missing.remove(handle)
                done.append((handle, completion))
        self._sent -= sum(not plan.missing for plan in self.plans)
        self.plans = [plan for plan in self.plans if plan.missing]
        return done

    def _replace(self, error: LostWorkerError) -> None:
        """End a worker that has died. ``supply`` starts another one."""
        self._end()
        self._unread, self._updated = 0, not self._update
        self._deaths += 1
        if self._deaths == ATTEMPTS:
            raise RuntimeError(f"{ATTEMPTS} workers of the generator died in a row, the last one: {error}") from error

    def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.end()


def _close(posts: list[_Post], place: Workplace) -> None:
    for post in posts:
        post.reset()
    place.close()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- in the worker ------------------------------------------------------------------------------------------------


class Inbox(Protocol):
    """The messages that a worker receives."""

    def waiting(self) -> bool:
        """Whether there is a message."""
        ...

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            EOFError, ConnectionError: if there will be no more.
        """
        ...


def serve(
    inbox: Inbox, answers: queue.SimpleQueue[Answer], load: Callable[[], tuple[Any, Any, Any]], slots: int
) -> None:
    """Answer messages until the inbox ends. ``load`` returns the model, the tokenizer and the critic.

    Messages are ``("update", version)``, followed by any number of ``("tensor", name, tensor)`` and ``("end",)``;
    ``("adapter", version, files)``; ``("submit", first handle, requests)``; ``("drop_cache",)``.
    """
    try:
        server = _Server(inbox, answers, load, slots)
        while True:
            try:
                server.step()
            except UserError as error:
                server.fail("user_error", str(error))
            except (EOFError, ConnectionError):
                raise
            except Exception:
                server.fail("error", traceback.format_exc())
    except (EOFError, ConnectionError):
        return


class _Server:
    """The generator of a worker, and the handles by which the other side knows its requests."""

    def __init__(
        self, inbox: Inbox, answers: queue.SimpleQueue[Answer], load: Callable[[], tuple[Any, Any, Any]], slots: int
    ) -> None:
        self.inbox, self.answers, self.slots = inbox, answers, slots
        self._load = load
        self._generator: LocalGenerator | None = None
        self._handles: dict[Handle, Handle] = {}

    def step(self) -> None:
        """Handle a message if there is one or nothing else to do; otherwise decode until a completion is finished."""
        if self._handles and not self.inbox.waiting():
            assert self._generator is not None
            done = self._generator.poll(None)
            self.answers.put(("done", [(self._handles.pop(handle), completion) for handle, completion in done]))
        else:
            self._handle(self.inbox.receive())

    def fail(self, kind: str, message: str) -> None:
        """Report an error. The requests in flight are lost."""
        self._handles.clear()
        self.answers.put((kind, message))

    def _handle(self, message: Message) -> None:
        if self._generator is None:
            self._generator = LocalGenerator(*self._load(), self.slots, frozen=True)
        generator = self._generator
        match message:
            case ("submit", first, requests):
                handles = generator.submit(requests, generator.version)
                self._handles.update(zip(handles, range(first, first + len(handles)), strict=True))
                return
            case ("update", version):
                tensors = self._tensors()
                try:
                    generator.update_weights(version, tensors)
                finally:  # after an error too, read on to the next message
                    for _ in tensors:
                        pass
            case ("adapter", version, contents):
                with tempfile.TemporaryDirectory(prefix="burnish-adapter-") as folder:
                    for name, content in contents.items():
                        path = Path(folder) / name
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(content)
                    generator.update_weights(version, Path(folder))
            case ("drop_cache",):
                generator.drop_cache()
            case other:
                raise AssertionError(f"unknown message: {other}")
        self.answers.put(("ready", None))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receive named tensors until the message ``end``."""
        while (message := self.inbox.receive())[0] == "tensor":
            yield message[1], message[2]
