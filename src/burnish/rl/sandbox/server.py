"""The fork server: starts processes for snippets, enforces their limits, and keeps the processes of sessions.

It is one event loop in a process of its own, which never runs code of a model, and never waits for a process that did.
It ends, with all other processes of the sandbox, when the trainer ends.

How a process runs a snippet: the server writes the snippet into a file in memory. It sends this file, a new socket and
the write end of a pipe to the process that ran the snippet before, which forks twice and ends the process in the
middle, so that the new process is a child of the server. The new process says hello, and the kernel tells the server
which process that is. The server sets limits and lets it run. The process sends its result and is stopped with SIGSTOP
until it has to fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from burnish.rl.sandbox import linux, seccomp, snippet
from burnish.rl.sandbox.types import REASONS, History, Limits, Reason, Report

START_SECONDS = 10.0
"""A process that takes longer to fork has been changed by what it ran. It is ended."""

ATTEMPTS = 2
"""So often a job is started if processes of its session end early."""

MESSAGE = 2**18  # bytes of the longest message of a process
REQUEST_SECONDS = 10.0


class Settings(NamedTuple):
    """What the trainer passes to the server, as JSON.

    ``Settings(trainer=4711, preload=["math"], path=[], folder="/tmp/x", limits={"memory": 2**29}, protected=True,
    processes=32, parallel=2)``
    """

    trainer: int
    preload: list[str]
    path: list[str]
    folder: str
    limits: dict[str, Any]
    protected: bool
    processes: int
    parallel: int


@dataclass(eq=False)
class Job:
    """A request: run the last of the snippets after the others. ``position`` is the one to run next."""

    reply: socket.socket
    snippets: History
    position: int = 0
    attempts: int = 0


@dataclass(eq=False)
class Process:
    """A process that is about to run a snippet, runs it, or keeps its namespace for the next one."""

    history: History
    connection: socket.socket
    state: Literal["starting", "running", "idle", "dead"] = "starting"
    pid: int = 0
    pidfd: int = -1
    parent: Process | None = None
    job: Job | None = None
    deadline: float = 0.0
    pipe: int = -1
    output: bytearray = field(default_factory=bytearray)
    starting: int = 0  # children
    forks: int = 0  # system calls to fork that are still allowed, to the process and to the one in the middle


class Server:
    """The event loop."""

    def __init__(self, control: socket.socket, trainer: int, settings: Settings) -> None:
        self.settings = settings
        self.limits = Limits(**settings.limits)
        self.control = control
        self.trainer = trainer  # a pidfd
        self.events = selectors.DefaultSelector()
        self.queue: deque[Job] = deque()
        self.active = 0  # jobs that have left the queue and have no answer
        self.busy: list[Process] = []  # those that are starting or running
        self.idle: OrderedDict[History, Process] = OrderedDict()  # least recently used first
        self.listener = -1

    # --- the start and the end ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fork the root process, wait until it has preloaded its modules, and tell the trainer."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                snippet.root(theirs, self.settings.preload, self.settings.path, self.settings.protected)
            finally:  # an error must not reach what the server does at its end
                os._exit(1)
        theirs.close()
        os.setpgid(pid, pid)
        root = self.idle[()] = Process((), ours, "idle", pid)
        self._wait_for(ours)
        message, listeners, _, _ = socket.recv_fds(ours, MESSAGE, 1)
        report = Report(**json.loads(message)) if message else Report("the process that preloads modules ended")
        self.control.send(json.dumps(asdict(report)).encode())
        if report.error is not None:
            raise SystemExit(0)
        if listeners:
            self.listener = listeners[0]
            self._watch(self.listener, self._on_fork)
        with open(f"/proc/{pid}/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        for name, value in {
            resource.RLIMIT_AS: size + self.limits.memory,
            resource.RLIMIT_NOFILE: self.limits.open_files,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }.items():
            resource.prlimit(pid, name, (value, value))
        self._watch_end(root)

    def _wait_for(self, root: socket.socket) -> None:
        """Wait for the report of the root process, or exit with the trainer. Importing its modules may take forever."""
        with selectors.DefaultSelector() as events:
            for file in (root, self.trainer, self.control):
                events.register(file, selectors.EVENT_READ)
            if root not in [key.fileobj for key, _ in events.select()]:
                raise SystemExit(0)

    def run(self) -> None:
        """Serve until the trainer ends or closes its end of the socket."""
        self._watch(self.trainer, lambda: sys.exit(0))
        self._watch(self.control, self._on_request)
        while True:
            deadlines = [process.deadline for process in self.busy]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self.events.select(timeout):
                if self.events.get_map().get(key.fd) is key:  # else an earlier event of this round removed it
                    key.data()
            for process in [process for process in self.busy if process.deadline <= time.monotonic()]:
                self._on_deadline(process)
            self._reap_orphans()
            while self.queue and self.active < self.settings.parallel:
                job = self.queue.popleft()
                self.active += 1
                self._step(job)

    def close(self) -> None:
        """Kill all processes."""
        for process in [*self.busy, *self.idle.values()]:
            self._kill(process)

    def _watch(self, file: int | socket.socket, handler: Callable[[], None]) -> None:
        self.events.register(file, selectors.EVENT_READ, handler)

    def _unwatch(self, file: int | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.events.unregister(file)

    # --- requests -------------------------------------------------------------------------------------------------

    def _on_request(self) -> None:
        """Receive a request: one byte with the socket for the answer, which holds the snippets as JSON."""
        message, received, _, _ = socket.recv_fds(self.control, 1, 1)
        if not message:
            raise SystemExit(0)
        reply = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, received[0])
        reply.settimeout(REQUEST_SECONDS)
        request = bytearray()
        try:
            while part := reply.recv(2**20):
                request += part
            self.queue.append(Job(reply, tuple(json.loads(request))))
        except (OSError, ValueError):  # the trainer's thread gave up
            reply.close()

    def _answer(self, job: Job, reason: Reason, value: str, output: str, kept: bool) -> None:
        self.active -= 1
        with contextlib.suppress(OSError), job.reply:
            answer = {"reason": reason, "value": value, "output": output, "kept": kept}
            job.reply.sendall(json.dumps(answer).encode())

    # --- forks ----------------------------------------------------------------------------------------------------

    def _step(self, job: Job) -> None:
        """Let a process fork for the next snippet of a job: the one whose history is the longest that fits."""
        job.position = max(len(history) for history in self.idle if self._fits(history, job))
        history = job.snippets[: job.position]
        parent = self.idle[history]
        self.idle.move_to_end(history)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        read, write = os.pipe()
        os.set_blocking(read, False)
        file = os.memfd_create("snippet")
        with open(file, "wb", closefd=False) as content:
            content.write(job.snippets[job.position].encode("utf-8", "surrogatepass"))
        process = Process(job.snippets[: job.position + 1], ours, parent=parent, job=job, pipe=read)
        process.deadline = time.monotonic() + START_SECONDS
        self.busy.append(process)
        parent.starting += 1
        parent.forks += 2
        try:
            socket.send_fds(parent.connection, [snippet.COMMAND], [theirs.fileno(), write, file])
            os.kill(parent.pid, signal.SIGCONT)
        except OSError:  # it reads no commands, or has just ended
            process.deadline = 0.0
        finally:
            theirs.close()
            os.close(write)
            os.close(file)
        self._watch(ours, lambda: self._on_message(process))
        self._watch(read, lambda: self._on_output(process))

    @staticmethod
    def _fits(history: History, job: Job) -> bool:
        return len(history) < len(job.snippets) and job.snippets[: len(history)] == history

    def _on_fork(self) -> None:
        """Decide about a fork: two for each command, by the process that got it and its child in the middle."""
        with contextlib.suppress(OSError):
            number, pid = seccomp.receive(self.listener)
            process = self._idle_process(pid) or self._idle_process(_parent(pid))
            allow = process is not None and process.forks > 0
            if process is not None and allow:
                process.forks -= 1
            seccomp.decide(self.listener, number, allow)

    def _idle_process(self, pid: int) -> Process | None:
        return next((process for process in self.idle.values() if process.pid == pid), None)

    def _started(self, process: Process) -> None:
        """A process has started, or will not: its parent waits for the next command, and needs no time for that."""
        parent, process.parent = process.parent, None
        if parent is not None:
            parent.starting -= 1
            if parent.starting == 0 and parent.state == "idle":
                parent.forks = 0
                if parent.history:
                    self._signal(parent, signal.SIGSTOP)

    # --- what processes do ----------------------------------------------------------------------------------------

    def _on_message(self, process: Process) -> None:
        if process.state == "starting":
            self._on_hello(process)
        elif process.state == "running":
            self._on_result(process)

    def _on_hello(self, process: Process) -> None:
        try:
            message, control, _, _ = process.connection.recvmsg(MESSAGE, socket.CMSG_SPACE(12))
            # struct ucred {pid, uid, gid}, which the kernel fills in: man 7 unix
            pid = next(struct.unpack("=iii", data)[0] for level, _, data in control if level == socket.SOL_SOCKET)
            known = {other.pid for other in (*self.busy, *self.idle.values())}
            if not message or pid in known:
                raise ChildProcessError
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # fails if it is not our child
            process.pid = pid
            os.setpgid(pid, pid)
            seconds = self.limits.cpu_seconds
            resource.prlimit(pid, resource.RLIMIT_CPU, (seconds, seconds + 1))
            self._watch_end(process)
            process.connection.send(snippet.GO)
        except (OSError, StopIteration, struct.error):
            self._fail_start(process)
            return
        process.state = "running"
        process.deadline = time.monotonic() + self.limits.wall_seconds
        self._started(process)

    def _watch_end(self, process: Process) -> None:
        process.pidfd = os.pidfd_open(process.pid)
        self._watch(process.pidfd, lambda: self._on_end(process))

    def _on_output(self, process: Process) -> None:
        """Collect what a process prints, and end it if that is too much."""
        try:
            printed = os.read(process.pipe, 2**16)
        except BlockingIOError:
            return
        if not printed:
            self._unwatch(process.pipe)
        process.output += printed
        if len(process.output) > self.limits.output:
            self._finish(process, "output", f"printed more than {self.limits.output:,} bytes", keep=False)

    def _on_result(self, process: Process) -> None:
        try:
            message = process.connection.recv(MESSAGE)
            if not message:  # it closed its socket, or ended: then `_on_end` knows more
                self._unwatch(process.connection)
                return
            result = json.loads(message)
            reason, value = result["reason"], result["value"]
            if reason not in REASONS or not isinstance(value, str):
                raise TypeError
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            self._finish(process, "crash", "sent a result that is not valid", keep=False)
            return
        while process.state == "running":  # what it printed last
            size = len(process.output)
            self._on_output(process)
            if len(process.output) == size:
                break
        if process.state == "running":
            self._finish(process, reason, snippet.cut(value), keep=reason in ("ok", "error", "denied"))

    def _on_end(self, process: Process) -> None:
        """Find out why a process ended."""
        self._signal(process, signal.SIGKILL)  # what it started, which only an unprotected process can do
        _, status, usage = os.wait4(process.pid, 0)
        process.pid = 0
        if not process.history:
            raise SystemExit(1)
        if process.state == "idle":
            self._forget(process)
            return
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU or usage.ru_utime + usage.ru_stime >= self.limits.cpu_seconds:
            self._finish(process, "cpu", f"took more than {self.limits.cpu_seconds} s of CPU time", keep=False)
        else:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._finish(process, "crash", f"its process ended: {how}", keep=False)

    def _on_deadline(self, process: Process) -> None:
        if process.state == "starting":
            self._fail_start(process)
        else:
            self._finish(process, "time", f"took more than {self.limits.wall_seconds:g} s", keep=False)

    # --- the end of a snippet -------------------------------------------------------------------------------------

    def _finish(self, process: Process, reason: Reason, value: str, keep: bool) -> None:
        """A snippet has ended. Run the next one of the job, or answer."""
        job = process.job
        assert job is not None
        process.job = None
        output = self._text(process)
        self._release(process)
        if keep and process.history not in self.idle:
            process.state = "idle"
            self._signal(process, signal.SIGSTOP)
            self.idle[process.history] = process
            self._evict(process)
        else:
            self._kill(process)
        if not keep or len(process.history) == len(job.snippets):
            self._answer(job, reason, value, output, keep)
        else:
            self._step(job)

    def _text(self, process: Process) -> str:
        limit = self.limits.output
        text = process.output[:limit].decode("utf-8", "replace")
        return text if len(process.output) <= limit else f"{text}... [cut after {limit:,} bytes]"

    def _release(self, process: Process) -> None:
        """A process that does not run has no pipe, and its socket is not read any more."""
        self.busy.remove(process)
        self._unwatch(process.connection)
        self._unwatch(process.pipe)
        os.close(process.pipe)
        process.output.clear()

    def _fail_start(self, process: Process) -> None:
        """A process could not be forked. Its parent is not used again."""
        job, parent = process.job, process.parent
        assert job is not None and parent is not None
        self._release(process)
        self._started(process)
        self._kill(process)
        if not parent.history:
            raise SystemExit(1)
        if parent.state == "idle":
            self._forget(parent)
        job.attempts += 1
        if job.attempts < ATTEMPTS:
            self._step(job)
        else:
            self._answer(job, "crash", "an earlier snippet of the session broke its process", "", kept=False)

    def _evict(self, newest: Process) -> None:
        """End the processes that have not been used for the longest time, if there are too many."""
        for process in list(self.idle.values()):
            if len(self.idle) - 1 <= self.settings.processes:
                return
            if process.history and not process.starting and process is not newest:
                self._forget(process)

    def _forget(self, process: Process) -> None:
        """End an idle process. Those that it was about to fork will be forked elsewhere."""
        if self.idle.get(process.history) is process:
            del self.idle[process.history]
        self._kill(process)
        for starting in [other for other in self.busy if other.parent is process]:
            starting.deadline = 0.0

    def _signal(self, process: Process, number: signal.Signals) -> None:
        if process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _kill(self, process: Process) -> None:
        """End a process with its group."""
        process.state = "dead"
        self._signal(process, signal.SIGKILL)
        if process.pidfd >= 0:
            self._unwatch(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = -1
        if process.pid:
            os.waitpid(process.pid, 0)
            process.pid = 0
        process.connection.close()

    def _reap_orphans(self) -> None:
        """Reap ended processes that the server does not know: those that an ended process had started."""
        known = {process.pid for process in (*self.busy, *self.idle.values())}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in known:  # its own event comes
                    break
                os.waitpid(ended.si_pid, 0)


def _parent(pid: int) -> int:
    """The parent of a process: the second field after its name in /proc/PID/stat (man 5 proc)."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def main(arguments: str) -> None:
    """Serve a trainer, which has passed its settings as JSON and its socket as standard input."""
    settings = Settings(**json.loads(arguments))
    try:
        _serve(settings)
    finally:
        shutil.rmtree(settings.folder, ignore_errors=True)


def _serve(settings: Settings) -> None:
    try:
        trainer = os.pidfd_open(settings.trainer)
    except ProcessLookupError:  # it has ended
        return
    if os.getppid() != settings.trainer:  # it has ended, and another process has its number
        return
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(settings.folder)
    # If memory runs out, the kernel ends a process of the sandbox first and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    server = Server(control, trainer, settings)
    try:
        server.start()
        server.run()
    finally:
        server.close()
