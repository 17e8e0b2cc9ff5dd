"""What docs/processes.md says: several processes give the results of one, and they end and resume together."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from run_processes import PYTHON, TORCHRUN, TWO, TWO_OF_TORCHRUN, Run, finished, kill, table

PAGE = Path(__file__).parent.parent / "docs" / "processes.md"
SMALL = [
    "stages.prepare.with={rows: 64, pairs: 64, prompts: 64, held_out: 16}",
    *(f"stages.{stage}.trainer.num_train_epochs=1" for stage in ("sft", "reward", "ppo")),
    *(f"stages.{stage}.trainer.per_device_train_batch_size=16" for stage in ("sft", "reward", "ppo")),
    *(f"stages.{stage}.trainer.warmup_steps=0" for stage in ("sft", "reward")),
]
LONG = ["stages.sft.trainer.num_train_epochs=40", "stages.sft.trainer.save_steps=20"]


def names(folder: Path) -> set[str]:
    """The files of a run, without the random states of its processes."""
    return {re.sub(r"rng_state\w*", "rng_state", str(path.relative_to(folder))) for path in folder.rglob("*")}


def tiny(out: Path, *overrides: str, launcher: list[str] = PYTHON, **variables: str) -> Run:
    """A run of the recipe tiny that has ended without an error."""
    return finished("tiny", *SMALL, f"out={out}", *overrides, launcher=launcher, **variables)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    tiny(out)
    return out


@pytest.mark.slow
def test_processes_that_burnish_starts_give_the_results_of_one(one: Path, tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", TWO)
    assert table(tmp_path / "run") == pytest.approx(table(one), abs=1e-5)
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
        Run(
            "tiny",
            *SMALL,
            f"out={tmp_path / 'run'}",
            launcher=[*TORCHRUN, *shared, "--node-rank", str(rank), "-m"],
            BURNISH_CACHE=str(tmp_path / f"cache{rank}"),
        )
        for rank in range(2)
    ]
    assert [node.end() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert table(tmp_path / "run") == pytest.approx(table(one), abs=1e-5)
    assert "burnish" not in nodes[1].output and "step" not in nodes[1].output  # only the first process shows the run


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "launcher, overrides",
    [
        (TWO_OF_TORCHRUN, []),
        ([*PYTHON, "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m"], []),
        (PYTHON, [TWO, "parallel.shard=fsdp2"]),
    ],
    ids=["torchrun", "accelerate", "fsdp2"],
)
def test_other_launchers_and_shards_give_the_results_of_one(
    launcher: list[str], overrides: list[str], one: Path, tmp_path: Path
) -> None:
    tiny(tmp_path / "run", *overrides, launcher=launcher)
    assert table(tmp_path / "run") == pytest.approx(table(one), abs=1e-5)


@pytest.mark.acceptance
def test_a_killed_rank_is_named_and_its_run_resumes_in_one_process(tmp_path: Path) -> None:
    run = Run("tiny", *SMALL, *LONG, f"out={tmp_path / 'run'}", TWO)
    run.until(r"sft\] step \d+/160")
    ranks = run.ranks()
    kill(run, "rank 1")
    assert run.process.returncode == 1
    last = run.output.splitlines()[-1]
    assert last.startswith(f"error: rank 1 (process {ranks[1]}) was killed by SIGKILL")
    assert "Traceback" not in run.output
    again = tiny(tmp_path / "run", *LONG)
    assert "started with processes: 2, shard: none and resumes with processes: 1, shard: none" in again.output


GRPO = """
name: small
method: {name: grpo}
model: base
reward: [{function: "rewards.py:score"}]
data: {train: prompts.jsonl}
generation: {max_new_tokens: 4, samples: 2}
parallel: {processes: 2, timeout: 6}
trainer: {per_device_train_batch_size: 2, max_steps: 2}
"""
RAISES = "raise ValueError('broken on rank 1')"
HANGS = "__import__('time').sleep(600)"


@pytest.mark.parametrize(
    "does, message",
    [
        pytest.param(
            RAISES,
            r"error: reward score .*raised ValueError .*: broken on rank 1",
            marks=pytest.mark.slow,
            id="raises",
        ),
        pytest.param(
            HANGS,
            r"error: rank 0 on \S+ waited for the other processes until the time limit, parallel\.timeout: one of",
            marks=pytest.mark.acceptance,
            id="hangs",
        ),
    ],
)
def test_an_error_in_one_process_ends_all_with_one_message(
    does: str, message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "base")
    (tmp_path / "small.yaml").write_text(GRPO)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n{"prompt": "2 + 1"}\n')
    lines = ["import os", "def score(answers):", f"    if os.environ['RANK'] == '1': {does}", "    return [1.0, 2.0]"]
    (tmp_path / "rewards.py").write_text("\n".join(lines))
    run = Run("small.yaml", cwd=tmp_path, BURNISH_CACHE=str(tmp_path / "cache"))
    assert run.end() == 1, run.output
    (shown,) = [line for line in run.output.splitlines() if line.startswith("error:")]
    assert re.match(message, shown), run.output
    assert run.output.count("Traceback") == (does == RAISES)  # of the user's own frames


SRUN = """#!{python}
import os, signal, subprocess, sys, time
tasks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}})
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


@pytest.mark.acceptance
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
    slurm = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
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
