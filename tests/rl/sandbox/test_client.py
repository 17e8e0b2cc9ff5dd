"""The sandbox: results, sessions that fork, and attacks, all of which end as failed snippets with a reason.

If a limit were missing, no attack could hurt this machine: each is bounded by itself.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.errors import UserError
from burnish.rl.sandbox.client import Sandbox, enforced
from burnish.rl.sandbox.types import Limits

LIMITS = Limits(cpu_seconds=1, wall_seconds=5.0, memory=2**28, output=1000)
CLOCK = "import time\nstarted = time.perf_counter()\nstarted"


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    if "protection" in (missing := enforced()):
        pytest.skip(missing["protection"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sandboxes of the test, in this process or another one, make their working folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, preload=("math",)) as sandbox:
        yield sandbox


@pytest.fixture
def limited() -> Iterator[Sandbox]:
    """A sandbox that ends snippets after half a second."""
    with Sandbox(Limits(wall_seconds=0.5), preload=()) as sandbox:
        yield sandbox


def processes_of(server: int) -> list[int]:
    """The processes of the session of a server, the ended ones that are not reaped among them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, IndexError):
            continue
        if session == server:
            found.append(int(entry.name))
    return found


def server_of(sandbox: Sandbox) -> int:
    server = sandbox._server
    assert server is not None
    return server._process.pid


def wait_until_gone(server: int, folder: Path) -> None:
    deadline = time.monotonic() + 10
    while left := [*processes_of(server), *folder.iterdir()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "output", "value", "reason"),
    [
        ("", "", "", "ok"),
        ("x = 4", "", "", "ok"),
        ("x = 4\nprint('four', x)\nx * 2", "four 4\n", "8", "ok"),
        ("import sys\nprint('a', end='')\nprint('b', file=sys.stderr, end='')\nNone", "ab", "", "ok"),
        ("print('before')\n1 / 0", "before\n", "ZeroDivisionError: division by zero", "error"),
        ("f(", "", "SyntaxError: '(' was never closed", "error"),
        ("raise SystemExit(3)", "", "SystemExit: 3", "error"),
        ("class Bad(Exception):\n    __str__ = None\nraise Bad", "", "Bad: <exception str() failed>", "error"),
        ("'é' + chr(0xD800)", "", r"'é\ud800'", "ok"),
        ("print(chr(0xD800))", "\\ud800\n", "", "ok"),
        ("'a' * 20000", "", "'" + "a" * 9999 + "... [cut after 10,000 characters]", "ok"),
        ("print('a' * 2000)", "a" * 1000 + "... [cut after 1,000 bytes]", "printed more than 1,000 bytes", "output"),
        (
            "import dataclasses, json, random, re\n@dataclasses.dataclass\nclass P:\n    x: int\nP(1)",
            "",
            "P(x=1)",
            "ok",
        ),
        ("import os\ndict(os.environ)", "", "{}", "ok"),
        ("input()", "", "EOFError: EOF when reading a line", "error"),
        ("import numpy", "", "ModuleNotFoundError: No module named 'numpy'", "error"),
    ],
)
def test_results(code, output, value, reason, sandbox):
    result = sandbox.run(code)
    assert (result.output, result.value, result.reason) == (output, value, reason)


def test_snippets_do_not_depend_on_the_time_or_on_chance():
    code = "import datetime, random, time\n(time.time(), str(datetime.datetime.now()), random.random(), hash('a'))"
    values = []
    for _ in range(2):
        with Sandbox(preload=()) as sandbox:
            first = sandbox.run(code)
            values.append((first.value, sandbox.run(code, first.history).value))
    assert values[0] == values[1]
    assert values[0][0].startswith("(1577836800.0, '2020-01-01 00:00:00'")
    assert values[0][0] != values[0][1]  # a session continues the random sequence


def test_a_module_that_is_missing_cannot_be_preloaded():
    with pytest.raises(UserError, match="cannot preload math, nosuch: ModuleNotFoundError: No module named 'nosuch'"):
        Sandbox(preload=("math", "nosuch"))


def test_limits_are_checked():
    with pytest.raises(ValueError, match="cpu_seconds must be more than 0, not 0"):
        Limits(cpu_seconds=0)


