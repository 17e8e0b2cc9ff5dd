"""Runs loops: which rounds a result has made unnecessary, and which models no later stage needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.config.inputs import from_stages
from burnish.config.rounds import Loop
from burnish.config.schema import Recipe, Stage
from burnish.errors import UserError
from burnish.models.settings import StageModel
from burnish.report.curves import estimates
from burnish.report.rounds import round_of

Entries = Mapping[str, dict[str, Any]]
"""The manifest's stages by name."""
THINNED = ("model", "adapter", "base", "checkpoint-*")
"""What is removed from the stages of old rounds. Rows, metrics and samples stay."""


def ended(recipe: Recipe, entries: Entries) -> dict[str, int]:
    """The last round of each loop that a result has ended early.

    Raises:
        UserError: the stage of ``until:`` has no such metric.
    """
    last = {}
    for name, loop in recipe.loops.items():
        for number in range(1, loop.rounds if loop.until else 1):
            if not _done(name, loop, number, entries):
                break
            if _reached(name, loop, number, entries):
                last[name] = number
                break
    return last


def _done(name: str, loop: Loop, number: int, entries: Entries) -> bool:
    """Whether a loop has this round, and it is done."""
    return number <= loop.rounds and all(
        entries[f"{name}/{number}/{stage['name']}"]["state"] == "done" for stage in loop.stages
    )


def _reached(name: str, loop: Loop, number: int, entries: Entries) -> bool:
    """Whether the result that ends a loop was reached in a round."""
    until = loop.until
    assert until is not None
    results = entries[f"{name}/{number}/{until.stage}"].get("results", {}).get("after", {})
    value = results.get(f"eval_{until.metric}", results.get(f"eval_reward_{until.metric}"))
    if value is None:
        known = ", ".join(sorted(estimates(results))) or "none"
        raise UserError(f"{name}: until: stage {until.stage} has no metric {until.metric!r}; its metrics are {known}")
    return value > until.above if until.above is not None else value < until.below  # type: ignore[operator]


def is_skipped(stage: Stage, last: Mapping[str, int]) -> bool:
    """Whether a stage is in a round after the last one of its loop."""
    place = round_of(stage.name)
    return place is not None and place[1] > last.get(place[0], place[1])


def with_last_rounds(stage: Stage, recipe: Recipe, last: Mapping[str, int]) -> Stage:
    """A stage after loops that ended early, with references to the last rounds that ran."""
    names = {
        f"{loop}/{recipe.loops[loop].rounds}/{inner['name']}": f"{loop}/{number}/{inner['name']}"
        for loop, number in last.items()
        for inner in recipe.loops[loop].stages
    }

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if isinstance(value, dict):
            return {
                key: names.get(item, item) if key == "stage" and isinstance(item, str) else renamed(item)
                for key, item in value.items()
            }
        return value

    if round_of(stage.name) or not names:
        return stage
    return Stage.model_validate(renamed(stage.model_dump(by_alias=True, exclude_unset=True)))


def thin(recipe: Recipe, entries: Entries) -> list[str]:
    """Mark the stages of old rounds whose models no unfinished stage reads, and return their names."""
    old = []
    for stage in recipe.stages:
        place, entry = round_of(stage.name), entries[stage.name]
        if place is None or stage.method is None or entry["state"] != "done" or entry.get("thinned"):
            continue
        loop = recipe.loops[place[0]]
        if loop.keep == "last" and _done(place[0], loop, place[1] + 1, entries):
            old.append(stage.name)
    if old:
        unfinished = [stage for stage in recipe.stages if entries[stage.name]["state"] != "done"]
        needed = {s.stage for stage in unfinished for s in from_stages(stage) if isinstance(s, StageModel)}
        old = [name for name in old if name not in needed]
    for name in old:
        entries[name]["thinned"] = True
    return old


def without_models(folder: Path) -> Iterator[Path]:
    """What is removed from the folder of a stage of an old round, if it is still there."""
    for pattern in THINNED:
        yield from sorted(folder.glob(pattern))
