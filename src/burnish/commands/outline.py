"""Shows the outline of a recipe with loops: what every stage of every round starts from and reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import Console

from burnish.config import Recipe, Stage, StageData
from burnish.config.rounds import Loop
from burnish.config.schema import Part
from burnish.data.selection import Select
from burnish.mistakes import find
from burnish.models.settings import ModelSource, PackageModel, StageModel
from burnish.report.rounds import round_of
from burnish.rl.settings import Limits

LISTED = 4
"""More rounds of a source than this are shown as a range."""


def shown_rounds(loop: Loop) -> list[int]:
    """The rounds that are shown in full: the first two and the last one."""
    return sorted({1, min(2, loop.rounds), loop.rounds})


def is_shown(recipe: Recipe, stage: Stage) -> bool:
    """Whether a stage is outside of loops, or in a round that is shown in full."""
    place = round_of(stage.name)
    return place is None or place[1] in shown_rounds(recipe.loops[place[0]])


def show_outline(recipe: Recipe, console: Console) -> None:
    """Print every stage, in order. Of a long loop, the rounds between the second and the last one are left out."""
    for line in outline(recipe):
        console.print(line, markup=False, highlight=False)


def outline(recipe: Recipe) -> Iterator[str]:
    """The lines of the outline."""
    for loop, stages in groupby(recipe.stages, lambda stage: (round_of(stage.name) or ("",))[0]):
        if not loop:
            for stage in stages:
                yield from _stage(recipe, stage, 0)
            continue
        yield f"{loop}: {_loop(recipe.loops[loop])}"
        shown = shown_rounds(recipe.loops[loop])
        for number, stages_of_round in groupby(stages, lambda stage: (round_of(stage.name) or ("", 0))[1]):
            if number in shown:
                yield f"  round {number} of {recipe.loops[loop].rounds}"
                for stage in stages_of_round:
                    yield from _stage(recipe, stage, 4)
            elif number == shown[1] + 1:
                left_out = f"rounds {number} to {shown[-1] - 1}" if number < shown[-1] - 1 else f"round {number}"
                yield f"  {left_out}: like round {shown[1]}, but with other rows, models and settings"


def _loop(loop: Loop) -> str:
    parts = [f"{loop.rounds} round{'s' * (loop.rounds > 1)}"]
    if (until := loop.until) is not None:
        bound = f"above {until.above:g}" if until.above is not None else f"below {until.below:g}"
        parts[0] += f", or until {until.metric} of {until.stage} is {bound}"
    kept = "all rounds" if loop.keep == "all" else "the last round"
    return "; ".join([*parts, f"keeps the models of {kept}"])


def _stage(recipe: Recipe, stage: Stage, indent: int) -> Iterator[str]:
    what = stage.method.name if stage.method else stage.run
    yield f"{'':{indent}}{stage.name}: {what}, seed {recipe.seed_of(stage)}"
    for name, value in _facts(recipe, stage):
        yield f"{'':{indent}}  {name}: {value}"


def _facts(recipe: Recipe, stage: Stage) -> Iterator[tuple[str, str]]:
    """The models, rows and settings that a stage uses in its round."""
    for (key, *rest), model in stage.models.items():
        yield f"method.{rest[0]}" if key == "method" else str(key), _model(model)
    if stage.data is not None:
        for split in stage.data.splits:
            yield split, _sources(stage.data.parts(split))
        if stage.data.select is not None:
            yield "select", _select(stage.data.select)
    if stage.acts:
        yield from episode_facts(stage)
    for key, value in _by_round(recipe, stage).items():
        yield key, f"{_plain(value)} (by_round)"


def episode_facts(stage: Stage) -> Iterator[tuple[str, str]]:
    """What answers the model in a stage's episodes, and their limits."""
    settings = stage.environment
    if settings.classes:
        kind = "environment" if settings.turns is None else "turn environment"
        named = (f"{name}: {reference}" if name else reference for name, reference in settings.classes.items())
        yield kind, ", ".join(named)
    if stage.tools:
        yield "tools", ", ".join(stage.tools)
    limits = settings.model_dump(include=set(Limits.model_fields), exclude_none=True)
    yield "limits", ", ".join(f"{name} {_plain(limits[name])}" for name in Limits.model_fields if name in limits)


def _model(source: ModelSource) -> str:
    if isinstance(source, StageModel):
        return source.stage
    return f"package {source.package}" if isinstance(source, PackageModel) else str(source)


def _sources(parts: list[Part]) -> str:
    """The sources of a split. Many rounds of one stage are a range: ``loop/1 to 20/grow/samples.jsonl``."""
    named = []
    for (loop, rest), group in groupby(parts, _without_round):
        same = list(group)
        places = [round_of(part.source.stage) for part in same if isinstance(part.source, StageData)]
        numbers = [place[1] for place in places if place]
        weight = f" (weight {same[0].weight:g}{' each' * (len(same) > 1)})" if same[0].weight is not None else ""
        if len(numbers) > LISTED:
            named.append(f"{loop}/{numbers[0]} to {numbers[-1]}/{rest}{weight}")
        else:
            named.append(", ".join(_name(part) for part in same) + weight)
    return ", ".join(named)


def _without_round(part: Part) -> tuple[str, str]:
    """The loop of a source and the rest of its name, without the round; of a source outside of loops, no loop."""
    source = part.source
    place = round_of(source.stage) if isinstance(source, StageData) else None
    if place is None or not isinstance(source, StageData):
        return "", _name(part)
    return place[0], f"{place[2]}/{source.file}"


def _name(part: Part) -> str:
    source = part.source
    return f"{source.stage}/{source.file}" if isinstance(source, StageData) else str(source)


def _select(select: Select) -> str:
    """The keys of a selection that are set: ``distinct, above 0.7, at_most 4``."""
    parts = select.model_dump(exclude_defaults=True)
    return ", ".join(key if value is True else f"{key} {_plain(value)}" for key, value in parts.items())


def _by_round(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """The settings that ``by_round:`` gives to a stage."""
    if (place := round_of(stage.name)) is None:
        return {}
    loop, number, inner = place
    written = next(one for one in recipe.loops[loop].stages if one["name"] == inner)
    return {key: values[number - 1] for key, values in (find(written, ("by_round",)) or {}).items()}


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
