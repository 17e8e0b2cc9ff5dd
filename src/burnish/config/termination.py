"""SIGTERM, with which schedulers and launchers end a run: it saves a checkpoint first if it is training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from burnish.errors import Terminated
from burnish.training.engine import Engine


class Termination:
    """Handles SIGTERM: ``Terminated`` is raised at once, or, in a context of ``deferred``, not at all."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """A context that handles SIGTERM, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which SIGTERM only sets ``requested``."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            raise Terminated


class SaveAndStop(TrainerCallback):
    """Ends training after the step in which a process got SIGTERM, with a checkpoint that the run can resume from.

    ``step`` is then the number of that step, and ``saved`` whether there is a checkpoint of it.
    """

    def __init__(self, termination: Termination, engine: Engine) -> None:
        self.termination, self.engine = termination, engine
        self.step: int | None = None
        self.saved = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step is done. All processes decide the same."""
        if not self.engine.all(torch.tensor(not self.termination.requested, device=self.engine.device)):
            self.step, self.saved = state.global_step, not args.save_only_model
            control.should_training_stop = True
            control.should_save |= self.saved
