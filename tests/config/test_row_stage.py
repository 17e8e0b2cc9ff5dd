"""Stages that make rows: their files and counts, a stop in the middle, and their use in a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish import files
from burnish.config import load, row_stage
from burnish.config import run as pipeline
from burnish.data.readers import load as load_rows
from burnish.errors import UserError
from burnish.files import staging
from burnish.methods.filter import Filter
from burnish.report.metrics import number
from burnish.types import Conversation, Prompt, Ranking
from tiny_runs import Killed, entries, json_rows, run_until_chunk

RECIPE = """
name: rest
threads: 1
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 64, pairs: 2, prompts: 10, held_out: 8}
  - name: loop
    rounds: 2
    stages:
      - name: grow
        method: {name: sample}
        model: {stage: improve, initial: {stage: prepare}}
        reward: [{function: "mine.py:digits"}, {function: "mine.py:length", weight: 0}]
        generation: {samples: 3, max_new_tokens: 4}
        data: {rows: {stage: prepare, file: prompts.jsonl}}
      - name: improve
        method: {name: sft}
        model: {stage: improve, initial: {stage: prepare}}
        data: {train: {stage: grow, file: samples.jsonl, from_rounds: all}, select: {distinct: true, above: 0.2}}
        trainer: {per_device_train_batch_size: 4, max_steps: 2, learning_rate: 1.0e-3}
"""
MINE = """
import random

def digits(trajectories):
    return [sum(c.isdigit() for c in t.text) / 4 for t in trajectories]

def length(trajectories):
    return [float(len(t.text)) for t in trajectories]

def short(row):
    return len(row["completion"]) < 4 or "too long"

def coin(row):
    return random.random() < 0.5

def eats_tags(row):
    return row["tags"].pop() == "b"

def nothing(row):
    return False
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "rest.yaml").write_text(RECIPE)
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_stage, "CHUNK", 4)
        yield


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    return pipeline.run(load(home / "rest.yaml", [f"out={home / 'whole'}"]))


def entry(folder: Path, name: str) -> dict[str, Any]:
    return entries(folder)[name]


def test_samples_are_in_the_order_of_their_prompts_and_can_be_read(whole: Path) -> None:
    data = whole / "loop/1/grow/data"
    samples, prompts = json_rows(data / "samples.jsonl"), json_rows(whole / "prepare/data/prompts.jsonl")
    order = [prompt["prompt"] for prompt in prompts]
    places = [order.index(sample["prompt"]) for sample in samples]
    assert places == sorted(places) and len(samples) <= 30
    for sample in samples:
        assert sample["score"] == sum(c.isdigit() for c in sample["completion"]) / 4
        assert sample["rewards"]["length"] == len(sample["completion"])
        assert sample["meta"] == {"answer": prompts[order.index(sample["prompt"])]["answer"]}
    assert len({sample["seed"] for sample in samples}) == len(samples)
    assert len(load_rows(data / "samples.jsonl", (Conversation,)).rows) == len(samples)
    for row in load_rows(data / "ranked.jsonl", (Ranking,)).rows:
        assert isinstance(row, Ranking) and len(set(row.scores)) > 1


def test_every_prompt_is_accounted_for_and_results_have_intervals(whole: Path) -> None:
    grown = entry(whole, "loop/1/grow")
    assert sum(grown["rows"]["rows"]["counts"].values()) == 10
    after = grown["results"]["after"]
    assert after["eval_score_low"] <= after["eval_score"] <= after["eval_score_high"]
    ranked = json_rows(whole / "loop/1/grow/data/ranked.jsonl")
    assert after["eval_ranked"] == len(ranked) / 10  # the other prompts have completions of equal scores
    assert 0 <= after["eval_stopped_low"] < after["eval_stopped_high"] <= 1
    improved = entry(whole, "loop/2/improve")
    assert sum(improved["rows"]["train"]["left_out"].values()) > 0


def test_rounds_sample_from_the_improved_model(whole: Path) -> None:
    first, second = (json_rows(whole / f"loop/{k}/grow/data/samples.jsonl") for k in (1, 2))
    assert [row["completion"] for row in first] != [row["completion"] for row in second]
    assert (
        entry(whole, "loop/2/improve")["rows"]["train"]["rows"]
        > entry(whole, "loop/1/improve")["rows"]["train"]["rows"]
    )


