"""Checkpoints of a run. Each one is complete or absent, and holds all that the run needs to resume from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from burnish import files
from burnish.errors import UserError

RESUME_STATE = "burnish.pt"


@dataclass(frozen=True)
class ResumeState:
    """What a checkpoint stores in ``burnish.pt``, in addition to the files of transformers.

    ``ResumeState(loader={"epoch": 0, "step": 3, ...}, rows_per_step=32, token_budget=512, pass_budget=512,
    precision="no", last={"nll": (81.5, 64.0)}, non_finite=(0, 0), logs={"metrics.jsonl": 1042}, start={})``
    """

    loader: dict[str, Any]
    """The state of the step loader."""
    rows_per_step: int
    """Rows of an optimizer step, over all processes."""
    token_budget: int | None
    """The maximum number of tokens in a micro-batch."""
    pass_budget: int | None
    """The same in passes without gradient (``Layout.pass_budget``). The default depends on the memory that is free."""
    precision: str
    """Precision of the passes: ``no`` (that of the weights), ``bf16`` or ``fp16``."""
    last: dict[str, tuple[float, float]]
    """Sum and count of each term and metric of the last optimizer step, over all processes."""
    non_finite: tuple[int, int]
    """Steps skipped because of NaN or infinity: in total, and in a row up to this step."""
    logs: dict[str, int]
    """The size in bytes of each log file."""
    start: dict[str, dict[str, Any]]
    """The headline metrics of the first evaluation, each with the fields of its ``RowSums``."""


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a run's folder, complete or not, the latest first."""
    paths = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(paths, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps before a checkpoint: 30 for ``checkpoint-30``."""
    return int(checkpoint.name.rpartition("-")[2])


def latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The latest complete checkpoint, or None, and what is wrong with each later one."""
    damaged = []
    for path in checkpoints(folder):
        fault = files.damage(path)
        if fault is None:
            return path, damaged
        damaged.append(f"{path}: {fault}")
    return None, damaged


@contextmanager
def writing(
    folder: Path, trainer_state: TrainerState, resume_state: ResumeState, accelerator: Accelerator, should_save: bool
) -> Iterator[Path]:
    """A context in which all processes write one checkpoint. It is complete if the context ends without an error.

    Every process writes its files below the path that the context gives, as ``transformers.Trainer`` does: weights,
    optimizer and random states in ``PATH/checkpoint-N``. The process that should save adds the two states and seals
    the checkpoint.
    """
    checkpoint = folder / f"checkpoint-{trainer_state.global_step}"
    needed = next((files.size(before) for before in checkpoints(folder)), None)  # as large as the one before
    with files.writing(checkpoint, needed) if should_save else nullcontext(files.staging(checkpoint)) as staging:
        parts = staging / "parts"
        accelerator.wait_for_everyone()  # the folder exists
        yield parts
        accelerator.wait_for_everyone()  # all files are written
        if trainer_state.best_global_step == trainer_state.global_step:
            trainer_state.best_model_checkpoint = str(checkpoint)
        if should_save:
            for path in (parts / checkpoint.name).iterdir():
                path.rename(staging / path.name)
            (parts / checkpoint.name).rmdir()
            parts.rmdir()
            torch.save(vars(resume_state), staging / RESUME_STATE)
            trainer_state.save_to_json(str(staging / TRAINER_STATE_NAME))
    accelerator.wait_for_everyone()


def load(checkpoint: Path) -> ResumeState:
    """Read the resume state of a checkpoint.

    Raises:
        UserError: the checkpoint is damaged.
    """
    if (fault := files.damage(checkpoint)) is not None:
        raise UserError(f"{checkpoint}: the checkpoint is damaged: {fault}")
    return _read(checkpoint)


def precision_of(checkpoint: Path) -> str:
    """The precision of the passes of a complete checkpoint: ``no`` (that of the weights), ``bf16`` or ``fp16``."""
    return _read(checkpoint).precision


def _read(checkpoint: Path) -> ResumeState:
    return ResumeState(**torch.load(checkpoint / RESUME_STATE, weights_only=True))


def find_best(folder: Path, state: TrainerState) -> None:
    """Update the path of the best checkpoint, which is wrong if the run's folder was moved."""
    best = folder / f"checkpoint-{state.best_global_step}"
    if state.best_global_step and best.is_dir():
        state.best_model_checkpoint = str(best)


def rotate(folder: Path, limit: int | None, best: Path | None, step: int) -> None:
    """Remove the oldest checkpoints until ``limit`` are left, but never the best or the latest one.

    Checkpoints after ``step``, the current step, do not count: an earlier run wrote them before training started over,
    and this run will replace them.
    """
    if not limit:
        return
    paths = [path for path in checkpoints(folder) if step_of(path) <= step]
    others = [path for path in paths if path != best]
    kept = paths[:limit] if best in (None, *paths[:limit]) else [*others[: max(limit - 1, 1)], best]
    for path in paths:
        if path not in kept:
            files.remove(path)
