"""``loader: unsloth``, with a stand-in for the package: what it is asked for, and what is refused."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import peft
import pytest
import torch

from burnish.config import load, run
from burnish.errors import UserError
from burnish.models import unsloth
from burnish.models.bases import Base
from burnish.models.loading import load_policy
from burnish.models.settings import AdapterConfig
from burnish.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
RECIPE = """
name: quick
stages:
  - name: sft
    method: {name: sft}
    model: base
    loader: unsloth
    adapter: {r: 4, targets: [q_proj, v_proj]}
    data: {train: rows.jsonl}
    trainer: {per_device_train_batch_size: 2, max_steps: 2, activation_checkpointing: true}
"""


class FastLanguageModel:
    """Records the calls, which have the parameters of Unsloth 2026.8, and loads with transformers and peft."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int,
        dtype: torch.dtype,
        load_in_4bit: bool,
        load_in_8bit: bool,
        load_in_16bit: bool,
        full_finetuning: bool,
        use_gradient_checkpointing: str | bool,
        trust_remote_code: bool,
    ) -> tuple[Any, None]:
        FastLanguageModel.calls.append(("from_pretrained", dict(locals())))
        if "missing" in model_name:
            raise RuntimeError("Unsloth: No config\nfile found")
        return load_policy(model_name, dtype=dtype), None

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int,
        target_modules: list[str],
        lora_alpha: float,
        lora_dropout: float,
        bias: str,
        use_gradient_checkpointing: str | bool,
        random_state: int,
        use_rslora: bool,
    ) -> Any:
        FastLanguageModel.calls.append(("get_peft_model", {k: v for k, v in locals().items() if k != "model"}))
        lora = peft.LoraConfig(r=r, target_modules=target_modules, task_type="CAUSAL_LM", lora_alpha=int(lora_alpha))
        return peft.get_peft_model(model, lora)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The stand-in as an installed package."""
    module: Any = ModuleType("unsloth")
    module.__spec__, module.FastLanguageModel = ModuleSpec("unsloth", None), FastLanguageModel
    monkeypatch.setitem(sys.modules, "unsloth", module)
    FastLanguageModel.calls.clear()
    return FastLanguageModel.calls


def test_without_the_package_or_a_gpu_one_message_says_what_is_needed(monkeypatch: Any, request: Any) -> None:
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    with pytest.raises(UserError, match=r"stages\.a\.loader: Unsloth is not installed: pip install a release of unslo"):
        unsloth.require("stages.a.loader")
    request.getfixturevalue("installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="Unsloth needs a CUDA GPU, and this machine has none: remove loader"):
        unsloth.require()


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_the_model_and_its_adapter_are_made_by_unsloth(
    quantize: Any, installed: Any, monkeypatch: Any, tiny_folder: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    adapter = AdapterConfig(r=4, alpha=8, dropout=0.1, rslora=True, quantize=quantize)
    base = Base("here", "hash")
    settings: dict[str, Any] = {"adapter": adapter, "base": base, "activation_checkpointing": True, "seed": 7}
    model: Any = unsloth.load_policy(str(tiny_folder), dtype=torch.float32, **settings)
    assert isinstance(model, peft.PeftModel) and model.trained_on is base
    (first, loaded), (second, adapted) = installed
    assert (first, second) == ("from_pretrained", "get_peft_model")
    assert loaded == {
        "model_name": str(tiny_folder),
        "max_seq_length": 256,  # the model's context
        "dtype": torch.float32,
        "load_in_4bit": quantize == "nf4",
        "load_in_8bit": quantize == "int8",
        "load_in_16bit": quantize is None,
        "full_finetuning": False,
        "use_gradient_checkpointing": "unsloth",
        "trust_remote_code": False,
    }
    assert adapted == {
        "r": 4,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_gradient_checkpointing": "unsloth",
        "random_state": 7,
        "use_rslora": True,
    }


def test_all_weights_are_trained_without_an_adapter(installed: Any, monkeypatch: Any, tiny_folder: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = unsloth.load_policy(str(tiny_folder), dtype=torch.float32)
    ((_, loaded),) = installed
    assert all(p.requires_grad for p in model.parameters())
    assert loaded["full_finetuning"] and loaded["use_gradient_checkpointing"] is False
    assert not (loaded["load_in_4bit"] or loaded["load_in_8bit"] or loaded["load_in_16bit"])


def test_what_unsloth_cannot_load_is_an_error_of_the_user(
    installed: Any, monkeypatch: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(unsloth.loading, "load_config", lambda *_, **__: load_policy(str(tiny_folder)).config)
    with pytest.raises(UserError, match=r"loader: unsloth: hub/missing: Unsloth: No config file found"):
        unsloth.load_policy("hub/missing", dtype=torch.float32)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is an adapter: expected a whole model"):
        unsloth.load_policy(str(tmp_path), dtype=torch.float32)


def test_a_stage_trains_the_model_of_unsloth(installed: Any, monkeypatch: Any, run_folder: Path) -> None:
    monkeypatch.setattr(unsloth, "require", lambda *_: FastLanguageModel)  # there is no GPU
    Path("rows.jsonl").write_text("\n".join(json.dumps({"prompt": "a", "completion": "b" * n}) for n in range(1, 6)))
    Path("run.yaml").write_text(RECIPE)
    layouts: list[tuple[Any, ...]] = []
    made = Trainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        layouts.append(
            (self.engine.layout.packed, self.engine.layout.shared_prompts, self.args.activation_checkpointing)
        )

    monkeypatch.setattr(Trainer, "__init__", init)
    run.run(load(Path("run.yaml")))
    assert [name for name, _ in installed] == ["from_pretrained", "get_peft_model"]
    assert installed[0][1]["use_gradient_checkpointing"] == "unsloth"
    assert layouts == [(False, False, False)]
    folder = Path("runs/quick/sft")
    assert (folder / "model/model.safetensors").is_file() and (folder / "adapter/adapter_model.safetensors").is_file()
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("r: 4", "r: 4, dora: true"), "adapter.dora: loader: unsloth trains plain LoRA"),
        (("[q_proj, v_proj]", ".*_proj"), "adapter.targets: loader: unsloth takes a list"),
        (("loader: unsloth", "loader: unsloth\n    packed: true"), "packed: true: a model of loader: unsloth ignores"),
        (("name: sft}", "name: reward}"), r"stages\.sft\.loader: unsloth: it loads language models"),
        (("name: sft}", "name: grpo}"), "generator local cannot sample from a model of Unsloth"),
    ],
)
def test_stages_that_it_does_not_suit_are_refused(
    change: tuple[str, str], message: str, monkeypatch: Any, run_folder: Path
) -> None:
    monkeypatch.setattr(unsloth, "require", lambda *_: FastLanguageModel)
    pair = '"chosen": "b", "rejected": "c"' if "reward" in change[1] else '"completion": "b"'
    Path("rows.jsonl").write_text(f'{{"prompt": "a", {pair}}}\n')
    text = RECIPE.replace(*change)
    assert text != RECIPE
    if "grpo" in text:
        text = text.replace("data:", "reward: [{function: rewards.py:one}]\n    generation: {samples: 2}\n    data:")
        Path("rewards.py").write_text("def one(trajectories):\n    return [1.0] * len(trajectories)\n")
        Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    Path("run.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        run.run(load(Path("run.yaml")))
