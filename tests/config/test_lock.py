"""Only one run at a time can use a folder, and a killed run leaves no lock."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.config.lock import LOCK, locked
from burnish.errors import UserError

HOLD = "import sys, time\nfrom pathlib import Path\nfrom burnish.config.lock import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that locks the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_folder_that_is_in_use_is_refused_by_name_until_its_process_is_killed(tmp_path: Path) -> None:
    other = hold(tmp_path)
    try:
        names = rf"{tmp_path} is in use by process {other.pid} on {socket.gethostname()} since \d{{4}}-"
        with pytest.raises(UserError, match=names), locked(tmp_path):
            pass
    finally:
        end(other)
    assert (tmp_path / LOCK).is_file(), "a killed process cannot remove it"
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert not list(tmp_path.iterdir())


def test_one_process_cannot_run_a_folder_twice_and_an_error_releases_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"), locked(tmp_path):
            pass
        raise KeyError
    with locked(tmp_path):
        pass


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = HOLD.replace("    print", "    import os\n    if os.fork():\n        time.sleep(60)\n    print")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        end(process)
        with locked(tmp_path):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_of_two_processes_that_wait_for_a_third_one_gets_the_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from burnish.config.lock import locked\nfrom burnish.errors import UserError\n"
        "folder = Path(sys.argv[1])\n"
        "for _ in range(300):\n"
        "    try:\n"
        "        with locked(folder):\n"
        "            (folder / 'inside').mkdir()\n"
        "            (folder / 'inside').rmdir()\n"
        "    except UserError:\n"
        "        pass\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(UserError, match=r"cannot lock files .*: name a folder on another file system"),
        locked(tmp_path),
    ):
        pass


def test_two_runs_of_one_folder(tmp_path: Path) -> None:
    """On the command line, the second run ends immediately with exit code 2, and the first run completes."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n\ndef make(folder, seed):\n    (folder / 'begun').touch()\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.05)\n"
    )
    (tmp_path / "slow.yaml").write_text("name: slow\nstages: [{name: make, run: 'slow.py:make'}]\n")
    command = [sys.executable, "-m", "burnish", "run", "slow.yaml", "out=run"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "run" / ".make.partial" / "begun").exists() and time.monotonic() < until:
            time.sleep(0.02)
        second = subprocess.run([*command, "--fresh"], cwd=tmp_path, capture_output=True, text=True)
        assert second.returncode == 2 and f"in use by process {first.pid}" in second.stderr
    finally:
        (tmp_path / "go").touch()
        assert first.wait() == 0
    assert (tmp_path / "run" / "make" / "begun").is_file() and not (tmp_path / "run" / LOCK).exists()