def test_the_code_of_the_page_runs():
    page = Path(__file__).parents[3] / "docs" / "sandbox.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    subprocess.run([sys.executable, "-c", code], check=True)


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_sessions_fork_and_no_history_runs_twice(sandbox):
    first = sandbox.run(CLOCK)
    left = sandbox.run("x = 'left'\nstarted", first.history)
    right = sandbox.run("started", first.history)
    assert left.value == right.value == first.value
    assert sandbox.run("x", left.history).value == "'left'"
    assert sandbox.run("x", right.history).value == "NameError: name 'x' is not defined"
    assert sandbox.run("started").reason == "error"


def test_a_session_keeps_what_a_snippet_did_before_its_exception(sandbox):
    result = sandbox.run("x = 1\n1 / 0")
    assert sandbox.run("x", result.history).value == "1"


def test_a_session_is_as_before_after_a_snippet_that_exceeded_a_limit(sandbox):
    first = sandbox.run("x = 1")
    result = sandbox.run("x = 2\nprint('a' * 2000)", first.history)
    assert result.reason == "output"
    assert result.history == first.history
    assert sandbox.run("x", result.history).value == "1"


def test_namespaces_are_bounded_and_rebuilt():
    with Sandbox(LIMITS, preload=(), processes=3) as sandbox:
        first = sandbox.run(CLOCK)
        second = sandbox.run("x = 1", first.history)
        for number in range(5):
            sandbox.run(str(number))
        assert len(processes_of(server_of(sandbox))) == 1 + 1 + 3  # the server, the root, and the namespaces
        rebuilt = sandbox.run("x, started", second.history)
        assert rebuilt.reason == "ok"
        assert rebuilt.value != f"(1, {first.value})"
        assert len(processes_of(server_of(sandbox))) == 1 + 1 + 3


def test_threads_share_a_sandbox():
    def session(number: int) -> list[str]:
        values, history = [], ()
        for step in range(3):
            result = sandbox.run(f"x = {number}" if step == 0 else "x += 1\nx", history)
            values.append(result.value)
            history = result.history
        return values

    with Sandbox(preload=(), parallel=3) as sandbox, ThreadPoolExecutor(6) as threads:
        assert list(threads.map(session, range(6))) == [["", str(n + 1), str(n + 2)] for n in range(6)]


@pytest.mark.slow
def test_fifty_snippets_a_second_with_sympy(record_property: Callable[[str, object], None]):
    """A rollout has many episodes at the same time, so there is always a snippet to run on each core."""
    pytest.importorskip("sympy")
    code = "from sympy import expand, symbols\nx = symbols('x')\nexpand((x + 1) ** 3)"
    rates = []
    with Sandbox() as sandbox, ThreadPoolExecutor(4) as threads:
        for _ in range(8):  # the best of them, because other programs run at the same time
            began = time.perf_counter()
            results = list(threads.map(sandbox.run, [code] * 40))
            rates.append(len(results) / (time.perf_counter() - began))
            assert {result.value for result in results} == {"x**3 + 3*x**2 + 3*x + 1"}
    record_property("snippets per second", round(max(rates)))
    assert max(rates) >= 50


# --- attacks ----------------------------------------------------------------------------------------------------------

DENIED = {
    "fork": "import os\nfor _ in range(10):\n    os.fork()",
    "other processes": "import subprocess\nsubprocess.run(['true'])",
    "another program": "import os\nos.execv('/bin/true', ['true'])",
    "write outside": "open('/tmp/burnish-attack', 'w')",
    "write inside": "open('file', 'w')",
    "read a file": "open('/etc/hostname').read()",
    "read what the trainer can read": f"open({__file__!r}).read()",
    "list a folder": "import os\nos.listdir('/')",
    "read the environment of the trainer": "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
    "read its own memory map": "open('/proc/self/maps').read()",
    "TCP": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
    "UDP": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "Unix sockets": "import socket\nsocket.socketpair()",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)",
    "signal the group": "import os\nos.killpg(0, 15)",
    "leave the group": "import os\nos.setsid()",
    "remove its folder": "import os\nos.rmdir(os.getcwd())",
    "new namespaces": "import ctypes, os\nif ctypes.CDLL(None, use_errno=True).unshare(0x10000000):\n"
    "    raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
    "fork by ctypes": "import ctypes, os\nif ctypes.CDLL(None, use_errno=True).vfork() < 0:\n"
    "    raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
}


