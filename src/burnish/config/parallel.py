"""The recipe key ``parallel``: how many processes train, and what each of them keeps."""

from __future__ import annotations

import threading
from typing import Literal, Self

from pydantic import Field, model_validator

from burnish.types import Config


class Parallel(Config, use_attribute_docstrings=True):
    """The processes of a run: ``{processes: 4, shard: fsdp2}``."""

    processes: int = Field(1, ge=1, le=4096)
    """Number of processes that burnish run starts, one per GPU. Under torchrun, leave it out."""
    launcher: Literal["torch", "ray"] = "torch"
    """Where burnish run starts the processes. torch: on this machine; ray: in the Ray cluster that it joins, with Ray
    Train."""
    shard: Literal["none", "fsdp2"] = "none"
    """What each process keeps. none: all weights; fsdp2: a shard of the weights, the gradients and the optimizer's
    state."""
    timeout: float = Field(1800, gt=0, le=threading.TIMEOUT_MAX)
    """Time limit in seconds for a process that waits in a training step for the others. It must cover the time that the
    first process needs to write a checkpoint."""

    @model_validator(mode="after")
    def _several(self) -> Self:
        if self.launcher != "torch" and self.processes == 1:
            raise ValueError(f"launcher: {self.launcher} starts several processes: set processes, or remove launcher")
        return self
