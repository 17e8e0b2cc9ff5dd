"""The JSON schema of recipes: every shipped recipe is valid, and mistakes are refused in loops too."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from burnish.config import json_schema
from burnish.config.loading import RECIPES
from burnish.config.yaml import read

SCHEMA = json_schema()
TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip
NOTES = {"title", "description", "default", "$schema", "$defs", "examples"}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value satisfies a schema, of which only the keywords below are known."""
    return all(_satisfies(value, key, rule, schema) for key, rule in schema.items() if key not in NOTES)


def _satisfies(value: Any, key: str, rule: Any, schema: dict[str, Any]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "$ref":
            return is_valid(value, SCHEMA["$defs"][rule.removeprefix("#/$defs/")])
        case "anyOf":
            return any(is_valid(value, one) for one in rule)
        case "oneOf":
            return sum(is_valid(value, one) for one in rule) == 1
        case "not":
            return not is_valid(value, rule)
        case "type":
            return isinstance(value, TYPES[rule]) and not (isinstance(value, bool) and rule in ("integer", "number"))
        case "enum":
            return value in rule
        case "const":
            return value == rule
        case "properties":
            return not isinstance(value, dict) or all(is_valid(value[k], rule[k]) for k in value.keys() & rule.keys())
        case "additionalProperties":
            given = value if isinstance(value, dict) else {}
            rest = [item for k, item in given.items() if k not in schema.get("properties", {})]
            return rule is True or all(rule is not False and is_valid(one, rule) for one in rest)
        case "required":
            return not isinstance(value, dict) or value.keys() >= set(rule)
        case "items":
            return not isinstance(value, list) or all(is_valid(item, rule) for item in value)
        case "minItems":
            return not isinstance(value, list) or len(value) >= rule
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
        case "pattern":
            return not isinstance(value, str) or re.search(rule, value) is not None
        case "minimum":
            return not is_number or value >= rule
        case "maximum":
            return not is_number or value <= rule
        case "exclusiveMinimum":
            return not is_number or value > rule
        case "exclusiveMaximum":
            return not is_number or value < rule
    raise AssertionError(f"unknown keyword {key}")


def shipped(name: str) -> dict[str, Any]:
    value = read((RECIPES / f"{name}.yaml").read_text("utf-8"), name).value
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("name", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_is_valid(name: str) -> None:
    assert is_valid(shipped(name), SCHEMA)


LOOP: dict[str, Any] = {
    "name": "r",
    "stages": [
        {"name": "prepare", "run": "a.py:b"},
        {
            "name": "loop",
            "rounds": 2,
            "until": {"stage": "tune", "metric": "loss", "below": 1.0},
            "keep": "all",
            "stages": [
                {
                    "name": "keep",
                    "method": {"name": "filter", "function": "a.py:c"},
                    "data": {"rows": {"stage": "prepare", "file": "a.jsonl"}},
                },
                {
                    "name": "tune",
                    "method": {"name": "sft", "learn": "last"},
                    "model": {"stage": "tune", "initial": {"stage": "prepare"}},
                    "data": {"train": [{"from": {"stage": "keep", "file": "rows.jsonl", "from_rounds": "all"}}]},
                    "by_round": {"trainer.learning_rate": [1e-3, 1e-4]},
                },
            ],
        },
    ],
}


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The recipe with another value at a path of its loop."""
    recipe = copy.deepcopy(LOOP)
    block = recipe["stages"][1]
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    return recipe


def test_a_recipe_with_a_loop_is_valid() -> None:
    assert is_valid(LOOP, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("round",), 2),
        (("rounds",), 0),
        (("keep",), "first"),
        (("until", "over"), 2),
        (("stages",), []),
        (("name",), "loop/1"),
        (("stages", 1, "modle"), "base"),
        (("stages", 1, "by_round"), [1]),
        (("stages", 1, "by_round"), {"trainer.learning_rate": 1e-3}),
        (("stages", 1, "name"), "loop/1/tune"),
        (("stages", 1, "model", "intial"), "base"),
        (("stages", 1, "model", "from_rounds"), "all"),
        (("stages", 1, "data", "train", 0, "from", "from_rounds"), "some"),
        (("stages", 0, "method", "functon"), "a.py:c"),
        (("stages", 0, "method"), {"name": "filter"}),
        (("stages", 0, "rounds"), 2),
    ],
)
def test_a_mistake_in_a_loop_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    assert not is_valid(changed(path, value), SCHEMA)


def test_by_round_belongs_to_loops() -> None:
    recipe = copy.deepcopy(LOOP)
    recipe["stages"][0]["by_round"] = {"seed": [1, 2]}
    assert not is_valid(recipe, SCHEMA)
