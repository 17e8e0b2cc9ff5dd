"""The examples of CONTRIBUTING.md run, as a reader would write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config import load
from burnish.config.run import run
from burnish.math.policy import reinforce
from burnish.report.metrics import read_metrics
from burnish.rewards.functions import load as load_function

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the reader's file of a policy loss and an advantage estimator, and the README's reward."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("python") if block.startswith("# my_rl.py")]
    Path("my_rl.py").write_text(code, "utf-8")
    Path("my_rewards.py").write_text(blocks("python", README)[0], "utf-8")
    return tmp_path


def test_the_loss_has_the_gradient_of_reinforce_where_nothing_moved(own_file: Path) -> None:
    old, mask = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[True, True, False]])
    advantages, segments = torch.tensor([[0.5, -3.0, 0.0]]), torch.tensor([[1, 1, 0]])
    gradients = []
    for loss, settings in (
        (load_function("my_rl.py:penalized"), {"strength": 0.5}),
        (reinforce, {"floor": None, "unlikelihood": False}),
    ):
        now = old.clone().requires_grad_()
        losses, _ = loss(now, old, advantages, mask, segments, **settings)
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


def test_a_recipe_uses_both_without_a_change_to_the_package(own_file: Path) -> None:
    (recipe,) = blocks("yaml")
    Path("own.yaml").write_text(recipe, "utf-8")
    folder = run(load("own.yaml"))
    lines: list[dict[str, Any]] = read_metrics(folder / "policy")
    assert len(lines) == 4 and all("moved" in line for line in lines)
