"""What docs/processes.md says: several processes give the results of one, and they end and resume together."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "processes.md"
SMALL = [
    "stages.prepare.with={rows: 64, pairs: 64, prompts: 64, held_out: 16}",
    *(f"stages.{stage}.trainer.num_train_epochs=1" for stage in ("sft", "reward", "ppo")),
    *(f"stages.{stage}.trainer.per_device_train_batch_size=16" for stage in ("sft", "reward", "ppo")),
    *(f"stages.{stage}.trainer.warmup_steps=0" for stage in ("sft", "reward")),
]
LONG = ["stages.sft.trainer.num_train_epochs=40", "stages.sft.trainer.save_steps=20"]
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run"]
TWO = "parallel.processes=2"


class Run:
    """A run of the recipe tiny in its own process."""

    def __init__(self, out: Path, *overrides: str, launcher: list[str] = PYTHON, **more: str) -> None:
        command = [*launcher, "burnish", "run", "tiny", *SMALL, f"out={out}", *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | more
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.output = ""

    def until(self, pattern: str) -> None:
        """Wait for a line."""
        for line in self.lines:
            self.output += line
            if re.search(pattern, line):
                return
        pytest.fail(f"no line {pattern}: {self.output}")

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        self.output += self.lines.read()
        self.lines.close()
        return self.process.wait(300)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        ranks: dict[int, int] = {}
        for process in descendants(self.process.pid):
            if "RANK" in (environment := environment_of(process)):
                ranks.setdefault(int(environment["RANK"]), process)  # its children come later
        return ranks


def descendants(process: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        children += [int(child) for child in path.read_text().split()]
    return [*children, *(inner for child in children for inner in descendants(child))]


def environment_of(process: int) -> Mapping[str, str]:
    """The variables with which a process was started."""
    try:
        text = Path(f"/proc/{process}/environ").read_text()
    except OSError:  # it has just ended
        return {}
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)  # type: ignore[misc]


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def finished(*arguments: Any, **more: Any) -> Run:
    run = Run(*arguments, **more)
    assert run.end() == 0, run.output
    return run


def results(folder: Path) -> dict[str, float]:
    """The numbers of the table of results."""
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    return {
        f"{stage['name']} {side} {name}": value
        for stage in stages
        for side, values in stage.get("results", {}).items()
        for name, value in values.items()
        if not name.endswith("second") and not name.endswith("seconds")
    }


def names(folder: Path) -> set[str]:
    """The files of a run, without the random states of its processes."""
    return {re.sub(r"rng_state\w*", "rng_state", str(path.relative_to(folder))) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    finished(out)
    return out


@pytest.mark.slow
def test_processes_that_burnish_starts_give_the_results_of_one(one: Path, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", TWO)
    assert results(tmp_path / "run") == pytest.approx(results(one), abs=1e-5)
    assert names(tmp_path / "run") == names(one)
    strange = [line for line in run.output.splitlines() if re.match(r"W\d|E\d|\[rank|\[transformers|\[W", line)]
    assert not strange, strange
    stages = json.loads((tmp_path / "run/manifest.json").read_text())["stages"]
    assert [(stage.get("processes"), stage.get("shard")) for stage in stages] == [(None, None)] + [(2, "none")] * 3


@pytest.mark.acceptance
def test_two_nodes_of_torchrun_give_the_results_of_one(one: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    nodes = [
        Run(tmp_path / "run", launcher=[*TORCHRUN, *shared, "--node-rank", str(rank), "-m"], BURNISH_CACHE=str(cache))
        for rank, cache in enumerate((tmp_path / "a", tmp_path / "b"))
    ]
    assert [node.end() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert results(tmp_path / "run") == pytest.approx(results(one), abs=1e-5)
    assert "burnish" not in nodes[1].output and "step" not in nodes[1].output  # only the first process shows the run


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "launcher, overrides",
    [
        ([*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m"], []),
        ([*PYTHON, "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m"], []),
        (PYTHON, [TWO, "parallel.shard=fsdp2"]),
    ],
    ids=["torchrun", "accelerate", "fsdp2"],
)
def test_other_launchers_and_shards_give_the_results_of_one(
    launcher: list[str], overrides: list[str], one: Path, tmp_path: Path
) -> None:
    finished(tmp_path / "run", *overrides, launcher=launcher)
    assert results(tmp_path / "run") == pytest.approx(results(one), abs=1e-5)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_its_run_resumes_in_one_process(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", TWO, *LONG)
    run.until(r"sft\] step \d+/160")
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    assert run.end() == 1
    last = run.output.splitlines()[-1]
    assert last.startswith(f"error: rank 1 (process {ranks[1]}) was killed by SIGKILL")
    assert "Traceback" not in run.output and not any(map(is_running, ranks.values()))
    again = finished(tmp_path / "run", *LONG)
    assert "started with processes: 2, shard: none and resumes with processes: 1, shard: none" in again.output


@pytest.mark.acceptance
@pytest.mark.parametrize("whom", ["rank 0", "rank 1", "all", "launcher"])
def test_a_run_killed_at_any_moment_resumes_with_the_same_bytes(whom: str, tmp_path: Path) -> None:
    finished(tmp_path / "whole", TWO, *LONG)
    seed = random.Random(whom)
    for _ in range(3):
        run = Run(tmp_path / "killed", TWO, *LONG)
        end = time.monotonic() + seed.uniform(5, 20)
        while run.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        ranks = run.ranks()
        of_rank = {f"rank {rank}": [process] for rank, process in ranks.items()}
        victims = ({"launcher": [run.process.pid], "all": [*ranks.values()]} | of_rank).get(whom, [run.process.pid])
        if run.process.poll() is None:
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
        run.end()
        time.sleep(2)
        assert not any(map(is_running, ranks.values()))
    finished(tmp_path / "killed", TWO, *LONG)
    weights = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").glob("*/model/*.safetensors")]
    assert weights
    for name in weights:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


SRUN = """#!{python}
import os, signal, subprocess, sys, time
tasks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(int(os.environ["SLURM_NTASKS"]))
]
while any(task.poll() is None for task in tasks):  # SLURM sends the signal to the tasks, not to srun
    if os.path.exists("time is up"):
        os.remove("time is up")
        [task.send_signal(signal.SIGTERM) for task in tasks]
    time.sleep(0.1)
