"""The user's functions as rewards, sync or async. Each call is isolated and has a time limit."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from burnish.errors import UserError, did_you_mean
from burnish.rewards.judge import JudgeReward
from burnish.rewards.model import ModelReward
from burnish.rewards.ray import RayReward
from burnish.rewards.remote import RemoteReward
from burnish.rewards.steps import StepReward
from burnish.types import Columns, Reward, Trajectory
from burnish.user_code import user_code
from burnish.user_tasks import user_tasks

TIMEOUT = 600.0
"""Default time limit of one call of a reward, in seconds."""
NO_TIMEOUT = 1e6
"""The time limit, in seconds, of a call that limits the time of its parts itself."""


class NamedReward(NamedTuple):
    """One part of the score: ``NamedReward("brevity", 0.1, brevity, "my_rewards.py:brevity", timeout=60.0)``.

    A reward with weight 0 is only logged. ``reference`` is the function's name in the recipe, for messages. ``timeout``
    is the time limit of one call, in seconds.
    """

    name: str
    weight: float
    function: Reward
    reference: str = ""
    timeout: float = TIMEOUT


def call(reward: NamedReward, trajectories: list[Trajectory], seed: tuple[int, ...]) -> Any | asyncio.Task[Any]:
    """Call a reward on copies of the trajectories. Returns its result, or a task if the reward is a coroutine.

    The random numbers of the call depend only on ``seed`` and the name of the reward.

    Raises:
        UserCodeError: if the reward raised an exception or exceeded its time limit. A task raises the same error. The
            message names the reward and the rows.
    """
    if isinstance(reward.function, ModelReward | StepReward):  # our own rewards change nothing and need no copies
        return reward.function(trajectories)
    if isinstance(reward.function, JudgeReward):
        scores = reward.function(trajectories)
        if not inspect.isawaitable(scores):
            return scores
        return user_tasks().start(scores, what=f"reward {reward.name}", during="", seed=0, timeout=NO_TIMEOUT)
    if isinstance(reward.function, RayReward):  # the actor copies, isolates and limits the call
        scores = reward.function(trajectories, seed)
        return user_tasks().start(scores, what=f"reward {reward.name}", during="", seed=0, timeout=NO_TIMEOUT)
    own = [_copied(trajectory) for trajectory in trajectories]
    what = f"reward {reward.name}" + (f" ({reward.reference})" if reward.reference else "")
    first, last = trajectories[0].source, trajectories[-1].source
    many = len(trajectories) > 1
    during = f"on a batch of {len(trajectories)} trajectories ({first} ... {last})" if many else f"on {first}"
    digest = hashlib.blake2b("/".join(map(str, (*seed, reward.name))).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    with user_code(what, during, seed=number, timeout=reward.timeout):
        returned = _called(reward, own)
    if not inspect.isawaitable(returned):
        return returned
    return user_tasks().start(returned, what=what, during=during, seed=number, timeout=reward.timeout)


def close(rewards: Iterable[NamedReward]) -> None:
    """Close the connections and end the actors of rewards that have some."""
    for reward in rewards:
        if isinstance(reward.function, JudgeReward | RemoteReward | RayReward):
            reward.function.close()


TRL = ("prompts", "completions", "completion_ids")
"""Parameters by which a reward for TRL is recognized."""


def _called(reward: NamedReward, trajectories: list[Trajectory]) -> Any:
    """Call a reward with trajectories, or as TRL does if it has a parameter that TRL names.

    TRL's rewards receive lists as keyword arguments: the texts of prompts and completions, the ids of the completions,
    and each column.
    """
    names = _parameters(reward.function)
    if not names.keys() & set(TRL):
        return reward.function(trajectories)
    function: Any = reward.function
    columns = list(dict.fromkeys(name for trajectory in trajectories for name in trajectory.columns))
    lists: dict[str, list[Any]] = {
        **{name: [t.columns.get(name) for t in trajectories] for name in columns},
        "prompts": [t.prompt_text for t in trajectories],
        "completions": [t.text for t in trajectories],
        "completion_ids": [t.tokens.tolist() for t in trajectories],
    }
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    required = [
        n for n, p in names.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if lacking := [name for name in required if name not in lists]:
        raise UserError(
            f"reward {reward.name}: its parameter {lacking[0]!r} is not a column of the prompts"
            f"{did_you_mean(lacking[0], columns)}; columns are {', '.join(columns) or 'none'}"
        )
    return function(**(lists if everything else {name: value for name, value in lists.items() if name in names}))


def _parameters(function: Reward) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; empty if it does not tell them, as some functions written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _copied(trajectory: Trajectory) -> Trajectory:
    """A copy of a trajectory that shares no mutable values with it."""
    try:
        prompt, turns, columns = copy.deepcopy((trajectory.prompt, trajectory.turns, dict(trajectory.columns)))
    except Exception as error:  # a column may hold any object
        raise UserError(
            f"{trajectory.source}: its columns cannot be copied for a reward: {error}; use plain values"
        ) from error
    sequences = tuple(sequence.with_arrays() for sequence in trajectory.sequences)  # their arrays are read-only
    return replace(trajectory, prompt=prompt, turns=turns, columns=Columns(columns), sequences=sequences)
