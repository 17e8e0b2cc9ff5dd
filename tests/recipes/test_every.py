"""Every shipped recipe runs, cut down to seconds, with small random models and stand-ins for downloads."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel

from builders import llama
from burnish.config import load, shipped
from burnish.config.run import run
from burnish.errors import WaitingForPeople
from burnish.label.store import Store
from burnish.label.tasks import Answer
from burnish.report.metrics import read_metrics

FILMS = ["stages.prepare.with.archive={archive}", "stages.prepare.with.pairs=12"]
# Overrides that replace models and files by small ones and reduce the work.
SUMS = [
    "stages.prepare.with={{rows: 64, pairs: 64, prompts: 32, held_out: 16}}",
    "stages.loop.stages.held-out.generation.samples=1",
]
BRIEF = ["trainer.num_train_epochs=1", "trainer.warmup_steps=0"]
SMALLER = {
    "alphamath": [
        "stages.prepare.with={{rows: 64, questions: 8, development: 8, held_out: 8, numbers: 3}}",
        *(f"stages.{stage}.trainer.warmup_steps=0" for stage in ("sft", "loop.stages.values")),
        *(f"stages.{stage}.trainer.max_steps=2" for stage in ("sft", "loop.stages.values")),
        "stages.loop.rounds=2",
    ],
    "alphamath-code": [
        "stages.prepare.with={{rows: 64, questions: 8, development: 8, held_out: 8, numbers: 2}}",
        *(f"stages.{stage}.trainer.warmup_steps=0" for stage in ("sft", "loop.stages.values")),
        *(f"stages.{stage}.trainer.max_steps=2" for stage in ("sft", "loop.stages.values")),
        "stages.loop.stages.search.method.step={{code: {{sandbox: none, preload: []}}}}",
        "stages.loop.rounds=2",
    ],
    "best-of-n": [
        SUMS[0],
        *(f"stages.{stage}.{setting}" for stage in ("sft", "reward", "distilled") for setting in BRIEF),
    ],
    "calculator": [
        "stages.prepare.with={{rows: 64, prompts: 32, held_out: 16}}",
        *(f"stages.sft.{setting}" for setting in BRIEF),
    ],
    "classic": [
        "stages.prepare.with={{dictionary: {dictionary}, rows: 3, pairs: 2, prompts: 2, held_out: 2}}",
        "stages.sft.model={policy}",
        "stages.ppo.trainer.per_device_train_batch_size=2",
        "stages.ppo.generation.max_new_tokens=4",
    ],
    "constitution": [
        *(f"stages.prepare.with.{setting}" for setting in ("rows=256", "questions=64", "prompts=128", "held_out=16")),
        *(f"stages.{stage}.{setting}" for stage in ("student", "sft", "reward") for setting in BRIEF),
    ],
    "distill": [
        "stages.prepare.with={{rows: 64, pairs: 1, prompts: 128, held_out: 16}}",
        *(f"stages.{stage}.{setting}" for stage in ("teacher", "start", "distill") for setting in BRIEF),
    ],
    "dpo": [*FILMS, "stages.prepare.with.pairs_held_out=8", "stages.dpo.model={policy}"],
    "expert-iteration": [*SUMS, *(f"stages.sft.{setting}" for setting in BRIEF)],
    "grpo": [
        "stages.prepare.with={{rows: 64, prompts: 32, held_out: 16}}",
        "stages.sft.trainer.num_train_epochs=1",
        "stages.sft.trainer.warmup_steps=0",
    ],
    "guess": [
        "stages.prepare.with={{rows: 64, prompts: 128, held_out: 16}}",
        *(f"stages.sft.{setting}" for setting in BRIEF),
    ],
    "online-dpo": [
        *SUMS,
        *(f"stages.sft.{setting}" for setting in BRIEF),
        "stages.loop.stages.dpo.trainer.max_steps=2",
    ],
    "people": [
        *FILMS,
        "stages.prepare.with.rows=8",
        "stages.prepare.with.prompts=8",
        "stages.sft.model={policy}",
        "stages.samples.generation.max_new_tokens=4",
        "stages.samples.data.limit=4",
        "stages.reward.model={encoder}",
        "stages.ppo.trainer.per_device_train_batch_size=8",
        "stages.ppo.generation.max_new_tokens=4",
    ],
    "pretrain": [
        "stages.prepare.with={{held_out: 2, docstrings: 1}}",
        "stages.pretrain.trainer.max_steps=2",
        "stages.pretrain.trainer.warmup_steps=0",
    ],
    "quickstart": [
        *FILMS,
        "stages.prepare.with.rows=8",
        "stages.prepare.with.rows_held_out=4",
        "stages.prepare.with.prompts=8",
        "stages.sft.model={policy}",
        "stages.reward.model={encoder}",
        "stages.ppo.reward=[{{model: {{stage: reward}}}}]",
        "stages.ppo.trainer.per_device_train_batch_size=8",
        "stages.ppo.generation.max_new_tokens=4",
    ],
    "reinforce": [
        "stages.prepare.with={{rows: 64, scored: 64, held_out: 16}}",
        "stages.sft.trainer.num_train_epochs=1",
        "stages.sft.trainer.warmup_steps=0",
    ],
    "rest": [*SUMS, *(f"stages.{stage}.{setting}" for stage in ("sft", "reward") for setting in BRIEF)],
    "rest-em": [*SUMS, *(f"stages.base.{setting}" for setting in BRIEF)],
    "rest-films": [
        *FILMS,
        "stages.prepare.with.rows=8",
        "stages.prepare.with.prompts=8",
        "stages.sft.model={policy}",
        "stages.reward.model={encoder}",
        "stages.loop.stages.grow.reward=[{{model: {{stage: reward}}}}]",
        "stages.loop.stages.grow.generation.max_new_tokens=4",
        "stages.loop.stages.held-out.reward=[{{model: {{stage: reward}}}}]",
        "stages.loop.stages.held-out.generation={{max_new_tokens: 4}}",
    ],
    "reward-causal": [*FILMS, "stages.prepare.with.pairs_held_out=8", "stages.reward.model={policy}"],
    "rlaif": [
        *FILMS,
        "stages.prepare.with.rows=8",
        "stages.prepare.with.prompts=8",
        "stages.prepare.with.questions=8",
        "stages.judge.model={judge}",
        "stages.judge.data.max_length=1024",
        "stages.sft.model={policy}",
        "stages.samples.generation.max_new_tokens=4",
        "stages.reward.model={encoder}",
        "stages.ppo.reward=[{{model: {{stage: reward}}}}]",
        "stages.ppo.trainer.per_device_train_batch_size=8",
        "stages.ppo.generation.max_new_tokens=4",
    ],
    "self-correct": [
        "stages.prepare.with={{rows: 64, prompts: 32, held_out: 16}}",
        *(f"stages.sft.{setting}" for setting in BRIEF),
    ],
    "step_value": [
        "stages.prepare.with={{rows: 64, prompts: 16, held_out: 16}}",
        "stages.values.trainer.num_train_epochs=1",
    ],
    "step_value_lora": [
        "stages.prepare.with={{rows: 16, held_out: 8}}",
        "stages.values.model={policy}",
        "stages.values.trainer.num_train_epochs=1",
        "stages.values.trainer.warmup_steps=0",
    ],
    "sft": [
        "stages.prepare.with={{rows: 64, pairs: 1, prompts: 1, held_out: 16}}",
        "stages.sft.trainer.num_train_epochs=1",
        "stages.sft.trainer.warmup_steps=0",
    ],
    "tiny": [
        "stages.prepare.with={{rows: 64, pairs: 64, prompts: 128, held_out: 16}}",
        "stages.sft.trainer.num_train_epochs=1",
        "stages.reward.trainer.num_train_epochs=1",
        "stages.ppo.trainer.num_train_epochs=1",
    ],
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT, without a head."""
    folder = tmp_path_factory.mktemp("encoder")
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that can read a judge's question, which has a token for each character."""
    folder = tmp_path_factory.mktemp("judge")
    llama(max_position_embeddings=1024).save_pretrained(folder)
    return folder


