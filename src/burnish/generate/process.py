"""The local generator in a child process, which receives weights and requests through a pipe."""

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
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish import files
from burnish.generate.remote import Answer, LostWorkerError, Message, RemoteGenerator, serve

GRACE_SECONDS = 5.0
"""A child that has not ended this long after SIGTERM is killed."""


class ProcessGenerator(RemoteGenerator):
    """Generates in a child process with a copy of the model. Completions are identical to those of ``LocalGenerator``.

    The child ends when this process ends.

    Args:
        model: as in ``RemoteGenerator``. It is written to a temporary folder, from which the child loads it.
        tokenizer: as in ``LocalGenerator``.
        critic: as in ``LocalGenerator``.
        slots: as in ``LocalGenerator``.
    """

    def __init__(self, model: Any, tokenizer: Any = None, critic: Any = None, slots: int = 64) -> None:
        super().__init__(model, tokenizer, critic, slots, _Children(model, tokenizer, critic, slots), workers=1)


class _Children:
    """Child processes of this one, which load the model from a temporary folder."""

    def __init__(self, model: Any, tokenizer: Any, critic: Any, slots: int) -> None:
        self.slots = slots
        self._folder = tempfile.TemporaryDirectory(prefix="burnish-generator-")
        self._path = Path(self._folder.name) / "model.pt"
        with files.storing(self._path):
            torch.save((model, tokenizer, critic), self._path)

    def start(self, index: int) -> _Child:
        return _Child(self._path, self.slots)

    def wait(self, workers: list[_Child], timeout: float | None) -> list[_Child]:
        ready = multiprocessing.connection.wait([worker.connection for worker in workers], timeout)
        return [worker for worker in workers if worker.connection in ready]

    def keep(self, value: Any) -> Any:
        return value.to("cpu", copy=True) if isinstance(value, Tensor) else value

    def close(self) -> None:
        self._folder.cleanup()


class _Child:
    """A child process and the parent's end of the pipe."""

    def __init__(self, model: Path, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_end = context.Pipe()
        arguments = (child_end, model, slots, torch.get_num_threads())
        self.process = context.Process(target=_run, args=arguments, name="burnish-generator", daemon=True)
        self.process.start()
        # If the parent kept this end open, it would not notice that the child died.
        child_end.close()

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages. Plain pickle copies tensors, whereas multiprocessing's pickler would share their memory."""
        try:
            for message in messages:
                self.connection.send_bytes(pickle.dumps(message))
        except ConnectionError as error:
            raise LostWorkerError(self._end()) from error

    def receive(self) -> Answer:
        """Wait for the child's next answer."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise LostWorkerError(self._end()) from error

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.terminate()
        self.process.join(GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _end(self) -> str:
        self.end()
        return f"exit code {self.process.exitcode}"


# --- in the child -------------------------------------------------------------------------------------------------


def _run(connection: Connection, path: Path, slots: int, threads: int) -> None:
    """Answer messages until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    # The parent may compute for a while before it reads, and a pipe that is full must not stop the decoding.
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_send, args=(connection, answers), daemon=True).start()
    serve(_Pipe(connection), answers, partial(torch.load, path, weights_only=False), slots)


class _Pipe:
    """The child's end of the pipe, as an inbox."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def waiting(self) -> bool:
        return self.connection.poll(0)

    def receive(self) -> Message:
        return pickle.loads(self.connection.recv_bytes())


def _send(connection: Connection, answers: queue.SimpleQueue[Answer]) -> None:
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
