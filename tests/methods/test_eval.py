"""The method `eval`: its measures, its results in a loop, a stop in the middle, and the mistakes it reports."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForSequenceClassification

from builders import character_tokenizer, llama
from burnish.commands.evaluate import evaluate
from burnish.config import load, row_stage
from burnish.config import run as pipeline
from burnish.config.evaluation import load_evaluation
from burnish.errors import UserError
from burnish.math.tensors import token_logprobs
from burnish.report.display import Display
from tiny_runs import entries, json_rows, run_until_chunk

MINE = """
def digits(trajectories):
    return [float(any(c.isdigit() for c in t.text)) for t in trajectories]

def length(trajectories):
    return [float(len(t.tokens)) for t in trajectories]

def first(trajectories):
    "0 or 1, except for one prompt."
    return [0.5 if t.source.endswith(":7") else 1.0 for t in trajectories]
"""
REWARD = '[{function: "mine.py:digits", name: accuracy}, {function: "mine.py:length", weight: 0}]'
RECIPE = f"""
name: measure
threads: 1
stages:
  - {{name: chat, method: {{name: eval, against: two}}, model: one, data: {{rows: chat.jsonl}}}}
  - {{name: pairs, method: {{name: eval, reference: two}}, model: one, data: {{rows: pairs.jsonl}}}}
  - {{name: scores, method: {{name: eval}}, model: rm, data: {{rows: pairs.jsonl}}}}
  - name: prompts
    method: {{name: eval, against: two, reference: two, resamples: 200}}
    model: one
    data: {{rows: prompts.jsonl}}
    reward: {REWARD}
    generation: {{max_new_tokens: 6, samples: 4}}
"""
LOOP = f"""
name: loop
threads: 1
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {{rows: 16, pairs: 2, prompts: 9, held_out: 8}}
  - name: loop
    rounds: 3
    stages:
      - name: tune
        method: {{name: sft}}
        model: {{stage: tune, initial: {{stage: prepare}}}}
        data: {{train: {{stage: prepare, file: sft.jsonl}}}}
        trainer: {{per_device_train_batch_size: 4, max_steps: 2, learning_rate: 1.0e-3}}
      - name: check
        method: {{name: eval, against: {{stage: tune}}, reference: {{stage: prepare}}, resamples: 200}}
        model: {{stage: tune}}
        data: {{rows: {{stage: prepare, file: prompts-eval.jsonl}}}}
        reward: {REWARD}
        generation: {{max_new_tokens: 6, samples: 4}}
    until: {{stage: check, metric: accuracy, above: -1}}
  - name: last
    method: {{name: eval, against: {{stage: tune}}, resamples: 200}}
    model: {{stage: prepare}}
    data: {{rows: {{stage: prepare, file: sft-eval.jsonl}}}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for name, seed in (("one", 0), ("two", 1)):
        llama(seed).save_pretrained(folder / name)
        character_tokenizer().save_pretrained(folder / name)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": 105, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_labels": 1, "pad_token_id": 0}
    LlamaForSequenceClassification(LlamaConfig(**settings)).save_pretrained(folder / "rm")
    character_tokenizer().save_pretrained(folder / "rm")
    save(folder / "chat.jsonl", [{"prompt": f"{n}", "completion": "ab" * (1 + n % 4)} for n in range(10)])
    save(folder / "pairs.jsonl", [{"prompt": f"{n}", "chosen": f"a{n}", "rejected": f"{n}bc"} for n in range(10)])
    save(folder / "prompts.jsonl", [{"prompt": f"{n}+{n}"} for n in range(10)])
    (folder / "mine.py").write_text(MINE)
    (folder / "measure.yaml").write_text(RECIPE)
    (folder / "loop.yaml").write_text(LOOP)
    return folder


