"""The generator in actors of a Ray cluster: the bytes of the local one whoever dies, and what is wrong in a message."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from burnish import GRPO
from burnish import ray_cluster as clusters
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.process import ProcessGenerator
from burnish.generate.protocol import Completion, Generator, Request, complete
from burnish.generate.ray import RayGenerator
from burnish.generate.sampling import Sampling
from burnish.models.heads import SharedCritic
from burnish.ray_cluster import Actors, described, last_words, room
from burnish.types import Prompt
from generating import PAD, check_adapters, environment_with_tests, llama, plain, requests

# --- without a cluster ---------------------------------------------------------------------------------------------


def test_workers_fit_on_nodes_and_not_across_them() -> None:
    nodes = [{"CPU": 8.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 3.0}]
    assert room(nodes, {"CPU": 2.0}) == 4 + 1
    assert room(nodes, {"CPU": 1.0, "GPU": 0.25}) == 4
    assert room(nodes, {"CPU": 9.0}) == 0
    assert room([{"CPU": 0.3}], {"CPU": 0.1}) == 3  # although 0.3 / 0.1 < 3
    assert described(nodes[0]) == "8 CPUs, 1 GPU" and described({}) == "0 CPUs, 0 GPUs"
    assert str(Actors(workers=2, gpus=0.5)) == "2 workers with 1 CPU, 0.5 GPUs each"
    assert (Actors(cpus=0.5).threads, Actors(cpus=4).threads) == (1, 4)


def test_the_end_of_an_actor_is_told_in_one_line() -> None:
    told = last_words(RuntimeError("The actor died.\n\tclass_name: A\n\tpid: 3\nIt was killed by SIGKILL.\n"))
    assert told == "The actor died. It was killed by SIGKILL. (logs: /tmp/ray/session_latest/logs)"
    assert last_words(RuntimeError()) == "RuntimeError (logs: /tmp/ray/session_latest/logs)"


def test_without_ray_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^generator: Ray is not installed: run pip install 'burnish\[ray\]'$"):
        RayGenerator(llama(), PAD)


def test_a_run_joins_only_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    ray: Any = ModuleType("ray")
    ray.is_initialized = lambda: bool(joined)
    ray.init = lambda address, **_: joined.append(address)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: ray)
    monkeypatch.setattr(clusters, "_joined", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"several processes need a Ray cluster that is already running.*RAY_ADDRESS"):
        clusters.join(None, several=True)
    monkeypatch.setenv("RAY_ADDRESS", "a:6379")
    before = signal.getsignal(signal.SIGTERM)
    for address in (None, "a:6379", "auto"):
        assert clusters.join(address, several=True) is ray
    assert joined == ["a:6379"] and signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(UserError, match=r"^address: b:6379: this run has already joined another Ray cluster, a:6379"):
        clusters.join("b:6379")
    monkeypatch.setattr(clusters, "_joined", "local")
    with pytest.raises(UserError, match=r"^address: auto: this run has already joined another Ray cluster, local"):
        clusters.join("auto")


def test_a_cluster_that_cannot_be_joined_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(**_: Any) -> None:
        raise ConnectionError("could not find any running Ray instance.\nMore.")

    ray: Any = ModuleType("ray")
    ray.is_initialized, ray.init = lambda: False, nobody
    ray.exceptions = SimpleNamespace(RayError=KeyError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: ray)
    with pytest.raises(UserError, match=r"^generator: cannot join the Ray cluster at auto: could not find any running"):
        RayGenerator(llama(), PAD, address="auto")


# --- with one ------------------------------------------------------------------------------------------------------


def actors() -> list[int]:
    """The processes of our actors."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_Actor"):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def closed(generator: Generator, wanted: list[Request]) -> list[Completion]:
    done = complete(generator, wanted)
    generator.close()
    return done


