"""The method search: rows that train, rounds of search and training, a stop in the middle, mistakes in recipes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from burnish.config import load, row_stage
from burnish.config import run as pipeline
from burnish.config.inputs import Checksums, of_code
from burnish.data.readers import load as load_rows
from burnish.errors import UserError
from burnish.search.solutions import distinct, paths
from burnish.search.tree import from_json
from burnish.types import Conversation, Steps
from tiny_runs import entries, json_rows, run_until_chunk

RECIPE = """
name: search
threads: 1
stages:
  - name: prepare
    run: mine.py:prepare
  - name: sft
    method: {name: sft}
    model: {stage: prepare}
    data: {train: {stage: prepare, file: sft.jsonl}}
    trainer: &brief {per_device_train_batch_size: 16, num_train_epochs: 4, learning_rate: 1.0e-2}
  - name: first
    method: &search
      {name: search, simulations: 16, children: 3, trees: 2, step: {depth: 5}, answer: {find: last_line, check: exact}}
    model: {stage: sft}
    generation: {max_new_tokens: 12}
    data: {rows: {stage: prepare, file: questions.jsonl}}
  - name: values
    method: {name: step_value, alpha: 1.0}
    model: {stage: sft}
    data: {train: {stage: first, file: steps.jsonl}}
    trainer: {per_device_train_batch_size: 4, num_train_epochs: 2, learning_rate: 1.0e-3}
  - name: second
    method: *search
    model: {stage: values}
    generation: {max_new_tokens: 12}
    generator: {slots: 8}
    data: {rows: {stage: prepare, file: questions.jsonl}}
"""
MINE = """
import random

from burnish.recipes import write_rows
from burnish.recipes.models import character_tokenizer, random_llama

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}"
)

def prepare(folder, seed):
    rng, rows = random.Random(seed), {}
    while len(rows) < 90:
        a, b, c, d = (rng.randrange(1, 6) for _ in range(4))
        steps = f"{a}+{b}={a + b}\\n{a + b}+{c}={a + b + c}\\n{a + b + c}+{d}={a + b + c + d}\\n"
        rows[f"{a}+{b}+{c}+{d}=?"] = steps, str(a + b + c + d)
    first, last = list(rows.items())[:80], list(rows.items())[80:87]
    write_rows(folder / "data/sft.jsonl", ({"prompt": p, "completion": steps} for p, (steps, _) in first))
    write_rows(folder / "data/questions.jsonl", ({"prompt": p, "answer": answer} for p, (_, answer) in last))
    tokenizer = character_tokenizer("0123456789+=?\\n", TEMPLATE)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.08}
    random_llama(tokenizer, seed, **sizes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

def number(text):
    return text[-1:] or None
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "search.yaml").write_text(RECIPE)
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_stage, "CHUNK", 4)
        yield


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    return pipeline.run(load(home / "search.yaml", [f"out={home / 'whole'}"]))


def test_rows_are_those_of_the_trees_and_can_be_read(whole: Path) -> None:
    known = {row["prompt"]: row["answer"] for row in json_rows(whole / "prepare/data/questions.jsonl")}
    for stage in ("first", "second"):
        data = whole / stage / "data"
        trees = json_rows(data / "trees.jsonl")
        assert 7 <= len(trees) <= 14 and {tree["prompt"] for tree in trees} == set(known)
        rows = json_rows(data / "steps.jsonl")
        for row in rows:
            mine = [from_json(tree) for tree in trees if tree["prompt"] == row["instruction"]]
            found = [[{"step": text, "Q": q} for text, q in one.steps] for one in distinct(paths(mine))]
            assert row["output"] in found
            if row["output"][-1]["Q"] == 1:
                assert row["output"][-1]["step"].rpartition("=")[2] == known[row["instruction"]]
        assert len(load_rows(data / "steps.jsonl", (Steps,)).rows) == len(rows) > 0
        assert len(load_rows(data / "solutions.jsonl", (Conversation,)).rows) == len(rows)
        outcomes = Counter((row["instruction"], row["output"][-1]["Q"]) for row in rows)
        assert max(outcomes.values()) <= 4


def test_values_come_from_the_head_where_there_is_one(whole: Path) -> None:
    def values(stage: str) -> set[float]:
        nodes = [node for tree in json_rows(whole / stage / "data/trees.jsonl") for node in tree["nodes"][1:]]
        return {node["value"] for node in nodes if "value" in node and "outcome" not in node}

    assert values("first") == {0.0}
    assert len(values("second")) > 3 and all(-1 < value < 1 for value in values("second"))


def test_measures_and_counts_are_those_of_the_rows(whole: Path) -> None:
    for stage in ("first", "second"):
        entry = entries(whole)[stage]
        after, rows = entry["results"]["after"], json_rows(whole / stage / "data/steps.jsonl")
        trees = json_rows(whole / stage / "data/trees.jsonl")
        solved = {tree["prompt"] for tree in trees if any(node.get("outcome") == 1 for node in tree["nodes"])}
        assert after["eval_solved"] == pytest.approx(len(solved) / 7)
        assert after["eval_solutions"] == pytest.approx(len(rows) / 7)
        assert after["eval_sampled_tokens"] == pytest.approx(sum(tree["tokens"] for tree in trees) / 7)
        assert sum(entry["rows"]["rows"]["counts"].values()) == 7


