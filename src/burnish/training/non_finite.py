"""Optimizer steps whose loss, gradient or weights are NaN or infinite: they are skipped, or they stop the run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from burnish.errors import UserError
from burnish.models.finite import non_finite
from burnish.protocols import Engine
from burnish.training import checkpoint

MAX_IN_A_ROW = 10
"""A run stops at this many skipped steps in a row."""


class NonFiniteSteps:
    """Counts the steps that were skipped, and stops the run with a message that says what to do.

    Args:
        mode: ``skip`` skips single steps; ``error`` stops the run at the first one.
        folder: the run's folder, with its checkpoints.
        learning_rate: the run's learning rate, for the message.
    """

    def __init__(self, mode: Literal["error", "skip"], folder: Path, learning_rate: float) -> None:
        self.mode = mode
        self.folder = folder
        self.learning_rate = learning_rate
        self.total = self.in_a_row = 0

    def add(self, step: int, problem: str, sources: list[str]) -> None:
        """Count a step that is skipped, and warn.

        Raises:
            UserError: steps are not skipped in this run, or this is one too many in a row.
        """
        self.total += 1
        self.in_a_row += 1
        rows = list(dict.fromkeys(sources))
        named = ", ".join(rows[:3]) + (f" and {len(rows) - 3} more rows" if len(rows) > 3 else "")
        if self.mode == "skip" and self.in_a_row < MAX_IN_A_ROW:
            warnings.warn(f"skipped step {step}: {problem}, in {named}", stacklevel=2)
            return
        again = f", the {self.in_a_row}th step in a row" if self.mode == "skip" else ""
        skip = "" if self.mode == "skip" else "; trainer.on_non_finite: skip skips single steps like this one"
        raise UserError(
            f"step {step}: {problem}, in {named}{again}. {self.advice()}, or these rows hold extreme numbers{skip}"
        )

    def check_weights(self, engine: Engine, step: int) -> None:
        """Raise a UserError if a trained weight is not finite, so that it never replaces a good one in a checkpoint."""
        names = [name for name in engine.gather(non_finite(engine.network, trained=True)) if name is not None]
        if names:
            raise UserError(
                f"step {step}: the weight {names[0].removeprefix('policy.')} holds NaN or infinity after the step. "
                f"{self.advice()}"
            )

    def advice(self) -> str:
        """The usual cause, and where the last good weights are."""
        saved, _ = checkpoint.latest(self.folder)
        kept = f"the last good checkpoint is {saved}" if saved else "there is no checkpoint before it"
        return (
            f"This step was not saved: {kept}. Usually the learning rate is too high (it is {self.learning_rate:g}) "
            "or lacks warmup_steps"
        )