@pytest.mark.parametrize("code", DENIED.values(), ids=DENIED.keys())
def test_what_the_sandbox_denies(code, sandbox):
    result = sandbox.run(code)
    assert result.reason == "denied", result
    assert result.value.startswith("PermissionError: [Errno 1"), result  # 1 is EPERM, 13 is EACCES


ENDED = {
    "an endless loop": ("while True:\n    pass", "cpu", "took more than 1 s of CPU time"),
    "10 GB": ("x = bytearray(10**10)", "memory", "MemoryError"),
    "10 GB in pieces": ("x = [bytearray(10**7) for _ in range(40)]", "memory", "MemoryError"),
    "100 MB of output": ("for _ in range(100):\n    print('x' * 10**6)", "output", "printed more than 1,000 bytes"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "crash", "its process ended: SIGSEGV"),
    "an exit": ("import os\nos._exit(0)", "crash", "its process ended: exit code 0"),
    "an invalid result": ("import os\nos.write(3, b'[]')\nos.pause()", "crash", "sent a result that is not valid"),
    "a result that is too long": (
        "import os\nos.write(3, b'[' * 200_000)\nos.pause()",
        "crash",
        "sent a result that is not valid",
    ),
    "an unknown reason": (
        'import os\nos.write(3, b\'{"reason": "cpu!", "value": ""}\')',
        "crash",
        "sent a result that is not valid",
    ),
    "a catcher": (
        "import signal, time\nfor n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(n, lambda *_: None)\nwhile time.process_time() < 10:\n    pass",
        "cpu",
        "took more than 1 s of CPU time",
    ),
}


@pytest.mark.parametrize(("code", "reason", "value"), ENDED.values(), ids=ENDED.keys())
def test_what_ends_a_snippet(code, reason, value, sandbox):
    before = sandbox.run("x = 'before'")
    result = sandbox.run(code, before.history)
    assert (result.reason, result.value) == (reason, value)
    assert result.history == before.history
    assert sandbox.run("x", before.history).value == "'before'"


@pytest.mark.parametrize(
    "code",
    [
        "import time\nwhile True:\n    try:\n        time.sleep(5)\n    except BaseException:\n        pass",
        "import os, time\nfor _ in range(9):\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(1)",
        "import os\nos.close(3)\nos.close(1)\nimport time\ntime.sleep(5)",
    ],
)
def test_deadlines_end_snippets_that_wait(code, limited):
    began = time.monotonic()
    result = limited.run(code)
    assert (result.reason, result.value) == ("time", "took more than 0.5 s")
    assert time.monotonic() - began < 4
    assert len(processes_of(server_of(limited))) == 2  # the server and the root


@pytest.mark.parametrize(
    "fork",
    [
        "lambda: 1 / 0",
        "lambda: (real(), real(), real(), real())",  # two are allowed, and the two children wait for more
        "lambda: 0 if real() == 0 else 0",
    ],
)
def test_a_session_that_changes_how_its_process_forks_fails_alone(fork, sandbox):
    broken = sandbox.run(f"import os\nreal = os.fork\nos.fork = {fork}")
    result = sandbox.run("1", broken.history)
    assert (result.reason, result.value) == ("crash", "an earlier snippet of the session broke its process")
    assert sandbox.run("6 * 7").value == "42"


def test_without_protection_only_limits_hold():
    with Sandbox(LIMITS, preload=(), protected=False) as sandbox:
        assert sandbox.enforced()["files"] == sandbox.enforced()["processes"] == "not enforced"
        harmless = "import os\nlen(os.listdir('/')) > 1"
        assert sandbox.run(harmless).value == "True"
        assert sandbox.run("x = bytearray(10**10)").reason == "memory"
        code = "import os, time\nif os.fork() == 0:\n    time.sleep(30)\nos._exit(3)"
        assert sandbox.run(code).value == "its process ended: exit code 3"
        deadline = time.monotonic() + 10
        while len(processes_of(server_of(sandbox))) > 3:  # the server, the root and the process of the harmless snippet
            assert time.monotonic() < deadline
            sandbox.run(harmless)


