"""Chain sums: their steps, mistakes and values, and the accuracy of the recipe step_value on held-out questions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish import config
from burnish.config import run as pipeline
from burnish.errors import UserError
from burnish.models.loading import load_value_model
from burnish.recipes import chains
from burnish.render.renderer import Renderer
from burnish.render.solutions import solution
from burnish.types import Steps, Trajectory

SIZES: dict[str, Any] = {"rows": 400, "prompts": 32, "held_out": 40}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    chains.prepare(folder, 0, **SIZES)
    return folder


@pytest.fixture(scope="module")
def rows(made: Path) -> list[dict[str, Any]]:
    return read(made / "data" / "steps.jsonl") + read(made / "data" / "steps-eval.jsonl")


def right(step: str) -> bool:
    sum_, _, total = step.partition("=")
    return eval(sum_) == int(total)


def test_no_question_is_both_trained_and_evaluated(made: Path) -> None:
    data = {path.stem: read(path) for path in (made / "data").iterdir()}
    seen = {row["instruction"] for row in data["steps"]} | {row["prompt"] for row in data["prompts"]}
    unseen = {row["instruction"] for row in data["steps-eval"]}
    assert unseen == {row["prompt"] for row in data["prompts-eval"]}
    assert len(unseen) == 40 and not seen & unseen
    assert {name: len(rows) for name, rows in data.items()} == {
        "steps": 400, "steps-eval": 40, "prompts": 32, "prompts-eval": 40
    }  # fmt: skip


def test_steps_follow_from_the_question_and_one_another(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        numbers = row["instruction"].removesuffix("=?").replace("-", "+-").split("+")
        steps = [item["step"] for item in row["output"]]
        assert len(steps) == len(numbers) - 1 in (3, 4)
        first, *later = (step.partition("=") for step in steps)
        assert eval(first[0]) == int(numbers[0]) + int(numbers[1])
        for (_, _, total), (sum_, _, _), number in zip([first, *later], later, numbers[2:], strict=False):
            assert eval(sum_) - int(total) == int(number)
        assert all(0 <= int(step.partition("=")[2]) <= 9 for step in steps)


def test_the_value_is_minus_one_after_a_mistake_and_only_then(rows: list[dict[str, Any]]) -> None:
    wrong = 0
    for row in rows:
        values = [item["Q"] for item in row["output"]]
        so_far = [all(right(item["step"]) for item in row["output"][: k + 1]) for k in range(len(values))]
        assert values[-1] == (1 if so_far[-1] else -1)
        assert all(value == -1 for value, fine in zip(values, so_far, strict=True) if not fine)
        wrong += not so_far[-1]
    # 1 - 0.8^3 = 0.49 and 1 - 0.8^4 = 0.59; a slip that would leave [0, 9] for good is not made
    assert 0.4 < wrong / len(rows) < 0.65


def test_values_are_estimates_of_how_often_the_solver_is_right() -> None:
    rng = random.Random(0)
    rows = [chains.solution_row(rng, (3, 1, 2, -1), 0.2, 8)["output"] for _ in range(3000)]
    for k, left in ((0, 2), (1, 1), (2, 0)):
        values = [row[k]["Q"] for row in rows if all(right(item["step"]) for item in row[: k + 1])]
        # no more than 3000 values of standard deviation 1 / sqrt(8)
        assert sum(values) / len(values) == pytest.approx(2 * 0.8**left - 1, abs=0.03)


def test_the_same_seed_writes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    chains.prepare(tmp_path / "same", 0, **SIZES)
    chains.prepare(tmp_path / "other", 1, **SIZES)
    for name in ("data/steps.jsonl", "data/prompts-eval.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_a_solution_is_rendered_like_a_conversation(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    row = Steps(({"role": "user", "content": "3+4-2=?"},), ("3+4=7", "7-2=5"), (0.5, 1.0), "s:1")
    assert tokenizer.decode(solution(Renderer(tokenizer), row).tokens) == "<bos>3+4-2=?\n3+4=7\n7-2=5\n<eos>"
    assert AutoModelForCausalLM.from_pretrained(made / "model").config.vocab_size == len(tokenizer)


def test_exact_reads_the_last_total() -> None:
    def answer(text: str) -> Trajectory:
        return Trajectory.from_text(
            text, ({"role": "user", "content": "3+4-2=?"},), columns={"answer": "5"}, source="p:1"
        )

    assert chains.exact([answer("3+4=7\n7-2=5"), answer("3+4=7"), answer("5"), answer("")]) == [1, 0, 1, 0]


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    for settings in ({"mistakes": 1.0}, {"attempts": 0}, {"held_out": 0}):
        with pytest.raises(UserError, match=next(iter(settings))):
            chains.prepare(tmp_path, 0, **settings)  # type: ignore[arg-type]


# --- the recipe ----------------------------------------------------------------------------------------------------


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    pipeline.run(config.load("step_value", [f"out={folder}", *overrides]))
    return json.loads((folder / "manifest.json").read_text())["stages"][-1]["results"]


SMALL = ("stages.prepare.with={rows: 64, prompts: 16, held_out: 16}", "stages.values.trainer.num_train_epochs=1")


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_small_run_of_the_recipe_leaves_a_model_that_values_steps(adapter: bool, tmp_path: Path) -> None:
    results = run(tmp_path / "run", *SMALL, *(["stages.values.adapter={r: 4}"] if adapter else []))
    assert {"eval_nll", "eval_value", "eval_sign_accuracy", "eval_value_first"} <= set(results["after"])
    network = load_value_model(str(tmp_path / "run" / "values"))
    tokens = torch.tensor([[1, 7, 14, 8, 17, 18]])
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "values" / "model")
    hidden = plain(tokens, output_hidden_states=True).hidden_states[-1]
    body: Any = network.policy
    assert network.critic is not None
    assert torch.equal(
        network.critic(hidden), network.critic(body(tokens, output_hidden_states=True).hidden_states[-1])
    )
    if adapter:
        beside = load_value_model(str(tmp_path / "run" / "values" / "adapter"))
        torch.testing.assert_close(beside.policy(tokens).logits, plain(tokens).logits)
        assert beside.critic is not None
        assert torch.equal(beside.critic(hidden), network.critic(hidden))


@pytest.mark.slow
def test_on_unseen_questions_the_sign_is_right_and_the_error_falls_with_depth(tmp_path: Path) -> None:
    results = run(tmp_path / "run")
    before, after = results["before"], results["after"]
    assert before["eval_sign_accuracy"] < 0.65
    assert after["eval_sign_accuracy_low"] > 0.85
    assert after["eval_value_first"] > after["eval_value_middle"] > after["eval_value_last"]
