"""The manifest of a run: its recipe with all defaults, package versions, and the results of each stage."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pydantic

from burnish import files
from burnish.config.schema import STAGE_NAME, Recipe, Stage
from burnish.errors import UserError
from burnish.generate import settings as generate
from burnish.judges import settings as judges
from burnish.report.metrics import from_json, to_json

MANIFEST = "manifest.json"
REMOVING = ".manifest.json.removing"
FORMAT = 1
"""The format version of a run's folder."""
MAY_CHANGE = re.compile(
    r"parallel(\.\w+)? was |stages\.\d+\."
    r"(reward\.\d+\.(url|token|timeout|retries|concurrency|ray\.(address|timeout))|method\.(wait|host|port)"
    rf"|generator\.({'|'.join(generate.MAY_CHANGE)})"
    rf"|(method|reward\.\d+)\.judge\.({'|'.join(judges.MAY_CHANGE)})) was "
)
"""Differences between recipes with which a run can be resumed, because its results do not depend on them."""
VERSIONS = ("burnish", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors")


def open_manifest(recipe: Recipe) -> dict[str, Any]:
    """Read the manifest of a run, or create a new one.

    Raises:
        UserError: if the folder contains a run of another recipe or Burnish version, or stages without a manifest.
    """
    path = recipe.folder / MANIFEST
    # As they are read back: JSON has no numbers for NaN and infinities.
    resolved, loops = to_json(recipe.resolved()), to_json(_loops(recipe))
    if path.is_file():
        manifest = read_manifest(path)
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"{recipe.folder} holds a run of another version of Burnish: start over with --fresh, or name another "
                "folder with out=FOLDER"
            )
        _move(manifest, recipe)
        found = [
            *_differences(manifest["recipe"], resolved, ""),
            *_differences(manifest.get("loops", {}), loops, "loops"),
        ]
        different = [difference for difference in found if not MAY_CHANGE.match(difference)]
        if different:
            moved = re.match(r"stages\.\d+\.(data|model|reward)\b", different[0])
            raise UserError(
                f"{recipe.folder} holds a run of another recipe: {different[0]}; start over with --fresh, name another "
                "folder with out=FOLDER, or restore this setting to resume: only out= may change, if the run was moved"
                + (", and a file that was moved needs a link at its old path" if moved else "")
            )
        if [entry["name"] for entry in manifest["stages"]] != [stage.name for stage in recipe.stages]:
            raise UserError(f"{path}: its stages are not those of its recipe: start over with --fresh")
        return manifest | {"recipe": resolved}
    if taken := [stage.name for stage in recipe.stages if (recipe.folder / stage.name).exists()]:
        raise UserError(
            f"{recipe.folder} holds {taken[0]}, but no manifest.json: remove it, or name another folder with out=FOLDER"
        )
    return {
        "format": FORMAT,
        "name": recipe.name,
        "state": "running",
        "recipe": resolved,
        "loops": loops,
        "versions": _versions(),
        "machine": _machine(),
        "stages": [pending(stage) for stage in recipe.stages],
        "checksums": {},
    }


def _loops(recipe: Recipe) -> dict[str, Any]:
    """The settings of the loops. Their stages are in the recipe, once for each round."""
    return {name: loop.model_dump(mode="json", exclude={"name", "stages"}) for name, loop in recipe.loops.items()}


def _move(manifest: dict[str, Any], recipe: Recipe) -> None:
    """Change the manifest of a run that was moved: its folder, and the paths of its files with known checksums."""
    before = files.expanded(manifest["recipe"].get("out") or Path("runs") / manifest["name"])
    manifest["recipe"]["out"] = recipe.out
    if before != recipe.folder:
        paths = {path: Path(path) for path in manifest["checksums"]}
        moved = {
            name: str(recipe.folder / path.relative_to(before)) if path.is_relative_to(before) else name
            for name, path in paths.items()
        }
        manifest["checksums"] = {moved[name]: known for name, known in manifest["checksums"].items()}


def pending(stage: Stage) -> dict[str, Any]:
    """The entry of a stage that has not started."""
    return {
        "name": stage.name,
        "method": stage.method.name if stage.method else None,
        "state": "pending",
        "seconds": 0.0,
    }


