"""The local generator in actors of a Ray cluster, on this machine or on others."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from burnish.generate.remote import Answer, LostWorkerError, Message, RemoteGenerator, serve
from burnish.ray_cluster import Actors, Reservation, last_words


class RayGenerator(RemoteGenerator):
    """Generates in the actors of a Ray cluster, each with a copy of the model.

    One worker gives the bytes of ``LocalGenerator`` with as many threads. With several, log-probabilities differ from
    those by rounding. In a run of several processes, each of them has workers of its own.

    Args:
        model: as in ``RemoteGenerator``. It goes through Ray's object store.
        tokenizer: as in ``LocalGenerator``.
        critic: as in ``LocalGenerator``.
        slots: as in ``LocalGenerator``, for each worker.
        workers: number of actors.
        cpus: CPUs of each actor, and its number of threads.
        gpus: GPUs of each actor; it computes on a GPU if this is not 0.
        address: address of the cluster, as in ``ray_cluster.join``.
        timeout: seconds to wait for free resources, and for an actor to start.

    Raises:
        UserError: as in ``ray_cluster.Reservation``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        critic: Any = None,
        slots: int = 64,
        *,
        workers: int = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        address: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        wanted = Actors(workers=workers, cpus=cpus, gpus=gpus, address=address, timeout=timeout)
        reserved = Reservation(wanted, "generator", dist.get_world_size() if dist.is_initialized() else 1)
        super().__init__(model, tokenizer, critic, slots, _Actors((model, tokenizer, critic), slots, reserved), workers)


class _Actors:
    """Actors in reserved resources of the cluster, which get a model from the object store."""

    def __init__(self, loaded: tuple[Any, Any, Any], slots: int, reserved: Reservation) -> None:
        self.slots, self.reserved, self.ray = slots, reserved, reserved.ray
        stored = io.BytesIO()
        torch.save(loaded, stored)
        self._model = self.ray.put(np.frombuffer(stored.getbuffer(), np.uint8))

    def start(self, index: int) -> _Remote:
        wanted = self.reserved.wanted
        arguments = self._model, self.slots, wanted.device, wanted.threads
        actor = self.reserved.actor(_Actor, index, *arguments, concurrency=2)  # put while next_answer waits
        return _Remote(self.ray, actor, wanted.timeout)

    def wait(self, workers: list[_Remote], timeout: float | None) -> list[_Remote]:
        answers = [worker.answer for worker in workers]
        ready, _ = self.ray.wait(answers, timeout=timeout)
        if ready:
            ready, _ = self.ray.wait(answers, num_returns=len(answers), timeout=0)
        return [worker for worker in workers if worker.answer in ready]

    def keep(self, value: Any) -> Any:
        return self.ray.put(value.cpu() if isinstance(value, Tensor) else value)

    def close(self) -> None:
        self.reserved.close()


class _Remote:
    """An actor, as seen by its generator."""

    def __init__(self, ray: Any, actor: Any, timeout: float) -> None:
        self.ray, self.actor, self.timeout = ray, actor, timeout
        self.answer = actor.next_answer.remote()

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages, and wait until they have arrived, since calls of an actor may overtake each other."""
        try:
            self.ray.get(self.actor.put.remote(messages), timeout=self.timeout)
        except self.ray.exceptions.RayError as error:
            raise LostWorkerError(last_words(error)) from error

    def receive(self) -> Answer:
        """Wait for the actor's next answer."""
        try:
            answer = self.ray.get(self.answer)
        except self.ray.exceptions.RayError as error:
            raise LostWorkerError(last_words(error)) from error
        self.answer = self.actor.next_answer.remote()
        return answer

    def end(self) -> None:
        """End the actor's process."""
        if self.ray.is_initialized():
            self.ray.kill(self.actor)


# --- in the actor -------------------------------------------------------------------------------------------------


class _Actor:
    """Runs ``serve`` in a thread. Messages and answers wait in queues."""

    def __init__(self, stored: np.ndarray, slots: int, device: str, threads: int) -> None:
        self._inbox = _Queue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        load = partial(torch.load, io.BytesIO(stored.tobytes()), map_location=device, weights_only=False)
        threading.Thread(target=self._serve, args=(load, slots, threads), daemon=True).start()

    def put(self, messages: Sequence[Message]) -> None:
        """Queue messages."""
        for message in messages:
            self._inbox.messages.put(message)

    def next_answer(self) -> Answer:
        """Wait for the next answer."""
        return self._answers.get()

    def _serve(self, load: Any, slots: int, threads: int) -> None:
        torch.set_num_threads(threads)  # of this thread
        serve(self._inbox, self._answers, load, slots)


class _Queue:
    """The messages of an actor, as an inbox. Tensors and files are read from the object store one by one."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def waiting(self) -> bool:
        return not self.messages.empty()

    def receive(self) -> Message:
        import ray

        message = self.messages.get()
        if message[0] in ("tensor", "adapter"):
            return (*message[:2], ray.get(message[2]))
        return message