WITHOUT_LANDLOCK = """
import ctypes, struct
from burnish.errors import UserError
from burnish.rl.python import Python
from burnish.rl.sandbox import linux, seccomp
from burnish.rl.sandbox.client import Sandbox, enforced

instructions = [
    seccomp._instruction(seccomp.LOAD_WORD, seccomp.NUMBER),
    seccomp._instruction(seccomp.JUMP_IF_EQUAL, linux.LANDLOCK_CREATE_RULESET[0], if_false=1),
    seccomp._instruction(seccomp.RETURN, seccomp.NOT_IMPLEMENTED),
    seccomp._instruction(seccomp.RETURN, seccomp.ALLOW),
]
code = ctypes.create_string_buffer(b"".join(instructions))
header = ctypes.create_string_buffer(struct.pack("@HP", len(instructions), ctypes.addressof(code)))
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.syscall(linux.SECCOMP, seccomp.SET_MODE_FILTER, 0, header)
print(enforced()["protection"])
with Sandbox(preload=(), protected=False) as sandbox:
    print(sandbox.run("6 * 7").value)
try:
    Python(preload=[])
except UserError as error:
    print(error)
print(Python(preload=[], sandbox="none").python("6 * 7"))
"""


def test_a_kernel_without_landlock_is_refused():
    shown = subprocess.run([sys.executable, "-c", WITHOUT_LANDLOCK], capture_output=True, text=True)
    refusal = (
        "the sandbox for Python did not start: this kernel cannot lock processes in with Landlock and seccomp "
        "(Function not implemented): use a newer kernel, or run the model's code without protection, with "
        "sandbox: none"
    )
    assert shown.stdout.splitlines() == [refusal, "42", refusal, "42"], shown.stderr


# --- nothing is left behind -------------------------------------------------------------------------------------------


def test_many_snippets_leave_no_processes_and_files(folder):
    files = len(os.listdir("/proc/self/fd"))
    with Sandbox(LIMITS, preload=(), processes=2) as sandbox:
        server = server_of(sandbox)
        counts = []
        for _ in range(3):
            for code in ("x = 1", "1 / 0", "import os\nos._exit(0)", "print('x' * 2000)"):
                sandbox.run("1", sandbox.run(code).history)
            counts.append((len(os.listdir(f"/proc/{server}/fd")), len(processes_of(server))))
        assert counts[0] == counts[1] == counts[2]
    wait_until_gone(server, folder)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_killed_trainer_leaves_nothing_behind(folder):
    code = (
        "from burnish.rl.sandbox.client import Sandbox\nimport threading\n"
        "sandbox = Sandbox(preload=())\nhistory = sandbox.run('x = 1').history\n"
        "threading.Thread(target=sandbox.run, args=('import time; time.sleep(15)', history)).start()\n"
        "print(sandbox._server._process.pid, flush=True)\ninput()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout is not None
        server = int(trainer.stdout.readline())
        deadline = time.monotonic() + 10
        while len(processes_of(server)) < 4 and time.monotonic() < deadline:  # server, root, x = 1, sleep
            time.sleep(0.02)
        assert len(processes_of(server)) == 4
        trainer.kill()
    wait_until_gone(server, folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_ends_during_the_start_leaves_nothing_behind(number, folder, tmp_path_factory):
    modules = tmp_path_factory.mktemp("modules")
    (modules / "slow.py").write_text(f"import time\nopen({str(modules / 'begun')!r}, 'w').close()\ntime.sleep(60)")
    code = f"import sys\nsys.path.append({str(modules)!r})\n"
    code += "from burnish.rl.sandbox.client import Sandbox\nSandbox(preload=('slow',))"
    trainer = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    with trainer:
        deadline = time.monotonic() + 20
        while not (modules / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (server,) = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        trainer.send_signal(number)
    wait_until_gone(int(server), folder)


def test_a_closed_sandbox_starts_no_new_server(folder):
    sandbox = Sandbox(LIMITS, preload=())
    server = server_of(sandbox)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(sandbox.run, "import time\ntime.sleep(4)")
        while len(processes_of(server)) < 3:
            time.sleep(0.02)
        sandbox.close()
        for run in (waiting.result, functools.partial(sandbox.run, "1")):
            with pytest.raises(RuntimeError, match="the sandbox is closed"):
                run()
    wait_until_gone(server, folder)


def test_a_killed_server_leaves_nothing_behind_and_is_replaced(folder):
    with Sandbox(LIMITS, preload=()) as sandbox:
        first = sandbox.run("x = 6")
        server = server_of(sandbox)
        os.kill(server, signal.SIGKILL)
        assert sandbox.run("x * 7", first.history).value == "42"
    wait_until_gone(server, folder)
