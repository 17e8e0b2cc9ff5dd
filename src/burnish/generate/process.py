"""The local generator in a process of its own, which receives weights and requests through a pipe.

It is the smallest remote generator: what it has to do when a worker dies is what every remote generator has to do.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
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

from burnish.errors import UserError
from burnish.generate.local import LocalGenerator, check_requests
from burnish.generate.protocol import Completion, Handle, Request

ATTEMPTS = 3
"""Children that may die in a row, with nothing done in between, before the generator gives up."""

SECONDS = 5.0
"""A child that was told to end and has not after so long is killed."""


class _Plan(NamedTuple):
    first: Handle
    requests: list[Request]
    missing: set[Handle]


class ProcessGenerator:
    """Generates in a child process with a copy of the model, and gives the bytes that ``LocalGenerator`` gives.

    If the child dies, another one is started. It receives the weights again and does the unfinished plans again from
    their beginning, so that nothing depends on when the child died. The child ends when this process does.

    Args:
        model: a causal language model. It is written to a temporary folder once, from where a child reads it, and
            every ``update_weights`` keeps a copy of the tensors that it is given.
        tokenizer: as for ``LocalGenerator``, and so are ``critic`` and ``slots``.
    """

    def __init__(self, model: Any, tokenizer: Any = None, critic: Any = None, slots: int = 64) -> None:
        self.model, self.tokenizer, self.critic, self.slots = model, tokenizer, critic, slots
        self.version = 0
        self._folder = tempfile.TemporaryDirectory(prefix="burnish-generator-")
        torch.save((model, tokenizer, critic), Path(self._folder.name) / "model.pt")
        self._weights: list[tuple[str, Tensor]] | Path | None = None
        self._plans: list[_Plan] = []
        self._submitted = 0
        self._child: _Child | None = None
        self._updated, self._sent = True, 0

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Send named tensors one by one, or the path of an adapter's folder, and wait until the child has them."""
        self._check_idle()
        if not isinstance(weights, Path):
            known = dict(self._weights) if isinstance(self._weights, list) else {}
            weights = list((known | {name: tensor.detach().cpu().clone() for name, tensor in weights}).items())
        self._weights, self._updated, self.version = weights, False, version
        self._attempt(lambda: None)

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Send a plan of requests; raises what ``LocalGenerator.submit`` raises."""
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        check_requests(requests, self.model, self.tokenizer, self.critic)
        handles = list(range(self._submitted, self._submitted + len(requests)))
        self._submitted += len(requests)
        if requests:
            self._plans.append(_Plan(handles[0], list(requests), set(handles)))
            self._attempt(lambda: None)
        return handles

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Completions that the child has sent; waits for the first for at most ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._plans:
            left = None if end is None else max(0.0, end - time.monotonic())
            if done := self._attempt(lambda left=left: self._received(left)):
                return done
            if left == 0:
                break
        return []

    def drop_cache(self) -> None:
        """Let the child forget keys and values of earlier requests."""
        self._check_idle()
        self._attempt(lambda: self._answered("drop_cache") if self._child else None)

    def close(self) -> None:
        """End the child and delete the copy of the model."""
        self._plans.clear()
        self._end_child()
        self._folder.cleanup()

    def _check_idle(self) -> None:
        if self._plans:
            raise RuntimeError("requests are in flight: poll them all first")

    # --- the child ------------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Do something with a child that has all weights and plans; start another one where it dies over it."""
        code: int | None = None
        for _ in range(ATTEMPTS):
            try:
                self._bring_up_to_date()
                return action()
            except (EOFError, ConnectionError):
                code = self._end_child()
            except BaseException:
                # What is in the pipe is of no use to anybody now.
                self._plans.clear()
                self._end_child()
                raise
        self._plans.clear()
        raise RuntimeError(f"the generator's process died {ATTEMPTS} times in a row, at last with exit code {code}")

    def _bring_up_to_date(self) -> None:
        """Start a child if there is none; send it the weights and the plans that it does not have."""
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
        self._answered("end")

    def _answered(self, *message: Any) -> None:
        """Send a message and wait until it was acted on."""
        assert self._child is not None
        self._child.send(*message)
        while (answer := self._child.receive()) is not None:
            raise AssertionError(f"an answer that nobody asked for: {answer}")

    def _received(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        assert self._child is not None
        if not self._child.connection.poll(timeout):
            return []
        done = []
        for handle, completion in self._child.receive():
            plan = next(plan for plan in self._plans if 0 <= handle - plan.first < len(plan.requests))
            if handle in plan.missing:
                plan.missing.remove(handle)
                done.append((handle, completion))
        complete = [plan for plan in self._plans if not plan.missing]
        self._plans = [plan for plan in self._plans if plan.missing]
        self._sent -= len(complete)
        return done

    def _end_child(self) -> int | None:
        """End the child; its exit code."""
        child, self._child = self._child, None
        return None if child is None else child.end()


class _Child:
    """The process and this side of its pipe."""

    def __init__(self, model: Path, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, model, slots, torch.get_num_threads())
        self.process = context.Process(target=_serve, args=arguments, name="burnish-generator", daemon=True)
        self.process.start()
        # With this end open, a dead child would not be noticed.
        theirs.close()

    def send(self, *message: Any) -> None:
        """Send a message; plain pickle copies tensors, where multiprocessing's own would share their memory."""
        self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """What the child answers.

        Raises:
            UserError: of the child.
            RuntimeError: with the traceback of any other error of the child.
            EOFError, ConnectionError: the child is dead.
        """
        kind, content = pickle.loads(self.connection.recv_bytes())
        if kind == "user_error":
            raise UserError(content)
        if kind == "error":
            raise RuntimeError(f"the generator's process failed:\n{content}")
        return content

    def end(self) -> int | None:
        """End the process, which has nothing to save, and wait for it; its exit code."""
        self.connection.close()
        self.process.terminate()
        self.process.join(SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


# --- in the child -------------------------------------------------------------------------------------------------


def _serve(connection: Connection, path: Path, slots: int, threads: int) -> None:
    """Answer messages until the other side of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        model, tokenizer, critic = torch.load(path, weights_only=False)
        generator = LocalGenerator(model, tokenizer, critic, slots)
        names: dict[Handle, Handle] = {}
        while True:
            try:
                if names and not connection.poll(0):
                    done = generator.poll(None)
                    _answer(connection, "done", [(names.pop(handle), completion) for handle, completion in done])
                else:
                    _act(connection, generator, names)
            except (EOFError, ConnectionError):
                return
            except UserError as error:
                names.clear()
                _answer(connection, "user_error", str(error))
            except Exception:
                names.clear()
                _answer(connection, "error", traceback.format_exc())
    except (EOFError, ConnectionError):
        return


def _act(connection: Connection, generator: LocalGenerator, names: dict[Handle, Handle]) -> None:
    """Do what the next message says."""
    match pickle.loads(connection.recv_bytes()):
        case ("submit", first, requests, version):
            handles = generator.submit(requests, version)
            names.update(zip(handles, range(first, first + len(handles)), strict=True))
        case ("update", version, folder):
            stream = _tensors(connection)
            try:
                generator.update_weights(version, stream if folder is None else folder)
            finally:  # the parent hears of an error behind the last tensor
                for _ in stream:
                    pass
            _answer(connection, "done", None)
        case ("drop_cache",):
            generator.drop_cache()
            _answer(connection, "done", None)
        case other:
            raise AssertionError(f"unknown message: {other}")


def _tensors(connection: Connection) -> Iterator[tuple[str, Tensor]]:
    """Named tensors that follow in the pipe, up to its ``end``."""
    while (message := pickle.loads(connection.recv_bytes()))[0] == "tensor":
        yield message[1], message[2]


def _answer(connection: Connection, kind: str, content: Any) -> None:
    connection.send_bytes(pickle.dumps((kind, content)))


def _end_with_parent() -> None:
    """End this process when the parent has ended, even in the middle of a batch."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