def _machine() -> dict[str, str | int]:
    import torch  # here, so that a manifest is checked without it

    from burnish.machine import processor

    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in VERSIONS} | {"python": platform.python_version()}


def other_versions(manifest: Mapping[str, Any]) -> str:
    """Packages whose version has changed since the run started: ``torch 2.12.0 and resumes with 2.13.0``."""
    now = _versions()
    changed = [name for name, old in manifest["versions"].items() if now.get(name) != old]
    return ", ".join(f"{name} {manifest['versions'][name]} and resumes with {now.get(name)}" for name in changed)


class _Entry(pydantic.BaseModel):
    """What is read of a stage's entry, besides its name."""

    state: Literal["pending", "running", "done", "skipped"]
    thinned: bool = False
    seconds: float
    method: str | None = None
    processes: int = 1
    shard: str = "none"
    model: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    results: dict[Literal["before", "after"], dict[str, Any]] = {}
    data: dict[str, str] = {}
    inputs: dict[str, str] = {}
    files: dict[str, str] = {}

    @pydantic.model_validator(mode="after")
    def _complete(self) -> _Entry:
        if self.state == "done" and "files" not in self.model_fields_set:
            raise ValueError("a stage that is done lists its files")
        return self


class _Manifest(pydantic.BaseModel):
    """What is read of a manifest of this version, besides the names of its stages."""

    name: str
    state: Literal["running", "done"]
    recipe: dict[str, Any]
    loops: dict[str, dict[str, Any]] = {}
    versions: dict[str, str]
    machine: dict[str, str | int]
    stages: list[_Entry]
    checksums: dict[str, tuple[int, int, str]]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and check everything that is read of it. Of another version, only the stages' names are checked.

    Raises:
        UserError: if the file is not a valid manifest.
    """
    advice = "restore it, or remove the folder"
    try:
        manifest = json.loads(path.read_text("utf-8"))
        names = [entry["name"] for entry in manifest["stages"]]
        if manifest.get("format") == FORMAT:
            _Manifest.model_validate(manifest)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: not a valid manifest: {at}: {first['msg']}: {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = "it is empty" if not path.stat().st_size else f"{error!r}"
        raise UserError(f"{path}: not a valid manifest ({what}): {advice}") from error
    if wrong := [name for name in names if not (isinstance(name, str) and re.fullmatch(STAGE_NAME, name))]:
        raise UserError(f"{path}: {wrong[0]!r} cannot be the name of a stage: restore the file, or remove the folder")
    for entry in manifest["stages"]:
        if "results" in entry:
            entry["results"] = from_json(entry["results"])
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a run atomically. NaN and infinities are written as strings, as in metrics.jsonl."""
    text = json.dumps(to_json(manifest), indent=1, ensure_ascii=False, allow_nan=False)
    files.write_text(folder / MANIFEST, text)


def clear(folder: Path) -> None:
    """Remove the stages, the report and the manifest of a run, but no other file in its folder.

    The manifest is renamed first, so that no stage counts as done while others are being removed. If the process is
    killed in between, the next run removes the rest.

    Raises:
        UserError: if the manifest is invalid, or a stage's folder is a symbolic link. Nothing is removed then.
    """
    for manifest in (folder / REMOVING, folder / MANIFEST):
        if not manifest.is_file():
            continue
        names = [entry["name"].partition("/")[0] for entry in read_manifest(manifest)["stages"]]
        places = [folder / name for name in dict.fromkeys(names)]
        if linked := [place for place in places if place.is_symlink()]:
            raise UserError(
                f"{linked[0]} is a link to {os.readlink(linked[0])}, and --fresh removes only files inside {folder}: "
                "remove the link yourself"
            )
        manifest.replace(folder / REMOVING)
        files.sync(folder)
        for path in (part for place in places for part in (place, files.staging(place), files.removing(place))):
            if path.is_dir():
                shutil.rmtree(path)
        (folder / "report.html").unlink(missing_ok=True)
        (folder / REMOVING).unlink()


def _differences(old: Any, new: Any, at: str) -> Iterator[str]:
    """The differences between two recipes: ``seed was 0 and is 1``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{at}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{at}.{i}")
    elif old != new:
        yield f"{at} was {old!r} and is {new!r}"
