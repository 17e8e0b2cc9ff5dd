"""Checks of what a reward returned: one finite number per trajectory, or one per sampled token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
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
    values = _listed(returned, reward, len(trajectories))
    if len(values) != len(trajectories):
        raise UserError(
            f"reward {reward.name} returned {len(values)} scores for {len(trajectories)} trajectories, starting with "
            f"{trajectories[0].source}: expected one per trajectory"
        )
    of_tokens = [_has_tokens(value) for value in values]
    if any(of_tokens) and not all(of_tokens):
        raise UserError(
            f"reward {reward.name} returned token scores for only some trajectories: expected them for all or none"
        )
    pairs = zip(values, trajectories, strict=True)
    if any(of_tokens):
        return [_of_tokens(value, reward, trajectory) for value, trajectory in pairs]
    return [_finite(value, reward, trajectory) for value, trajectory in pairs]


def _listed(returned: Any, reward: NamedReward, n: int) -> Sequence[Any]:
    """The returned values for n trajectories as a sequence, not checked yet."""
    if isinstance(returned, torch.Tensor | np.ndarray):
        _check_readable(returned, reward)
        if returned.ndim != 1:
            raise UserError(
                f"reward {reward.name} returned {type(returned).__name__} of shape {tuple(returned.shape)}: expected "
                f"shape ({n},), one number for each trajectory"
            )
        return returned.tolist()
    if not hasattr(returned, "__len__") or isinstance(returned, str | bytes | bytearray | Mapping | Set):
        raise UserError(
            f"reward {reward.name} returned {type(returned).__name__}: expected a list of {n} numbers, one for each "
            "trajectory"
        )
    return returned


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
    if isinstance(value, torch.Tensor):
        _check_readable(value, reward)
        value = value.detach().cpu()
    return np.array([_finite(number, reward, trajectory) for number in value])


def _finite(value: Any, reward: NamedReward, trajectory: Trajectory) -> float:
    if isinstance(value, torch.Tensor | np.ndarray):
        _check_readable(value, reward)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    try:
        # float("1.5") would accept text
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST:
        limit = f" of at most {LARGEST:.2g}, the limit of float32" if math.isfinite(number) else ""
        raise UserError(
            f"reward {reward.name} returned {value!r} for {trajectory.source}, completion {_short(trajectory.text)!r}: "
            f"expected a finite number{limit}"
        )
    return number


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
