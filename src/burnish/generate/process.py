"""The local generator in a child process, which receives weights and requests through a pipe.

This is the simplest remote generator. It recovers from the death of its worker as every remote generator must.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish import files
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator, check_requests
from burnish.generate.protocol import Completion, Handle, Request

ATTEMPTS = 3
"""The generator gives up after this many children have died in a row without progress."""

GRACE_SECONDS = 5.0
"""A child that has not ended this long after SIGTERM is killed."""


Answers = queue.SimpleQueue[tuple[str, Any]]
"""What a child sends: ``done``, ``user_error`` or ``error``, with the completions or the message."""


class _Plan(NamedTuple):
    """The requests of one ``submit``, the handle of the first, and the handles that are not completed yet."""

    first: Handle
    requests: list[Request]
    missing: set[Handle]


class ProcessGenerator:
    """Generates in a child process with a copy of the model. Completions are identical to those of ``LocalGenerator``.

    If the child dies, a new one is started. It receives the weights again and repeats the unfinished plans from their
    start, so results do not depend on when the child died. The child ends when this process ends.

    Args:
        model: a causal language model. It is written to a temporary folder, from which the child loads it. Every
            ``update_weights`` keeps a copy of its tensors in this process.
        tokenizer: as in ``LocalGenerator``.
        critic: as in ``LocalGenerator``.
        slots: as in ``LocalGenerator``.
    """

    overlaps = True

    def __init__(self, model: Any, tokenizer: Any = None, critic: Any = None, slots: int = 64) -> None:
        self.model, self.tokenizer, self.critic, self.slots = model, tokenizer, critic, slots
        self.version = 0
        self._folder = tempfile.TemporaryDirectory(prefix="burnish-generator-")
        path = Path(self._folder.name) / "model.pt"
        with files.storing(path):
            torch.save((model, tokenizer, critic), path)
        self._weights: list[tuple[str, Tensor]] | Path | None = None
        self._plans: list[_Plan] = []
        self._submitted = 0
        self._child: _Child | None = None
        self._updated, self._sent = True, 0

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Send named tensors one by one, or the path of an adapter's folder, and wait until they are loaded."""
        self._check_idle()
        if not isinstance(weights, Path):
            known = dict(self._weights) if isinstance(self._weights, list) else {}
            weights = list((known | {name: tensor.detach().cpu().clone() for name, tensor in weights}).items())
        self._weights, self._updated, self.version = weights, False, version
        self._with_child(lambda: None)

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Send a plan of requests. Raises the same errors as ``LocalGenerator.submit``."""
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        check_requests(requests, self.model, self.tokenizer, self.critic)
        handles = list(range(self._submitted, self._submitted + len(requests)))
        self._submitted += len(requests)
        if requests:
            self._plans.append(_Plan(handles[0], list(requests), set(handles)))
            self._with_child(lambda: None)
        return handles

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Return completions that the child has sent. Waits at most ``timeout`` seconds for the first."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._plans:
            left = None if end is None else max(0.0, end - time.monotonic())
            if done := self._with_child(lambda left=left: self._receive(left)):
                return done
            if left == 0:
                break
        return []

    def drop_cache(self) -> None:
        """Make the child drop the keys and values of earlier requests."""
        self._check_idle()
        self._with_child(lambda: self._request("drop_cache") if self._child else None)

    def close(self) -> None:
        """End the child and delete the copy of the model."""
        self._plans.clear()
        self._end_child()
        self._folder.cleanup()

    def _check_idle(self) -> None:
        if self._plans:
            raise RuntimeError("requests are in flight: poll them all first")

    # --- the child ------------------------------------------------------------------------------------------------

    def _with_child(self, action: Callable[[], Any]) -> Any:
        """Run an action with a child that has the weights and all plans. If the child dies, retry with a new one."""
        code: int | None = None
        for _ in range(ATTEMPTS):
            try:
                self._start_and_sync()
                return action()
            except (EOFError, ConnectionError):
                code = self._end_child()
            except BaseException:
                # The pipe may contain a partial message, so this child cannot be used again.
                self._plans.clear()
                self._end_child()
                raise
        self._plans.clear()
        raise RuntimeError(f"the generator's process died {ATTEMPTS} times in a row, last with exit code {code}")

    def _start_and_sync(self) -> None:
        """Start a child if there is none, and send it the weights and plans that it does not have."""
        if self._child is None:
            self._child = _Child(Path(self._folder.name) / "model.pt", self.slots)
            weakref.finalize(self, self._child.end)
            self._updated, self._sent = self._weights is None and self.version == 0, 0
        if not self._updated:
            self._send_weights()
            self._updated = True
        while self._sent < len(self._plans):
            plan = self._plans[self._sent]
            self._child.send("submit", plan.first, plan.requests, self.version)
            self._sent += 1

    def _send_weights(self) -> None:
        assert self._child is not None
        streamed = [] if isinstance(self._weights, Path) or self._weights is None else self._weights
        self._child.send("update", self.version, self._weights if isinstance(self._weights, Path) else None)
        for name, tensor in streamed:
            self._child.send("tensor", name, tensor)
        self._request("end")

    def _request(self, *message: Any) -> None:
        """Send a message and wait until the child has handled it."""
        assert self._child is not None
        self._child.send(*message)
        answer = self._child.receive()
        assert answer is None, f"unexpected answer: {answer}"

    def _receive(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        assert self._child is not None
        done: list[tuple[Handle, Completion]] = []
        while self._child.connection.poll(0 if done else timeout):
            try:
                sent = self._child.receive()
            except (EOFError, ConnectionError):
                if done:
                    break  # the next call notices that the child is dead
                raise
            for handle, completion in sent:
                plan = next(plan for plan in self._plans if 0 <= handle - plan.first < len(plan.requests))
                if handle in plan.missing:
                    plan.missing.remove(handle)
                    done.append((handle, completion))
        complete = [plan for plan in self._plans if not plan.missing]
        self._plans = [plan for plan in self._plans if plan.missing]
        self._sent -= len(complete)
        return done

    def _end_child(self) -> int | None:
        """End the child and return its exit code."""
        child, self._child = self._child, None
        return None if child is None else child.end()


class _Child:
    """The child process and the parent's end of the pipe."""

    def __init__(self, model: Path, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_end = context.Pipe()
        arguments = (child_end, model, slots, torch.get_num_threads())
        self.process = context.Process(target=_serve, args=arguments, name="burnish-generator", daemon=True)
        self.process.start()
        # If the parent kept this end open, it would not notice that the child died.
        child_end.close()

    def send(self, *message: Any) -> None:
        """Send a message. Plain pickle copies tensors, whereas multiprocessing's pickler would share their memory."""
        self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Wait for the child's next answer.

        Raises:
            UserError: if the child raised one.
            RuntimeError: if the child raised any other error. The message has its traceback.
            EOFError, ConnectionError: if the child is dead.
        """
        kind, content = pickle.loads(self.connection.recv_bytes())
        if kind == "user_error":
            raise UserError(content)
        if kind == "error":
            raise RuntimeError(f"the generator's process failed:\n{content}")
        return content

    def end(self) -> int | None:
        """End the process, which has nothing to save, and return its exit code."""
        self.connection.close()
        self.process.terminate()
        self.process.join(GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


# --- in the child -------------------------------------------------------------------------------------------------


def _serve(connection: Connection, path: Path, slots: int, threads: int) -> None:
    """Answer messages until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    # The parent may compute for a while before it reads, and a pipe that is full must not stop the decoding.
    answers: Answers = queue.SimpleQueue()
    threading.Thread(target=_send, args=(connection, answers), daemon=True).start()
    try:
        model, tokenizer, critic = torch.load(path, weights_only=False)
        generator = LocalGenerator(model, tokenizer, critic, slots)
        parent_handles: dict[Handle, Handle] = {}
        while True:
            try:
                if parent_handles and not connection.poll(0):
                    done = generator.poll(None)
                    completions = [(parent_handles.pop(handle), completion) for handle, completion in done]
                    answers.put(("done", completions))
                else:
                    _handle_message(connection, answers, generator, parent_handles)
            except (EOFError, ConnectionError):
                return
            except UserError as error:
                parent_handles.clear()
                answers.put(("user_error", str(error)))
            except Exception:
                parent_handles.clear()
                answers.put(("error", traceback.format_exc()))
    except (EOFError, ConnectionError):
        return


def _handle_message(
    connection: Connection, answers: Answers, generator: LocalGenerator, parent_handles: dict[Handle, Handle]
) -> None:
    """Receive and handle one message. ``parent_handles`` maps this process's handles to the parent's."""
    match pickle.loads(connection.recv_bytes()):
        case ("submit", first, requests, version):
            handles = generator.submit(requests, version)
            parent_handles.update(zip(handles, range(first, first + len(handles)), strict=True))
        case ("update", version, folder):
            stream = _tensors(connection)
            try:
                generator.update_weights(version, stream if folder is None else folder)
            finally:  # read all tensors even after an error, because the parent reads answers only after the last one
                for _ in stream:
                    pass
            answers.put(("done", None))
        case ("drop_cache",):
            generator.drop_cache()
            answers.put(("done", None))
        case other:
            raise AssertionError(f"unknown message: {other}")


def _tensors(connection: Connection) -> Iterator[tuple[str, Tensor]]:
    """Receive named tensors until the message ``end``."""
    while (message := pickle.loads(connection.recv_bytes()))[0] == "tensor":
        yield message[1], message[2]


def _send(connection: Connection, answers: Answers) -> None:
    """Send answers to the parent until it closes its end of the pipe."""
    with contextlib.suppress(ConnectionError):
        while True:
            connection.send_bytes(pickle.dumps(answers.get()))


def _end_with_parent() -> None:
    """End this process as soon as the parent has ended, even in the middle of a batch."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
