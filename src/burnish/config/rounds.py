"""Writes out the rounds of a recipe: every stage of a loop once for each round, with its references resolved.

After that, a recipe is a list of stages again. The stage ``values`` of the loop ``loop`` is ``loop/2/values`` in the
second round, which is also its folder. ``{stage: values}`` means

- the stage of the same round, if it comes earlier in the round;
- the stage of the previous round, if it comes later or is the stage itself; the first round uses ``initial:`` instead;
- the stage of the last round, after the loop.

``{stage: loop/1/values}`` always means the stage of the first round.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from burnish.errors import did_you_mean
from burnish.mistakes import Keys, Problem, find, mistakes
from burnish.report.rounds import round_of
from burnish.types import Config

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
SEED_STRIDE = 1_000_003
"""The seeds of two rounds differ by this number."""
SEVERAL = (("data", "train"), ("data", "rows"))
"""Keys of a stage that can name several sources."""
RESERVED = ("manifest.json", "report.html", "run.lock")
"""Files of a run's folder, beside the folders of its stages and loops."""
NOT_REFERENCES = ("with", "by_round")
"""Keys of a stage whose values are not searched for references."""


def not_reserved(name: str) -> str:
    """The name of a stage or a loop, if it is not that of a file of every run.

    Raises:
        ValueError: it is.
    """
    if name.lower() in RESERVED:
        raise ValueError(f"{name} is a file in the folder of every run: choose another name")
    return name


class Until(Config, use_attribute_docstrings=True):
    """The result that ends a loop early: ``{stage: eval, metric: accuracy, above: 0.9}``."""

    stage: str
    """A stage of the loop."""
    metric: str
    """A metric that this stage measures."""
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

    name: Annotated[str, Field(pattern=f"^{NAME}$"), pydantic.AfterValidator(not_reserved)]
    rounds: int = Field(gt=0, le=1000)
    """How many times the stages run."""
    until: Until | None = None
    """Ends the loop early."""
    keep: Literal["last", "all"] = "last"
    """Whose models and checkpoints stay on disk: only those of the last round, or those of all. Rows always stay."""
    stages: list[dict[str, Any]] = Field(min_length=1)


def is_loop(stage: Any) -> bool:
    """Whether an entry of ``stages:`` is a loop."""
    return isinstance(stage, dict) and bool({"rounds", "stages"} & stage.keys())


@dataclass(frozen=True)
class WrittenOut:
    """A recipe without loops, and where its parts were written."""

    value: dict[str, Any]
    """The recipe. Every loop in ``stages:`` is replaced by the stages of its rounds."""
    given: dict[str, Any]
    """The recipe with its loops."""
    loops: dict[str, Loop]
    """The loops by name."""
    places: list[Keys]
    """The path of each stage in the recipe that was given."""
    moved: dict[Keys, Keys]
    """Paths below stages and loops that the recipe that was given has elsewhere, such as those of settings by round."""

    def original(self, problems: Iterable[Problem]) -> list[Problem]:
        """The problems with paths of the recipe that was given. One that all rounds have is there only once."""
        stages: dict[Keys, int | str] = {}
        found = []
        for path, text in problems:
            place = self._original(path)
            stage = path[1] if len(path) > 1 else 0
            if stages.setdefault(place, stage) == stage:
                found.append(Problem(place, text))
        return found

    def _original(self, path: Keys) -> Keys:
        """The path in the recipe that was given, or that of the nearest enclosing block."""
        start, rest = _unmoved(path, self.places, self.moved)
        value = find(self.given, start)
        for key in rest:
            if isinstance(value, dict) and isinstance(key, str):
                start, value = (*start, key), value.get(key)  # of a key that is missing, the path where it should be
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                start, value = (*start, key), value[key]
            else:
                break
        return start


def _unmoved(path: Keys, places: list[Keys], moved: Mapping[Keys, Keys]) -> tuple[Keys, Keys]:
    """Where the longest known beginning of a path was written, and the rest of the path."""
    for n in range(len(path), 2, -1):
        if path[:n] in moved:
            return moved[path[:n]], path[n:]
    if path[:1] == ("stages",) and len(path) > 1 and isinstance(path[1], int) and path[1] < len(places):
        return places[path[1]], path[2:]
    return (), path


