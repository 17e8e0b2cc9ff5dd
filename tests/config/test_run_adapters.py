"""Stages with adapters: each kind, what is stored, continuing to train one, and merging one first."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from burnish.config import load
from burnish.config import run as pipeline
from burnish.errors import UserError
from burnish.models import loading
from burnish.models.bases import recorded, weights_hash
from burnish.report.display import Display
from burnish.training import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
RECIPE = """
name: adapters
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 24, pairs: 12, prompts: 8, held_out: 6}
  - name: sft
    method: {name: sft}
    model: {stage: prepare}
    adapter: {r: 4, dora: true}
    data: {train: {stage: prepare, file: sft.jsonl}}
    trainer: {per_device_train_batch_size: 8, learning_rate: 1.0e-2, save_steps: 1}
  - name: reward
    method: {name: reward}
    model: {stage: sft}
    adapter: {r: 4, rslora: true}
    data: {train: {stage: prepare, file: pairs.jsonl}}
    trainer: {per_device_train_batch_size: 6, learning_rate: 1.0e-2, save_steps: 1}
  - name: ppo
    method: {name: ppo, epochs: 1, mini_batches: 1, critic: shared}
    model: {stage: sft}
    adapter: {r: 4}
    reward: [{model: {stage: reward}}]
    data: {train: {stage: prepare, file: prompts.jsonl}}
    generation: {max_new_tokens: 4}
    trainer: {per_device_train_batch_size: 4, learning_rate: 1.0e-2, save_steps: 1}
"""


def run(file: Path, text: str) -> str:
    """Run a recipe and return its output."""
    file.write_text(text)
    shown = io.StringIO()
    with Display(Console(file=shown, width=400)) as screen:
        pipeline.run(load(file, [f"out={file.with_suffix('')}"]), display=screen)
    return shown.getvalue()


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Iterator[Path]:
    """A finished run of the recipe, which tests must not change."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(home / "cache"))
        run(home / "run.yaml", RECIPE)
        yield home / "run"


def more(done: Path, **settings: Any) -> str:
    """A recipe of one stage, ``more``, that starts from a folder."""
    stage = {
        "name": "more",
        "method": {"name": "sft"},
        "data": {"train": str(done / "prepare" / "data" / "sft.jsonl")},
        "trainer": {"per_device_train_batch_size": 8, "learning_rate": 1e-2},
    }
    return json.dumps({"name": "more", "stages": [stage | settings]})


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model: Any = loading.load_policy(str(folder)).eval()
    return model(input_ids=torch.tensor([[1, 5, 9, 14, 6]])).logits


BASES = {"sft": "prepare", "reward": "sft", "ppo": "sft"}


def test_every_folder_loads_without_burnish_and_gives_the_same_logits(done, artifacts):
    for stage, by_folder in artifacts(*(done / stage for stage in BASES)).items():
        assert {name.partition("-")[0] for name in by_folder} == {"model", "adapter", "checkpoint"}
        for name, logits in by_folder.items():
            assert logits == pytest.approx(by_folder["model"], abs=1e-5), f"{stage}/{name}"


def test_an_adapter_records_its_base_by_name_and_hash(done):
    for stage, base in BASES.items():
        folder = str(done / base / "model")
        for place in (done / stage / "adapter", checkpoint.latest(done / stage)[0]):
            assert place is not None
            assert recorded(place) == (folder, weights_hash(folder))
    assert (done / "ppo" / "adapter" / "value_head.safetensors").is_file()
    bases = [weights_hash(str(done / stage / "model")) for stage in ("prepare", *BASES)]
    assert len(set(bases)) == 4


def test_a_stage_without_its_own_adapter_continues_the_one_it_starts_from(done, tmp_path):
    start = done / "sft" / "adapter"
    shown = run(tmp_path / "run.yaml", more(done, model=str(start)))
    assert f"{start} is an adapter: training continues it on top of its base {done / 'prepare' / 'model'}" in shown
    stage = tmp_path / "run" / "more"
    assert recorded(stage / "adapter") == recorded(start)
    config = [json.loads((folder / "adapter_config.json").read_text()) for folder in (start, stage / "adapter")]
    assert config[0]["use_dora"] and config[1]["use_dora"] and not (stage / "base").exists()


