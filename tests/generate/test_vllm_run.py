"""A recipe that samples on a vLLM server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from burnish.config import load, run
from burnish.errors import UserError
from fake_vllm import serving
from run_processes import TWO, finished
from tiny_runs import run_until

RECIPE = """
name: sampled
stages:
  - name: train
    method: {name: grpo, show_every: 1}
    model: base
    adapter: {r: 2}
    data: {train: prompts.jsonl}
    reward: [{function: "rewards.py:length"}]
    generation: {max_new_tokens: 4, samples: 2}
    generator: GENERATOR
    trainer: {per_device_train_batch_size: 2, learning_rate: 1.0e-2, save_steps: 1}
"""


@pytest.fixture
def served(run_folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer that servers start with, and beside them what the recipe needs."""
    Path("rewards.py").write_text("def length(answers): return [sum(a.tokens) % 5 / 2 for a in answers]")
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1"}) + "\n" for i in range(6)))
    return hf.LlamaForCausalLM.from_pretrained("base"), hf.AutoTokenizer.from_pretrained("base")


def recipe(out: str, generator: str) -> Any:
    Path("recipe.yaml").write_text(RECIPE.replace("GENERATOR", generator))
    return load("recipe.yaml", [f"out={out}"])


def at(url: str, **settings: str | int) -> str:
    return json.dumps({"name": "vllm", "url": url, **settings})


def check_equal(run: str, expected: str) -> None:
    """Check that two runs trained the same adapter, up to rounding."""
    ours, theirs = (load_file(f"{name}/train/adapter/adapter_model.safetensors") for name in (run, expected))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_run_continues_on_another_server(served: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = served
    monkeypatch.setenv("VLLM_KEY", "sk-secret")
    with serving(model, tokenizer) as first:
        run_until(lambda: run.run(recipe("remote", at(first.url))), "train", 2, monkeypatch)
        assert first.bodies and not first.vllm.adapters
    with serving(model, tokenizer) as second:
        second.key = "sk-secret"
        run.run(recipe("remote", at(second.url, key="VLLM_KEY", folder="adapters")))
        assert len(second.bodies) == 1 + 2 * 2  # the probe, and the last of three batches of two prompts
        assert not list(Path("adapters").iterdir())
    run.run(recipe("local", "{name: local}"))
    check_equal("remote", "local")
    assert not any("sk-secret" in path.read_text(errors="ignore") for path in Path("remote").rglob("*.json*"))
    with pytest.raises(UserError, match=r"generator.slots was .*start over"):
        run.run(recipe("remote", at(second.url, slots=3)))


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_run_of_two_processes_uses_one_server(served: tuple[Any, Any]) -> None:
    run.run(recipe("local", "{name: local}"))
    with serving(*served) as server:
        recipe("two", at(server.url))
        finished("recipe.yaml", "out=two", TWO, cwd=Path.cwd())
        assert server.calls.count("/v1/load_lora_adapter") == 3
    check_equal("two", "local")
