"""The first optimizer step of a trainer, ours or another library's, and a table of how far they were apart."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
TABLE = pytest.StashKey[list[str]]()


class Step(NamedTuple):
    """The first loss that a trainer logs, and the gradient of each parameter by its name in the model."""

    loss: float
    gradient: dict[str, Tensor]


class _Keep(TrainerCallback):
    def __init__(self) -> None:
        self.gradient: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradient = gradient_of(model)


def gradient_of(model: Any) -> dict[str, Tensor]:
    """The gradient of each parameter by its name in the policy."""
    return {name.removeprefix("policy."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="session")
def first_step() -> Callable[[Any], Step]:
    """Trains one step: loss and gradient, neither clipped."""

    def run(trainer: Any) -> Step:
        keep = _Keep()
        trainer.add_callback(keep)
        for silent in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(silent)
        trainer.train()
        return Step(next(line["loss"] for line in trainer.state.log_history if "loss" in line), keep.gradient)

    return run


@pytest.fixture
def ours(make_trainer: Any, first_step: Any) -> Callable[..., Step]:
    """``ours(method, model, rows, **own)``: the step of all rows; with ``reference=`` what the policy started from."""

    def run(method: Any, model: Any, rows: list[Any], reference: Any = None, **own: Any) -> Step:
        start = copy.deepcopy(reference or model)
        trainer = make_trainer(method, start, rows, batch=len(rows), own=own, max_steps=1, max_grad_norm=0)
        trainer.network.policy.load_state_dict(model.state_dict())
        return first_step(trainer)

    return run


@pytest.fixture
def trl_trainer(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``trl_trainer("SFT", model, rows, tokenizer, config={...}, **others)``: TRL's trainer of one step of all rows.

    A dotted name is one of ``trl.experimental``.
    """
    pytest.importorskip("trl", reason="TRL is not installed here: `make peers` makes an environment that has it")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(name: str, model: Any, rows: list[Any], tokenizer: Any = None, config: Any = None, **others: Any) -> Any:
        module, _, short = name.rpartition(".")
        home = importlib.import_module(f"trl.experimental.{module}" if module else "trl")
        settings = {
            "output_dir": str(tmp_path / "trl"),
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            "per_device_train_batch_size": len(rows),
            "max_steps": 1,
            "max_grad_norm": 0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        length = {} if short in ("GRPO", "RLOO") else {"max_length": None}
        return getattr(home, f"{short}Trainer")(
            model=copy.deepcopy(model),
            args=getattr(home, f"{short}Config")(**(settings | length | (config or {}))),
            train_dataset=Dataset.from_list(rows),
            processing_class=copy.deepcopy(tokenizer or tiny_tokenizer),
            **others,
        )

    return make


@pytest.fixture
def trl_step(trl_trainer: Any, first_step: Any) -> Callable[..., Step]:
    """The step of a ``trl_trainer``."""
    return lambda *args, **others: first_step(trl_trainer(*args, **others))


@pytest.fixture(scope="session")
def backward() -> Callable[[Tensor, Any], Step]:
    """Takes the gradient of a loss."""

    def run(loss: Tensor, model: Any) -> Step:
        loss.backward()
        return Step(loss.item(), gradient_of(model))

    return run


@pytest.fixture(scope="session")
def plus() -> Callable[[Step, Any, Tensor], Step]:
    """``plus(step, model, term)``: the step with a term of the model's parameters added to its loss."""

    def add(step: Step, model: Any, term: Tensor) -> Step:
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(term, parameters)
        added = {name: step.gradient[name] + gradient for name, gradient in zip(names, gradients, strict=True)}
        return Step(step.loss + term.item(), added)

    return add


@pytest.fixture
def written(tiny_tokenizer: Any) -> Callable[[str, str], Any]:
    """``written(old, new)``: the tokenizer with a part of its template replaced."""

    def replace(old: str, new: str) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        assert old in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
        return tokenizer

    return replace


@pytest.fixture
def same(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``same(what, ours, theirs)``: losses and gradients of two steps are equal; both losses go into the table."""

    def check(what: str, ours: Step, theirs: Step) -> None:
        a, b = (torch.cat([step.gradient[name].flatten() for name in sorted(ours.gradient)]) for step in (ours, theirs))
        distance = float((a - b).norm() / b.norm())
        request.config.stash.setdefault(TABLE, []).append(
            f"| {what} | {ours.loss:.6f} | {theirs.loss:.6f} | {abs(ours.loss - theirs.loss):.0e} | {distance:.0e} |"
        )
        assert ours.gradient.keys() == theirs.gradient.keys()
        assert b.norm() > 1e-3
        assert ours.loss == pytest.approx(theirs.loss, rel=LOSS_TOLERANCE)
        assert distance < GRADIENT_TOLERANCE

    return check


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was compared, unless it was among all the other tests."""
    table = config.stash.get(TABLE, [])
    if table and config.getoption("markexpr") in ("peers", ""):
        terminalreporter.section("peers")
        for line in [
            "| first step | ours | theirs | losses apart | gradients apart |",
            "|---|---|---|---|---|",
            *table,
        ]:
            terminalreporter.line(line)
