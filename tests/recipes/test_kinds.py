"""Questions about kinds of things: the steps, mistakes and values of their solutions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from burnish.errors import UserError
from burnish.recipes import kinds


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("made")
    kinds.prepare(folder, 0, rows=400, held_out=50)
    return {path.stem: read(path) for path in (folder / "data").iterdir()}


def test_no_held_out_thing_is_in_a_training_row(data: dict[str, list[dict[str, Any]]]) -> None:
    questions = {name: {row["instruction"] for row in rows} for name, rows in data.items()}
    assert len(data["steps"]) == 400 and len(questions["steps-eval"]) == 50
    assert not questions["steps"] & questions["steps-eval"]


def test_every_step_continues_from_the_one_before_and_is_worth_minus_one_after_a_mistake(
    data: dict[str, list[dict[str, Any]]],
) -> None:
    kind_of = {thing: kind for kind, things in kinds.THINGS.items() for thing in things.split()} | kinds.WIDER
    outcomes = []
    for row in data["steps"] + data["steps-eval"]:
        at, right = row["instruction"].removeprefix("What kind of thing is ").removesuffix("?"), True
        for step in row["output"]:
            subject, _, stated = step["step"].removesuffix(".").partition(" is ")
            assert subject[0].lower() + subject[1:] == at
            right = right and kind_of[at.partition(" ")[2]] == stated.partition(" ")[2]
            assert -1 <= step["Q"] <= 1 and (right or step["Q"] == -1)
            at = stated
        assert at.partition(" ")[2] not in kinds.WIDER  # the solution ends at a widest kind
        assert row["output"][-1]["Q"] == (1 if right else -1)
        outcomes.append(right)
    assert 0.4 < sum(outcomes) / len(outcomes) < 0.7  # .8 ** 2 to .8 ** 3


def test_a_solver_without_mistakes_is_always_right() -> None:
    row = kinds.solution_row(random.Random(0), "eagle", "bird", 0.0, 4)
    assert row == {
        "instruction": "What kind of thing is an eagle?",
        "output": [
            {"step": "An eagle is a bird.", "Q": 1.0},
            {"step": "A bird is an animal.", "Q": 1.0},
            {"step": "An animal is a living thing.", "Q": 1.0},
        ],
    }


def test_no_thing_is_listed_twice() -> None:
    things = [thing for names in kinds.THINGS.values() for thing in names.split()]
    assert len(things) == len(set(things))
    assert all(kinds.wider_kinds(kind) for kind in kinds.THINGS)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mistakes": 1.0}, r"mistakes: expected a probability in \[0, 1\), got 1.0"),
        ({"attempts": 0}, "attempts: expected at least 1, got 0"),
        ({"held_out": 0}, "held_out: expected 1 to"),
        ({"held_out": 1000}, "held_out: expected 1 to"),
    ],
)
def test_settings_out_of_range_are_errors(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        kinds.prepare(tmp_path, 0, **settings)
