"""README.md and CONTRIBUTING.md are true: every file is listed, and their commands and code run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# The recipe `tiny`, cut down to seconds.
SMALL = {
    "run tiny": "stages.prepare.with.rows=512 stages.prepare.with.pairs=128 stages.prepare.with.prompts=128 "
    "stages.prepare.with.held_out=32 stages.sft.trainer.num_train_epochs=1 stages.reward.trainer.num_train_epochs=1"
}


# Folders that have a single line in CONTRIBUTING.md, not one for each file.
PER_FOLDER = re.compile(r"(tests/\w+/|benchmarks/peers/)")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def listed_paths() -> set[str]:
    """Paths of the list of files in CONTRIBUTING.md, from its indentation."""
    (tree,) = blocks("text", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    paths: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        name, *purpose = line.split()
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        path = "".join(folders)
        if not name.endswith("/") or PER_FOLDER.fullmatch(path):
            assert purpose, f"CONTRIBUTING.md does not say what {path} is for"
            paths.add(path)
    return paths


def purpose_of(path: str) -> str:
    if not path.endswith(".py"):
        return "what it is for"
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8")))
    return docstring.split("\n")[0] if docstring else "what it is for"


def test_contributing_lists_every_file_and_no_other() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what else lies here is unknown")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    # an __init__.py stands for its folder, which is listed
    files = {name for name in tracked if (ROOT / name).exists() and Path(name).name != "__init__.py"}
    files.add("src/burnish/__init__.py")
    known = {match[0] if (match := PER_FOLDER.match(name)) else name for name in files}
    listed = listed_paths()
    missing = [
        f"{name.rpartition('/')[2]:24} {purpose_of(name)}   <- under {Path(name).parent}/"
        for name in sorted(known - listed)
        if not name.endswith("/")
    ]
    missing += [name for name in sorted(known - listed) if name.endswith("/")]
    assert not missing, "add to the list of files in CONTRIBUTING.md:\n" + "\n".join(missing)
    gone = sorted(listed - known)
    assert not gone, "remove from the list of files in CONTRIBUTING.md:\n" + "\n".join(gone)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z]+)$", "\n".join(blocks("bash")), re.MULTILINE))
    assert used and used <= targets


def test_the_recipe_in_the_readme_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.config import load

    recipe, dpo = blocks("yaml")
    monkeypatch.chdir(tmp_path)
    Path("my-run.yaml").write_text(recipe, "utf-8")
    Path("my_rewards.py").write_text(blocks("python")[0], "utf-8")
    Path("data").mkdir()
    for name in ("chat", "chat-eval", "pairs", "prompts"):
        Path(f"data/{name}.jsonl").write_text("{}\n", "utf-8")
    assert [stage.name for stage in load("my-run.yaml").stages] == ["sft", "reward", "ppo"]
    Path("my-run.yaml").write_text(recipe.partition("  - name: reward\n")[0] + dpo, "utf-8")
    assert [stage.name for stage in load("my-run.yaml").stages] == ["sft", "dpo"]


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
