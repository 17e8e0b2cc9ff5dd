"""Repeats a run from a stage on: what must be there for it, and what is removed first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from burnish import files
from burnish.config import loops
from burnish.config.inputs import from_stages
from burnish.config.manifest import pending, write_manifest
from burnish.config.schema import Recipe, Stage
from burnish.errors import UserError, did_you_mean
from burnish.models.settings import StageModel

FORGOTTEN = "forgotten"
"""Key of a stage's entry in the manifest: its folder is still to be removed."""


def check_name(recipe: Recipe, start: str) -> None:
    """Check that a recipe has a stage.

    Raises:
        UserError: it has not.
    """
    names = [stage.name for stage in recipe.stages]
    if start in names:
        return
    inner = [name for name in names if name.rpartition("/")[2] == start or name.startswith(f"{start}/")]
    if inner:
        raise UserError(f"--from {start}: a stage of a loop is named with its round, such as --from {inner[0]}")
    raise UserError(f"--from {start}: there is no such stage{did_you_mean(start, names)}; stages are {_listed(names)}")


def forget(recipe: Recipe, manifest: dict[str, Any], start: str) -> None:
    """Mark a stage and all later ones as not started, and their folders as to be removed.

    Raises:
        UserError: the stage was not run because its loop ended earlier, a model that is read again was removed, or a
            folder is a link. Nothing is changed then.
    """
    entries = {entry["name"]: entry for entry in manifest["stages"]}
    index = _places(recipe)[start]
    later = recipe.stages[index:]
    last = loops.ended(recipe, entries | {stage.name: pending(stage) for stage in later})
    if loops.is_skipped(recipe.stages[index], last):
        loop = start.partition("/")[0]
        raise UserError(
            f"--from {start}: {loop} ended after round {last[loop]}, so this stage was not run: name a stage of that "
            "round or an earlier one, or one after the loop"
        )
    for stage in later:
        read = loops.with_last_rounds(stage, recipe, last)
        check_models(recipe, read, {stage.name: entries[stage.name] for stage in recipe.stages[:index]})
        _refuse_links(recipe.folder, stage.name, start)
    for stage in later:
        entries[stage.name].clear()
        entries[stage.name] |= pending(stage) | {FORGOTTEN: True}
    manifest["state"] = "running"
    write_manifest(recipe.folder, manifest)


def _refuse_links(folder: Path, name: str, start: str) -> None:
    """Refuse the folder of a stage that is outside of the run's folder."""
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise UserError(
                f"--from {start}: {path} is a link to {os.readlink(path)}, and only files inside {folder} are removed: "
                "remove the link yourself"
            )


def remove_forgotten(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Remove the folders of the stages that `forget` has marked. After a kill, the next run removes the rest."""
    marked = [entry for entry in manifest["stages"] if FORGOTTEN in entry]
    if not marked:
        return
    for entry in marked:
        place = recipe.folder / entry["name"]
        for path in (place, files.staging(place), files.removing(place)):
            if path.is_dir():
                shutil.rmtree(path)
                files.sync(path.parent)
        manifest["checksums"] = {k: v for k, v in manifest["checksums"].items() if not k.startswith(f"{place}{os.sep}")}
    (recipe.folder / "report.html").unlink(missing_ok=True)
    for entry in marked:
        del entry[FORGOTTEN]
    write_manifest(recipe.folder, manifest)


def check_models(recipe: Recipe, stage: Stage, entries: loops.Entries) -> None:
    """Check that no model that a stage reads was removed after its round.

    Args:
        recipe: the recipe.
        stage: the stage that is going to run.
        entries: the manifest's stages by name; those that run again may be left out.

    Raises:
        UserError: one was. The message names the stage from which the run can be repeated.
    """
    if lost := _lost(stage, entries):
        raise UserError(
            f"{stage.name} reads the model of {lost[0]}, which was removed after the next round (keep: last): repeat "
            f"the run with --from {_first(recipe, lost, entries)}"
        )


def _lost(stage: Stage, entries: loops.Entries) -> list[str]:
    """The stages whose models a stage reads, and whose models were removed after their rounds."""
    models = [source.stage for source in from_stages(stage) if isinstance(source, StageModel)]
    return [model for model in models if entries.get(model, {}).get("thinned")]


def _first(recipe: Recipe, lost: list[str], entries: loops.Entries) -> str:
    """The last stage from which all of these models, and those that they start from, can be made again."""
    places = _places(recipe)
    first, end = min(places[name] for name in lost), len(recipe.stages)
    while True:
        more = [places[name] for stage in recipe.stages[first:end] for name in _lost(stage, entries)]
        if min([first, *more]) == first:
            return recipe.stages[first].name
        first, end = min(more), first


def _places(recipe: Recipe) -> dict[str, int]:
    return {stage.name: index for index, stage in enumerate(recipe.stages)}


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 12 else [*names[:8], "...", *names[-3:]])
