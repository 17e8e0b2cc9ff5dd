"""Writes out the rounds of a recipe: every stage of a loop once for each round, with its references resolved.

After that, a recipe is a list of stages again. The stage ``values`` of the loop ``loop`` is ``loop/2/values`` in the
second round, which is also its folder. ``{stage: values}`` means

- in the same round, if the stage comes earlier in it;
- in the round before, if it comes later or is the stage itself; in the first round, its ``initial:``;
- in the last round, after the loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
from pydantic import Field

from burnish.config.yaml import Document
from burnish.errors import did_you_mean
from burnish.mistakes import Keys, Problem, find, mistakes
from burnish.types import Config

SEED_STRIDE = 1_000_003
"""The seeds of two rounds differ by this number."""
NOT_REFERENCES = ("with", "by_round")
"""Keys of a stage whose values are not searched for references."""


class Until(Config, use_attribute_docstrings=True):
    """The result that ends a loop early: ``{stage: eval, metric: accuracy, above: 0.9}``."""

    stage: str
    """A stage of the loop."""
    metric: str
    """A metric of its last evaluation."""
    above: float | None = None
    """The loop ends after the first round in which the metric is greater than this."""
    below: float | None = None
    """The loop ends after the first round in which the metric is less than this."""

    @pydantic.model_validator(mode="after")
    def _one_bound(self) -> Until:
        if (self.above is None) == (self.below is None):
            raise ValueError("needs either above: or below:, and not both")
        return self


class Loop(Config, use_attribute_docstrings=True):
    """Stages that run several times: ``{name: loop, rounds: 3, stages: [...]}``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
    rounds: int = Field(gt=0, le=1000)
    """How many times the stages run."""
    until: Until | None = None
    """Ends the loop early."""
    keep: Literal["last", "all"] = "last"
    """Rounds whose models and checkpoints stay on disk after the next round. Rows always stay."""
    stages: list[dict[str, Any]] = Field(min_length=1)


def is_loop(stage: Any) -> bool:
    """Whether an entry of ``stages:`` is a loop."""
    return isinstance(stage, dict) and bool({"rounds", "stages"} & stage.keys())


def write_out(document: Document) -> tuple[Document, dict[str, Loop], list[Problem]]:
    """Replace every loop in ``stages:`` by the stages of its rounds.

    Returns:
        The document, in which every stage has the place where it was written; the loops by name; and the mistakes in
        loops, with paths of the document that was given. If there are any, the document is returned as it was.
    """
    stages = document.value.get("stages")
    if not isinstance(stages, list) or not any(map(is_loop, stages)):
        return document, {}, []
    loops: dict[str, Loop] = {}
    problems: list[Problem] = []
    for index, stage in enumerate(stages):
        if not is_loop(stage):
            continue
        try:
            loop = Loop.model_validate(stage)
        except pydantic.ValidationError as error:
            problems += [Problem(("stages", index, *path), text) for path, text in mistakes(error, Loop, stage)]
            continue
        loops[loop.name] = loop
        problems += _problems(loop, ("stages", index))
    problems += _same_names(stages)
    if problems:
        return document, {}, problems
    writer = _Writer(document, loops)
    for index, stage in enumerate(stages):
        if is_loop(stage):
            writer.add_loop(loops[stage["name"]], index)
        else:
            writer.add(_Place(("stages", index)), stage)
    if writer.problems:
        return document, {}, writer.problems
    return Document({**document.value, "stages": writer.stages}, writer.places, document.hidden), loops, []


def _problems(loop: Loop, at: Keys) -> Iterator[Problem]:
    names = [stage.get("name") for stage in loop.stages]
    for index, stage in enumerate(loop.stages):
        if is_loop(stage):
            yield Problem((*at, "stages", index), "a loop cannot be inside another loop")
        if not isinstance(stage.get("name"), str):
            yield Problem((*at, "stages", index, "name"), "this key is missing")
    if loop.until is not None and loop.until.stage not in names:
        near = did_you_mean(loop.until.stage, [name for name in names if name])
        yield Problem((*at, "until", "stage"), f"{loop.until.stage!r} is not a stage of this loop{near}")


