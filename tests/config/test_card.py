"""Model cards: facts of the manifest, the same bytes every time, and text of users that stays text."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from rich.console import Console
from ruamel.yaml import YAML
from typer.testing import CliRunner

from burnish import __version__
from burnish.cli import app
from burnish.config import load
from burnish.config import run as pipeline
from burnish.config.card import code, escape, fence, merged_card, short, write_card
from burnish.files import damage
from burnish.models.bases import recorded
from burnish.models.heads import VALUE_HEAD
from burnish.report.display import Display

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
RUN = """
name: cards
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 4, pairs: 8, prompts: 4, held_out: 4}
  - name: reward
    method: {name: reward}
    model: {stage: prepare}
    adapter: {r: 2}
    data: {train: {stage: prepare, file: pairs.jsonl}, eval: {stage: prepare, file: pairs-eval.jsonl}}
    trainer: {per_device_train_batch_size: 4, save_strategy: "no"}
"""
ONE = """
name: one
method: {name: METHOD}
model: MODEL
data: {train: DATA}
trainer: {per_device_train_batch_size: 2}
"""
AFTER = {"step": 3, "eval_loss": 0.5, "eval_accuracy": 0.8, "eval_accuracy_low": 0.7, "eval_accuracy_high": 0.9}
ENTRY: dict[str, Any] = {
    "rows": {"train": {"rows": 24, "skipped": ["x:1: bad", "x:2: bad"]}},
    "results": {"before": {"step": 0, "eval_loss": 0.7}, "after": AFTER},
    "data": {"DATA": "9f86d081"},
    "inputs": {},
}


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    return YAML(typ="safe").load(front)


def card(folder: Path, model: str = "org/model", data: str = "chat.jsonl", method: str = "sft", **entry: Any) -> str:
    """The card of a recipe of one stage."""
    folder.mkdir(exist_ok=True)
    (folder / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path(data).write_text('{"prompt": "a", "completion": "b"}\n')
    text = ONE.replace("METHOD", method).replace("MODEL", json.dumps(model)).replace("DATA", json.dumps(data))
    (folder / "one.yaml").write_text(text)
    recipe = load(folder / "one.yaml")
    write_card(folder, recipe, recipe.stages[0], ENTRY | {"data": {data: "9f86d081"}} | entry)
    return (folder / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Path]:
    """A finished stage with an adapter and held-out rows."""
    home = tmp_path_factory.mktemp("home")
    (home / "cards.yaml").write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(home / "cache"))
        with Display(Console(file=io.StringIO())) as screen:
            pipeline.run(load(home / "cards.yaml", [f"out={home / 'run'}"]), display=screen)
        yield home / "run" / "reward"


def test_a_stage_writes_the_card_of_its_model_and_of_its_adapter(stage):
    model, adapter = ((stage / kind / "README.md").read_text("utf-8") for kind in ("model", "adapter"))
    assert front_matter(model) == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["burnish", "reward", "lora"],
    }
    assert front_matter(adapter)["library_name"] == "peft" and "AutoPeftModelForSequenceClassification" in adapter
    for text in (model, adapter):
        assert "the model of stage `prepare`" in text and str(stage.parent) not in text
        assert re.search(r"train: `prepare/data/pairs\.jsonl`: 8 rows\n", text)
        assert re.search(r"- `prepare/model/model\.safetensors`: `[0-9a-f]{64}`\n", text)
        interval = r"[\d.]+ % \[[\d.]+ %, [\d.]+ %\]"
        verdict = "(unchanged|no clear change|clearly better|clearly worse)"
        assert re.search(rf"\| Accuracy \| {interval} \| {interval} \| {verdict} \|\n", text)
        assert f"Made with Burnish {__version__}." in text


def loaded_by(text: str, folder: Path) -> dict[str, Any]:
    """What the code of a card in a folder loads: its model and its tokenizer."""
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("PATH/TO/THIS/FOLDER", str(folder)), names)
    return names


def test_the_code_of_a_card_loads_the_model(stage):
    for kind, name in (("model", "LlamaForSequenceClassification"), ("adapter", "PeftModelForSequenceClassification")):
        names = loaded_by((stage / kind / "README.md").read_text("utf-8"), stage / kind)
        assert type(names["model"]).__name__ == name
        assert isinstance(names["tokenizer"], hf.PreTrainedTokenizerBase)


def test_facts_of_a_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = card(tmp_path / "model")
    assert front_matter(text)["base_model"] == "org/model" and front_matter(text)["tags"] == ["burnish", "sft"]
    assert "- train: `chat.jsonl`: 24 rows, 2 skipped\n" in text and "- `chat.jsonl`: `9f86d081`\n" in text
    assert "| Loss | 0.7000 | 0.5000 | better |\n" in text and "| Accuracy |  | 80.0 % [70.0 %, 90.0 %] |  |\n" in text
    assert "after 3 optimizer steps" in text and "per_device_train_batch_size: 2" in text
    assert "learning_rate: 5e-05" in text and "learn_eos: true" in text  # defaults that define the method
    assert card(tmp_path / "model") == text


def test_a_value_head_is_loaded_by_burnish(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = card(tmp_path / "model", method="step_value", rows={}, results={})
    assert "from burnish.models.loading import load_value_model" in text and "## Results" not in text
    (tmp_path / "model" / VALUE_HEAD).touch()
    (tmp_path / "model" / "critic").mkdir()
    text = card(tmp_path / "model", method="ppo}\nreward: [{function: 'burnish.recipes.tiny:exact'}]\n# {")
    assert "holds the critic" in text and "AutoModelForTokenClassification" in text


def test_absolute_paths_stay_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    text = card(tmp_path / "model", model=str(tmp_path / "base"), data=str(tmp_path / "mine.jsonl"))
    assert str(tmp_path) not in text and "`base`" in text and "`mine.jsonl`" in text
    assert "base_model" not in front_matter(text)


@pytest.mark.parametrize(
    "name", ["a`b`.jsonl", "``.jsonl", "---.jsonl", "[x](y).jsonl", "<b>&amp;.jsonl", "a\n---\nb: c.jsonl"]
)
def test_names_of_users_are_neither_markup_nor_yaml(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = card(tmp_path / "model", data=name)
    assert front_matter(text) == front_matter(card(tmp_path / "model"))
    assert text.count("\n---\n") == 1
    shown = code(name)
    ticks = re.match("`+", shown)
    assert ticks and shown.endswith(ticks[0]) and ticks[0] not in shown[len(ticks[0]) : -len(ticks[0])]
    assert shown in text


def test_fences_and_escapes():
    assert fence("a\n```\nb", "yaml") == "````yaml\na\n```\nb\n````"
    assert escape("Reward: [/bold]|<b>\n*x*") == r"Reward: \[/bold\]\|\<b\> \*x\*"
    assert short("/home/me/rows.jsonl") == "rows.jsonl" and short("data/rows.jsonl") == "data/rows.jsonl"
    assert short("/") == "/"


def test_a_merged_adapter_of_a_run_has_the_card_of_its_model(stage, tmp_path):
    merged = CliRunner().invoke(app, ["merge", str(stage), "--output", str(tmp_path / "merged")])
    assert merged.exit_code == 0, merged.output
    assert (tmp_path / "merged" / "README.md").read_bytes() == (stage / "model" / "README.md").read_bytes()
    assert damage(tmp_path / "merged") is None


def test_a_merged_adapter_without_a_run_has_a_short_card(stage, tmp_path):
    shutil.copytree(stage / "adapter", tmp_path / "mine")
    merged = CliRunner().invoke(app, ["merge", str(tmp_path / "mine")])
    assert merged.exit_code == 0, merged.output
    text = (tmp_path / "mine-merged" / "README.md").read_text("utf-8")
    base = recorded(stage / "adapter")
    assert base is not None and "the adapter `mine` merged into its base, `model`" in text and base.weights in text
    assert str(stage.parent) not in text and front_matter(text)["pipeline_tag"] == "text-classification"
    assert type(loaded_by(text, tmp_path / "mine-merged")["model"]).__name__ == "LlamaForSequenceClassification"


def test_names_in_a_short_card_are_neither_markup_nor_yaml(tmp_path):
    folder = tmp_path / "a`b"
    folder.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "x`\n---\ntags: y"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    text = merged_card(folder)
    assert text.count("\n---\n") == 1 and front_matter(text)["tags"] == ["burnish", "merged"]
    assert code("a`b") in text and code("x` --- tags: y") in text
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "org/model"}))
    assert front_matter(merged_card(folder))["base_model"] == "org/model"