def test_the_report_has_every_metric_by_round(whole: Path) -> None:
    page = (whole / "report.html").read_text("utf-8")
    for label in ("Rewards in grow", "Score", "Completion length", "Reward: length", "Stopped", "Empty"):
        assert f'aria-label="{label} by round, ' in page
    first, second = (entry(whole, f"loop/{k}/grow")["results"]["after"]["eval_score"] for k in (1, 2))
    assert f'aria-label="Score by round, grow from {number(first)} to {number(second)}"' in page
    assert page.count('<details class="round" open>') == 1 and page.count('<details class="round"') == 2


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_stage_that_was_killed_ends_with_the_same_bytes(
    home: Path, whole: Path, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(home / "rest.yaml", [f"out={home / f'killed-{chunks}'}"])
    run_until_chunk(lambda: pipeline.run(recipe), chunks, monkeypatch)
    pipeline.run(recipe)
    for path in [*sorted(whole.glob("loop/*/*/data/*.jsonl")), whole / "loop/2/improve/model/model.safetensors"]:
        assert (recipe.folder / path.relative_to(whole)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((), "improve.data.train: stage 'loop/1/grow' has no reward:, so its samples have no score for data.select"),
        (
            ("stages.loop.stages.improve.method.name=dpo",
             "stages.loop.stages.improve.data={train: {stage: grow, file: ranked.jsonl}}"),
            "improve.data.train: stage 'loop/1/grow' has no reward:, so it ranks nothing",
        ),
        (
            ("stages.loop.until={stage: grow, metric: digits_pass@1, above: 1}",
             'stages.loop.stages.grow.reward=[{function: "mine.py:digits"}]'),
            "only the method eval measures pass@k",
        ),
    ],
)  # fmt: skip
def test_scores_that_a_stage_cannot_have_are_an_error_when_the_recipe_is_read(
    home: Path, changes: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        load(home / "rest.yaml", ["stages.loop.stages.grow.reward=[]", *changes])
    load(home / "rest.yaml", ["stages.loop.stages.grow.reward=[]", "stages.loop.stages.improve.data.select.above=null"])


def test_nothing_selected_ends_a_stage_with_a_message_and_its_model(home: Path, whole: Path) -> None:
    recipe = load(home / "rest.yaml", [f"out={home / 'none'}", "stages.loop.stages.improve.data.select.above=9"])
    folder = pipeline.run(recipe)
    assert entry(folder, "loop/2/improve")["state"] == "done"
    assert entry(folder, "loop/2/improve")["rows"]["train"]["rows"] == 0
    start = load_weights(folder / "prepare/model")
    assert load_weights(folder / "loop/2/improve/model") == start


def test_a_model_that_stays_as_it_is_is_evaluated_and_keeps_its_precision(home: Path, whole: Path) -> None:
    stage = "stages.loop.stages.improve"
    settings = [
        f"{stage}.data.select.above=9",
        f"{stage}.data.eval={{stage: prepare, file: sft-eval.jsonl}}",
        f"{stage}.precision=bf16",
        f"{stage}.adapter={{r: 2}}",
        "stages.loop.until={stage: improve, metric: perplexity, below: 1}",
    ]
    folder = pipeline.run(load(home / "rest.yaml", [f"out={home / 'stays'}", *settings]))
    results = entry(folder, "loop/2/improve")["results"]
    assert results["after"] == results["before"] and results["after"]["eval_perplexity"] > 1
    assert load_weights(folder / "loop/2/improve/model") == load_weights(folder / "prepare/model")


def test_prompts_that_are_too_long_are_left_out_and_counted(home: Path, whole: Path) -> None:
    prompts = [{"prompt": "1+" * n + "1", "answer": "2"} for n in (1, 9, 2, 9, 3)]
    (home / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    data = f"stages.loop.stages.grow.data={{rows: {home / 'long.jsonl'}, max_length: 14, too_long: drop}}"
    folder = pipeline.run(load(home / "rest.yaml", [f"out={home / 'long'}", data, "stages.loop.rounds=1"]))
    made = entry(folder, "loop/1/grow")["rows"]["rows"]["counts"]
    assert made == {"made": 3, "dropped: too long": 2}
    samples = json_rows(folder / "loop/1/grow/data/samples.jsonl")
    assert {sample["id"].partition("-")[0] for sample in samples} == {"0", "2", "4"}  # the indices of their rows


def load_weights(folder: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_a_filter_writes_what_passes_and_why_the_rest_does_not(home: Path) -> None:
    (home / "filter.yaml").write_text("""
name: filter
method: {name: filter, function: "mine.py:short"}
data: {rows: chat.jsonl}
""")
    given = [{"prompt": "a", "completion": "abc", "extra": 1}, {"prompt": "b", "completion": "abcdef"}]
    (home / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        folder = pipeline.run(load("filter.yaml", ["out=filtered"]))
        assert json_rows(folder / "filter/data/rows.jsonl") == given[:1]
        assert json_rows(folder / "filter/data/failed.jsonl") == [{**given[1], "reason": "too long"}]
        assert entry(folder, "filter")["rows"]["rows"]["counts"] == {"made": 1, "failed: too long": 1}


FILTER = """
name: filter
method: {name: filter, function: "mine.py:FUNCTION"}
data: {rows: [{from: ROWS, weight: 1}, {from: MORE, weight: 4}], keep: [reason, tags]}
"""


def filtered(home: Path, function: str, given: list[dict[str, Any]]) -> Path:
    """Filter rows in two chunks. The last row is drawn again in the second one."""
    (home / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (home / "again.jsonl").write_text(json.dumps(given[-1]) + "\n")
    text = FILTER.replace("FUNCTION", function).replace("ROWS", str(home / "given.jsonl"))
    (home / f"{function}.yaml").write_text(text.replace("MORE", str(home / "again.jsonl")))
    return pipeline.run(load(home / f"{function}.yaml", [f"out={home / function}"])) / "filter/data"


def test_a_filter_draws_other_random_numbers_for_each_row(home: Path) -> None:
    data = filtered(home, "coin", [{"prompt": f"{i}", "completion": "a"} for i in range(12)])
    kept = json_rows(data / "rows.jsonl")
    assert 0 < len(kept) < len(kept) + len(json_rows(data / "failed.jsonl"))


def test_a_filter_cannot_change_rows(home: Path) -> None:
    data = filtered(home, "eats_tags", [{"prompt": f"{i}", "completion": "a", "tags": ["b"]} for i in range(3)])
    assert all(row["tags"] == ["b"] for row in json_rows(data / "rows.jsonl"))


def test_a_reason_of_a_row_is_not_replaced(home: Path) -> None:
    with pytest.raises(UserError, match=r"jsonl:1: did not pass, but its column 'reason' would be lost"):
        filtered(home, "nothing", [{"prompt": "a", "completion": "b", "reason": "mine"}])


def test_a_filter_that_lets_nothing_pass_does_not_end_the_run(home: Path, whole: Path) -> None:
    (home / "strict.yaml").write_text(f"""
name: strict
threads: 1
stages:
  - {{name: strict, method: {{name: filter, function: "mine.py:nothing"}}, data: {{rows: again.jsonl}}}}
  - name: more
    method: {{name: filter, function: "mine.py:nothing"}}
    data: {{rows: {{stage: strict, file: rows.jsonl}}}}
  - name: improve
    method: {{name: sft}}
    model: {whole / "prepare/model"}
    data: {{train: {{stage: more, file: rows.jsonl}}, eval: {whole / "prepare/data/sft-eval.jsonl"}}}
""")
    (home / "again.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        folder = home / pipeline.run(load("strict.yaml"))
    assert [entry(folder, name)["rows"]["rows"]["rows"] for name in ("strict", "more")] == [1, 0]
    assert entry(folder, "improve")["results"]["after"]["eval_perplexity"] > 1
    assert load_weights(folder / "improve/model") == load_weights(whole / "prepare/model")
    assert "data.train was empty, so the model stays as it is." in (folder / "report.html").read_text("utf-8")


def test_a_column_that_json_cannot_store_is_named(home: Path) -> None:
    (home / "nan.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b", "tags": [NaN]}\n'
    )
    text = FILTER.replace("FUNCTION", "short").replace("ROWS", "nan.jsonl").replace("MORE", "nan.jsonl")
    (home / "nan.yaml").write_text(text.replace("nan.jsonl", str(home / "nan.jsonl")))
    with pytest.raises(UserError, match=r"nan\.jsonl:2: tags: list \[nan\] cannot be written as JSON"):
        pipeline.run(load(home / "nan.yaml", [f"out={home / 'nan'}"]))


def test_a_stage_that_was_killed_while_it_lists_its_checksums_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        staging(folder / "checksums.json").write_text("{")
        raise Killed

    given = [{"prompt": f"{i}", "completion": "abc"} for i in range(3)]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(files, "seal", killed)
        filtered(home, "short", given)
    data = filtered(home, "short", given)
    assert files.damage(data) is None and staging(data / "checksums.json").name not in files.listed(data)


def test_an_error_of_reading_is_not_one_of_the_output(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "model.safetensors")

    monkeypatch.setattr(Filter, "make", unreadable)
    with pytest.raises(PermissionError, match=r"model\.safetensors"):
        filtered(home, "length", [{"prompt": "a", "completion": "b"}])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stages.loop.stages.grow.data.train=a.jsonl", "data.train: the method 'sample' reads data.rows"),
        ("stages.loop.stages.grow.trainer={max_steps: 1}", "trainer: the method 'sample' does not use this"),
        (
            "stages.loop.stages.grow={name: grow, method: {name: filter, function: 'mine.py:short'}, "
            "data: {rows: {stage: prepare, file: sft.jsonl}, max_length: 9}}",
            "data.max_length: the method 'filter' reads rows of any length",
        ),
        ("stages.loop.stages.improve.data.rows=a.jsonl", "data.rows: the method 'sft' reads data.train"),
        (
            "stages.loop.stages.improve.data.train.file=sampels.jsonl",
            "writes no file 'sampels.jsonl' \\(did you mean 'samples.jsonl'",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(home: Path, change: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(home / "rest.yaml", [change])
    assert Prompt
