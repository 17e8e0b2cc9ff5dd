"""The puzzles: their solutions, and how answers are found and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from burnish import config
from burnish.commands.search import questions
from burnish.config.run import run
from burnish.errors import UserError
from burnish.generate.sampling import Sampling
from burnish.models.loaded import load
from burnish.recipes import alphamath as recipe
from burnish.search.inference import InferenceSettings, Strategy, compare, solve
from burnish.search.settings import AnswerSettings

SIZES: dict[str, Any] = {"rows": 500, "questions": 50, "development": 50, "held_out": 100}


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
    for name in ("data/sft.jsonl", "data/questions.jsonl", "data/held-out.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_no_puzzle_is_in_two_files(made: Path) -> None:
    prompts = [row["prompt"] for path in sorted((made / "data").glob("*.jsonl")) for row in read(path)]
    assert len(prompts) == sum(SIZES.values())
    assert len(set(prompts)) == len(prompts)


def test_every_puzzle_has_a_solution_that_the_check_accepts(made: Path) -> None:
    for row in read(made / "data" / "questions.jsonl"):
        first, *rest = row["numbers"].split()
        expressions = [
            first + "".join(map("".join, zip(signs, rest, strict=True))) for signs in product("+-", repeat=4)
        ]
        right = [e for e in expressions if eval(e) % 10 == int(row["target"])]
        assert right
        assert [recipe.check(e, row) for e in expressions] == [e in right for e in expressions]


def test_the_student_calculates_without_mistakes_and_guesses_the_signs(made: Path) -> None:
    signs, solved = [], []
    for row in read(made / "data" / "sft.jsonl"):
        numbers, target = row["prompt"].split("=")
        lines = row["completion"].splitlines()
        assert all(eval(line.split("=")[0]) % 10 == int(line.split("=")[1]) for line in lines)
        answer = recipe.find(row["completion"])
        assert answer is not None
        signs += [sign for sign in answer if sign in "+-"]
        solved.append(recipe.check(answer, {"numbers": numbers, "target": target}))
    assert 0.45 < signs.count("+") / len(signs) < 0.55
    assert 0.1 < sum(solved) / len(solved) < 0.4  # chance: at least one of ten results, and every puzzle has a solution


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3+8=1\n1-5=6", "3+8-5"),
        ("3+8=1\n1-5=6\n", "3+8-5"),
        ("3+8=2\n2-5=7", "3+8-5"),  # the check calculates again
        ("3+8=1\n2-5=7", None),  # the second line does not continue the first
        ("3+8=1\n1-5", None),
        ("3+8", None),
        ("", None),
    ],
)
def test_an_answer_is_found_in_lines_that_continue_each_other(text: str, answer: str | None) -> None:
    assert recipe.find(text) == answer


@pytest.mark.parametrize(
    ("answer", "right"), [("3+8-5", True), ("3-8+5", False), ("3+8", False), ("8+3-5", False), ("3+8-5-0", False)]
)
def test_a_solution_uses_all_numbers_in_their_order(answer: str, right: bool) -> None:
    assert recipe.check(answer, {"numbers": "3 8 5", "target": "6"}) is right


def test_numbers_out_of_range_and_too_few_puzzles_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="numbers: expected 2 to 6, got 1"):
        recipe.prepare(tmp_path, 0, numbers=1)
    # Two numbers of 1 to 6 and their sum or difference modulo 10, which are equal for 5 alone: 36 * 2 - 6.
    with pytest.raises(UserError, match="expected at most 66, the number of puzzles with 2 numbers, got 700"):
        recipe.prepare(tmp_path, 0, numbers=2, **SIZES)


def test_all_puzzles_are_those_that_some_signs_solve() -> None:
    found = recipe.puzzles(3)
    assert len(found) == len(set(found))
    for drawn in product(range(1, 7), repeat=3):
        totals = {(drawn[0] + a * drawn[1] + b * drawn[2]) % 10 for a, b in product((1, -1), repeat=2)}
        assert {puzzle.target for puzzle in found if puzzle.numbers == drawn} == totals


@pytest.mark.slow
def test_after_one_round_a_beam_search_solves_more_than_greedy_decoding(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The recipe with four numbers and one round."""
    overrides = [
        "stages.prepare.with={rows: 1500, questions: 600, development: 20, held_out: 300, numbers: 4}",
        "stages.sft.trainer.max_steps=250",
        "stages.loop.rounds=1",
        "stages.loop.stages.search.method.simulations=15",
        "stages.loop.stages.values.trainer.max_steps=600",
    ]
    folder = run(config.load("alphamath", [*overrides, f"out={tmp_path / 'run'}"]))
    place = "burnish.recipes.alphamath"
    answer = AnswerSettings(find=f"{place}:find", check=f"{place}:check", column="target")
    settings = InferenceSettings(answer=answer, sampling=Sampling(max_new_tokens=16))
    model, rows = load(str(folder / "loop/1/values")), questions(folder / "prepare/data/held-out.jsonl")
    strategies = [Strategy(method="greedy"), *(Strategy(method="sbs", beams=beams, children=5) for beams in (1, 3))]
    found = compare({strategy.label: solve(rows, model, strategy, settings) for strategy in strategies})
    for label, line in found.items():
        record_property(label, f"{line['accuracy']['value']:.3f}")
    assert found["sbs(1, 5)"]["difference"]["low"] > 0
    assert found["sbs(3, 5)"]["difference"]["low"] > found["sbs(1, 5)"]["difference"]["value"]
