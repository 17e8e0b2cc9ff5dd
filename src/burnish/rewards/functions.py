"""Plain functions as rewards: found by name, weighted, and checked."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from burnish.errors import UserError, did_you_mean
from burnish.rewards.model import ModelReward
from burnish.rewards.steps import StepReward
from burnish.types import Answer, Reward
from burnish.user_code import user_code

LARGEST = torch.finfo(torch.float32).max


class NamedReward(NamedTuple):
    """One part of the score: ``NamedReward("brevity", 0.1, brevity, "my_rewards.py:brevity")``.

    A weight of 0 measures and changes nothing. ``reference`` is what a recipe calls the function, for messages.
    """

    name: str
    weight: float
    function: Reward
    reference: str = ""


def load(reference: str) -> Callable[..., Any]:
    """The function that ``file.py:name`` or ``package.module:name`` names; a reward takes answers and gives floats.

    A file is imported once for each version of its contents, always with the same random seed.

    Raises:
        UserError: there is no such file, module or function, or the file is not Python.
        UserCodeError: the file or module raised an exception when it was imported.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"{reference}: not a function: expected file.py:name or package.module:name")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise UserError(f"{reference}: {name} is a {type(function).__name__}, not a function")
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise UserError(f"{reference}: {place} has no {name}{_nearest(name, functions)}")


class Scores(NamedTuple):
    """What answers were given: ``Scores([1.5, 1.0], {"model": [1, 1], "steps": [0.5, 0]}, [(0.0, 0.5), (0.0,)])``.

    ``totals`` are weighted sums of all rewards; ``by_name`` each reward's own scores, those of tokens summed up.
    ``tokens`` is the part of a total that lies on tokens, weighted; None where no reward speaks of tokens.
    """

    totals: list[float]
    by_name: dict[str, list[float]]
    tokens: list[tuple[float, ...]] | None


