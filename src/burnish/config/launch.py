"""Starts the processes of a run on this machine with torch's elastic launcher, and reports how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.parallel import Parallel
from burnish.config.processes import CODE, LAUNCHER, MESSAGE, OUTCOME
from burnish.errors import LostProcessError, Terminated, UserError
from burnish.machine import cores


def launch(settings: Parallel, count: int, arguments: Sequence[str]) -> int:
    """Run ``burnish ARGUMENTS`` in several processes on this machine, and return the exit code.

    The processes write to this one's stdout. Of their errors, the first one's message is shown. If this process ends,
    however it ends, so do they.

    Raises:
        UserError: if there are GPUs, but fewer than processes.
        LostProcessError: if a process was killed.
        KeyboardInterrupt, Terminated: if this process was interrupted or got SIGTERM, and they left no message.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if 0 < (gpus := torch.cuda.device_count()) < count:
        raise UserError(f"parallel.processes is {count}, but {gpus} GPUs are visible: set it to {gpus} or less")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they would show tracebacks besides our message
    with tempfile.TemporaryDirectory(prefix="burnish-run-") as folder:
        os.environ |= {LAUNCHER: str(os.getpid()), OUTCOME: folder}
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
        # the time for an optimizer step and a checkpoint after SIGTERM
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(settings.timeout) + 1))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "burnish", *arguments)
        except ChildFailedError as error:
            _raise_if_killed(error.failures)
            codes = [failure.exitcode for failure in error.failures.values()]
            return _reported(Path(folder), codes[0])
        except SignalException as error:
            interrupted = error.sigval == signal.SIGINT
            if (Path(folder) / MESSAGE).is_file():
                return _reported(Path(folder), 1)
            raise (KeyboardInterrupt() if interrupted else Terminated()) from None
    return 0


def _raise_if_killed(failures: Mapping[int, Any]) -> None:
    """Name the processes that a signal has killed, which had no time for a message."""
    killed = [
        f"rank {rank} (process {failure.pid}) was killed by {signal.Signals(-failure.exitcode).name}"
        for rank, failure in sorted(failures.items())
        if failure.exitcode < 0
    ]
    if killed:
        raise LostProcessError(
            f"{', '.join(killed)}, and the other processes were ended. If nobody killed it, the machine may have run "
            "out of memory. Run the same command again to resume"
        )


def _reported(folder: Path, code: int) -> int:
    """Show the message that the first failed process has left, and return its exit code, or else the given one."""
    if (folder / MESSAGE).is_file():
        sys.stderr.write((folder / MESSAGE).read_text("utf-8"))
        sys.stderr.flush()
    return int((folder / CODE).read_text()) if (folder / CODE).is_file() else code
