"""The recipe key ``parallel``: how many processes train, and what each of them keeps."""

from __future__ import annotations

import threading
from typing import Literal

from pydantic import Field

from burnish.types import Config


class Parallel(Config, use_attribute_docstrings=True):
    """The processes of a run: ``{processes: 4, shard: fsdp2}``."""

    processes: int = Field(1, ge=1, le=4096)
    """Number of processes that burnish run starts on this machine, one per GPU. Under torchrun, leave it out."""
    shard: Literal["none", "fsdp2"] = "none"
    """What each process keeps. none: all weights; fsdp2: a shard of the weights, the gradients and the optimizer's
    state."""
    timeout: float = Field(1800, gt=0, le=threading.TIMEOUT_MAX)
    """Time limit in seconds for a process that waits in a training step for the others. It must cover the time that the
    first process needs to write a checkpoint."""
