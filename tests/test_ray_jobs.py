"""The section on Ray of docs/processes.md: jobs and training processes in a cluster give the results of one process."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from run_processes import TWO, Run, environment_of, is_running, table
from test_processes_page import LONG, SMALL, tiny

RAY = "parallel.launcher=ray"
CLUSTER = """
import ray, sys
context = ray.init(address="local", num_cpus=4, include_dashboard=True, dashboard_port=0, log_to_driver=False)
print(context.address_info["gcs_address"], context.dashboard_url, flush=True)
sys.stdin.read()
"""


class Cluster(NamedTuple):
    """The variables with which runs join a cluster, and the address of its server for jobs."""

    environment: dict[str, Any]
    jobs: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of four CPUs, which ends with this process."""
    pytest.importorskip("ray")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "BURNISH_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    # a token of its own, without which others who reach its ports could run code
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command,
        env=environment | token,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline().split()
        if len(line) != 2:
            process.kill()
            pytest.fail(f"no cluster: {process.communicate()[1]}")
        yield Cluster({"RAY_ADDRESS": line[0]} | token, f"http://{line[1]}")
        process.communicate()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, without Ray."""
    out = tmp_path_factory.mktemp("one") / "run"
    tiny(out)
    return out


@pytest.mark.acceptance
def test_a_job_with_its_sampler_and_reward_in_the_cluster_gives_the_results_of_one_process(
    cluster: Cluster, one: Path, tmp_path: Path
) -> None:
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "job", "submit", "--address", cluster.jobs, "--"] if ray.is_file() else []
    command = command or [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", cluster.jobs, "--"]
    overrides = [*SMALL, f"out={tmp_path / 'run'}", "stages.ppo.generator={name: ray, workers: 2}"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "burnish", "run", "tiny", *overrides],
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"done: {tmp_path / 'run'}" in done.stdout
    assert table(tmp_path / "run") == pytest.approx(table(one), abs=1e-5)


@pytest.mark.acceptance
def test_processes_of_ray_train_give_the_results_of_one(cluster: Cluster, one: Path, tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", TWO, RAY, **cluster.environment)
    assert table(tmp_path / "run") == pytest.approx(table(one), abs=1e-5)
    assert run.output.splitlines()[-1].startswith("report: ")
    strange = [line for line in run.output.splitlines() if re.search(r"Ray|raylet|pid=|WARNING|Traceback", line)]
    assert not strange, strange


@pytest.mark.acceptance
def test_an_error_of_a_process_is_shown_once_with_its_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(
        "tiny", *SMALL, f"out={tmp_path / 'run'}", TWO, RAY, "stages.sft.model=nothing/there", **cluster.environment
    )
    assert run.end() == 2
    assert run.output.count("error:") == 1 and "Traceback" not in run.output
    run = Run("tiny", *SMALL, f"out={tmp_path / 'run'}", "parallel.processes=9", RAY, **cluster.environment)
    assert run.end() == 2
    assert "error: parallel.launcher: the Ray cluster is too small for 9 workers with 1 CPU, 0 GPUs each" in run.output


@pytest.mark.acceptance
@pytest.mark.parametrize("whom", ["rank 1", "command", "SIGTERM"])
def test_a_killed_run_in_a_cluster_ends_and_resumes(cluster: Cluster, whom: str, tmp_path: Path) -> None:
    run = Run("tiny", *SMALL, f"out={tmp_path / 'run'}", TWO, RAY, *LONG, **cluster.environment)
    run.until(r"sft\] step \d+/160")
    ranks = ranks_of(tmp_path / "run")
    assert sorted(ranks) == [0, 1]
    if whom == "rank 1":
        os.kill(ranks[1], signal.SIGKILL)
        assert run.end() == 1
        last = run.output.splitlines()[-1]
        assert last.startswith(f"error: rank 1 (process {ranks[1]} on ") and "was killed by signal 9" in last
    elif whom == "command":
        run.process.kill()
        run.end()
    else:
        run.process.terminate()
        assert run.end() == 143, run.output
        assert re.search(r"^ended by SIGTERM after saving a checkpoint of step \d+; run", run.output, re.MULTILINE)
    for _ in range(150):
        if not any(map(is_running, ranks.values())):
            break
        time.sleep(0.1)
    assert not any(map(is_running, ranks.values()))
    again = tiny(tmp_path / "run", TWO, RAY, *LONG, **cluster.environment)
    assert whom != "SIGTERM" or "resumes after step" in again.output


def ranks_of(folder: Path) -> dict[int, int]:
    """The process of each rank of a run."""
    ranks = {}
    for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        try:
            arguments = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        except OSError:  # it has just ended
            continue
        environment = environment_of(process)
        if f"out={folder}" in arguments and "burnish" in arguments and "RANK" in environment:
            ranks[int(environment["RANK"])] = process
    return ranks