def score(answers: list[Answer], rewards: list[NamedReward], seed: tuple[int, ...] = ()) -> Scores:
    """The weighted sum of all rewards for each answer, each reward's own scores, and what lies on tokens.

    total_i = sum_r weight_r * score_r(answer_i), in the order of ``answers``; the score of a reward that gives a number
    for each token is their sum. Each reward gets its own copies of the answers, and ``user_code`` restores what it
    changes in the process. Its random numbers depend on ``seed`` and its name only.

    Raises:
        UserError: two rewards share a name; or one gives another number of scores than answers or tokens, or a score
            that is not a finite number; or a weighted sum exceeds the range of float32. The message names the reward
            and the row.
        UserCodeError: a reward raised an exception; the message names the reward and the batch.
    """
    names = [reward.name for reward in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two rewards are named {', '.join(twice)}: give each its own name:")
    given = [_checked(reward, answers, seed) for reward in rewards]
    by_name = {
        reward.name: [math.fsum(value) if isinstance(value, tuple) else value for value in values]
        for reward, values in zip(rewards, given, strict=True)
    }
    weighed = [reward for reward in rewards if reward.weight]
    totals = [
        _total([(reward, by_name[reward.name][i]) for reward in weighed], answer) for i, answer in enumerate(answers)
    ]
    of_tokens = [
        (reward, values)
        for reward, values in zip(rewards, given, strict=True)
        if reward.weight and any(isinstance(value, tuple) for value in values)
    ]
    if not of_tokens:
        return Scores(totals, by_name, None)
    tokens = []
    for i, answer in enumerate(answers):
        rows: list[Any] = [[(reward, number) for number in values[i]] for reward, values in of_tokens]  # type: ignore
        tokens.append(tuple(_total(one, answer) for one in zip(*rows, strict=True)))
    return Scores(totals, by_name, tokens)


def _total(scores: Iterable[tuple[NamedReward, float]], answer: Answer) -> float:
    """The sum of weight * score."""
    scores = list(scores)
    try:
        total = math.fsum(reward.weight * number for reward, number in scores)
    except (OverflowError, ValueError):  # beyond float64, or inf - inf
        total = math.nan
    if not abs(total) <= LARGEST:
        parts = " + ".join(f"{reward.weight:g} * {number:g} ({reward.name})" for reward, number in scores)
        raise UserError(
            f"rewards for {answer.source} add up to more than float32 holds: {parts}: expected at most {LARGEST:.2g}; "
            "lower the scores or the weights"
        )
    return total


def _checked(reward: NamedReward, answers: list[Answer], seed: tuple[int, ...]) -> list[float | tuple[float, ...]]:
    """A number for each answer, or for each of them as many as it has tokens."""
    returned = _listed(_called(reward, answers, seed) if answers else [], reward, len(answers))
    if len(returned) != len(answers):
        raise UserError(
            f"reward {reward.name} returned {len(returned)} scores for {len(answers)} answers, of which the first is "
            f"{answers[0].source}: expected one for each answer"
        )
    scores: list[float | tuple[float, ...]] = []
    for given, answer in zip(returned, answers, strict=True):
        value = given.tolist() if isinstance(given, torch.Tensor | np.ndarray | np.generic) else given
        if isinstance(value, list | tuple):
            if len(value) != len(answer.tokens):
                raise UserError(
                    f"reward {reward.name} gave {len(value)} numbers for the {len(answer.tokens)} tokens of "
                    f"{answer.source}: expected one for each"
                )
            scores.append(tuple(_finite(number, reward, answer) for number in value))
        else:
            scores.append(_finite(value, reward, answer))
    if len({isinstance(value, tuple) for value in scores}) > 1:
        raise UserError(f"reward {reward.name} gave numbers of tokens for some answers only: expected them for all")
    return scores


def _called(reward: NamedReward, answers: list[Answer], seed: tuple[int, ...]) -> Any:
    """What the reward returns for its own copies of the answers."""
    # these two only read the answers and change nothing: a copy of long prompts would be wasted
    if type(reward.function) in (ModelReward, StepReward):
        return reward.function(answers)
    own = [_copied(answer) for answer in answers]
    what = f"reward {reward.name}" + (f" ({reward.reference})" if reward.reference else "")
    first, last = answers[0].source, answers[-1].source
    batch = f"on {first}" if len(answers) == 1 else f"on a batch of {len(answers)} answers ({first} ... {last})"
    digest = hashlib.blake2b("/".join(map(str, (*seed, reward.name))).encode(), digest_size=8).digest()
    with user_code(what, batch, seed=int.from_bytes(digest, "big") >> 1):
        return reward.function(own)


def _copied(answer: Answer) -> Answer:
    """An answer that shares no mutable value with the given one."""
    try:
        prompt, columns = copy.deepcopy((answer.prompt, dict(answer.columns)))
    except Exception as error:  # whatever the values of a column raise
        raise UserError(
            f"{answer.source}: its columns cannot be copied for a reward: {error}: expected plain values"
        ) from error
    return dataclasses.replace(answer, prompt=prompt, columns=columns)


def _listed(returned: Any, reward: NamedReward, n: int) -> Sequence[Any]:
    """The n values that a reward returned, not checked yet."""
    if isinstance(returned, torch.Tensor | np.ndarray):
        if returned.ndim != 1:
            raise UserError(
                f"reward {reward.name} returned {type(returned).__name__} of shape {tuple(returned.shape)}: expected "
                f"shape ({n},), one number for each answer"
            )
        return returned.tolist()
    if not hasattr(returned, "__len__") or isinstance(returned, str | bytes | bytearray | Mapping | Set):
        raise UserError(
            f"reward {reward.name} returned {type(returned).__name__}: expected a list of {n} numbers, one for each "
            "answer"
        )
    return returned


def _finite(value: Any, reward: NamedReward, answer: Answer) -> float:
    try:
        # float("1.5") would accept text
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST:
        within = f" of at most {LARGEST:.2g}, as float32 holds it" if math.isfinite(number) else ""
        raise UserError(
            f"reward {reward.name} gave {value!r} for {answer.source}, answer {_short(answer.text)!r}: "
            f"expected a finite number{within}"
        )
    return number


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        others = [str(other) for other in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file{_nearest(str(path), others)}")
    source = path.read_bytes()
    # By its contents, so that a file named like a module of Python does not take its place.
    name = f"_{path.stem}_{hashlib.sha256(str(path.resolve()).encode() + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _importing(str(path)):
            try:
                spec.loader.exec_module(module)
            except SyntaxError as error:
                raise UserError(f"{error.filename}:{error.lineno}: not Python: {error.msg}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> ModuleType:
    with _importing(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that is there but misses one of its own is that module's fault, and its traceback says so.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            hint = f"; a file is named with its .py: {name}.py:NAME" if Path(f"{name}.py").is_file() else ""
            raise UserError(f"{name}: no module {error.name} is installed{hint}") from error


def _importing(place: str) -> contextlib.AbstractContextManager[None]:
    return user_code(place, "when it was imported", seed=0, keep_environment=True)


def _nearest(name: str, candidates: Sequence[str]) -> str:
    if near := did_you_mean(name, candidates):
        return near
    return f"; it has {', '.join(candidates)}" if candidates and "/" not in candidates[0] else ""
