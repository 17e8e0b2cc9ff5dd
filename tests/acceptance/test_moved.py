"""Promise 2 for every kind of stage: killed ten times, and moved to another place after each, a run ends the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config.yaml import read
from run_processes import PATIENCE, chunks, lines, results, unfinished, wait

# What each process is killed at: some time after its start, a line of metrics, a chunk of rows, a folder being written.
MOMENTS = {
    "everything": ["start", "line", "write", "line", "write"] * 2,
    "loops": ["start", "chunk", "line", "write", "chunk", "write", "line", "chunk", "write", "line"],
    "environments": ["start", "line", "write", "line", "write"] * 2,
    # three times in the search of the first round and twice in that of the second
    "search": ["chunk", "chunk", "chunk", "line", "chunk", "chunk", "line", "write", "line", "write"],
}
REWARDS = """\
import random

from burnish import Observation

class Asks:
    def respond(self, message):
        return Observation(random.choice(["1", "22"]), reward=random.random() + len(message["content"]) / 10)

class Dice:
    def reset(self, seed, **columns):
        self.dice, self.reward = random.Random(seed), random.random()
        return str(self.dice.randrange(10))

    async def calculator(self, expression: str) -> str:
        '''Roll a die.

        Args:
            expression: is ignored.
        '''
        self.reward += self.dice.random()
        return str(random.randrange(10))

def brevity(answers):
    return [-float(len(answer.text)) for answer in answers]

def digits(answers):
    return [sum(letter.isdigit() for letter in answer.text) - 3 for answer in answers]

def ended(row):
    return row["finish_reason"] == "stop" or "cut off"