def write_out(recipe: dict[str, Any]) -> tuple[WrittenOut, list[Problem]]:
    """Replace every loop in ``stages:`` by the stages of its rounds.

    Returns:
        The recipe without loops; and the mistakes in loops, with paths of the recipe that was given. If there are any,
        the loops are left out.
    """
    stages = recipe.get("stages")
    if not isinstance(stages, list):
        return WrittenOut(recipe, recipe, {}, [], {}), []
    loops: dict[str, Loop] = {}
    problems: list[Problem] = []
    for index, stage in enumerate(stages):
        if not is_loop(stage):
            problems += _name_problems(stage, ("stages", index))
            continue
        try:
            loop = Loop.model_validate(stage)
        except pydantic.ValidationError as error:
            problems += [Problem(("stages", index, *path), text) for path, text in mistakes(error, Loop, stage)]
            continue
        loops[loop.name] = loop
        problems += _problems(loop, ("stages", index))
    if any(map(is_loop, stages)):
        problems += _same_names(stages)
    writer = _Writer(recipe, loops)
    if not problems:
        for index, stage in enumerate(stages):
            if is_loop(stage):
                writer.add_loop(loops[stage["name"]], index)
            else:
                writer.add(_Place(("stages", index)), stage)
    whole = WrittenOut({**recipe, "stages": writer.stages}, recipe, loops, writer.places, writer.moved)
    return whole, problems + whole.original(writer.problems)


def _problems(loop: Loop, at: Keys) -> Iterator[Problem]:
    names = [stage.get("name") for stage in loop.stages]
    for index, stage in enumerate(loop.stages):
        if is_loop(stage):
            yield Problem((*at, "stages", index), "a loop cannot be inside another loop")
        elif not isinstance(stage.get("name"), str):
            yield Problem((*at, "stages", index, "name"), "this key is missing")
        yield from _name_problems(stage, (*at, "stages", index))
    if loop.until is not None and loop.until.stage not in names:
        near = did_you_mean(loop.until.stage, [name for name in names if name])
        yield Problem((*at, "until", "stage"), f"{loop.until.stage!r} is not a stage of this loop{near}")


def _name_problems(stage: Any, at: Keys) -> Iterator[Problem]:
    """A name that looks like that of a stage with its round."""
    if isinstance(name := find(stage, ("name",)), str) and round_of(name):
        yield Problem((*at, "name"), f"{name!r}: names such as loop/1/grow are reserved for the stages of loops")


def _same_names(stages: list[Any]) -> Iterator[Problem]:
    """Names that two stages or loops have."""
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        inner = find(stage, ("stages",)) if is_loop(stage) else None
        named = [(("stages", index, "name"), find(stage, ("name",)))]
        named += [
            (("stages", index, "stages", i, "name"), find(one, ("name",)))
            for i, one in enumerate(inner if isinstance(inner, list) else ())
        ]
        for path, name in named:
            if isinstance(name, str):
                if name in seen:
                    yield Problem(path, f"two stages or loops are called {name!r}")
                seen.add(name)


@dataclass(frozen=True)
class _Place:
    """Where a stage was written, and the round that it is in."""

    keys: Keys
    loop: Loop | None = None
    index: int = 0
    round: int = 1