@pytest.mark.slow
def test_one_actor_gives_the_bytes_of_local_and_two_the_same_each_time(ray_cluster: Any, tmp_path: Path) -> None:
    head = SharedCritic(32)
    torch.nn.init.normal_(head.score.weight)
    wanted = requests(values=True)
    local = closed(LocalGenerator(llama(), PAD, head, slots=4), wanted)
    assert len({c.finish_reason for c in local}) == 2
    assert plain(closed(ProcessGenerator(llama(), PAD, head, slots=4), wanted)) == plain(local)
    assert plain(closed(RayGenerator(llama(), PAD, head, slots=4), wanted)) == plain(local)
    two = RayGenerator(llama(), PAD, head, slots=4, workers=2)
    first = complete(two, wanted)
    assert plain(complete(two, wanted)) == plain(first)
    for ours, expected in zip(first, local, strict=True):
        assert ours.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        assert ours.values is not None and expected.values is not None
        np.testing.assert_allclose(ours.values, expected.values, atol=1e-4, rtol=0)
    # a worker dies in the middle
    other = llama(seed=1)
    two.update_weights(1, other.named_parameters())
    changed = complete(two, wanted, 1)
    handles = two.submit(wanted, 1)
    done = dict(two.poll(None))
    assert len(done) < len(wanted)
    before = actors()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    while len(done) < len(wanted):
        done |= dict(two.poll(None))
    assert plain([done[handle] for handle in handles]) == plain(changed) != plain(first)
    assert len(actors()) == 2 and before[0] not in actors()
    two.close()


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_sent_as_tensors_or_as_files(ray_cluster: Any, tmp_path: Path) -> None:
    check_adapters(lambda model: RayGenerator(model, PAD, cpus=0.5), tmp_path)


@pytest.mark.slow
def test_a_cluster_without_room_is_named(ray_cluster: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"^generator: the Ray cluster is too small for 3 workers with 2 CPUs, 0 GPUs each: it has room for 2 on "
        r"its nodes, which have 4 CPUs, 0 GPUs: lower workers, cpus or gpus, or add nodes$",
    ):
        RayGenerator(llama(), PAD, workers=3, cpus=2)
    with pytest.raises(UserError, match="too small for 1 worker with 1 CPU, 1 GPU each"):
        RayGenerator(llama(), PAD, gpus=1)
    busy = clusters.Reservation(Actors(workers=3), "generator")
    with pytest.raises(
        UserError, match=r"no room for 2 workers with 1 CPU, 0 GPUs each after 1 seconds.* only 1 CPU, 0 GPUs are free"
    ):
        RayGenerator(llama(), PAD, workers=2, timeout=1)
    busy.close()


PROMPTS = [Prompt(({"role": "user", "content": f"{i} + 1"},), {}, f"prompts:{i}") for i in range(12)]


KILLS = 5


@pytest.mark.acceptance
def test_training_gives_the_same_bytes_if_workers_are_killed_at_random_moments(
    ray_cluster: Any, make_trainer: Any, tiny_llama: Any, weights: Any, tmp_path: Path
) -> None:
    chance, killed = random.Random(0), []

    def kill_workers(trainer: Any) -> None:
        while len(killed) < KILLS:
            step = trainer.state.global_step
            while trainer.state.global_step <= step:  # every worker makes progress between two kills
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.5))
            killed.append(chance.choice(actors()))
            os.kill(killed[-1], signal.SIGKILL)

    def trained(name: str, kill: bool = False) -> Any:
        def score(answers: Any) -> list[float]:
            return [sum(answer.tokens) % 9 / 4 - 1 for answer in answers]

        generator = partial(RayGenerator, workers=2, slots=2)
        method = GRPO(score, Sampling(max_new_tokens=12, samples=32), generator, max_staleness=1)
        folder = str(tmp_path / name)
        trainer = make_trainer(method, tiny_llama(), PROMPTS, batch=4, output_dir=folder, num_train_epochs=10)
        if kill:
            threading.Thread(target=kill_workers, args=(trainer,), daemon=True).start()
        trainer.train()
        method.close()
        return trainer

    whole, disturbed = trained("whole"), trained("disturbed", kill=True)
    assert len(set(killed)) == KILLS
    assert weights(whole.network.policy) == weights(disturbed.network.policy) != weights(tiny_llama())
    staleness = [line["staleness"] for line in whole.state.log_history if "staleness" in line]
    assert staleness[0] == 0 and 1 in staleness


DRIVER = """
import sys, tests.generate.test_ray as t
generator = t.RayGenerator(t.llama(), t.PAD)
t.complete(generator, t.requests(4))
print(*t.actors(), flush=True)
long = t.Sampling(max_new_tokens=100, min_new_tokens=100)
while True:
    t.complete(generator, [t.Request((9, 10), i, long) for i in range(64)])
"""


@pytest.mark.acceptance
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_actors_end_with_the_run(number: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "job.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "job.py")]
    with subprocess.Popen(command, env=environment_with_tests(), stdout=subprocess.PIPE, start_new_session=True) as job:
        assert job.stdout is not None
        (actor,) = map(int, job.stdout.readline().split())
        os.killpg(job.pid, number) if number == signal.SIGINT else job.send_signal(number)
        assert job.wait(60) != 0
    for _ in range(100):
        if not Path(f"/proc/{actor}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{actor}").exists()
