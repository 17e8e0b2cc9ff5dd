"""The examples of CONTRIBUTING.md run, as a reader would write them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config import load
from burnish.config.run import run
from burnish.math.policy import reinforce
from burnish.report.metrics import read_metrics
from burnish.user_functions import load as load_function

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def definitions(file: str) -> set[str]:
    """The functions, classes and methods (``Class.method``) that a file of the package defines."""
    tree = ast.parse((ROOT / "src" / "burnish" / file).read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {f"{owner.name}.{part.name}" for owner in classes for part in owner.body if isinstance(part, functions)}
    return methods | {node.name for node in ast.walk(tree) if isinstance(node, (*functions, ast.ClassDef))}


@pytest.mark.parametrize("title", ["The path of one SFT row", "The path of `kl_coef`"])
def test_a_path_names_functions_after_the_files_that_define_them(title: str) -> None:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    files: dict[str, set[str]] = {}
    last = ""
    for span in re.findall(r"`([^`]+)`", section):
        if span.endswith(".py"):
            files[span], last = definitions(span), span
        elif method := re.fullmatch(r"([A-Z]\w+\.\w+)(\(\))?", span):
            assert any(method[1] in known for known in files.values()), f"{span}: not in {', '.join(files)}"
        elif function := re.fullmatch(r"(\w+)\(\)", span):
            assert function[1] in files[last], f"{span}: not in {last}"
    assert len(files) > 8


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the reader's own policy loss, advantage estimator and reduction."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("python") if block.startswith("# my_rl.py")]
    Path("my_rl.py").write_text(code, "utf-8")
    return tmp_path


def test_the_loss_has_the_gradient_of_reinforce_before_the_first_step(own_file: Path) -> None:
    old, mask = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[True, True, False]])
    advantages, segments = torch.tensor([[0.5, -3.0, 0.0]]), torch.tensor([[1, 1, 0]])
    gradients = []
    for loss in (
        partial(load_function("my_rl.py:penalized"), strength=0.5),
        partial(reinforce, floor=None, unlikelihood=False),
    ):
        now = old.clone().requires_grad_()
        losses, _ = loss(now, old, advantages, mask, segments)
        losses[mask].sum().backward()
        gradients.append(now.grad)
    assert torch.equal(gradients[0], gradients[1])
    moved = old + torch.tensor([[2.0, 4.0, 0.0]]).log()
    losses, metrics = load_function("my_rl.py:penalized")(moved, old, advantages, mask, segments, strength=0.5)
    # -0.5 * 2 + 0.25 * 1, and 3 * 4 + 0.25 * 9
    torch.testing.assert_close(losses, torch.tensor([[-0.75, 14.25, 0.0]]))
    torch.testing.assert_close(metrics["moved"], torch.tensor([[1.0, 3.0, 0.0]]))


def test_the_estimator_subtracts_the_median_of_a_prompts_completions(own_file: Path) -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 5.0], [3.0, 0.0], [0.0, 7.0]])
    mask, groups = rewards != -1, torch.tensor([0, 0, 0, 1])
    mask[2, 1] = False
    advantages, returns = load_function("my_rl.py:over_median")(rewards, mask, groups, None)
    assert advantages.tolist() == [[-2.0, -2.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]] and returns is None


def test_the_reduction_divides_by_the_root_of_the_length(own_file: Path) -> None:
    losses, mask = torch.tensor([[1.0, 2.0, 0.0, 3.0, 4.0, 5.0]]), torch.tensor([[True, True, False, True, True, True]])
    segments = torch.tensor([[1, 2, 2, 2, 2, 2]])
    term = load_function("my_rl.py:root_length")(losses, mask, segments)
    # a sequence with one learned token and one with four: 1 / 1 + (2 + 3 + 4 + 5) / 2
    assert (term.total.item(), term.unit) == (8.0, "sequences")


def test_a_recipe_uses_all_three_without_a_change_to_the_package(own_file: Path) -> None:
    recipe, _ = blocks("yaml")
    Path("own.yaml").write_text(recipe, "utf-8")
    folder = run(load("own.yaml"))
    lines: list[dict[str, Any]] = read_metrics(folder / "policy")
    assert len(lines) == 4 and all("moved" in line for line in lines)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the files and the changes of the page."""
    home = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for code in blocks("python"):
        place = code.partition("\n")[0].removeprefix("# ")
        if place.startswith("src/"):
            assert not (home / place).exists()
            (home / place).write_text(code, "utf-8")
    for change in blocks("diff"):
        apply(change, home)
    return home


def apply(change: str, home: Path) -> None:
    """Replace the lines of every hunk, which have to occur once in their file."""
    for place, hunks in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", change, re.MULTILINE | re.DOTALL):
        text = (home / place).read_text("utf-8")
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
            assert text.count(old) == 1, f"{place}: {old}"
            text = text.replace(old, new)
        (home / place).write_text(text, "utf-8")


def python(code: str, home: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(home / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_changes_pass_the_checks_of_style(changed: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", changed)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "src"], cwd=changed, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_the_kind_of_reward_and_the_generator_train_a_policy(changed: Path) -> None:
    recipe, part = blocks("yaml")
    recipe = re.sub(
        r"^    reward:.*\n", "".join(f"    {line}\n" for line in part.splitlines()), recipe, flags=re.MULTILINE
    )
    recipe = re.sub(r"^      (policy_loss|advantage|reduction):.*\n", "", recipe, flags=re.MULTILINE)
    (changed / "own.yaml").write_text(recipe, "utf-8")
    python("from burnish.cli import main; import sys; sys.argv = ['burnish', 'run', 'own.yaml']; main()", changed)
    lines = read_metrics(changed / "runs" / "own-functions" / "policy")
    assert len(lines) == 4 and all(line["sampler_mismatch"] < 1e-5 for line in lines if "sampler_mismatch" in line)
    assert any("reward_pattern" in line for line in lines)


def test_the_generator_gives_the_completions_of_the_local_one(changed: Path, tiny_llama: Any) -> None:
    tiny_llama().save_pretrained(changed / "policy")
    text = python(COMPARED, changed)
    plain, local = text.split()
    assert plain == local


COMPARED = """
from transformers import AutoModelForCausalLM
from burnish.generate.local import LocalGenerator
from burnish.generate.plain import PlainGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling

model = AutoModelForCausalLM.from_pretrained("policy").eval()
requests = [Request((5, 6, seed), seed, Sampling(temperature=0.0, max_new_tokens=6)) for seed in (7, 8, 9)]
for generator in (PlainGenerator(model, None), LocalGenerator(model)):
    print("/".join(f"{c.tokens.tolist()}{c.finish_reason}".replace(" ", "") for c in complete(generator, requests)))
"""