def finished(name: str, overrides: list[str]) -> Path:
    """Run a recipe to its end. If it waits for people, rank the completions in the order of the rows."""
    recipe = load(name, overrides)
    try:
        return run(recipe)
    except WaitingForPeople:
        for database in recipe.folder.glob("*.labels.sqlite"):
            with Store(database) as store:
                for task in store.tasks():
                    store.record(Answer(task.id, "Ann", tuple(range(len(task.completions)))))
        return run(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_it_runs(
    name: str,
    tmp_path: Path,
    archive: Path,
    dictionary: Path,
    tiny_folder: Path,
    tiny_tokenizer: Any,
    encoder: Path,
    judge: Path,
) -> None:
    for folder in (encoder, judge):
        tiny_tokenizer.save_pretrained(folder)
    places = {
        "archive": archive,
        "dictionary": dictionary,
        "policy": tiny_folder,
        "encoder": encoder,
        "judge": judge,
    }
    smaller = [setting.format(**places) for setting in SMALLER[name]]
    folder = finished(name, [*smaller, f"out={tmp_path / 'run'}", "threads=1"])
    made = {entry["name"]: entry for entry in json.loads((folder / "manifest.json").read_text())["stages"]}
    for stage in load(name, smaller).stages:
        if stage.makes_rows:
            assert list((folder / stage.name / "data").glob("*.jsonl")) and read_metrics(folder / stage.name)
        elif stage.method is not None and made[stage.name]["state"] == "done":
            trained = any("loss" in line for line in read_metrics(folder / stage.name))
            assert trained or made[stage.name]["rows"]["train"]["rows"] == 0
            kept = (folder / stage.name / "model" / "config.json").is_file()
            assert kept != made[stage.name].get("thinned", False)
    assert (folder / "report.html").is_file()
