"""`burnish serve` as a process: faults, large bodies, and runs whose service is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from burnish.rewards import remote
from burnish.rewards.functions import NamedReward
from burnish.rewards.remote import RemoteReward
from burnish.serving.reward import reward_service
from services import TOKEN, completions, model_reward, running

pytestmark = pytest.mark.acceptance

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "REWARD_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
HEADERS = {"authorization": f"Bearer {TOKEN}"}
FUNCTION = """
import time

def digits(trajectories):
    time.sleep(0.3)
    return [sum(c.isdigit() for c in t.text) / 4 for t in trajectories]
"""
SAMPLE = """
name: served
stages:
  - name: made
    method: {{name: sample}}
    model: base
    data: {{rows: prompts.jsonl}}
    reward: [{reward}]
    generation: {{samples: 2, max_new_tokens: 4}}
"""
PPO = """
name: served
stages:
  - name: made
    method: {{name: ppo}}
    model: base
    data: {{train: prompts.jsonl}}
    reward: [{reward}]
    generation: {{max_new_tokens: 4}}
    trainer: {{per_device_train_batch_size: 8, max_steps: 8, save_strategy: steps, save_steps: 1}}
"""


@contextmanager
def served(source: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `burnish serve reward` as a process."""
    command = [sys.executable, "-m", "burnish", "serve", "reward", source, "--token-env", "REWARD_TOKEN"]
    process = subprocess.Popen([*command, "--port", str(port)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"listening on (http://\S+)", line)
        assert found, line
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def train(out: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "burnish", "run", "r.yaml", f"out={out}"]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(out: str) -> str:
    process = train(out)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_a_thousand_requests_with_time_outs_and_errors(monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    chance, faults = random.Random(0), 0
    model = model_reward()
    service = reward_service(NamedReward("tiny", 1.0, model), TOKEN, joins=True)

    async def faulty(scope: Any, receive: Any, send: Any) -> None:
        nonlocal faults
        drawn = chance.random()
        faults += drawn < 0.1
        if drawn < 0.03:
            await asyncio.sleep(3)  # longer than the client waits
        elif drawn < 0.1:
            await PlainTextResponse("injected", chance.choice([429, 500, 502, 503]))(scope, receive, send)
        else:
            await service.app(scope, receive, send)

    rows = completions(1000)
    with running(service, faulty) as url:
        reward = RemoteReward(url, TOKEN, batch=1, timeout=2, retries=8)
        began = time.monotonic()
        assert asyncio.run(reward(rows)) == [score for row in rows for score in model([row])]  # type: ignore[arg-type]
        record_property("faults", faults)
        record_property("seconds of 1,000 requests", round(time.monotonic() - began, 1))
        reward.close()
    assert faults > 80


def test_a_body_of_100_mb_does_not_grow_the_service(tmp_path: Path, record_property: Any) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)

    def peak(process: subprocess.Popen[str]) -> int:
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[0])

    with served(f"{tmp_path}/mine.py:digits") as (process, url):
        before = peak(process)
        for content in (b" " * 100 * 2**20, (b" " * 2**16 for _ in range(1600))):  # announced, and in chunks
            response = httpx2.post(f"{url}/score", content=content, headers=HEADERS, timeout=60)
            assert response.status_code == 413
        grown = (peak(process) - before) / 1024
        record_property("MiB grown", round(grown, 1))
        assert grown < 45  # the limit of a body is 32 MiB
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_process_prints_its_address_and_a_token_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    command = [sys.executable, "-m", "burnish", "serve", "reward", f"{tmp_path}/mine.py:digits", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    row = {"prompt": [{"role": "user", "content": "Hi"}], "messages": [{"role": "assistant", "content": "4 a"}]}
    try:
        assert process.stdout is not None
        url = re.findall(r"listening on (http://127\.0\.0\.1:\d+)", process.stdout.readline())[0]
        token = process.stdout.readline().removeprefix("token: ").strip()
        headers = {"authorization": f"Bearer {token}"}
        answer = httpx2.post(f"{url}/score", json={"version": 1, "trajectories": [row]}, headers=headers)
        assert answer.json() == {"version": 1, "scores": [0.25]}
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
        assert (process.returncode, said, errors) == (0, "stopped\n", "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("recipe", [SAMPLE, PPO], ids=["sample", "ppo"])
def test_a_run_whose_service_is_killed_resumes_with_the_same_bytes(
    recipe: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FUNCTION)
    Path("base").symlink_to(tiny_folder)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(256)))
    with served("mine.py:digits") as (process, url):
        port = int(url.rpartition(":")[2])
        reward = f'{{url: "{url}", token: REWARD_TOKEN, retries: 2}}'
        Path("r.yaml").write_text(recipe.format(reward=reward))
        disturbed = train("disturbed")
        begun = [Path("disturbed/made/progress.json"), Path("disturbed/made/checkpoint-2")]
        while not any(path.exists() for path in begun) and disturbed.poll() is None:
            time.sleep(0.02)
        process.kill()
    said, _ = disturbed.communicate(timeout=120)
    assert disturbed.returncode == 2, said
    assert "is down" in said and "run the same command again to resume" in said and TOKEN not in said
    assert "Traceback" not in said
    with served("mine.py:digits", port):
        assert "resum" in finished("disturbed")
        finished("whole")
    for kind in ("*.jsonl", "*.safetensors"):
        for path in Path("whole/made").rglob(kind):
            same = Path("disturbed/made") / path.relative_to("whole/made")
            if path.name != "metrics.jsonl":  # it has times
                assert same.read_bytes() == path.read_bytes(), path
    assert any(Path("whole/made").rglob("samples.jsonl"))
