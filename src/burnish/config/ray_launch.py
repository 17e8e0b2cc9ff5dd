"""Starts the processes of a run in a Ray cluster with Ray Train, and reports how they ended.

Each worker of Ray Train starts ``burnish run`` as a process with the environment variables of torchrun, so the
processes meet, train and end as they do under any other launcher.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.processes import CODE, LAUNCHER, MESSAGE, OUTCOME
from burnish.config.termination import Termination
from burnish.errors import LostProcessError
from burnish.ray_cluster import Actors, Reservation, join, last_words

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""How long a failed process without a message waits before it ends the others, one of which has the message."""


class Failure(NamedTuple):
    """How a process failed: ``Failure(rank=1, process=4711, host="a", code=-9, message="")``."""

    rank: int
    process: int
    host: str
    code: int
    message: str


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``burnish ARGUMENTS`` in several processes of a Ray cluster, and return the exit code.

    What the processes write appears on this one's stdout. Of their errors, the first one's message is shown. If this
    process ends, however it ends, so do they.

    Raises:
        UserError: if Ray is not installed, there is no such cluster, or it has no room for the processes.
        LostProcessError: if a process was killed.
    """
    ray = join(None)
    gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    # Ray Train would wait without end for a cluster that is too small
    Reservation(Actors(workers=count, gpus=gpus), "parallel.launcher").close()
    console = ray.remote(_Console).options(num_cpus=0).remote()
    with tempfile.TemporaryDirectory(prefix="burnish-ray-") as folder:
        job = {"arguments": list(arguments), "folder": os.getcwd(), "environment": _environment(), "console": console}
        fitting = _Fitting(job, count, gpus, folder)
        termination = Termination()
        with termination.handled(), termination.deferred():
            while fitting.running(POLL_SECONDS):
                _show(ray.get(console.read.remote()))
                if termination.requested:
                    ray.get(console.stop.remote())  # the processes save a checkpoint, and end
        _show(ray.get(console.read.remote()))
        failures = [Failure(*failure) for failure in ray.get(console.failures.remote())]
    if fitting.error is None:
        return 0
    return _reported(failures, fitting.error)


def _environment() -> dict[str, str]:
    """The variables of this process that its processes get too. Others, such as tokens, are those of their machine."""
    names = [name for name in os.environ if name.startswith("OMP_") or name == "BURNISH_CACHE"]
    return {name: os.environ[name] for name in names} | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _reported(failures: Sequence[Failure], error: BaseException) -> int:
    """Show the message of the first process that failed, and return its exit code.

    Raises:
        LostProcessError: if it was killed, or Ray lost it.
    """
    for failure in sorted(failures, key=lambda failure: failure.code >= 0):
        if failure.code < 0:
            raise LostProcessError(
                f"rank {failure.rank} (process {failure.process} on {failure.host}) was killed by signal "
                f"{-failure.code}, and the other processes were ended. If nobody killed it, the machine may have run "
                "out of memory. Run the same command again to resume"
            )
        if failure.message:
            sys.stderr.write(failure.message)
            sys.stderr.flush()
            return failure.code
    raise LostProcessError(f"Ray Train ended the processes: {last_words(error)}. Run the same command again to resume")


class _Fitting:
    """Ray Train at work in a thread, so that this process can show what is written, and handle signals itself."""

    def __init__(self, job: Mapping[str, Any], count: int, gpus: float, folder: str) -> None:
        self.error: BaseException | None = None
        self._job, self._count, self._gpus, self._folder = job, count, gpus, folder
        self._thread = threading.Thread(target=self._run, name="burnish-ray", daemon=True)
        self._thread.start()

    def running(self, seconds: float) -> bool:
        """Whether the processes are still running after so many seconds."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from burnish.config.ray_ranks import RanksConfig

        logging.getLogger("ray.train").setLevel(logging.CRITICAL)  # it would show tracebacks besides our message
        each = {"CPU": 1.0} | ({"GPU": self._gpus} if self._gpus else {})
        try:
            TorchTrainer(
                run_process,
                train_loop_config=dict(self._job),
                torch_config=RanksConfig(),
                scaling_config=ScalingConfig(
                    num_workers=self._count, use_gpu=bool(self._gpus), resources_per_worker=each
                ),
                run_config=RunConfig(name="run", storage_path=self._folder),
            ).fit()
        except BaseException as error:
            self.error = error


class _Console:
    """What the processes write and how they failed, in an actor that all of them reach."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._failures: list[tuple[Any, ...]] = []
        self._stopped = False

    def write(self, text: str) -> bool:
        """Add text. Returns whether the processes are to stop."""
        self._text.append(text)
        return self._stopped

    def read(self) -> str:
        """The text since the last call."""
        text, self._text = self._text, []
        return "".join(text)

    def fail(self, *failure: Any) -> None:
        """Note a failure."""
        self._failures.append(failure)

    def failures(self) -> list[tuple[Any, ...]]:
        """All failures, in order."""
        return self._failures

    def stop(self) -> None:
        """Make the processes stop."""
        self._stopped = True


# --- in a worker of Ray Train -------------------------------------------------------------------------------------


def run_process(job: Mapping[str, Any]) -> None:
    """Run ``burnish ARGUMENTS`` as one of the processes, and relay what it writes."""
    import ray

    console = job["console"]
    with tempfile.TemporaryDirectory(prefix="burnish-run-") as outcome:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        ranks = {name: os.environ[name] for name in names}
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray sets it
        own = {LAUNCHER: str(os.getpid()), OUTCOME: outcome, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        process = subprocess.Popen(
            [sys.executable, "-m", "burnish", *job["arguments"]],
            cwd=job["folder"],
            env=inherited | job["environment"] | ranks | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        relay = threading.Thread(target=_relay, args=(process.stdout, console), daemon=True)
        relay.start()
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if ray.get(console.write.remote("")):
                process.terminate()
                process.wait()
        relay.join()
        if not process.returncode:
            return
        message = Path(outcome) / MESSAGE
        code = int((Path(outcome) / CODE).read_text()) if (Path(outcome) / CODE).is_file() else process.returncode
        text = message.read_text("utf-8") if message.is_file() else ""
        failure = int(ranks["RANK"]), process.pid, socket.gethostname(), code, text
        ray.get(console.fail.remote(*failure))
        if not text and code >= 0:
            time.sleep(GRACE_SECONDS)
        raise RuntimeError(f"rank {ranks['RANK']} ended with exit code {process.returncode}")


def _relay(lines: Any, console: Any) -> None:
    import ray

    for line in lines:
        ray.get(console.write.remote(line))
    lines.close()
