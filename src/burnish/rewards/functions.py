"""Functions of the user as rewards, sync or async: each call is isolated and has a time limit."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
from dataclasses import replace
from typing import Any, NamedTuple

from burnish.errors import UserError
from burnish.rewards.model import ModelReward
from burnish.rewards.steps import StepReward
from burnish.types import Reward, Trajectory
from burnish.user_code import user_code
from burnish.user_tasks import user_tasks

TIMEOUT = 600.0
"""Seconds that one call of a reward may take where nothing else is said."""


class NamedReward(NamedTuple):
    """One part of the score: ``NamedReward("brevity", 0.1, brevity, "my_rewards.py:brevity", timeout=60.0)``.

    A weight of 0 only measures. ``reference`` is what a recipe calls the function, for messages. ``timeout`` is the
    longest that one call may take, in seconds.
    """

    name: str
    weight: float
    function: Reward
    reference: str = ""
    timeout: float = TIMEOUT


def call(reward: NamedReward, trajectories: list[Trajectory], seed: tuple[int, ...]) -> Any | asyncio.Task[Any]:
    """What a reward returns for its own copies of the trajectories, or the task of a coroutine that will return it.

    The call's random numbers depend on ``seed`` and on the name of the reward only.

    Raises:
        UserCodeError: the reward raised an exception or exceeded its time limit. A task raises the same. The message
            names the reward and the rows.
    """
    if isinstance(reward.function, ModelReward | StepReward):  # ours: they change nothing, and need no copies
        return reward.function(trajectories)
    own = [_copied(trajectory) for trajectory in trajectories]
    what = f"reward {reward.name}" + (f" ({reward.reference})" if reward.reference else "")
    first, last = trajectories[0].source, trajectories[-1].source
    many = len(trajectories) > 1
    during = f"on a batch of {len(trajectories)} trajectories ({first} ... {last})" if many else f"on {first}"
    digest = hashlib.blake2b("/".join(map(str, (*seed, reward.name))).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    with user_code(what, during, seed=number, timeout=reward.timeout):
        returned = reward.function(own)
    if not inspect.isawaitable(returned):
        return returned
    return user_tasks().start(returned, what=what, during=during, seed=number, timeout=reward.timeout)


def _copied(trajectory: Trajectory) -> Trajectory:
    """A trajectory that shares no mutable value with the given one."""
    try:
        prompt, columns = copy.deepcopy((trajectory.prompt, dict(trajectory.columns)))
    except Exception as error:  # whatever the values of a column raise
        raise UserError(
            f"{trajectory.source}: its columns cannot be copied for a reward: {error}: expected plain values"
        ) from error
    sequences = tuple(sequence.with_arrays() for sequence in trajectory.sequences)  # their arrays are read-only
    return replace(trajectory, prompt=prompt, columns=columns, sequences=sequences)
