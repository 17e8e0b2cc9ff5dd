"""Rounds of a recipe: references, settings by round, seeds, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config.rounds import SEED_STRIDE, write_out
from burnish.config.yaml import read

RECIPE = """\
name: test
seed: 7
stages:
  - name: sft
    method: {name: sft}
    model: base
    data: {train: a.jsonl}
  - name: loop
    rounds: 3
    stages:
      - name: make
        run: make.py:make
      - name: values
        method: {name: sft}
        model: {stage: values, initial: {stage: sft}}
        data: {train: {stage: make, file: steps.jsonl, from_rounds: all}, eval: {stage: make, file: e.jsonl}}
        by_round: {trainer.learning_rate: [4.0e-5, 2.0e-5, 1.0e-5]}
  - name: last
    method: {name: sft}
    model: {stage: values}
    data: {train: {stage: make, file: steps.jsonl}}
"""


def written(text: str) -> list[dict[str, Any]]:
    document, _, problems = write_out(read(text, "r.yaml"))
    assert not problems
    return document.value["stages"]


def mistakes(text: str) -> list[str]:
    document = read(text, "r.yaml")
    _, _, problems = write_out(document)
    return [f"{document.where(path)}: {text}" for path, text in problems]


def test_every_stage_of_a_loop_is_there_once_a_round_with_its_references() -> None:
    stages = {stage["name"]: stage for stage in written(RECIPE)}
    assert list(stages) == [
        "sft", "loop/1/make", "loop/1/values", "loop/2/make", "loop/2/values", "loop/3/make", "loop/3/values", "last"
    ]  # fmt: skip
    assert [stages[f"loop/{k}/values"]["model"] for k in (1, 2, 3)] == [
        {"stage": "sft"}, {"stage": "loop/1/values"}, {"stage": "loop/2/values"}
    ]  # fmt: skip
    file = {"file": "steps.jsonl"}
    assert stages["loop/1/values"]["data"]["train"] == {"stage": "loop/1/make", **file}
    assert stages["loop/3/values"]["data"]["train"] == [
        {"from": {"stage": f"loop/{k}/make", **file}} for k in (1, 2, 3)
    ]
    assert stages["loop/2/values"]["data"]["eval"] == {"stage": "loop/2/make", "file": "e.jsonl"}
    assert stages["last"]["model"] == {"stage": "loop/3/values"}
    assert stages["last"]["data"]["train"] == {"stage": "loop/3/make", **file}


def test_settings_and_seeds_differ_by_round() -> None:
    stages = {stage["name"]: stage for stage in written(RECIPE)}
    assert [stages[f"loop/{k}/values"]["trainer"] for k in (1, 2, 3)] == [
        {"learning_rate": 4e-5}, {"learning_rate": 2e-5}, {"learning_rate": 1e-5}
    ]  # fmt: skip
    assert [stages[f"loop/{k}/make"]["seed"] for k in (1, 2, 3)] == [7, 7 + SEED_STRIDE, 7 + 2 * SEED_STRIDE]
    assert "seed" not in stages["sft"]


def test_a_stage_keeps_the_place_where_it_was_written() -> None:
    document, _, _ = write_out(read(RECIPE, "r.yaml"))
    for index in (2, 4, 6):  # the three rounds of values
        assert document.where(("stages", index, "model", "stage")) == "r.yaml:15"
    assert document.where(("stages", 7, "model")) == "r.yaml:20"


def test_a_recipe_without_a_loop_is_not_changed() -> None:
    document = read("name: a\nstages: [{name: b, run: c.py:d}]", "r.yaml")
    assert write_out(document) == (document, {}, [])


def test_earlier_rounds_share_the_weight_of_their_source() -> None:
    made = "{stage: make, file: s.jsonl, from_rounds: earlier, initial: a.jsonl}"
    train = f"[{{from: {made}, weight: 3}}, {{from: b.jsonl, weight: 1}}]"
    text = RECIPE.replace("{stage: make, file: steps.jsonl, from_rounds: all}", train)
    stages = {stage["name"]: stage for stage in written(text)}
    assert stages["loop/1/values"]["data"]["train"][0] == {"from": "a.jsonl", "weight": 3.0}
    assert stages["loop/3/values"]["data"]["train"] == [
        {"from": "a.jsonl", "weight": 1.0},
        {"from": {"stage": "loop/1/make", "file": "s.jsonl"}, "weight": 1.0},
        {"from": {"stage": "loop/2/make", "file": "s.jsonl"}, "weight": 1.0},
        {"from": "b.jsonl", "weight": 1},
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rounds: 3", "rounds: 0", "r.yaml:9: expected more than 0, got 0"),
        ("rounds: 3", "rouns: 3", "r.yaml:9: unknown key (did you mean 'rounds'?)"),
        (", initial: {stage: sft}", "", "r.yaml:15: 'values' is this stage itself, so the first round needs a start"),
        ("from_rounds: all", "from_rounds: some", "r.yaml:16: expected this, earlier or all, got 'some'"),
        ("from_rounds: all", "from_rounds: earlier", "r.yaml:16: there is no earlier round in the first one"),
        ("[4.0e-5, 2.0e-5, 1.0e-5]", "[1.0e-5]", "r.yaml:17: expected a list of 3 values, one for each round, got 1"),
        ("trainer.learning_rate: [4", "name.x: [4", "r.yaml:17: this is not a setting of the stage"),
        ("name: make", "name: sft", "r.yaml:11: two stages are called 'sft'"),
        ("name: last", "name: values", "r.yaml:18: two stages are called 'values'"),
        ("rounds: 3", "rounds: 3\n    until: {stage: vales, metric: loss, below: 1}", "'vales' is not a stage of this"),
        ("rounds: 3", "rounds: 3\n    until: {stage: values, metric: loss}", "needs either above: or below:"),
        ("model: base", "model: {stage: x, initial: base}", "r.yaml:6: only in a loop"),
        ("run: make.py:make", "rounds: 2\n        stages: []", "r.yaml:11: a loop cannot be inside another loop"),
    ],
)
def test_mistakes_are_named_with_their_place(old: str, new: str, says: str) -> None:
    found = mistakes(RECIPE.replace(old, new, 1))
    assert any(says in text for text in found), found
