"""Rewards in actors of a Ray cluster, on this machine or on others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import torch

from burnish.errors import UserCodeError, UserError
from burnish.ray_cluster import Actors, Reservation, last_words
from burnish.types import Trajectory

ATTEMPTS = 3
"""A reward fails after this many of its actors have died in a row."""


class RayReward:
    """Calls a reward in actors, each of which has loaded it. The scores are those of a call with as many threads.

    An actor that dies is replaced, and the call is repeated.

    Args:
        load: loads the reward for a device. It is called in each actor.
        score: called in an actor with the reward, trajectories and the seed of the call. It returns the scores.
        wanted: the actors.
        what: the key of the recipe, for messages.
        processes: how many processes have actors of their own.

    Raises:
        UserError: as in ``ray_cluster.Reservation``.
    """

    def __init__(
        self, load: Callable[[str], Any], score: Callable[..., Any], wanted: Actors, what: str, processes: int = 1
    ) -> None:
        self.load, self.score = load, score
        self._reserved = Reservation(wanted, what, processes)
        self._actors: list[Any] = [None] * wanted.workers
        self._calls = 0

    async def __call__(self, trajectories: list[Trajectory], /, seed: tuple[int, ...] = (0,)) -> Any:
        """Score trajectories in the actor whose turn it is.

        Raises:
            UserError, UserCodeError: as the reward itself.
            RuntimeError: if the actors die again and again.
        """
        ray, index = self._reserved.ray, self._calls % len(self._actors)
        self._calls += 1
        last: Exception | None = None
        for _ in range(ATTEMPTS):
            actor = self._actor(index)
            try:
                kind, content = await asyncio.wrap_future(actor.score.remote(trajectories, seed).future())
            except ray.exceptions.RayError as error:
                last = error
                if self._actors[index] is actor:  # another call may have replaced it
                    self._actors[index] = None
                    ray.kill(actor)
                continue
            if kind == "user_error":
                raise UserError(content)
            if kind == "user_code_error":
                raise UserCodeError(*content)
            return content
        assert last is not None
        raise RuntimeError(f"{ATTEMPTS} of its Ray actors died in a row, the last one: {last_words(last)}")

    def close(self) -> None:
        """End the actors, and return their resources."""
        self._reserved.close()

    def _actor(self, index: int) -> Any:
        if self._actors[index] is None:
            wanted = self._reserved.wanted
            arguments = self.load, self.score, os.getcwd(), wanted.device, wanted.threads
            self._actors[index] = self._reserved.actor(_Actor, index, *arguments)
        return self._actors[index]


class _Actor:
    """Loads a reward, and calls it."""

    def __init__(
        self, load: Callable[[str], Any], score: Callable[..., Any], folder: str, device: str, threads: int
    ) -> None:
        os.chdir(folder)  # paths of models and of the user's files are relative to it
        torch.set_num_threads(threads)
        self._load, self._score, self._device = load, score, device
        self._reward: Any = None

    def score(self, trajectories: list[Trajectory], seed: tuple[int, ...]) -> tuple[str, Any]:
        """``done`` with the scores, or the kind of an error with its message."""
        try:
            if self._reward is None:
                self._reward = self._load(self._device)
            return "done", self._score(self._reward, trajectories, seed)
        except UserError as error:
            return "user_error", str(error)
        except UserCodeError as error:
            return "user_code_error", (str(error), error.traceback)