def quickly(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Work in a folder, in small chunks, and write no report."""
    patch.chdir(home)
    patch.setattr(row_stage, "CHUNK", 4)
    patch.setattr(pipeline.report, "write", lambda folder: None)


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch, home)


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        quickly(patch, home)
        return pipeline.run(load("measure.yaml", ["out=whole"])).resolve()


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def shown(recipe: str, *overrides: str) -> str:
    """What a run of a recipe prints."""
    console = Console(file=io.StringIO(), width=400)
    with Display(console) as screen:
        pipeline.run(load(recipe, overrides), display=screen)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stage", "model", "settings"),
    [
        ("chat", "one", ["data.eval=chat.jsonl", "against=two"]),
        ("pairs", "one", ["data.eval=pairs.jsonl", "reference=two"]),
        ("scores", "rm", ["data.eval=pairs.jsonl"]),
        (
            "prompts",
            "one",
            [
                "data.eval=prompts.jsonl", "against=two", "reference=two",
                f"reward={REWARD}",
                "generation={max_new_tokens: 6, samples: 4}",
                "resamples=200",
            ],
        ),
    ],
)  # fmt: skip
def test_a_stage_has_the_results_of_the_command(whole: Path, stage: str, model: str, settings: list[str]) -> None:
    results = entries(whole)[stage]["results"]
    command = evaluate(model, load_evaluation(settings))
    expected: dict[str, dict[str, float]] = {"after": {"step": 10}, "before": {"step": 0}}
    for name, interval in command["measures"].items():
        for side, of in (("after", interval), ("before", interval.get("against"))):
            if of is not None:
                values = {"": of["value"], "_low": of["low"], "_high": of["high"]}
                expected[side] |= {f"eval_{name}{end}": value for end, value in values.items()}
        if "difference" in interval:
            expected["after"] |= {f"eval_{name}_change_{end}": interval["difference"][end] for end in ("low", "high")}
    assert results["after"] == expected["after"] and results.get("before", {"step": 0}) == expected["before"]
    samples = json_rows(whole / stage / "data/samples.jsonl")
    names = {"model": command["models"][0], "against": command["models"][-1]}
    samples.sort(key=lambda sample: sample["model"] == "against")  # the stage writes chunks, with both models in each
    assert [{**sample, "model": names[sample["model"]]} for sample in samples] == command["samples"]


def test_each_row_has_its_own_measures(whole: Path) -> None:
    lines = json_rows(whole / "chat/data/measures.jsonl")
    assert [line["source"] for line in lines] == [f"chat.jsonl:{n}" for n in range(1, 11)]
    tokenizer = character_tokenizer()
    for line, row in zip(lines[:3], json_rows(whole.parent / "chat.jsonl"), strict=False):
        messages = [{"role": "user", "content": row["prompt"]}]
        start: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = [*start, *tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        for seed, measured in ((0, line), (1, line["against"])):
            with torch.no_grad():
                values = token_logprobs(llama(seed)(torch.tensor([ids])).logits, torch.tensor([ids]))[0, len(start) :]
            assert measured["values"]["nll"] == pytest.approx(-values.mean().item(), abs=1e-5)
            assert measured["weights"] == {"nll": len(values)}
    after = entries(whole)["chat"]["results"]["after"]
    total = math.fsum(line["values"]["nll"] * line["weights"]["nll"] for line in lines)
    mean = total / math.fsum(line["weights"]["nll"] for line in lines)
    assert after["eval_nll"] == pytest.approx(mean) and after["eval_perplexity"] == pytest.approx(math.exp(mean))


def test_the_win_rate_and_pass_at_k_follow_from_the_samples(whole: Path) -> None:
    samples = json_rows(whole / "prompts/data/samples.jsonl")
    mine, other = ([s["rewards"]["accuracy"] for s in samples if s["model"] == name] for name in ("model", "against"))
    after = entries(whole)["prompts"]["results"]["after"]
    wins = [0.5 if a == b else float(a > b) for a, b in zip(mine, other, strict=True)]
    assert after["eval_win_rate"] == pytest.approx(sum(wins) / 40)
    assert after["eval_reward_accuracy_pass@4"] == pytest.approx(
        sum(any(mine[i : i + 4]) for i in range(0, 40, 4)) / 10
    )
    assert not any(key.startswith("eval_reward_length_pass@") for key in after)


def test_pass_at_k_needs_rewards_of_0_or_1_in_all_chunks(home: Path) -> None:
    reward = 'stages.prompts.reward=[{function: "mine.py:first"}]'
    (home / "one.yaml").write_text("name: one\nstages:\n" + RECIPE[RECIPE.index("  - name: prompts") :])
    after = entries(pipeline.run(load("one.yaml", ["out=some", reward])))["prompts"]["results"]["after"]
    assert after["eval_reward_first"] == 0.95 and "eval_reward_first_pass@4" not in after


def test_the_models_to_compare_with_are_inputs(whole: Path) -> None:
    inputs = entries(whole)["prompts"]["inputs"]
    assert {"one/model.safetensors", "two/model.safetensors", "mine.py"} <= set(inputs)


@pytest.mark.parametrize("chunks", [1, 5])
def test_a_stage_that_was_killed_ends_with_the_same_bytes(
    home: Path, whole: Path, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("measure.yaml", [f"out=killed-{chunks}"])
    run_until_chunk(lambda: pipeline.run(recipe), chunks, monkeypatch)
    pipeline.run(recipe)
    for path in [*whole.glob("*/data/*.jsonl"), *whole.glob("*/metrics.jsonl"), *whole.glob("*/samples.jsonl")]:
        assert (recipe.folder / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert [one["results"] for one in entries(recipe.folder).values()] == [
        one["results"] for one in entries(whole).values()
    ]


def test_a_loop_ends_on_an_evaluation(home: Path) -> None:
    """`until` names the reward; the models of the stage are those of its round."""
    folder = pipeline.run(load("loop.yaml", ["out=early"]))
    found = entries(folder)
    assert [found[f"loop/{k}/check"]["state"] for k in (1, 2, 3)] == ["done", "skipped", "skipped"]
    check = found["loop/1/check"]
    assert {"loop/1/tune/model/model.safetensors", "prepare/model/model.safetensors"} <= set(check["inputs"])
    assert "loop/1/tune/model/model.safetensors" in found["last"]["inputs"]
    assert check["results"]["after"]["eval_win_rate"] == 0.5
    assert check["results"]["after"]["eval_length"] == check["results"]["before"]["eval_length"]


def test_rows_that_earlier_stages_train_on_are_reported(home: Path) -> None:
    train = "stages.loop.stages.check.data.rows.file=prompts.jsonl"
    said = shown("loop.yaml", "out=seen", train, "stages.loop.until={stage: check, metric: length, below: 0}")
    overlap = [entry.get("overlap") for name, entry in entries(home / "seen").items() if name.endswith("check")]
    trained = {row["prompt"] for row in json_rows(home / "seen/prepare/data/sft.jsonl")}
    count = sum(row["prompt"] in trained for row in json_rows(home / "seen/prepare/data/prompts.jsonl"))
    if count:
        assert f"warning: {count} of 9 rows have a prompt" in said
    assert all(bool(text) == bool(count) for text in overlap)


@pytest.mark.parametrize(
    ("recipe", "change", "says"),
    [
        ("measure.yaml", "stages.chat.method.against={stage: nothing}", "method.against.stage: 'nothing' is not"),
        ("measure.yaml", "stages.chat.method.against={stage: prompts}", "'prompts' is not an earlier stage"),
        ("measure.yaml", "stages.prompts.method.against={stage: chat}", "stage 'chat' makes rows and no model"),
        ("measure.yaml", "stages.chat.method.against=./three", "stages.chat.method.against: no such model"),
        ("measure.yaml", "stages.chat.method.agianst=two", "agianst: unknown key \\(did you mean 'against'"),
        ("measure.yaml", "stages.chat.method.resamples=0", "resamples: expected more than 0, got 0"),
        ("measure.yaml", "stages.chat.data.eval=chat.jsonl", "data.eval: the method 'eval' reads data.rows"),
        ("loop.yaml", "stages.loop.stages.check.method.against={stage: check}", "'check' is this stage itself"),
        ("loop.yaml", "stages.loop.until.metric=acuracy", "no metric 'acuracy' \\(did you mean 'accuracy'"),
        ("loop.yaml", "stages.loop.until.metric=perplexity", "no metric 'perplexity'"),
        ("loop.yaml", "stages.loop.until.metric=accuracy_pass@3", "with generation.samples: 4, k is 1, 2, 4$"),
        ("loop.yaml", "stages.loop.until.metric=reward_accuracy_best_of_8", "samples: 4, k is 2, 4$"),
        ("loop.yaml", "stages.loop.until={stage: tune, metric: loss, below: 1}", "stage 'tune' has no data.eval"),
    ],
)  # fmt: skip
def test_mistakes_are_found_when_the_recipe_is_read(home: Path, recipe: str, change: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(recipe, [change])


def test_a_wrong_metric_is_reported_with_its_line(home: Path) -> None:
    (home / "wrong.yaml").write_text(LOOP.replace("metric: accuracy", "metric: win_rat"))
    with pytest.raises(
        UserError, match=r"wrong.yaml:22: stages.loop.until.metric: stage 'check' has no metric 'win_rat'"
    ):
        load("wrong.yaml")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stages.pairs.method={name: eval}", "stages.pairs: the rows are pairs: .* set reference:"),
        ("stages.chat.generation.samples=2", "stages.chat: generation: applies only to prompts"),
        ("stages.chat.method.reference=two", "stages.chat: reference: applies only to a policy"),
        ("stages.scores.data.rows=chat.jsonl", "stages.scores: the model is a reward model, but chat.jsonl:1 is a"),
        ("stages.prompts.model=rm", "stages.prompts: the model is a reward model, which cannot complete prompts"),
        ("stages.scores.data.rows=[{from: pairs.jsonl}, {from: chat.jsonl}]", "among rows of type"),
    ],
)  # fmt: skip
def test_rows_that_do_not_suit_stop_the_run_before_it_starts(home: Path, change: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        pipeline.run(load("measure.yaml", ["out=unsuited", change]))
    assert not (home / "unsuited").exists()


def test_a_reward_model_is_not_compared_with_a_policy(home: Path) -> None:
    with pytest.raises(UserError, match="against: two is a policy, but rm is a reward model"):
        pipeline.run(load("measure.yaml", ["out=kinds", "stages.scores.method.against=two"]))


def test_rows_that_are_left_out_are_counted_and_named(home: Path) -> None:
    changes = ["stages.chat.data.max_length=30", "stages.chat.data.too_long=drop"]
    folder = pipeline.run(load("measure.yaml", ["out=short", *changes]))
    lines = json_rows(folder / "chat/data/measures.jsonl")
    dropped = [line["source"] for line in lines if not line["values"]]
    assert entries(folder)["chat"]["rows"]["rows"]["counts"] == {"measured": 10 - len(dropped), "dropped": len(dropped)}
    assert 0 < len(dropped) < 10
    assert all(line["changed"].startswith("drop: ") for line in lines if not line["values"])


def test_rows_of_one_line_that_are_read_with_other_keys_are_measured_on_their_own(home: Path) -> None:
    save(home / "both.jsonl", [{"q": f"{n}", "good": "ab", "bad": "xyzw"} for n in range(3)])
    parts = [{"from": "both.jsonl", "keys": {"prompt": "q", "completion": answer}} for answer in ("good", "bad")]
    stage = {
        "name": "chat",
        "method": {"name": "eval"},
        "model": "one",
        "data": {"rows": parts, "keep": ["good", "bad"]},
    }
    (home / "both.yaml").write_text(json.dumps({"name": "both", "threads": 1, "stages": [stage]}))
    lines = (pipeline.run(load("both.yaml")) / "chat/data/measures.jsonl").read_text().splitlines()
    tokens = [json.loads(line)["weights"]["nll"] for line in lines]
    assert [n - min(tokens) for n in tokens] == [0, 0, 0, 2, 2, 2]  # "ab" and "xyzw"
