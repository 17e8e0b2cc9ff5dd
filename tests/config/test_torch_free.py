"""A recipe is read, checked and inspected without importing torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "peft", "datasets", "matplotlib")


def imported(statement: str) -> set[str]:
    """Which of the heavy packages a statement imports, in a separate process."""
    program = f"import sys\n{statement}\nprint([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(eval(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "data.readers",
        "generate.sampling",
        "math.choices",
        "methods",
        "methods.settings",
        "models.settings",
        "protocols",
        "render.truncate",
        "types",
    ],
)
def test_a_module_of_settings_imports_no_torch(module: str) -> None:
    assert imported(f"import burnish.{module}") == set()


@pytest.mark.parametrize("command", ["recipes", "schema"])
def test_a_command_about_recipes_imports_no_torch(command: str) -> None:
    call = f"from burnish.cli import app\nfrom typer.testing import CliRunner\nCliRunner().invoke(app, [{command!r}])"
    assert imported(call) == set()


@pytest.mark.parametrize("recipe", ["tiny", "grpo", "dpo", "pretrain", "step_value", "reinforce"])
def test_a_recipe_is_checked_without_torch(recipe: str) -> None:
    assert imported(f"from burnish.config import load\nload({recipe!r}).resolved()") == set()


COMMANDS = [
    ["generate", "./modle", "Hi"],
    ["generate", "gpt2", "--input", "promts.jsonl"],
    ["chat", "./modle"],
    ["eval", "./modle", "data.eval=README.md"],
    ["merge", "./modle"],
    ["report", "nowhere"],
    ["serve", "reward", "./modle"],
]
MISTAKES = [
    "stages.sft.trainer.learnig_rate=1",
    "stages.sft.data.max_length=long",
    "stages.sft.data.train=chats.jsonl",
    "stages.sft.model=./modle",
    "stages.ppo.reward=[{function: 'mine.py:score'}]",
    "stages.ppo.model={stage: sfd}",
    "stages.sft.trainer.optim=adalomo",
]


@pytest.mark.parametrize(
    "arguments",
    COMMANDS + [[command, "tiny", mistake] for command in ("run", "inspect") for mistake in MISTAKES],
    ids=" ".join,
)
def test_a_mistake_is_reported_without_torch(arguments: list[str], tmp_path: Path) -> None:
    call = (
        f"import os\nfrom burnish.cli import app\nfrom typer.testing import CliRunner\nos.chdir({str(tmp_path)!r})\n"
        f"result = CliRunner().invoke(app, {arguments!r})\nassert result.exit_code == 2, result.output"
    )
    assert imported(call) == set()


def test_the_check_itself_detects_torch() -> None:
    assert "torch" in imported("import burnish.math.losses")
