"""Measures of `burnish eval` against independent computations, and the mistakes it reports."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForSequenceClassification
from typer.testing import CliRunner

from burnish import cli
from burnish.commands.evaluate import table
from burnish.generate.sampling import Sampling
from burnish.math.tensors import token_logprobs
from burnish.methods.eval import log_ratios
from burnish.models.loaded import Loaded
from burnish.types import Sequence, Trajectory

REWARDS = """
def length(answers):
    return [float(len(answer.tokens)) for answer in answers]

def even(answers):
    return [float(len(answer.text) % 2 == 0) for answer in answers]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Any, tiny_tokenizer: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    for name, seed in (("one", 0), ("two", 1)):
        tiny_llama(seed).save_pretrained(name)
        tiny_tokenizer.save_pretrained(name)
    Path("rewards.py").write_text(REWARDS)
    save("chat.jsonl", [{"prompt": "ab", "completion": "cd"}, {"prompt": "a", "completion": "bcdefgh"}])
    save("pairs.jsonl", [{"prompt": f"{n}", "chosen": f"a{n}", "rejected": f"{n}bc"} for n in range(6)])
    save("prompts.jsonl", [{"prompt": f"{n}+{n}"} for n in range(6)])
    return tmp_path


def save(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)], terminal_width=200)


def measured(*arguments: Any) -> dict[str, Any]:
    result = call(*arguments, "--json", "resamples=200")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["measures"]