def test_searches_that_were_killed_end_with_the_same_bytes(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search has two chunks. Both are killed in the second one."""
    recipe = load(home / "search.yaml", [f"out={home / 'killed'}"])
    for chunks in (1, 2):
        run_until_chunk(lambda: pipeline.run(recipe), chunks, monkeypatch)
    assert (recipe.folder / "second/unfinished").is_dir()
    pipeline.run(recipe)
    files = [*sorted(whole.glob("*/data/*.jsonl")), whole / "values/model/value_head.safetensors"]
    assert len(files) == 2 + 3 + 3 + 1
    for path in files:
        again = (recipe.folder / path.relative_to(whole)).read_bytes()
        assert again.replace(str(recipe.folder).encode(), str(whole).encode()) == path.read_bytes(), path


# --- mistakes in recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("first.method.step={delimeter: x}", "first.method.step.delimeter: unknown key.*did you mean 'delimiter'"),
        ("first.method.simulation=3", "first.method.simulation: unknown key.*did you mean 'simulations'"),
        ("first.method.answer.find=maths", "first.method.answer: find: expected math, last_line or file.py:name"),
        ("first.method.answer.find=mine.py:nobody", "first.method.answer.find: .*has no 'nobody'|nobody"),
        ("first.method.answer.check=yours.py:f", "first.method.answer.check: no such file: .*yours.py"),
        ("first.method.step.code={output: x}", "output: expected {} once"),
        ("first.generation.samples=4", "first.generation.samples: search does not use this: method.children"),
        ("first.generation.stop=[x]", "first.generation.stop: search does not use this: method.step.delimiter"),
        ("first.generation={length_range: [2, 9]}", "first.generation.length_range: search does not use this"),
        ("first.generation={min_new_tokens: 9}", "first.generation.min_new_tokens: search does not use this"),
        ("first.generation={temperature: 0}", "first.generation.temperature: at temperature 0, all steps after a"),
        ("second.generator.name=continuous", "second.generator.name: stage 'values' trains a value head, and the gen"),
        ("second.method.step.delimiter=;", r"steps that end with '\\n', but these end with ';'"),
        ("first.reward=[{function: mine.py:number}]", "reward: the method 'search' does not use this"),
        ("values.data.train.file=step.jsonl", "writes no file 'step.jsonl' .*steps.jsonl"),
    ],
)
def test_mistakes_are_found_before_the_run(home: Path, change: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(home / "search.yaml", [f"stages.{change}", f"out={home / 'wrong'}"])


def test_the_users_functions_are_those_beside_the_recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (away := home / "away").mkdir()
    monkeypatch.chdir(away)
    keep = ["stages.first.method.answer.find=mine.py:number", f"out={home / 'own'}"]
    recipe = load(home / "search.yaml", keep)
    choice = recipe.stages[2].method
    assert choice is not None
    assert recipe.method_settings(choice)["answer"] == {"find": f"{home}/mine.py:number", "check": "exact"}
    assert list(of_code(recipe, recipe.stages[2], Checksums({}))) == ["mine.py"]


def broken(home: Path, whole: Path, name: str, rows: list[dict[str, Any]], *changes: str) -> str:
    """The error of a search with the model of an earlier run and with these rows."""
    path = home / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = home / f"{name}.yaml"
    recipe.write_text(
        f"name: {name}\nstages:\n  - name: search\n    method: {{name: search}}\n"
        f"    model: {whole / 'values'}\n    data: {{rows: {path}}}\n"
    )
    with pytest.raises(UserError) as caught:
        pipeline.run(load(recipe, [f"out={home / f'run-{name}'}", *changes]))
    return str(caught.value)


def test_a_row_without_a_known_answer_is_an_error(home: Path, whole: Path) -> None:
    said = broken(home, whole, "unanswered", [{"prompt": "1+1=?", "answer": 0}, {"prompt": "1+2=?", "answer": " "}])
    assert "stages.search: " in said and "unanswered.jsonl:2: no answer: search checks solutions" in said
    listed = broken(home, whole, "listed", [{"prompt": "1+1=?", "answer": [2]}])
    assert "listed.jsonl:1: answer: expected text or a number, got [2]: name a function of yours" in listed
    column = "stages.search.method.answer.column=target"
    assert "other.jsonl:1: no target: " in broken(home, whole, "other", [{"prompt": "1+1=?", "answer": "2"}], column)


def test_a_model_with_a_head_needs_its_delimiter_and_a_generator_with_values(home: Path, whole: Path) -> None:
    rows = [{"prompt": "1+1=?", "answer": "2"}]
    said = broken(home, whole, "delimiter", rows, "stages.search.method.step.delimiter=;")
    assert r"its value head judges steps that end with '\n', but the steps of this search end with ';'" in said
    assert r'set step: {delimiter: "\n"}' in said
    said = broken(home, whole, "continuous", rows, "stages.search.generator.name=continuous")
    assert "has a value head, and the generator continuous returns no values: use generator: {name: local}" in said
