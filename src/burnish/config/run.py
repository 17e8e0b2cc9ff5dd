"""Runs the stages of a recipe in order. Stages exchange files, and an unfinished run resumes where it stopped."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainingArguments
from transformers.utils import logging as hf_logging

from burnish import files, progress, user_functions
from burnish.config import Recipe, Stage, StageData, loops, repeat
from burnish.config.inputs import Checksums, check_still_current, verify
from burnish.config.lock import LOCK, locked
from burnish.config.manifest import REMOVING, clear, open_manifest, other_versions, pending, write_manifest
from burnish.config.processes import Processes
from burnish.config.resolve import environments_of, remote_reward
from burnish.config.row_stage import RowStage
from burnish.config.schema import RewardFromURL
from burnish.config.stage import TrainingStage, check_rewards
from burnish.config.termination import Termination
from burnish.data import readers as rows
from burnish.data.streaming import RowStream
from burnish.errors import UserError
from burnish.judges.endpoint import read_key
from burnish.machine import limit_threads
from burnish.models import quantize
from burnish.models.precision import resolve
from burnish.models.settings import Precision
from burnish.report import page as report
from burnish.report.display import Display
from burnish.report.rounds import Rounds, grouped, round_of
from burnish.rewards.functions import NamedReward
from burnish.terminal import visible
from burnish.training.arguments import check_sharded
from burnish.user_code import user_code


def run(
    recipe: Recipe,
    *,
    fresh: bool = False,
    start: str | None = None,
    display: Display | None = None,
    processes: Processes | None = None,
) -> Path:
    """Run a recipe to its end, write its report, and return the run's folder.

    Finished stages do not run again. A stage that was interrupted resumes from its last complete checkpoint.

    Args:
        recipe: the recipe.
        fresh: start over: remove what the run has made.
        start: the name of a stage: remove what it and all later stages have made, and run them again.
        display: shows the run. Default: the terminal, or plain lines.
        processes: the processes of the run, each of which calls this function. Default: only this one.

    Raises:
        UserError: if the folder contains a run of another recipe, or a stage cannot start.
        Terminated: if this process got SIGTERM.
    """
    processes, termination = processes or Processes(), Termination()
    if start is not None:
        if fresh:
            raise UserError("--from keeps the earlier stages, and --fresh removes them: use only one of the two")
        repeat.check_name(recipe, start)
    folder = recipe.folder
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    else:
        limit_threads()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    with termination.handled():
        if processes.first:
            _lead(recipe, fresh, start, display or Display(), processes, termination)
        else:
            _follow(recipe, processes, termination)
    return folder


def _lead(
    recipe: Recipe, fresh: bool, start: str | None, display: Display, processes: Processes, termination: Termination
) -> None:
    """Run a recipe as the first process, which decides and writes."""
    folder = recipe.folder
    _check_all(recipe, processes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot create the folder of the run: {error.strerror}") from error
    with locked(folder):
        if fresh or (folder / REMOVING).is_file():
            clear(folder)
        manifest = open_manifest(recipe)
        if start is not None:
            repeat.forget(recipe, manifest, start)
        repeat.remove_forgotten(recipe, manifest)
        with display as screen, _warnings_on(screen):
            if other := other_versions(manifest):
                screen.message(f"this run started with {other}: results may differ in the last digits")
            _run_stages(recipe, manifest, screen, processes, termination)
            manifest["state"] = "done"
            write_manifest(folder, manifest)
            report.write(folder)


def _follow(recipe: Recipe, processes: Processes, termination: Termination) -> None:
    """Train the stages that the first process tells this one to train. It shows and writes nothing."""
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(Display(Console(quiet=True), live=False))
        stack.enter_context(_warnings_on(screen))
        stack.enter_context(progress.shown_by(screen.progress))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the first process shows them
        while (message := processes.told()) is not None:
            lock = recipe.folder / LOCK
            if not lock.is_file() or lock.read_text("utf-8") != message["lock"]:
                raise UserError(
                    f"{recipe.folder.absolute()} is not the folder of rank 0 on this machine, {socket.gethostname()}: "
                    "all machines of a run need the same file system: name a folder on it with out=FOLDER"
                )
            stage = loops.with_last_rounds(recipe.stages[message["number"] - 1], recipe, message["last"])
            follower = TrainingStage(recipe, stage, processes, termination)
            follower.follow(screen, message["checkpoint"], message["precision"])


REPORTED = ("burnish.render.encode", "burnish.data.streaming")
"""Loggers of truncated, dropped and skipped rows. They warn in every pass; a stage reports these rows once, in all."""


class _Messages(logging.Handler):
    """Shows what is logged as messages of a run."""

    def __init__(self, screen: Display) -> None:
        super().__init__(logging.WARNING)
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        self.screen.message(visible(record.getMessage()))


@contextmanager
def _warnings_on(screen: Display) -> Iterator[None]:
    """Show the warnings that the package logs as messages of the run, except those that stages report themselves."""
    handler, package = _Messages(screen), logging.getLogger("burnish")
    reported = {logger: logger.level for logger in map(logging.getLogger, REPORTED)}
    package.addHandler(handler)
    for logger in reported:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.removeHandler(handler)
        for logger, level in reported.items():
            logger.setLevel(level)


def _run_stages(
    recipe: Recipe, manifest: dict[str, Any], screen: Display, processes: Processes, termination: Termination
) -> None:
    """Run every unfinished stage, in order."""
    folder, checksums = recipe.folder, Checksums(manifest["checksums"])
    entries = {entry["name"]: entry for entry in manifest["stages"]}
    _remove_models(folder, [name for name, entry in entries.items() if entry.get("thinned")])
    for number, planned in enumerate(recipe.stages, start=1):
        last = loops.ended(recipe, entries)
        entry = entries[planned.name]
        if loops.is_skipped(planned, last):
            entry["state"] = "skipped"
            continue
        screen.stage(planned.name, number, len(recipe.stages))
        stage = loops.with_last_rounds(planned, recipe, last)
        if entry["state"] == "done":
            if (folder / stage.name).is_dir():
                check_still_current(recipe, stage, entries)
                screen.message("already done")
                continue
            screen.message(f"{folder / stage.name} is missing: the stage runs again")
            entry.clear()
            entry |= pending(stage)
            manifest["state"] = "running"
        place, before = round_of(stage.name), round_of(recipe.stages[max(0, number - 2)].name)
        if place is not None and (number == 1 or before is None or place[:2] != before[:2]):
            screen.message(f"round {place[1]} of {recipe.loops[place[0]].rounds}")
        began = time.monotonic()
        repeat.check_models(recipe, stage, entries)
        verify(recipe, stage, entries, checksums)
        running: RowStage | TrainingStage | None = None
        if stage.makes_rows:
            running = RowStage(recipe, stage)
        elif not stage.run:
            announce = partial(_tell, recipe, processes, number, last)
            running = TrainingStage(recipe, stage, processes, termination, announce)
        entry |= {"state": "running"} | (running.check_inputs(entry, checksums) if running else {})
        if isinstance(running, TrainingStage):
            if other := _other_processes(entry, recipe, processes):
                screen.message(other)
            entry |= {"processes": processes.size, "shard": recipe.parallel.shard}
        write_manifest(folder, manifest)
        with progress.shown_by(screen.progress):
            outcome = running.run(screen, entry, checksums) if running else _run_function(recipe, stage, screen)
        for name, checksum in outcome["files"].items():
            checksums.note(folder / stage.name / name, checksum)
        entry |= outcome | {"state": "done", "seconds": round(entry["seconds"] + time.monotonic() - began, 1)}
        write_manifest(folder, manifest)
        if old := loops.thin(recipe, entries):
            write_manifest(folder, manifest)  # first, so that they are not missed if the process is killed now
            _remove_models(folder, old)
    for item in grouped(manifest):
        if isinstance(item, Rounds) and item.ended:
            screen.message(f"{item.name} {item.state}")


def _tell(
    recipe: Recipe,
    processes: Processes,
    number: int,
    last: dict[str, int],
    checkpoint: Path | None,
    precision: Precision,
) -> None:
    """Tell the other processes to train a stage from a checkpoint. ``last`` is what ``loops.ended`` returned."""
    lock = (recipe.folder / LOCK).read_text("utf-8")  # tells them whether they see the same folder
    start = str(checkpoint) if checkpoint else None
    processes.tell({"number": number, "last": last, "checkpoint": start, "precision": precision, "lock": lock})


def _other_processes(entry: Mapping[str, Any], recipe: Recipe, processes: Processes) -> str | None:
    """A message if a stage resumes with another number of processes, or with weights sharded in another way."""
    before, shard = entry.get("processes", processes.size), entry.get("shard", recipe.parallel.shard)
    if (before, shard) == (processes.size, recipe.parallel.shard):
        return None
    return (
        f"this stage started with processes: {before}, shard: {shard} and resumes with processes: {processes.size}, "
        f"shard: {recipe.parallel.shard}: results may differ in the last digits"
    )


def _remove_models(folder: Path, names: list[str]) -> None:
    """Remove the models and checkpoints of stages of old rounds, and what a killed process has left of them."""
    for name in names:
        files.remove_leftovers(folder / name)
        for path in loops.without_models(folder / name):
            files.remove(path)


def _check_all(recipe: Recipe, processes: Processes) -> None:
    """Check the settings, the available rows and the machine for every stage before the first one starts."""
    for stage in recipe.stages:
        if stage.method is None:
            continue
        for reward in stage.reward:
            if isinstance(reward, RewardFromURL):
                remote_reward(reward)  # its token may be missing
        for settings in stage.judges:
            read_key(settings.key)
        if stage.makes_rows:
            _check_rows(RowStage(recipe, stage))
            continue
        training = TrainingStage(recipe, stage, processes)
        arguments = training.arguments(resolve(stage.precision, None))  # the model may not be there yet
        if processes.sharded:
            _check_sharded(stage, arguments)
        if stage.precision == "fp16" and not torch.cuda.is_available():
            raise UserError(
                f"stages.{stage.name}.precision: fp16 trains on a GPU only, since it needs loss scaling: set bf16 or "
                "float32"
            )
        if stage.adapter is not None and (kind := stage.adapter.quantize) is not None:
            quantize.require(kind, f"stages.{stage.name}.adapter.quantize")
        training.method([NamedReward(str(i), reward.weight, len) for i, reward in enumerate(stage.reward)])  # type: ignore
        splits: dict[str, rows.Rows | RowStream] = {}
        for split in training.splits:
            if not any(isinstance(part.source, StageData) for part in training.data.parts(split)):
                splits[split] = read = training.rows(split)
                if isinstance(read, RowStream):
                    read.take(1)
        if len(splits) == len(training.splits):
            check_rewards(stage, splits)


def _check_sharded(stage: Stage, arguments: TrainingArguments) -> None:
    """Check that the weights of a stage can be sharded."""
    try:
        if stage.adapter is not None and stage.adapter.quantize is not None:
            raise UserError("sharded: adapter.quantize does not work: remove it, or remove parallel.shard")
        check_sharded(arguments)
    except UserError as error:
        problem = str(error).removeprefix("sharded: ")
        raise UserError(f"stages.{stage.name}: with parallel.shard, {problem}") from error


def _check_rows(making: RowStage) -> None:
    """Check the settings and the available input of a stage that makes rows."""
    making.method()
    environments_of(making.stage, making.recipe.locate)
    if not any(isinstance(part.source, StageData) for part in making.data.parts("rows")):
        making.read()


# --- a stage that runs a function ----------------------------------------------------------------------------------


def _run_function(recipe: Recipe, stage: Stage, screen: Display) -> dict[str, Any]:
    """Run a stage's function. Its folder appears only once it is complete."""
    assert stage.run is not None
    screen.message(f"running {stage.run}")
    function = user_functions.load(recipe.locate(stage.run))
    folder = recipe.folder / stage.name
    what, seed = f"stages.{stage.name}.run: {stage.run}", recipe.seed_of(stage)
    with files.writing(folder) as staging, user_code(what, seed=seed):
        function(staging, seed=seed, **stage.arguments)
        if not staging.is_dir():
            raise UserError(f"{what} removed its folder, which should hold what it makes")
    return {"files": files.listed(folder)}
