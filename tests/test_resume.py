"""Promise 2: a pipeline that is killed at any moment and run again ends with the same bytes as an uninterrupted one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from burnish.config.loading import RECIPES
from burnish.report.metrics import is_timing

SMALL = [
    "stages.prepare.with={rows: 256, pairs: 128, prompts: 64, held_out: 16, corrupted: 0.4}",
    *(f"stages.{stage}.trainer.save_steps=3" for stage in ("sft", "reward", "ppo")),
    "stages.sft.trainer.num_train_epochs=2",
    "stages.sft.trainer.per_device_train_batch_size=16",
    "stages.reward.trainer.num_train_epochs=2",
    "stages.reward.trainer.per_device_train_batch_size=16",
    "stages.ppo.trainer.per_device_train_batch_size=16",
    "stages.ppo.trainer.num_train_epochs=2",
    "stages.ppo.method={name: ppo, epochs: 2, mini_batches: 2, kl_target: 1.0, kl_horizon: 500, target_kl: 0.01}",
]


# Every method that learns from files, and one that samples without a critic: full training and adapters.
OFFLINE = """
name: offline
threads: 1
stages:
  - {name: sums, run: RECIPES/tiny.py:prepare, with: {rows: 96, pairs: 64, prompts: 48, scored: 64, held_out: 16}}
  - {name: chains, run: RECIPES/chains.py:prepare, with: {rows: 96, prompts: 16, held_out: 16}}
  - name: pretrain
    method: {name: pretrain}
    model: {stage: sums}
    data: {train: {stage: sums, file: prompts.jsonl}, keys: {text: prompt}, keep: [answer]}
    trainer: &often {per_device_train_batch_size: 8, save_steps: 3, num_train_epochs: 2}
  - name: dpo
    method: {name: dpo}
    model: {stage: pretrain}
    adapter: {r: 4}
    data: {train: {stage: sums, file: pairs.jsonl}, eval: {stage: sums, file: pairs-eval.jsonl}}
    trainer: *often
  - name: kto
    method: {name: dpo, loss: kto}
    model: {stage: dpo}
    data: {train: {stage: sums, file: pairs.jsonl}}
    trainer: *often
  - name: reinforce
    method: {name: reinforce, advantage: mean, kl_coef: 0.1, kl_in: loss, kl_estimate: k2, policy_loss: {floor: -4.0}}
    model: {stage: kto}
    data: {train: {stage: sums, file: scored.jsonl}}
    trainer: *often
  - name: grpo
    method: {name: reinforce, advantage: group_std, policy_loss: clip, epochs: 2, kl_coef: 0.05, dynamic_sampling: 2}
    model: {stage: reinforce}
    adapter: {r: 4}
    reward: [{function: "RECIPES/tiny.py:exact"}]
    data: {train: {stage: sums, file: prompts.jsonl}, eval: {stage: sums, file: prompts-eval.jsonl}}
    generation: {max_new_tokens: 4, samples: 3}
    trainer: *often
  - name: values
    method: {name: step_value}
    model: {stage: chains}
    data: {train: {stage: chains, file: steps.jsonl}}
    trainer: *often
"""


# Batches are sampled by another process while the policy is updated.
AHEAD = """
name: ahead
threads: 1
method: {name: ppo, epochs: 2, mini_batches: 2, max_staleness: 1}
model: FOLDER/base
reward: [{function: "brevity.py:brevity"}]
data: {train: FOLDER/prompts.jsonl, eval: FOLDER/prompts.jsonl}
generation: {max_new_tokens: 24}
generator: {name: process, slots: 4}
trainer: {per_device_train_batch_size: 8, num_train_epochs: 4, save_steps: 3, eval_strategy: steps, eval_steps: 7}
"""


def command(folder: Path, *recipe: str) -> list[str]:
    return [sys.executable, "-m", "burnish", "run", *recipe, f"out={folder}"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "random"}


def progress(folder: Path) -> int:
    """Lines of metrics that the stages have written."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/metrics.jsonl"))


def results(folder: Path) -> dict[str, object]:
    """What must be equal: every weight, the critic among them, the samples, and the metrics but for their timings."""
    contents: dict[str, object] = {}
    for path in sorted(folder.glob("*/model/**/*.safetensors")) + sorted(folder.glob("*/samples.jsonl")):
        contents[str(path.relative_to(folder))] = path.read_bytes()
    for path in sorted(folder.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        contents[str(path.relative_to(folder))] = [
            {key: value for key, value in line.items() if not is_timing(key)} for line in lines
        ]
    return contents


def offline(folder: Path) -> str:
    """The recipe with every other method, as a file."""
    path = folder / "offline.yaml"
    path.write_text(OFFLINE.replace("RECIPES", str(RECIPES)), "utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["tiny", "offline"])
def test_killed_at_ten_moments_ends_with_the_same_bytes(pipeline: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"  # the same for both, because rows are named by their file
    run = command(folder, *(["tiny", *SMALL] if pipeline == "tiny" else [offline(tmp_path)]))
    subprocess.run(run, check=True, env=environment(), capture_output=True, timeout=300)
    expected = results(folder)
    lines = progress(folder)
    shutil.rmtree(folder)
    models = {
        "tiny": ["sft/model/model", "reward/model/model", "ppo/model/critic/model", "ppo/model/model"],
        "offline": [f"{stage}/model/model" for stage in ("pretrain", "dpo", "kto", "reinforce", "grpo", "values")]
        + ["values/model/value_head"],
    }
    assert {f"{name}.safetensors" for name in models[pipeline]} <= set(expected)
    moments = random.Random(time.time_ns())
    targets = sorted(moments.uniform(0, lines) for _ in range(10))
    kills = 0
    for target in targets:
        process = subprocess.Popen(run, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and progress(folder) < target:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills == 10, "some runs had ended before they were killed"
    subprocess.run(run, check=True, env=environment(), capture_output=True, timeout=300)
    got = results(folder)
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name] == value, name


@pytest.mark.acceptance
def test_killed_while_a_batch_is_sampled_ahead_ends_with_the_same_bytes(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ahead.yaml").write_text(AHEAD.replace("FOLDER", str(tmp_path)), "utf-8")
    (tmp_path / "brevity.py").write_text("def brevity(answers):\n    return [-len(a.tokens) / 9 for a in answers]\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1"}) + "\n" for i in range(16)))
    shutil.copytree(tiny_folder, tmp_path / "base")
    folder = tmp_path / "run"
    run = command(folder, str(tmp_path / "ahead.yaml"))
    subprocess.run(run, check=True, env=environment(), capture_output=True, timeout=300)
    expected, lines = results(folder), progress(folder)
    shutil.rmtree(folder)
    target = random.Random(time.time_ns()).uniform(0.1, 0.9) * lines
    process = subprocess.Popen(run, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and progress(folder) < target:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run had ended before it was killed"
    subprocess.run(run, check=True, env=environment(), capture_output=True, timeout=300)
    assert results(folder) == expected
    metrics: Any = next(value for name, value in expected.items() if name.endswith("metrics.jsonl"))
    assert max(line.get("staleness", 0) for line in metrics) == 1
