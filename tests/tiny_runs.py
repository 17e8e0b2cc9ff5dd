"""Rows, models and settings of small training runs, and what tests compare: ``from tiny_runs import ROWS, weights``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import TrainerCallback, TrainingArguments

from builders import character_tokenizer, llama
from burnish import PPO, Distill, Reinforce, Trainer
from burnish.config.row_stage import _State
from burnish.generate.sampling import Sampling
from burnish.models.adapters import add_adapter
from burnish.models.loaded import Loaded
from burnish.models.settings import AdapterConfig
from burnish.rewards.functions import NamedReward

NUMBERS = random.Random(0)
ROWS = [
    {"prompt": f"{'abcde'[i % 5]} + {i} =", "completion": "x" * (1 + i % 4) + str(NUMBERS.randrange(1000))}
    for i in range(10)
]
PROMPTS = [{"prompt": f"{i} + {i} ="} for i in range(8)]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no" + str(i)} for i, row in enumerate(ROWS)
]


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """TrainingArguments of two epochs of steps of four rows, logged at every step."""
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "max_grad_norm": 0,
    }
    return TrainingArguments(str(folder), **(defaults | settings))


class Gradients(TrainerCallback):
    """Keeps the gradient of every step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        assert model is not None
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


class Killed(BaseException):
    """Stands for the end of the process."""


def run_until(run: Callable[[], object], stage: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a recipe until a checkpoint of a stage has been saved, and stop there."""
    saved = Trainer._save_checkpoint

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        saved(self, *args, **kwargs)
        if self.folder.name == stage and self.state.global_step == step:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "_save_checkpoint", save)
        run()


def run_until_chunk(run: Callable[[], object], chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a recipe until its stages that make rows have written one more chunk than these, which are recorded."""
    save, saved = _State.save, []

    def killed(self: Any, folder: Path) -> None:
        if len(saved) == chunks:
            raise Killed
        saved.append(folder)
        save(self, folder)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(_State, "save", killed)
        run()


def json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The stages of a run's manifest by name."""
    return {stage["name"]: stage for stage in json.loads((folder / "manifest.json").read_text("utf-8"))["stages"]}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The relative distance of two gradients, by parameter name."""
    assert list(a) == list(b)
    flat = [torch.cat([x.flatten() for x in gradients.values()]) for gradients in (a, b)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def weights(trainer: Trainer) -> dict[str, bytes]:
    """The bytes of all weights."""
    state = trainer.network.state_dict()
    return {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in state.items()}


def gradient(make, **settings: Any) -> dict[str, torch.Tensor]:
    """The gradient of the first step of the trainer that ``make(**settings)`` makes."""
    keep = Gradients()
    make(callbacks=[keep], max_steps=1, **settings).train()
    return keep.gradients[0]


def with_dropout(seed: int = 0) -> Any:
    """A GPT-2 with dropout."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 105, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **ends, attn_pdrop=0.0, resid_pdrop=0.2, embd_pdrop=0.2))


def lora(model: Any, dropout: float = 0.0, **more: Any) -> Any:
    """A model with a LoRA adapter."""
    settings: dict[str, Any] = {"r": 4, "dropout": dropout} | more
    torch.manual_seed(3)
    return add_adapter(model, AdapterConfig(**settings), "CAUSAL_LM")


def reward(answers: list) -> list[float]:
    """A score that follows from the text alone."""
    return [answer.text.count("1") - 0.1 * len(answer.tokens) for answer in answers]


def ppo(**settings: Any) -> PPO:
    """PPO with several epochs, mini-batches and an adaptive KL coefficient."""
    defaults: dict[str, Any] = {"epochs": 2, "mini_batches": 2, "kl_target": 0.5, "kl_horizon": 20}
    return PPO(reward, Sampling(max_new_tokens=5), **(defaults | settings))


def grpo() -> Reinforce:
    """GRPO with a correction, normalized scores and a KL term in the loss."""
    settings: dict[str, Any] = {
        "epochs": 2,
        "policy_loss": "clip",
        "correction": {"mode": "truncate", "cap": 2.0},
        "score_normalize": True,
    }
    kl: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimate": "k3"}
    return Reinforce(reward, Sampling(max_new_tokens=5, samples=3), advantage="group_std", **settings, **kl)


def distill(**settings: Any) -> Distill:
    """Distillation from a teacher with another layer, on two completions of each prompt."""
    teacher = Loaded("teacher", llama(7, num_hidden_layers=3), character_tokenizer())
    sampling = Sampling(max_new_tokens=5, samples=2)
    return Distill(
        [NamedReward("ones", 0.0, reward)],
        sampling,
        load=lambda _: teacher,
        teacher="teacher",
        show_every=1,
        **settings,
    )