def test_a_stage_with_its_own_adapter_first_merges_the_one_it_starts_from(done, tmp_path):
    start = done / "sft" / "adapter"
    shown = run(tmp_path / "run.yaml", more(done, model=str(start), adapter={"r": 2}))
    stage = tmp_path / "run" / "more"
    assert f"{start} is an adapter: merged into its base before the new one is added: {stage / 'base'}" in shown
    assert recorded(stage / "adapter") == (str(stage / "base"), weights_hash(str(stage / "base")))
    # what it starts from is what the earlier stage ended with, and it is still there to go back to
    torch.testing.assert_close(logits(stage / "base"), logits(done / "sft" / "model"), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(stage / "adapter"), logits(stage / "model"), atol=1e-5, rtol=1e-5)


def test_a_reward_model_that_starts_from_a_policys_adapter_merges_it(done, tmp_path):
    start = done / "sft" / "adapter"
    data = {"train": str(done / "prepare" / "data" / "pairs.jsonl")}
    shown = run(tmp_path / "run.yaml", more(done, model=str(start), method={"name": "reward"}, data=data))
    assert f"{start} is an adapter: it is merged into its base {done / 'prepare' / 'model'}" in shown
    assert not (tmp_path / "run" / "more" / "adapter").exists()


def test_a_stage_is_refused_if_its_adapter_has_another_base(done, tmp_path):
    wrong = tmp_path / "adapter"
    wrong.mkdir()
    for path in (done / "ppo" / "adapter").iterdir():
        (wrong / path.name).write_bytes(path.read_bytes())
    # the tutorial's mistake: an adapter that was trained on the fine-tuned model, put on the raw one
    known = json.loads((wrong / "base.json").read_text())
    (wrong / "base.json").write_text(json.dumps(known | {"base": str(done / "prepare" / "model")}))
    for name, settings in {"on": {}, "merged": {"adapter": {"r": 2}}}.items():
        with pytest.raises(UserError, match=r"was trained on .*: its weights are now"):
            run(tmp_path / f"{name}.yaml", more(done, model=str(wrong), **settings))


def test_in_bf16_trained_weights_are_float32_and_adapters_are_merged_in_float32(done, tmp_path):
    model = str(done / "sft" / "model")
    shown = run(tmp_path / "full.yaml", more(done, model=model, precision="bf16"))
    assert re.search(r"LlamaForCausalLM, .* trained, float32, passes in bf16", shown), shown
    shown = run(tmp_path / "run.yaml", more(done, model=model, precision="bf16", adapter={"r": 2}))
    assert re.search(r"LlamaForCausalLM, .* trained, bfloat16", shown), shown
    stage = tmp_path / "run" / "more"
    torch.testing.assert_close(logits(stage / "adapter"), logits(stage / "model"), atol=1e-5, rtol=1e-5)
    merged: Any = loading.load_policy(str(stage / "model"))
    assert merged.config.dtype is not None and str(merged.config.dtype).endswith("float32")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_stages_train_and_are_merged_in_full_or_are_refused_before_anything_runs(
    kind, done, tmp_path, artifacts
):
    text = more(done, model=str(done / "sft" / "model"), adapter={"r": 2, "quantize": kind})
    try:
        import bitsandbytes  # type: ignore  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=rf"stages\.more\.adapter\.quantize: {kind} needs bitsandbytes"):
            run(tmp_path / "run.yaml", text)
        assert not (tmp_path / "run").exists()
        return
    run(tmp_path / "run.yaml", text)
    logits = artifacts(tmp_path / "run" / "more", done / "sft")
    assert logits["more"]["adapter"] == pytest.approx(logits["more"]["model"], abs=1e-5)
    assert logits["more"]["model"] != pytest.approx(logits["sft"]["model"], abs=1e-3)
