"""Checksums of a stage's inputs. A stage does not resume if its inputs have changed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from burnish import files
from burnish.config import Recipe, Stage, StageData
from burnish.config.resolve import model_reference, remote_reward
from burnish.config.schema import SPLITS, Data, RewardFromFunction, RewardFromJudge, RewardFromURL
from burnish.config.sources import references
from burnish.data.readers import files_of
from burnish.errors import UserError
from burnish.methods import METHODS, ROW_METHODS
from burnish.models.settings import StageModel

READ = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py", ".gguf")
"""Extensions of the files that loading a model may read from its folder."""


class Checksums:
    """SHA-256 checksums of files. A file is hashed again only if its size or modification time has changed.

    The manifest stores ``known``: ``{"runs/tiny/sft/model/config.json": [629, 1795300000123456789, "9f86"]}``.
    """

    def __init__(self, known: dict[str, list[Any]]) -> None:
        self.known = known

    def of(self, path: Path) -> str:
        """The checksum of a file, in hex."""
        now = path.stat()
        stamp = [now.st_size, now.st_mtime_ns]
        if self.known.get(str(path), [])[:2] != stamp:
            self.known[str(path)] = [*stamp, files.sha256(path)]
        return self.known[str(path)][2]

    def note(self, path: Path, checksum: str) -> None:
        """Remember the checksum of a file that was just written."""
        stat = path.stat()
        self.known[str(path)] = [stat.st_size, stat.st_mtime_ns, checksum]


def verify(recipe: Recipe, stage: Stage, entries: Mapping[str, Mapping[str, Any]], checksums: Checksums) -> None:
    """Check that the files a stage reads from earlier stages are the ones they wrote.

    ``entries`` are the manifest's stages by name.

    Raises:
        UserError: if a file is missing or has changed.
    """
    for source in from_stages(stage):
        folder = recipe.folder / source.stage
        part = "model" if isinstance(source, StageModel) else f"data/{source.file}"
        for name, checksum in entries[source.stage]["files"].items():
            path = folder / name
            if name != part and not name.startswith(f"{part}/"):
                continue
            if part == "model" and path.suffix not in READ:  # people edit a model card before they publish it
                continue
            if not path.is_file() or checksums.of(path) != checksum:
                wrong = "has changed since" if path.is_file() else "is missing;"
                raise UserError(
                    f"{path} {wrong} stage {source.stage} wrote it: restore it, or run that stage and all later ones "
                    f"again with --from {source.stage}"
                )


def check_still_current(recipe: Recipe, stage: Stage, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the inputs of a finished stage are still what earlier stages hold now.

    Raises:
        UserError: if an earlier stage ran again and wrote something else.
    """
    read = {**entries[stage.name].get("data", {}), **entries[stage.name].get("inputs", {})}
    for source in from_stages(stage):
        for name, checksum in entries[source.stage]["files"].items():
            if read.get(f"{source.stage}/{name}", checksum) != checksum:
                raise UserError(
                    f"{recipe.folder / stage.name} was made from another {source.stage}/{name}: that stage ran again "
                    f"and wrote something else: run {stage.name} and all later ones again with --from {stage.name}"
                )


def from_stages(stage: Stage) -> list[StageModel | StageData]:
    """The sources of a stage that earlier stages create."""
    data = [part.source for split in SPLITS for part in (stage.data.parts(split) if stage.data else [])]
    return [source for source in [*stage.models.values(), *data] if isinstance(source, StageModel | StageData)]


def inputs_of(recipe: Recipe, stage: Stage, checksums: Checksums) -> dict[str, dict[str, str]]:
    """Checksums of the rows, models and code that a stage reads, for the manifest: ``{"data": ..., "inputs": ...}``."""
    assert stage.data is not None
    inputs = of_code(recipe, stage, checksums)
    for source in stage.models.values():
        inputs |= of_model(model_reference(source, recipe.folder), recipe.folder, checksums)
    inputs |= of_services(stage)
    return {"data": of_rows(stage.data, stage.data.splits, recipe.folder, checksums), "inputs": inputs}


def refuse_changes(stage: Stage, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise a UserError if an input has changed since a stage started."""
    changed = [name for name in [*now, *before] if now.get(name) != before.get(name)]
    if changed:
        raise UserError(f"{changed[0]} has changed since {stage.name} started: restore it, or start over with --fresh")


def of_rows(data: Data, splits: list[str], folder: Path, checksums: Checksums) -> dict[str, str]:
    """Checksums of the files of rows, by file name. A dataset on the hub has none."""
    sums = {}
    for reference in (reference for split in splits for reference in references(data, split, folder)):
        sums |= {_name(path, folder): checksums.of(path) for path in files_of(reference)}
    return sums


def _name(path: Path, folder: Path) -> str:
    """A path as in messages and the manifest: relative to the run's folder if inside it, so that a run can be moved."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def of_model(reference: str, folder: Path, checksums: Checksums) -> dict[str, str]:
    """Checksums of a model's files, by path. For a hub id, its commit."""
    path = files.expanded(reference)
    if path.is_dir():
        has = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
        inner = path if has or not (path / "model").is_dir() else path / "model"
        return {_name(one, folder): checksums.of(one) for one in sorted(inner.iterdir()) if one.suffix in READ}
    if path.is_file():
        return {str(path): checksums.of(path)}
    try:
        config = cached_file(reference, "config.json")
    except OSError:  # loading the model reports the problem
        config = None
    return {reference: Path(config).parent.name if config else "not here"}


def of_services(stage: Stage) -> dict[str, str]:
    """The digests that the services of a stage's rewards report: ``{"the service of reward url": "9f86"}``.

    A service that reports nothing has none.

    Raises:
        UserError: if a service is down or refuses the token.
    """
    sums = {}
    for source in stage.reward:
        if isinstance(source, RewardFromURL):
            with contextlib.closing(remote_reward(source)) as service:
                digest = service.digest()
            sums |= {f"the service of reward {source.title}": digest} if digest is not None else {}
    return sums


def of_code(recipe: Recipe, stage: Stage, checksums: Checksums) -> dict[str, str]:
    """Checksums of the user's files that define a stage's rewards, environments, method or parts of the method."""
    read = [r.principles for r in stage.reward if isinstance(r, RewardFromJudge) and isinstance(r.principles, str)]
    names = [reward.function for reward in stage.reward if isinstance(reward, RewardFromFunction)]
    names += [*stage.environment.classes.values(), *stage.tools]
    if stage.method:
        own = [] if stage.method.name in METHODS or stage.method.name in ROW_METHODS else [stage.method.name]
        names += [*own, *stage.method.functions.values()]
        read += stage.method.files.values()
    sums = {name: checksums.of(recipe.beside(name)) for name in read if recipe.beside(name).is_file()}
    for name in names:
        written = name.rpartition(":")[0]  # the key as written, because a recipe can be moved with its files
        place = recipe.locate(name).rpartition(":")[0]
        if not place.endswith(".py"):
            spec = importlib.util.find_spec(place)
            place = (spec.origin if spec else None) or ""
        if Path(place).is_file():
            sums[written] = checksums.of(Path(place))
    return sums
