"""Plain functions as rewards: found by name, weighted, and checked."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from burnish.types import Answer, Reward, UserError


class NamedReward(NamedTuple):
    """One part of the score: ``NamedReward("brevity", 0.1, brevity)``. A weight of 0 measures and changes nothing."""

    name: str
    weight: float
    function: Reward


def load(reference: str) -> Callable[..., Any]:
    """The function that ``file.py:name`` or ``package.module:name`` names; a reward takes answers and gives floats.

    Raises:
        UserError: there is no such file, module or function, or the file is not Python.
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


def score(answers: list[Answer], rewards: list[NamedReward]) -> Scores:
    """The weighted sum of all rewards for each answer, each reward's own scores, and what lies on tokens.

    total_i = sum_r weight_r * score_r(answer_i), in the order of ``answers``; the score of a reward that gives a number
    for each token is their sum.

    Raises:
        UserError: two rewards share a name; or one gives another number of scores than answers or tokens, or one that
            is not a finite number: the message names the reward and the row.
    """
    names = [reward.name for reward in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two rewards are named {', '.join(twice)}: give each its own name:")
    given = [_checked(reward, answers) for reward in rewards]
    by_name = {
        reward.name: [math.fsum(value) if isinstance(value, tuple) else value for value in values]
        for reward, values in zip(rewards, given, strict=True)
    }
    weighed = [reward for reward in rewards if reward.weight]
    totals = [math.fsum(reward.weight * by_name[reward.name][i] for reward in weighed) for i in range(len(answers))]
    parts = [
        [tuple(reward.weight * number for number in value) for value in values if isinstance(value, tuple)]
        for reward, values in zip(rewards, given, strict=True)
        if reward.weight
    ]
    of_tokens = [part for part in parts if part]
    tokens = [tuple(map(math.fsum, zip(*one, strict=True))) for one in zip(*of_tokens, strict=True)]
    return Scores(totals, by_name, tokens if of_tokens else None)


def _checked(reward: NamedReward, answers: list[Answer]) -> list[float | tuple[float, ...]]:
    """A number for each answer, or for each of them as many as it has tokens."""
    returned: Any = reward.function(answers) if answers else []
    if not hasattr(returned, "__len__") or isinstance(returned, str | dict | set):
        raise UserError(
            f"reward {reward.name} returned {type(returned).__name__}: expected a list of {len(answers)} numbers, "
            "one for each answer"
        )
    if len(returned) != len(answers):
        raise UserError(
            f"reward {reward.name} returned {len(returned)} scores for {len(answers)} answers, of which the first is "
            f"{answers[0].source}: expected one for each answer"
        )
    scores: list[float | tuple[float, ...]] = []
    for value, answer in zip(returned, answers, strict=True):
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


def _finite(value: Any, reward: NamedReward, answer: Answer) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"reward {reward.name} gave {value!r} for {answer.source}, answer {_short(answer.text)!r}: "
            "expected a finite number"
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
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise UserError(f"{error.filename}:{error.lineno}: not Python: {error.msg}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is there but misses one of its own is that module's fault, and its traceback says so.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        hint = f"; a file is named with its .py: {name}.py:NAME" if Path(f"{name}.py").is_file() else ""
        raise UserError(f"{name}: no module {error.name} is installed{hint}") from error


def _nearest(name: str, candidates: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, candidates, 1)
    if near:
        return f": did you mean {near[0]}?"
    return f": it has {', '.join(candidates)}" if candidates and "/" not in candidates[0] else ""
