"""The processes of a run: who they are, how the first one tells the others what to do, and how they end together.

The first process decides and writes. The others wait until it tells them to train a stage. They wait by asking a store
for a key from time to time, without the time limit of collectives, because a stage that makes rows may take hours.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from burnish.config.parallel import Parallel
from burnish.errors import LostProcessError, UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LAUNCHER = "BURNISH_LAUNCHER"
"""Environment variable with the id of the process of burnish run that started this one."""
OUTCOME = "BURNISH_OUTCOME"
"""Environment variable with the folder where the first process that fails leaves its message and exit code."""
MESSAGE, CODE = "message", "code"
FAILED = "failed"
"""Key of the store: the number of processes that have failed."""

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""A process that has not ended this long after another one failed is ended: it may wait for the one that failed."""
JOIN_SECONDS = 300.0
"""How long a process tries to reach the others when it starts."""
LEAVE_SECONDS = 60.0
"""How long the first process, which may hold the store, waits for the others to leave it."""


def world_size() -> int:
    """The number of processes that a launcher started; 1 without one."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdigit() else 1


class Processes:
    """The processes of a run, as one of them sees them: ``Processes()`` is a run of one process.

    ``rank`` is the number of this process, ``size`` how many there are, and ``sharded`` whether they share the weights.
    ``store`` is what all of them read and write; a run of one process has none.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank, self.size, self.sharded = rank, size, False
        self._store, self._group_store = store, store
        self._messages, self._left, self._other_failed = 0, threading.Event(), False

    @classmethod
    def join(cls) -> Processes:
        """Meet the processes that a launcher started, which it describes in environment variables.

        Raises:
            UserError: if the variables are incomplete.
            LostProcessError: if the other processes cannot be reached.
        """
        if (size := world_size()) == 1:
            return cls()
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(
                f"WORLD_SIZE={size}, but {', '.join(missing)} not set: start the processes with torchrun or accelerate "
                "launch, which set all of them, or unset WORLD_SIZE"
            )
        joined = cls(int(os.environ["RANK"]), size)
        threading.Thread(target=joined._watch, args=(os.getppid(),), name="burnish-watch", daemon=True).start()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        try:
            store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
        except (RuntimeError, ConnectionError) as error:
            raise LostProcessError(joined._unreachable(error)) from error
        joined._group_store, joined._store = dist.PrefixStore("group", store), dist.PrefixStore("burnish", store)  # pyright: ignore[reportPrivateImportUsage]
        return joined

    def to_start(self, settings: Parallel) -> int:
        """The number of processes that this one has to start; 0 if it is one of the run.

        Raises:
            UserError: if a launcher started another number of processes than the recipe sets, or than it was asked for.
        """
        if "WORLD_SIZE" not in os.environ:
            if settings.processes == 1 and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
                raise UserError(
                    "accelerate launch has started one process, since it starts several only on GPUs: use torchrun "
                    "--nproc-per-node N, or parallel.processes=N without a launcher"
                )
            return settings.processes if settings.processes > 1 else 0
        if "processes" in settings.model_fields_set and settings.processes != self.size:
            raise UserError(
                f"parallel.processes is {settings.processes}, but WORLD_SIZE={self.size}: torchrun or another launcher "
                f"started {self.size} processes: remove parallel.processes, since the launcher decides, or start "
                "burnish run without a launcher"
            )
        return 0

    def connect(self, settings: Parallel) -> None:
        """Choose this process's GPU and threads, and create the process group of the collectives.

        Raises:
            UserError: if there are fewer GPUs than processes, or weights are to be sharded in one process.
            LostProcessError: if the other processes cannot be reached.
        """
        self.sharded = settings.shard != "none"
        if self._store is None:
            if self.sharded:
                raise UserError(
                    f"parallel.shard: {settings.shard} needs several processes: set parallel.processes, or remove shard"
                )
            return
        import torch
        import torch.distributed as dist

        from burnish.machine import cores

        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpu = torch.cuda.is_available()
        if gpu:
            if (gpus := torch.cuda.device_count()) < local_size:
                raise UserError(f"{local_size} processes on a machine with {gpus} GPUs: start one process per GPU")
            torch.cuda.set_device(local_rank)
        if "OMP_NUM_THREADS" not in os.environ:  # else every process would use all cores
            torch.set_num_threads(max(1, cores() // local_size))
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # accelerate reads it
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo",
                store=self._group_store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=settings.timeout),
            )
        except (RuntimeError, ConnectionError) as error:
            raise LostProcessError(self._unreachable(error)) from error

    def _unreachable(self, error: Exception) -> str:
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"rank {self.rank} of {self.size} cannot reach the others through {at}: {str(error).splitlines()[0]}"

    @property
    def first(self) -> bool:
        """Whether this process is the one that decides and writes."""
        return self.rank == 0

    def tell(self, message: Mapping[str, Any] | None) -> None:
        """Tell the others what to do next: ``{"number": 2, ...}``; None ends them. Only the first process calls it."""
        if self._store is not None:
            self._store.set(f"message {self._messages}", json.dumps(message))
            self._messages += 1

    def told(self) -> dict[str, Any] | None:
        """Wait for the next message of the first process, for as long as it takes.

        Raises:
            LostProcessError: if another process has failed.
        """
        assert self._store is not None
        key = f"message {self._messages}"
        while not self._store.check([key]):
            if self._store.check([FAILED]):
                raise LostProcessError(f"rank {self.rank}: another process has failed")
            time.sleep(POLL_SECONDS)
        self._messages += 1
        return json.loads(self._store.get(key))

    def leave(self) -> None:
        """Leave the run when it is done. The first process is the last one to leave."""
        if self._store is None:
            return
        if not self.first:
            self._left.set()
            self._store.add("left", 1)
            return
        self.tell(None)
        end = time.monotonic() + LEAVE_SECONDS
        while self._store.add("left", 0) < self.size - 1 and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 10)
        self._left.set()

    @contextmanager
    def one_message(self) -> Iterator[None]:
        """A context in which errors of several processes are shown once, as the message of the first that fails."""
        try:
            yield
        except BaseException as error:
            if self.size == 1:
                raise
            for name in (signal.SIGTERM, signal.SIGINT):  # launchers end the others in this way
                signal.signal(name, signal.SIG_IGN)
            lost = self._lost(error)
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stderr = self._errors()
            self._left.set()
            if self.first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(5 * POLL_SECONDS)  # this process holds the store, in which the others still read that
            if lost is not None:
                raise LostProcessError(lost) from error
            raise

    def _errors(self) -> TextIO:
        """Where this process, which has failed, writes its message: nowhere if another one failed before."""
        outcome = os.environ.get(OUTCOME)
        try:
            first = self._store is None or self._store.add(FAILED, 1) == 1
        except RuntimeError:  # the process that held the store was killed
            first = outcome is None and self.rank == 1 and not self._other_failed
        if not first:
            return io.StringIO()
        return sys.stderr if outcome is None else (Path(outcome) / MESSAGE).open("w", encoding="utf-8")

    def _lost(self, error: BaseException) -> str | None:
        """A message, if an error means that a collective failed because of another process."""
        import torch.distributed as dist

        text = str(error)
        if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "gloo" in text):
            return None
        where = f"rank {self.rank} on {socket.gethostname()}"
        if "timed out" in text.lower() or "timeout" in text.lower():
            return (
                f"{where} waited for the other processes until the time limit, parallel.timeout: one of them hangs, or "
                "needs longer for its part, such as a slow reward or a large checkpoint; then set a larger "
                "parallel.timeout. Run the same command again to resume"
            )
        return (
            f"{where} lost its connection to another process, which was killed or whose machine failed. Run the same "
            "command again to resume"
        )

    def _watch(self, parent: int) -> None:
        """End this process if its launcher has ended, or if another one has failed and this one does not notice."""
        known = os.environ.get(LAUNCHER, str(parent)) == str(parent)  # not the process that adopts orphans
        while not self._left.wait(POLL_SECONDS):
            if os.getppid() != parent or not known:
                os._exit(1)
            try:
                self._other_failed |= self._store is not None and self._store.check([FAILED])
                stop = self._other_failed
            except RuntimeError:  # the process that held the store is gone
                stop = True
            if stop and not self._left.wait(GRACE_SECONDS):
                if self.rank == 1 and not self._other_failed and OUTCOME not in os.environ:
                    print("error: rank 1 lost its connection to rank 0", file=sys.stderr, flush=True)
                os._exit(1)


def end_now(code: int) -> NoReturn:
    """End one of several processes without taking its process group down.

    The destructor of gloo holds the interpreter while it waits for a thread that may need it.
    """
    outcome = os.environ.get(OUTCOME)
    if outcome is not None and isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.name == f"{outcome}/{MESSAGE}":
        (Path(outcome) / CODE).write_text(str(code))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
