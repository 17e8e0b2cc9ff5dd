"""Checks of what a reward returned: one finite number per trajectory, or one per sampled token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from burnish.errors import UserError
from burnish.rewards.functions import NamedReward
from burnish.types import Trajectory

LARGEST = torch.finfo(torch.float32).max

OfTokens = npt.NDArray[np.float64]
"""One number per sampled token of a trajectory."""

Values = list[float] | list[OfTokens]
"""The values that a reward gives to trajectories, in their order."""


def checked(returned: Any, reward: NamedReward, trajectories: list[Trajectory]) -> Values:
    """Check and convert what a reward returned. All trajectories get the same kind of value.

    Raises:
        UserError: if the number of scores does not match the trajectories or tokens, or a score is not a finite number.
            The message names the reward and the row.
    """
    values = _listed(returned, reward, trajectories)
    of_tokens = [_has_tokens(value) for value in values]
    if any(of_tokens) and not all(of_tokens):
        raise UserError(
            f"reward {reward.name} returned token scores for only some trajectories: expected them for all or none"
        )
    pairs = zip(values, trajectories, strict=True)
    if any(of_tokens):
        return [_of_tokens(value, reward, trajectory) for value, trajectory in pairs]
    return [_finite(value, reward, trajectory) for value, trajectory in pairs]


def _listed(returned: Any, reward: NamedReward, trajectories: list[Trajectory]) -> list[Any]:
    """The returned values as a list with one entry per trajectory, not checked yet."""
    n = len(trajectories)
    if isinstance(returned, torch.Tensor | np.ndarray):
        _check_readable(returned, reward)
        if returned.ndim != 1:
            raise UserError(
                f"reward {reward.name} returned {type(returned).__name__} of shape {tuple(returned.shape)}: expected "
                f"shape ({n},), one number for each trajectory"
            )
        _check_length(len(returned), reward, trajectories)
        return _plain(returned, reward)
    if not hasattr(returned, "__len__") or isinstance(returned, str | bytes | bytearray | Mapping | Set):
        raise UserError(
            f"reward {reward.name} returned {type(returned).__name__}: expected a list of {n} numbers, one for each "
            "trajectory"
        )
    with _readable(returned, reward):
        length, values = len(returned), list(islice(returned, n))  # a longer one may have no end
    _check_length(len(values) if length == n else length, reward, trajectories)
    return values


def _check_length(length: int, reward: NamedReward, trajectories: list[Trajectory]) -> None:
    if length != len(trajectories):
        raise UserError(
            f"reward {reward.name} returned {length} scores for {len(trajectories)} trajectories, starting with "
            f"{trajectories[0].source}: expected one per trajectory"
        )


@contextmanager
def _readable(value: object, reward: NamedReward) -> Iterator[None]:
    """Explain an error of reading a value. The methods of an object may be the user's own, and raise anything."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"reward {reward.name} returned {type(value).__name__} that cannot be read as numbers: {_shown(error)}"
        ) from error


def _check_readable(values: torch.Tensor | np.ndarray, reward: NamedReward) -> None:
    if isinstance(values, torch.Tensor) and (values.is_meta or values.layout != torch.strided):
        kind = "on the meta device, which holds no values" if values.is_meta else f"with the layout {values.layout}"
        raise UserError(f"reward {reward.name} returned a tensor {kind}: expected one number for each trajectory")


def _has_tokens(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0)


def _of_tokens(value: Any, reward: NamedReward, trajectory: Trajectory) -> OfTokens:
    expected = len(trajectory.tokens)
    if len(value) != expected:
        raise UserError(
            f"reward {reward.name} returned {len(value)} numbers for the {expected} tokens of {trajectory.source}: "
            "expected one per token"
        )
    return np.array([_finite(number, reward, trajectory) for number in _plain(value, reward)])


def _plain(value: Any, reward: NamedReward) -> Any:
    """The Python numbers of an array or a tensor; other values stay as they are."""
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value
    if not isinstance(value, np.generic):
        _check_readable(value, reward)
    with _readable(value, reward):
        return value.tolist()


def _finite(value: Any, reward: NamedReward, trajectory: Trajectory) -> float:
    value = _plain(value, reward)
    try:
        # float("1.5") would accept text
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:
        number = math.inf
    except Exception:  # of the object's own __float__
        number = math.nan
    if not abs(number) <= LARGEST:
        limit = f" of at most {LARGEST:.2g}, the limit of float32" if math.isfinite(number) else ""
        raise UserError(
            f"reward {reward.name} returned {_shown(value)} for {trajectory.source}, completion "
            f"{_short(trajectory.text)!r}: expected a finite number{limit}"
        )
    return number


def _shown(value: object) -> str:
    try:
        return _short(repr(value))
    except Exception:  # of the object's own __repr__, or an integer with too many digits to be written
        return f"an object of the class {type(value).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
