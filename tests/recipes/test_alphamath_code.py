"""The puzzles that code solves: their solutions, and how answers are found and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.errors import UserError
from burnish.recipes import alphamath_code as recipe

SIZES: dict[str, Any] = {"rows": 100, "questions": 50, "development": 50, "held_out": 100}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    recipe.prepare(folder, 0, **SIZES)
    return folder


def test_the_same_seed_writes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    recipe.prepare(tmp_path, 0, **SIZES)
    for name in ("data/solutions.jsonl", "data/held-out.jsonl", "model/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()


def test_no_puzzle_is_in_two_files(made: Path) -> None:
    rows = [row for path in sorted((made / "data").glob("*.jsonl")) for row in read(path)]
    prompts = {row.get("prompt") or row["instruction"] for row in rows}
    assert len(prompts) == len(rows) == sum(SIZES.values())


def test_the_code_of_every_solution_prints_its_output_and_reaches_the_target(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in read(made / "data" / "solutions.jsonl"):
        numbers, target = row["instruction"].split("=")
        names: dict[str, int] = {}
        for step in row["output"]:
            exec(step["step"].removeprefix("<code>").removesuffix("</code>"), names)
            assert f"<output>{capsys.readouterr().out.strip()}</output>" == step["output"]
        assert names["r"] % 1000 == 0
        answer = recipe.find("\n".join(step["step"] + step["output"] for step in row["output"]) + "\n")
        assert answer is not None and eval(answer) % 1000 == int(target)
        assert recipe.check(answer, {"numbers": numbers, "target": target})


FIRST = "<code>r=624-527;print(r%1000)</code><output>97</output>"
THEN = "<code>r-=684;print(r%1000)</code><output>413</output>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"{FIRST}\n{THEN}\n<code>r+=587;print(r%1000)</code><output>0</output>", "527+684-587"),
        (f"{FIRST}\n", "527"),
        (f"{FIRST}\n<code>r=0;print(r%1000)</code>", None),
        (THEN, None),
        ("", None),
    ],
)
def test_an_answer_is_found_in_code_of_the_expected_form(text: str, answer: str | None) -> None:
    assert recipe.find(text) == answer


@pytest.mark.parametrize(
    ("answer", "right"),
    [("527+684-587", True), ("527-684+587", False), ("527", False), ("684+527-587", False), ("527+684-587-0", False)],
)
def test_a_solution_uses_all_numbers_in_their_order(answer: str, right: bool) -> None:
    assert recipe.check(answer, {"numbers": "527 684 587", "target": "624"}) is right


def test_numbers_out_of_range_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="numbers: expected 2 to 6, got 7"):
        recipe.prepare(tmp_path, 0, numbers=7)
