"""The README is true: it lists every file, and its commands and its code run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# A cut of the recipe `tiny` that takes seconds.
SMALL = {
    "run tiny": "stages.prepare.with.rows=512 stages.prepare.with.pairs=128 stages.prepare.with.prompts=128 "
    "stages.prepare.with.held_out=32 stages.sft.trainer.num_train_epochs=1 stages.reward.trainer.num_train_epochs=1"
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def listed() -> set[str]:
    """Paths of the tree in the README, from its indentation."""
    (tree,) = blocks("text")
    paths: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        if not name.endswith("/"):
            assert len(line.split()) > 1, f"{name} has no purpose in the README"
            paths.add("".join(folders))
    return paths


def test_the_readme_lists_every_file_and_no_other() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what else lies here is unknown")
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    # an __init__.py stands for its folder, which is listed
    files = {name for name in known if (ROOT / name).exists() and Path(name).name != "__init__.py"}
    files.add("src/burnish/__init__.py")
    assert listed() == files


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z]+)$", "\n".join(blocks("bash")), re.MULTILINE))
    assert used and used <= targets


def test_the_recipe_in_the_readme_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.config import load

    (recipe,) = blocks("yaml")
    monkeypatch.chdir(tmp_path)
    Path("my-run.yaml").write_text(recipe, "utf-8")
    Path("my_rewards.py").write_text(blocks("python")[0], "utf-8")
    Path("data").mkdir()
    for name in ("chat", "chat-eval", "pairs", "prompts"):
        Path(f"data/{name}.jsonl").write_text("{}\n", "utf-8")
    assert [stage.name for stage in load("my-run.yaml").stages] == ["sft", "reward", "ppo"]


@pytest.mark.slow
def test_commands_and_code_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    lines = "".join(blocks("bash")).splitlines()
    commands = [shlex.split(line.removeprefix(".venv/bin/burnish ")) for line in lines if not line.startswith("make ")]
    assert ["run", "tiny"] in commands
    for command in commands:
        extra = SMALL.get(" ".join(command), "").split()
        run([sys.executable, "-m", "burnish", *command, *extra], tmp_path)
    for code in blocks("python"):
        run([sys.executable, "-c", code], tmp_path)


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