sys.exit(max(task.returncode for task in tasks))
"""
SCONTROL = """#!{python}
import sys
if sys.argv[1] == "show":
    print("127.0.0.1")
else:
    print(*sys.argv[1:], file=open("requeued", "w"))
"""
BURNISH = """#!{python}
import os, sys
overrides = {overrides!r}
os.execv(sys.executable, [sys.executable, "-m", "burnish", "run", "tiny", *overrides])
"""


@pytest.mark.slow
def test_the_slurm_script_saves_requeues_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    tools = {"srun": SRUN, "scontrol": SCONTROL, "burnish": BURNISH}
    overrides = [*SMALL, *LONG, f"out={tmp_path / 'run'}"]
    for name, text in tools.items():
        (tmp_path / name).write_text(text.format(python=sys.executable, overrides=overrides))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = script.replace("$((20000 + SLURM_JOB_ID % 10000))", str(port))
    (tmp_path / "job.sh").write_text(script)
    slurm = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def submit(during: Callable[[str], None]) -> tuple[int, str]:
        job = subprocess.Popen(
            ["bash", "job.sh"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert job.stdout is not None
        output = ""
        for line in job.stdout:
            during(line)
            output += line
        job.stdout.close()
        return job.wait(60), output

    def end_time(line: str) -> None:
        if re.search(r"sft\] step \d+/160", line) and not Path("requeued").exists():
            Path("time is up").touch()

    code, output = submit(end_time)
    assert code == 143, output
    assert re.search(r"^ended by SIGTERM after saving a checkpoint of step \d+; run", output, re.MULTILINE), output
    assert output.count("SIGTERM") == 1
    assert Path("requeued").read_text() == "requeue 7\n"
    code, output = submit(lambda line: None)
    assert code == 0, output
    assert "resumes after step" in output