class _Writer:
    """Collects the stages of the written-out recipe. Paths in it are those of the written-out recipe."""

    def __init__(self, recipe: dict[str, Any], loops: Mapping[str, Loop]) -> None:
        self.recipe, self.loops = recipe, loops
        self.homes = {str(s["name"]): (loop, i) for loop in loops.values() for i, s in enumerate(loop.stages)}
        self.stages: list[dict[str, Any]] = []
        self.places: list[Keys] = []
        self.moved: dict[Keys, Keys] = {}
        self.ended: set[str] = set()  # the loops that come earlier
        self.problems: list[Problem] = []

    def add_loop(self, loop: Loop, index: int) -> None:
        """Add the stages of all rounds of a loop."""
        self.moved[("stages", loop.name, "until")] = ("stages", index, "until")
        seed = self.recipe.get("seed", 0)
        for number in range(1, loop.rounds + 1):
            for i, stage in enumerate(loop.stages):
                place = _Place(("stages", index, "stages", i), loop, i, number)
                stage = self._by_round(copy.deepcopy(stage), place)
                if isinstance(seed, int):
                    stage.setdefault("seed", (seed + (number - 1) * SEED_STRIDE) % 2**32)
                self.add(place, {**stage, "name": f"{loop.name}/{number}/{stage['name']}"})
        self.ended.add(loop.name)

    def add(self, place: _Place, stage: Any) -> None:
        """Add one stage with its references resolved."""
        if len(self.places) == len(self.stages):
            self.places.append(place.keys)
        self.stages.append(self._resolved(stage, place, ()) if isinstance(stage, dict) else stage)

    def _problem(self, at: Keys, text: str) -> None:
        """Note a problem of the stage that is being added."""
        self.problems.append(Problem(("stages", len(self.stages), *at), text))

    def _move(self, at: Keys, source: Keys) -> None:
        """Note where a part of the stage that is being added was written."""
        self.moved[("stages", len(self.stages), *at)] = source

    def _written(self, at: Keys) -> Keys:
        """Where a part of the stage that is being added was written."""
        start, rest = _unmoved(("stages", len(self.stages), *at), self.places, self.moved)
        return (*start, *rest)

    def _by_round(self, stage: dict[str, Any], place: _Place) -> dict[str, Any]:
        """The stage with the settings of its round."""
        assert place.loop is not None
        self.places.append(place.keys)
        settings = stage.pop("by_round", None)
        if settings is None:
            return stage
        if not isinstance(settings, dict):
            self._problem(("by_round",), "expected a block of keys: {trainer.learning_rate: [4.0e-5, 2.0e-5]}")
            return stage
        for key, values in settings.items():
            if not isinstance(values, list) or len(values) != place.loop.rounds:
                many = f"{len(values)}" if isinstance(values, list) else "no list"
                text = f"expected a list of {place.loop.rounds} values, one for each round, got {many}"
                self._problem(("by_round", key), text)
                continue
            path = _put(stage, key.split("."), values[place.round - 1]) if key != "name" else None
            if path is None:
                self._problem(("by_round", key), "this is not a setting of the stage")
                continue
            self._move(path, (*place.keys, "by_round", key))
        return stage

    def _resolved(self, value: Any, place: _Place, at: Keys) -> Any:
        """A value of a stage, in which every ``{stage: NAME}`` names a stage of the written-out recipe."""
        if isinstance(value, list):
            resolved: list[Any] = []
            start = self._written(at)
            for i, item in enumerate(value):
                here = (*at, len(resolved))
                if i != len(resolved):
                    self._move(here, (*start, i))
                several = self._sources(item, place, here) if _from_rounds(item) else None
                for n in range(1, len(several or ())):
                    self._move((*at, len(resolved) + n), (*start, i))
                resolved += [self._resolved(item, place, here)] if several is None else several
            return resolved
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("stage"), str):
            if "from_rounds" in value:
                found = self._rounds(value, place, at)
                return found[0] if len(found) == 1 else [{"from": source} for source in found]
            return self._reference(value, place, at)
        return {
            key: item if not at and key in NOT_REFERENCES else self._resolved(item, place, (*at, key))
            for key, item in value.items()
        }

    def _sources(self, part: dict[str, Any], place: _Place, at: Keys) -> list[dict[str, Any]]:
        """A source of a mixture for each round that it names, which share its weight."""
        found = self._rounds(part["from"], place, (*at, "from"))
        shared = {"weight": part["weight"] / len(found)} if isinstance(part.get("weight"), int | float) else {}
        return [{**part, "from": source, **shared} for source in found]

    def _rounds(self, source: dict[str, Any], place: _Place, at: Keys) -> list[Any]:
        """The references of ``{stage: NAME, file: FILE, from_rounds: all}``, from the first round on."""
        which, name = source["from_rounds"], source["stage"]
        plain = {key: item for key, item in source.items() if key not in ("from_rounds", "initial")}
        loop, index = self.homes.get(name, (None, 0))
        inside = loop is not None and loop is place.loop
        if which not in ("this", "earlier", "all"):
            text = f"expected this, earlier or all, got {which!r}"
        elif at[:2] not in SEVERAL:
            text = "only in data.train and data.rows, which can read several sources"
        elif loop is None and name not in self.loops:
            text = f"only for a stage of a loop, and {name!r} is not in one"
        elif loop is not None and not inside and which != "all":
            text = f"after the loop, expected all, got {which!r}: to read only the last round, remove from_rounds"
        elif loop is not None and not inside and loop.until is not None:
            text = (
                f"{loop.name} has until:, so its number of rounds is not known: remove from_rounds: to read the last "
                f"round, or read the rounds in a stage of {loop.name}"
            )
        else:
            text = ""
        if text:
            self._problem((*at, "from_rounds"), text)
            return [plain]
        if which == "this" or loop is None or (not inside and loop.name not in self.ended):
            rest = {key: item for key, item in source.items() if key != "from_rounds"}
            return [self._reference(rest, place, at)]
        in_round = place.round if which == "all" and index < place.index else place.round - 1
        last = in_round if inside else loop.rounds
        found: list[Any] = [{**plain, "stage": f"{loop.name}/{k}/{name}"} for k in range(1, last + 1)]
        if "initial" in source and not inside:
            self._problem((*at, "initial"), "only in a loop")
        elif "initial" in source:
            alone = at[-1] == "from" or not found
            found.insert(0, self._initial(source, place, at, at if alone else (*at, 0, "from")))
        if not found:
            text = "the first round has no earlier round: set with initial: what it reads instead"
            self._problem((*at, "from_rounds"), text)
            return [plain]
        return found

    def _reference(self, source: dict[str, Any], place: _Place, at: Keys) -> Any:
        """What ``{stage: NAME}`` stands for in this round."""
        name = source["stage"]
        plain = {key: item for key, item in source.items() if key != "initial"}
        if text := self._name_problem(name):
            self._problem((*at, "stage"), text)
        loop, index = self.homes.get(name, (None, 0))
        inside = loop is not None and loop is place.loop
        later = inside and index >= place.index
        if "initial" in source and not later:
            text = "only for a stage that comes later in the same round" if place.loop else "only in a loop"
            self._problem((*at, "initial"), text)
        if loop is None or not (inside or loop.name in self.ended):
            return plain
        if not later:
            return {**plain, "stage": f"{loop.name}/{place.round if inside else loop.rounds}/{name}"}
        if "initial" not in source:
            text = f"{name!r} {_when(index, place)}, so set what the first round uses: "
            self._problem((*at, "stage"), f"{text}{{stage: {name}, initial: ...}}")
            return plain
        if place.round == 1:
            return self._initial(source, place, at, at)
        return {**plain, "stage": f"{loop.name}/{place.round - 1}/{name}"}

    def _initial(self, source: dict[str, Any], place: _Place, at: Keys, to: Keys) -> Any:
        """What a stage reads in the first round. It is at ``to`` in the written-out recipe."""
        start = source["initial"]
        self._move(to, (*self._written(at), "initial"))
        for key in ("initial", "from_rounds"):
            if isinstance(start, dict) and key in start:
                self._problem((*to, key), f"initial: cannot have {key}:")
                return {"stage": source["stage"]}
        name = find(start, ("stage",))
        loop, index = self.homes.get(name, (None, 0)) if isinstance(name, str) else (None, 0)
        if loop is not None and loop is place.loop and index >= place.index:
            text = f"{name!r} {_when(index, place)}, and the first round needs something that already exists"
            self._problem((*to, "stage"), f"{text}: name a stage before the loop or earlier in the round")
            return {"stage": source["stage"]}
        return self._resolved(start, place, to)

    def _name_problem(self, name: str) -> str | None:
        """What is wrong with the name of a loop, or with that of a stage with its round."""
        if name in self.loops:
            inner = ", ".join(str(stage["name"]) for stage in self.loops[name].stages)
            return f"{name!r} is a loop: name one of its stages: {inner}"
        if (place := round_of(name)) is None or (loop := self.loops.get(place[0])) is None:
            return None
        inner = [str(stage["name"]) for stage in loop.stages]
        if place[2] not in inner:
            near = did_you_mean(place[2], inner)
            return f"{place[2]!r} is not a stage of {loop.name}{near}; its stages are {', '.join(inner)}"
        if not 1 <= place[1] <= loop.rounds:
            return f"{loop.name} has rounds 1 to {loop.rounds}"
        if place[1] > 1 and loop.until is not None and loop.name in self.ended:
            text = f"{loop.name} has until: and may end before round {place[1]}: name the last round"
            return f"{text} ({{stage: {place[2]}}}) or the first ({{stage: {loop.name}/1/{place[2]}}})"
        return None


def _put(block: Any, keys: list[str], value: Any) -> Keys | None:
    """Set a value in nested blocks and lists, and return its path; None if there is no such place."""
    path: Keys = ()
    for depth, name in enumerate(keys, start=1):
        key: Any = name
        if isinstance(block, list):
            key = int(name) if re.fullmatch("[0-9]{1,9}", name) else len(block)
            if key >= len(block):
                return None
        elif not isinstance(block, dict):
            return None
        path = (*path, key)
        if depth == len(keys):
            block[key] = value
        else:
            block = block.setdefault(key, {}) if isinstance(block, dict) else block[key]
    return path


def _when(index: int, place: _Place) -> str:
    """Why a stage of the loop is not there yet."""
    return "is this stage itself" if index == place.index else "comes later in the round"


def _from_rounds(value: Any) -> bool:
    """Whether a part of a mixture has a source that names several rounds."""
    return isinstance(source := find(value, ("from",)), dict) and "from_rounds" in source and "stage" in source