def _same_names(stages: list[Any]) -> Iterator[Problem]:
    """Names that two stages have, in or outside of loops."""
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        inner = find(stage, ("stages",)) if is_loop(stage) else None
        named = [(("stages", index, "name"), find(stage, ("name",)))]
        named += [
            (("stages", index, "stages", i, "name"), find(one, ("name",)))
            for i, one in enumerate(inner if isinstance(inner, list) else ())
        ]
        for path, name in named:
            if isinstance(name, str) and name in seen:
                yield Problem(path, f"two stages are called {name!r}")
            seen.add(str(name))


@dataclass(frozen=True)
class _Place:
    """Where a stage was written, and the round that it is in."""

    keys: Keys
    loop: Loop | None = None
    index: int = 0
    round: int = 1


class _Writer:
    """Collects the stages of the written-out recipe."""

    def __init__(self, document: Document, loops: Mapping[str, Loop]) -> None:
        self.document, self.loops = document, loops
        self.stages: list[dict[str, Any]] = []
        self.places = {path: at for path, at in document.places.items() if path[:1] != ("stages",) or len(path) == 1}
        self.finished: dict[str, str] = {}  # stages of loops that have ended, by name: their last round
        self.problems: list[Problem] = []

    def add_loop(self, loop: Loop, index: int) -> None:
        """Add the stages of all rounds of a loop."""
        seed, until = self.document.value.get("seed", 0), ("stages", index, "until")
        self.places |= {
            ("stages", loop.name, *path[2:]): at for path, at in self.document.places.items() if path[:3] == until
        }
        for number in range(1, loop.rounds + 1):
            for i, stage in enumerate(loop.stages):
                place = _Place(("stages", index, "stages", i), loop, i, number)
                stage = self._by_round(copy.deepcopy(stage), place)
                if isinstance(seed, int):
                    stage.setdefault("seed", (seed + (number - 1) * SEED_STRIDE) % 2**32)
                self.add(place, {**stage, "name": f"{loop.name}/{number}/{stage['name']}"})
        self.finished |= {str(stage["name"]): f"{loop.name}/{loop.rounds}/{stage['name']}" for stage in loop.stages}

    def add(self, place: _Place, stage: Any) -> None:
        """Add one stage with its references resolved."""
        path = ("stages", len(self.stages))
        for old, at in self.document.places.items():
            if old[: len(place.keys)] == place.keys:
                self.places[(*path, *old[len(place.keys) :])] = at
        self.stages.append(self._resolved(stage, place, ()) if isinstance(stage, dict) else stage)

    def _by_round(self, stage: dict[str, Any], place: _Place) -> dict[str, Any]:
        """The stage with the settings of its round."""
        assert place.loop is not None
        settings = stage.pop("by_round", None)
        if settings is None:
            return stage
        at = (*place.keys, "by_round")
        if not isinstance(settings, dict):
            self.problems.append(Problem(at, "expected a block of keys: {trainer.learning_rate: [4.0e-5, 2.0e-5]}"))
            return stage
        for key, values in settings.items():
            if not isinstance(values, list) or len(values) != place.loop.rounds:
                many = f"{len(values)}" if isinstance(values, list) else "no list"
                text = f"expected a list of {place.loop.rounds} values, one for each round, got {many}"
                self.problems.append(Problem((*at, key), text))
                continue
            block, *inner = [stage, *key.split(".")[:-1]]
            for name in inner:
                block = block.setdefault(name, {}) if isinstance(block, dict) else None
            if not isinstance(block, dict):
                self.problems.append(Problem((*at, key), "this is not a setting of the stage"))
                continue
            block[key.split(".")[-1]] = values[place.round - 1]
        return stage

    def _resolved(self, value: Any, place: _Place, path: Keys) -> Any:
        """A value of a stage, in which every ``{stage: NAME}`` names a stage of the written-out recipe."""
        if isinstance(value, list):
            resolved = []
            for i, item in enumerate(value):
                resolved += (
                    self._sources(item, place, (*path, i))
                    if _from_rounds(item, "from")
                    else [self._resolved(item, place, (*path, i))]
                )
            return resolved
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("stage"), str):
            if "from_rounds" in value:
                found = self._rounds(value, place, path)
                return found[0] if len(found) == 1 else [{"from": source} for source in found]
            return self._reference(value, place, path)
        return {
            key: item if not path and key in NOT_REFERENCES else self._resolved(item, place, (*path, key))
            for key, item in value.items()
        }

    def _sources(self, part: dict[str, Any], place: _Place, path: Keys) -> list[dict[str, Any]]:
        """A source of a mixture for each round that it names, which share its weight."""
        found = self._rounds(part["from"], place, (*path, "from"))
        shared = {"weight": part["weight"] / len(found)} if isinstance(part.get("weight"), int | float) else {}
        return [{**part, "from": source, **shared} for source in found]

    def _rounds(self, source: dict[str, Any], place: _Place, path: Keys) -> list[Any]:
        """The references of ``{stage: NAME, file: FILE, from_rounds: all}``, from the first round on."""
        which, name = source["from_rounds"], source["stage"]
        at = (*place.keys, *path)
        plain = {key: item for key, item in source.items() if key not in ("from_rounds", "initial")}
        names = [stage["name"] for stage in place.loop.stages] if place.loop else []
        if which not in ("this", "earlier", "all"):
            self.problems.append(Problem((*at, "from_rounds"), f"expected this, earlier or all, got {which!r}"))
            return [plain]
        if name not in names:
            text = "only for a stage of the same loop" if place.loop else "only in a loop"
            self.problems.append(Problem((*at, "from_rounds"), text))
            return [plain]
        assert place.loop is not None
        if which == "this":
            rest = {key: item for key, item in source.items() if key != "from_rounds"}
            return [self._reference(rest, place, path)]
        last = place.round if which == "all" and names.index(name) < place.index else place.round - 1
        found: list[Any] = [{**plain, "stage": f"{place.loop.name}/{k}/{name}"} for k in range(1, last + 1)]
        if "initial" in source:
            found.insert(0, self._resolved(source["initial"], place, (*path, "initial")))
        if not found:
            text = "there is no earlier round in the first one: say with initial: what it reads then"
            self.problems.append(Problem((*at, "from_rounds"), text))
            return [plain]
        return found

    def _reference(self, source: dict[str, Any], place: _Place, path: Keys) -> Any:
        """What ``{stage: NAME}`` stands for in this round."""
        name, at = source["stage"], (*place.keys, *path)
        plain = {key: item for key, item in source.items() if key != "initial"}
        names = [stage["name"] for stage in place.loop.stages] if place.loop else []
        later = name in names and names.index(name) >= place.index
        if "initial" in source and not later:
            text = "only for a stage that comes later in the same round" if place.loop else "only in a loop"
            self.problems.append(Problem((*at, "initial"), text))
        if place.loop is None or name not in names:
            return {**plain, "stage": self.finished.get(name, name)}
        if not later:
            return {**plain, "stage": f"{place.loop.name}/{place.round}/{name}"}
        if "initial" not in source:
            what = "is this stage itself" if names[place.index] == name else "comes later in the round"
            text = f"{name!r} {what}, so the first round needs a start: {{stage: {name}, initial: ...}}"
            self.problems.append(Problem((*at, "stage"), text))
            return plain
        if place.round == 1:
            return self._resolved(source["initial"], place, (*path, "initial"))
        return {**plain, "stage": f"{place.loop.name}/{place.round - 1}/{name}"}


def _from_rounds(value: Any, key: str) -> bool:
    """Whether a value has a source that names several rounds."""
    return isinstance(source := find(value, (key,)), dict) and "from_rounds" in source and "stage" in source