"""


def working_folder(parent: Path, recipe: str) -> Path:
    """A folder with a recipe, and beside it the rows and the functions that it names by relative paths."""
    folder = parent / "work"
    (folder / "rows").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / f"{recipe}.yaml", folder / "recipe.yaml")
    (folder / "rewards.py").write_text(REWARDS, "utf-8")
    texts = (json.dumps({"text": f"{n}+{n}={2 * n}"}) + "\n" for n in range(10, 40))
    (folder / "rows" / "texts.jsonl").write_text("".join(texts), "utf-8")
    return folder


def start(folder: Path) -> subprocess.Popen[bytes]:
    """``burnish run`` in a working folder, with a cache inside it."""
    environment = os.environ | {
        "BURNISH_CACHE": "cache",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONHASHSEED": "random",
        "PYTHONPATH": str(Path(burnish.__file__).parents[1]),
    }
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "burnish", "run", "recipe.yaml"]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def shown(folder: Path) -> str:
    """The end of what the last process showed."""
    return (folder / "log.txt").read_text("utf-8", "replace")[-5000:]


def finish(folder: Path) -> None:
    """Run to the end."""
    assert start(folder).wait(timeout=PATIENCE) == 0, shown(folder)


def kill(folder: Path, moment: str, target: float, chance: random.Random) -> bool:
    """Start the run and kill it at a moment, where that is not its start after so many lines.

    Returns:
        Whether a folder was being written, and is left unfinished.
    """
    before, old, made = lines(folder), unfinished(folder), chunks(folder)
    process = start(folder)
    if moment == "start":
        time.sleep(chance.uniform(0.5, 8))
    elif moment == "chunk":
        wait(process, lambda: lines(folder) >= target)
        wait(process, lambda: bool(chunks(folder) - made))
        time.sleep(chance.uniform(0, 0.3))
    else:
        # Lines that were there already do not count: the process must have got as far as to train.
        wait(process, lambda: lines(folder) != before)
        wait(process, lambda: lines(folder) >= target)
        if moment == "write":
            wait(process, lambda: bool(unfinished(folder) - old))
        time.sleep(chance.uniform(0, 0.02 if moment == "write" else 0.1))
    process.kill()
    assert process.wait() == -signal.SIGKILL, f"ended before it was killed: {shown(folder)}"
    return bool(unfinished(folder) - old)


def rename(parent: Path, target: Path) -> None:
    """Move a working folder by a rename of the folder above it."""
    parent.rename(target)


def copy(parent: Path, target: Path) -> None:
    """Copy a working folder as to another machine, where files have new times and the cache is empty."""
    subprocess.run(["cp", "-r", parent, target], check=True)
    shutil.rmtree(parent)
    shutil.rmtree(target / "work" / "cache", ignore_errors=True)


def check(name: str, expected: dict[str, Any]) -> None:
    """What a straight run must have written, for its comparison to mean anything."""
    if name == "loops":
        models = [f"loop/3/{stage}/model/model.safetensors" for stage in ("improve", "dpo")]
        assert len({expected[model] for model in [*models, "last/model/model.safetensors"]}) == 3
        samples = [expected[f"loop/{number}/grow/data/samples.jsonl"] for number in (1, 2, 3)]
        assert len(set(samples)) == 3
        assert {f"loop/{number}/held-out/data/measures.jsonl" for number in (1, 2, 3)} <= set(expected)
        assert "loop/1/dpo/model/model.safetensors" not in expected  # the models of old rounds are removed
        return
    if name == "environments":
        models = {expected[f"{stage}/model/model.safetensors"] for stage in ("sft", "ppo", "turns", "grpo", "again")}
        assert len(models) == 5 and "held-out/data/measures.jsonl" in expected
        for stage in ("ppo", "turns", "grpo"):
            assert all(line["turns"] > 1 for line in expected[f"{stage}/metrics.jsonl"] if "turns" in line)
        assert any(line.get("tool_calls") for line in expected["ppo/metrics.jsonl"])
        return
    if name == "search":
        trees = [expected[f"loop/{number}/search/data/trees.jsonl"] for number in (1, 2)]
        assert len(set(trees)) == 2 and all(tree.count(b"\n") > 384 for tree in trees)  # some questions have two trees
        assert all(b'"outcome": 1' in tree for tree in trees)
        heads = [path for path in expected if path.endswith("value_head.safetensors")]
        assert heads == ["loop/2/values/model/value_head.safetensors"]
        return
    stages = read((Path(__file__).parent / "everything.yaml").read_text("utf-8"), "recipe").value["stages"]
    trained = [stage["name"] for stage in stages if "method" in stage]
    weights = [expected[f"{stage}/model/model.safetensors"] for stage in trained]
    assert len(set(weights)) == len(trained) == 12
    adapted = ("sft-lora", "reward", "ppo-shared", "ppo-separate", "distill", "kto")
    assert {f"{stage}/adapter/adapter_model.safetensors" for stage in adapted} <= set(expected)
    assert {"ppo-separate/model/critic/model.safetensors", "values/model/value_head.safetensors"} <= set(expected)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", MOMENTS)
def test_killed_and_moved_ten_times_ends_with_the_same_bytes(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    straight = working_folder(tmp_path / "straight", name)
    finish(straight)
    record_property("straight run", f"{time.monotonic() - began:.0f} s")
    expected, total = results(straight), lines(straight)
    check(name, expected)

    seed = time.time_ns()
    record_property("seed", seed)
    chance = random.Random(seed)
    parent = tmp_path / "Größe 漢字 0"
    working_folder(parent, name)
    writing = 0
    moments = MOMENTS[name]
    for number, moment in enumerate(moments):
        target = total * (number + chance.random()) / len(moments)
        writing += kill(parent / "work", moment, target, chance)
        place = tmp_path / f"Größe 漢字 {number + 1}"
        (copy if number % 2 else rename)(parent, place)
        parent = place
    record_property("kills", len(moments))
    record_property("while a folder was written", writing)
    finish(parent / "work")

    got = results(parent / "work")
    assert list(got) == list(expected)
    assert [name for name in expected if got[name] != expected[name]] == []
    record_property("files equal", len(expected))
    assert writing >= 2, "hardly any kill fell into the writing of a folder"
