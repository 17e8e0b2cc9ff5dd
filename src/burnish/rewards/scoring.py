"""Scoring of trajectories while others are still being sampled. A score is the weighted sum of all rewards."""

from __future__ import annotations

import asyncio
import math
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from burnish.errors import UserError
from burnish.rewards.checks import LARGEST, OfTokens, Values, checked
from burnish.rewards.functions import NamedReward, call
from burnish.types import Trajectory
from burnish.user_tasks import user_tasks


class Scores(NamedTuple):
    """Scores of trajectories, in their order:
    ``Scores([1.5, 1.0], {"model": [1.0, 1.0], "steps": [0.5, 0.0]}, [np.array([0.0, 0.5]), np.array([0.0])])``.

    ``totals`` holds the weighted sums of all rewards. ``by_name`` holds each reward's own scores, where token scores
    are summed. ``tokens`` is the weighted part of each total per sampled token; None if no reward scores tokens.
    """

    totals: list[float]
    by_name: dict[str, list[float]]
    tokens: list[OfTokens] | None


class Scorer:
    """Scores groups of trajectories while others are still being sampled.

    >>> with Scorer(rewards, seed=(0, 3)) as scorer:
    ...     scorer.add(0, first_group)     # calls every reward; coroutines only start
    ...     scorer.advance()               # lets coroutines continue; call it between two polls of a generator
    ...     scores = scorer.finish()[0]    # waits for the rest

    Each reward is called once per group. Groups and their numbers, which seed a reward's random numbers, must depend on
    what is sampled and not on the order in which completions finish.
    """

    def __init__(self, rewards: list[NamedReward], seed: tuple[int, ...] = ()) -> None:
        names = [reward.name for reward in rewards]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"two rewards are named {', '.join(repeated)}: give each its own name:")
        self.rewards, self.seed = {reward.name: reward for reward in rewards}, seed
        self.groups: dict[int, list[Trajectory]] = {}
        self.values: dict[tuple[int, str], Values] = {}
        self.tasks: dict[tuple[int, str], asyncio.Task[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tasks:
            user_tasks().cancel(self.tasks.values())

    def add(self, group: int, trajectories: list[Trajectory]) -> None:
        """Call all rewards on a group. The user's functions get copies, and global state they change is restored.

        Raises:
            UserCodeError: if a reward raised an exception or exceeded its time limit.
            UserError: if a reward returned anything but one finite number per trajectory or per token.

        Both messages name the reward and the rows. ``advance`` and ``finish`` raise the same errors.
        """
        self.groups[group] = trajectories
        for name, reward in self.rewards.items():
            returned = call(reward, trajectories, (*self.seed, group)) if trajectories else []
            if isinstance(returned, asyncio.Task):
                self.tasks[group, name] = returned
            else:
                self.values[group, name] = checked(returned, reward, trajectories)

    def advance(self, wait: bool = False) -> None:
        """Let coroutines continue. With ``wait``, wait up to a second until one of them has ended."""
        if not self.tasks:
            return
        user_tasks().advance(wait)
        for group, name in [key for key, task in self.tasks.items() if task.done()]:
            returned = self.tasks.pop((group, name)).result()
            self.values[group, name] = checked(returned, self.rewards[name], self.groups[group])

    def finish(self) -> dict[int, Scores]:
        """Wait for all rewards and return the scores of each group.

        Raises:
            UserError: if a weighted sum exceeds the range of float32.
        """
        while self.tasks:
            self.advance(wait=True)
        return {
            group: combined(trajectories, [(reward, self.values[group, name]) for name, reward in self.rewards.items()])
            for group, trajectories in self.groups.items()
        }


def score(trajectories: list[Trajectory], rewards: list[NamedReward], seed: tuple[int, ...] = ()) -> Scores:
    """Score finished trajectories as one group."""
    with Scorer(rewards, seed) as scorer:
        scorer.add(0, trajectories)
        return scorer.finish()[0]


def values_of(reward: NamedReward, trajectories: list[Trajectory], seed: tuple[int, ...]) -> Values:
    """Call a reward with the seed of a call, whose last part is the number of the group, and wait for its values."""
    *before, group = seed
    with Scorer([reward], tuple(before)) as scorer:
        scorer.add(group, trajectories)
        scorer.finish()
        return scorer.values[group, reward.name]


def combined(trajectories: list[Trajectory], values: list[tuple[NamedReward, Values]]) -> Scores:
    """Weighted sums of rewards: total_i = sum_r weight_r * value_ri, in the order of the trajectories.

    Token scores are summed to get the value of a trajectory.

    Raises:
        UserError: if a sum exceeds the range of float32. The message names the rewards and the row.
    """
    sums = [(reward, [float(math.fsum(np.atleast_1d(value))) for value in given]) for reward, given in values]
    weighted = [(reward, given) for reward, given in sums if reward.weight]
    totals = [_total(weighted, i, trajectory) for i, trajectory in enumerate(trajectories)]
    by_token: list[Any] = [
        (reward, given) for reward, given in values if reward.weight and any(np.ndim(value) for value in given)
    ]
    tokens = [_of_tokens(by_token, i, trajectory) for i, trajectory in enumerate(trajectories)] if by_token else None
    return Scores(totals, {reward.name: given for reward, given in sums}, tokens)


def _total(values: list[tuple[NamedReward, list[float]]], i: int, trajectory: Trajectory) -> float:
    parts = [(reward, given[i]) for reward, given in values]
    try:
        total = math.fsum(reward.weight * number for reward, number in parts)
    except (OverflowError, ValueError):  # beyond float64, or inf - inf
        total = math.nan
    if not abs(total) <= LARGEST:
        _too_large(parts, trajectory)
    return total


def _of_tokens(values: list[tuple[NamedReward, list[OfTokens]]], i: int, trajectory: Trajectory) -> OfTokens:
    total = np.zeros(len(trajectory.tokens))
    with np.errstate(all="ignore"):
        for reward, given in values:
            total += reward.weight * given[i]
    if len(beyond := np.flatnonzero(~(np.abs(total) <= LARGEST))):
        _too_large([(reward, float(given[i][beyond[0]])) for reward, given in values], trajectory)
    return total


def _too_large(parts: list[tuple[NamedReward, float]], trajectory: Trajectory) -> NoReturn:
    terms = " + ".join(f"{reward.weight:g} * {number:g} ({reward.name})" for reward, number in parts)
    raise UserError(
        f"rewards for {trajectory.source} exceed the range of float32: {terms}: expected at most {LARGEST:.2g}; "
        "lower the scores or the weights"
    )