def logprob(model: Any, tokenizer: Any, prompt: str, answer: str) -> tuple[float, int]:
    """Sum of log-probabilities of an answer and its end token, and their number, by transformers alone."""
    messages = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = [*start, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        values = token_logprobs(model(torch.tensor([ids])).logits, torch.tensor([ids]))
    return values[0, len(start) :].sum().item(), len(ids) - len(start)


def test_columns_that_are_kept_are_listed(here: Path) -> None:
    save("chat.jsonl", [{"prompt": "ab", "completion": "cd", "lang": "en"}])
    result = call("one", "data.eval=chat.jsonl")
    assert result.exit_code == 2
    assert "chat.jsonl:1: lang: unknown column" in result.output
    assert measured("one", "data.eval=chat.jsonl", "data.keep=[lang]")


def test_conversations_give_the_perplexity(here: Path, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    perplexity = measured("one", "data.eval=chat.jsonl", "against=two")["perplexity"]
    expected = []
    for seed in (0, 1):
        sides = [logprob(tiny_llama(seed), tiny_tokenizer, p, a) for p, a in (("ab", "cd"), ("a", "bcdefgh"))]
        expected.append(math.exp(-sum(s for s, _ in sides) / sum(n for _, n in sides)))
    assert perplexity["value"] == pytest.approx(expected[0], rel=1e-4)
    assert perplexity["against"]["value"] == pytest.approx(expected[1], rel=1e-4)
    assert perplexity["difference"]["value"] == pytest.approx(expected[0] - expected[1], rel=1e-3)
    assert perplexity["low"] <= perplexity["value"] <= perplexity["high"]


def test_texts_give_the_perplexity(here: Path) -> None:
    save("texts.jsonl", [{"text": "once upon a time"}, {"text": "the end"}])
    assert measured("one", "data.eval=texts.jsonl")["perplexity"]["value"] > 1


def test_pairs_give_the_accuracy_of_implicit_rewards(here: Path, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    measures = measured("one", "data.eval=pairs.jsonl", "reference=two")
    one, two = tiny_llama(0), tiny_llama(1)
    margins = []
    for n in range(6):
        c, r = (
            logprob(one, tiny_tokenizer, f"{n}", answer)[0] - logprob(two, tiny_tokenizer, f"{n}", answer)[0]
            for answer in (f"a{n}", f"{n}bc")
        )
        margins.append(c - r)
    assert measures["margin"]["value"] == pytest.approx(sum(margins) / 6, abs=1e-4)
    assert measures["accuracy"]["value"] == pytest.approx(sum(m > 0 for m in margins) / 6)
    assert call("one", "data.eval=pairs.jsonl", "reference=two", "--output", "out.json").exit_code == 0
    pairs = json.loads(Path("out.json").read_text())["samples"]
    assert [pair["margin"] for pair in pairs] == pytest.approx(margins, abs=1e-4)
    assert pairs[2]["source"] == "pairs.jsonl:3" and pairs[2]["chosen"] == [{"role": "assistant", "content": "a2"}]
    same = measured("one", "data.eval=pairs.jsonl", "reference=one")
    assert (same["accuracy"]["value"], same["margin"]["value"]) == (0.5, 0.0)


def test_a_reward_model_is_measured_by_accuracy(here: Path, tiny_tokenizer: Any) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": 105, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_labels": 1, "pad_token_id": 0}
    model: Any = LlamaForSequenceClassification(LlamaConfig(**settings)).eval()
    model.save_pretrained("rm")
    tiny_tokenizer.save_pretrained("rm")
    differences = []
    for n in range(6):
        c, r = (
            model(torch.tensor([tiny_tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": answer}], return_dict=False
            )])).logits.item()
            for answer in (f"a{n}", f"{n}bc")
        )  # fmt: skip
        differences.append(c - r)
    told = call("rm", "data.eval=pairs.jsonl", "against=one")
    assert told.exit_code == 2 and "against: one is a policy, but rm is a reward model" in told.stderr
    measures = measured("rm", "data.eval=pairs.jsonl")
    assert measures["margin"]["value"] == pytest.approx(sum(differences) / 6, abs=1e-5)
    assert measures["accuracy"]["value"] == pytest.approx(sum(d > 0 for d in differences) / 6)
    assert call("rm", "data.eval=pairs.jsonl", "--output", "out.json").exit_code == 0
    pairs = json.loads(Path("out.json").read_text())["samples"]
    assert [p["chosen_score"] - p["rejected_score"] for p in pairs] == pytest.approx(differences, abs=1e-5)
    # both answers share a prompt, so the difference of their lengths is that of "a0" and "0bc"
    assert pairs[0]["rejected_tokens"] - pairs[0]["chosen_tokens"] == 1


RECIPE = """\
name: compare
data: {eval: prompts.jsonl}
reward: [{function: "rewards.py:length"}, {function: "rewards.py:even", weight: 0}]
generation: {max_new_tokens: 8, samples: 4}
against: two
reference: two
"""


def test_prompts_are_answered_and_scored(here: Path) -> None:
    Path("compare.yaml").write_text(RECIPE)
    result = call("one", "compare.yaml", "--output", "out/results.json")
    assert result.exit_code == 0, result.output
    assert "Win rate" in result.stdout and "Reward: even, pass@4" in result.stdout
    written = json.loads(Path("out/results.json").read_text())
    mine = [[s for s in written["samples"] if s["model"] == name] for name in ("one", "two")]
    assert [len(part) for part in mine] == [24, 24]
    measures = written["measures"]
    lengths = [[s["rewards"]["length"] for s in part] for part in mine]
    assert measures["reward_length"]["value"] == pytest.approx(sum(lengths[0]) / 24)
    assert measures["reward_length"]["difference"]["value"] == pytest.approx((sum(lengths[0]) - sum(lengths[1])) / 24)
    wins = [(a > b) + 0.5 * (a == b) for a, b in zip(*lengths, strict=True)]
    assert measures["win_rate"]["value"] == pytest.approx(sum(wins) / 24)
    best = [max(lengths[0][i : i + 4]) for i in range(0, 24, 4)]
    assert measures["reward_length_best_of_4"]["value"] == pytest.approx(sum(best) / 6)
    even = [any(s["rewards"]["even"] for s in mine[0][i : i + 4]) for i in range(0, 24, 4)]
    assert measures["reward_even_pass@4"]["value"] == pytest.approx(sum(even) / 6)
    assert measures["reward_even_pass@1"]["value"] == measures["reward_even"]["value"]
    assert measures["kl"]["value"] > 0 and measures["kl"]["against"]["value"] == pytest.approx(0, abs=1e-4)


def test_a_policy_has_no_kl_to_itself(here: Path) -> None:
    options = ["generation.temperature=0.7", "generation.max_new_tokens=4"]
    measures = measured("one", "data.eval=prompts.jsonl", "reference=one", *options)
    assert measures["kl"]["value"] == pytest.approx(0, abs=1e-5)
    cut = measured("one", "data.eval=prompts.jsonl", "reference=two", *options, "generation.top_k=3")
    assert "kl" not in cut and cut["log_ratio"]["value"] > 0


def test_the_kl_is_computed_at_the_sampling_temperature(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    one, two = (Loaded(str(seed), tiny_llama(seed), tiny_tokenizer) for seed in (0, 1))
    ids = (5, 9, 30, 41, 2)
    sequence = Sequence(ids, (False, False, True, True, True), "row")
    trajectory = replace(Trajectory.from_text("", source="row"), sequences=(sequence,))
    ratios = log_ratios(one, two, [trajectory], Sampling(temperature=0.5))
    sides = []
    for model in (one.model, two.model):
        with torch.no_grad():
            whole = (model(torch.tensor([ids])).logits[0, 1:-1] / 0.5).log_softmax(-1)
        sides.append(sum(row[token].item() for row, token in zip(whole, ids[2:], strict=True)))
    assert ratios == pytest.approx([sides[0] - sides[1]], abs=1e-4)


def test_a_model_against_itself_is_a_draw(here: Path) -> None:
    Path("compare.yaml").write_text(RECIPE)
    measures = measured("one", "compare.yaml", "against=one")
    assert (measures["win_rate"]["value"], measures["win_rate"]["low"], measures["win_rate"]["high"]) == (0.5, 0.5, 0.5)
    assert measures["reward_length"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0, "rows": 6}


def test_rewards_of_weight_0_choose_no_winner(here: Path) -> None:
    reward = 'reward=[{function: "rewards.py:length", weight: 0}]'
    measures = measured("one", "data.eval=prompts.jsonl", reward, "against=two", "generation.max_new_tokens=4")
    assert set(measures) == {"reward_length", "length", "stopped"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare.yaml", "rewrad=[]"], "unknown key (did you mean 'reward'?)"),
        (["compare.yaml", "data.eval=none.jsonl"], "data.eval: no such file: none.jsonl"),
        (
            ["compare.yaml", "against={stage: sft}"],
            "an evaluation has no stages: give the folder instead, runs/NAME/sft",
        ),
        (["compare.yaml", "against=./three"], "no such model"),
        (["compare.yaml", "resamples=1000000000000"], "resamples: expected 1e+06 or less"),
        (["compare.yaml", "generation.samples=0"], "generation.samples: expected 1 or more, got 0"),
        (["compare.yaml", 'reward=[{function: "rewards.py:lenth"}]'], "defines no 'lenth' (did you mean 'length'?)"),
        (["compare.yaml", "template=chatlm"], "unknown template 'chatlm'"),
        (["a.yaml", "b.yaml"], "expected one recipe, got a.yaml, b.yaml"),
        ([], "data: this key is missing"),
        (["data.eval=pairs.jsonl"], "set reference:"),
        (["data.eval=prompts.jsonl"], "the rows are prompts: set reward: to score answers, or reference: for the KL"),
        (["data.eval=chat.jsonl", "data.max_length=2", "data.too_long=drop"], "no rows left to evaluate"),
        (
            ["data.eval=chat.jsonl", "reference=two"],
            "reference: applies only to a policy evaluated on prompts or pairs",
        ),
        (["data.eval=chat.jsonl", "generation.samples=2"], "generation: applies only to prompts"),
        (["data.eval=chat.jsonl", "--output", "rewards.py/results.json"], "cannot create its folder"),
    ],
)
def test_mistakes_are_named(here: Path, arguments: list[str], message: str) -> None:
    Path("compare.yaml").write_text(RECIPE)
    result = call("one", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr, result.stderr


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_damaged_model_is_reported_with_its_file(here: Path, name: str) -> None:
    Path("one", name).write_text("[]")
    result = call("one", "data.eval=chat.jsonl")
    assert result.exit_code == 2 and f"one/{name}: expected a JSON object, got []" in result.stderr


def test_a_mistake_in_a_file_is_reported_with_its_line(here: Path) -> None:
    Path("compare.yaml").write_text(RECIPE.replace("against: two", "agianst: two"))
    assert "compare.yaml:5: agianst: unknown key (did you mean 'against'?)" in call("one", "compare.yaml").stderr


def test_two_models_are_told_apart_on_a_narrow_terminal() -> None:
    one = {"value": 0.046875, "low": 0.0, "high": 0.109375}
    both = one | {"against": one, "difference": {"value": 0.0, "low": -0.03125, "high": 0.03125}}
    models = ["/home/someone/runs/addition/ppo", "/home/someone/runs/addition/sft"]
    console = Console(file=io.StringIO(), width=60)
    console.print(table({"models": models, "measures": {"reward_exact_pass@1": both, "win_rate": one}}))
    head, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["measure", "ppo", "sft", "difference"]
    assert max(map(len, lines)) <= 60 and "[-0.03125," in " ".join(lines)
    console.print(table({"models": models[:1], "measures": {"win_rate": one}}))
    assert "/home/someone/runs/addition/ppo" in console.file.getvalue()  # type: ignore[attr-defined]


def test_finish_reasons_and_tool_errors_that_never_occur_are_left_out_of_the_table() -> None:
    zero, some = ({"value": value, "low": 0.0, "high": 1.0} for value in (0.0, 0.25))
    names = ("finished_stop", "finished_turns", "tool_error_raised", "tool_errors")
    measures = dict(zip(names, (zero, zero | {"against": some}, some, zero), strict=True))
    console = Console(file=io.StringIO(), width=200)
    console.print(table({"models": ["a", "b"], "measures": measures}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Finished: stop" not in text
    assert all(label in text for label in ("Finished: turns", "Tool error: raised", "Tool errors"))
