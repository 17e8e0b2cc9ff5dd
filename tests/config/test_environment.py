"""Mistakes in tools: and environment: of a recipe, and in the user's classes: one message says what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from burnish.config import load
from burnish.config.resolve import environments_of
from burnish.config.sources import in_training, read
from burnish.errors import UserError
from burnish.types import Prompt

CODE = '''
def guess(number: int) -> str:
    """Guess the number.

    Args:
        number: The guess.
    """
    return "no"


class Guess:
    reward = 0.0

    def __init__(self, most=10):
        self.most = most

    def reset(self, **columns):
        return None

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        return "no"


class NoReset:
    guess = Guess.guess


class NoTools:
    reset = Guess.reset


class NoHint(Guess):
    def guess(self, number):
        return "no"


class Game:
    def respond(self, message):
        ...


def zero(trajectories):
    return [0.0 for _ in trajectories]


VALUE = 3
'''
GUESS = "my_env.py:Guess"
ZERO = [{"function": "my_env.py:zero"}]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that loads a recipe with these keys, and its environments."""
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(CODE, "utf-8")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}", "utf-8")
    Path("p.jsonl").write_text('{"prompt": "Guess."}\n', "utf-8")

    def make(**keys: Any) -> Any:
        base = {"name": "bad", "method": {"name": "grpo"}, "model": "model", "data": {"train": "p.jsonl"}}
        with Path("bad.yaml").open("w", encoding="utf-8") as file:
            YAML().dump(base | {"generation": {"samples": 2}} | keys, file)
        recipe = load("bad.yaml")
        return environments_of(recipe.stages[0], recipe.locate)

    return make


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment": {"clas": GUESS}}, r"bad.yaml:\d+: environment.clas: unknown key \(did you mean 'class'\?\)"),
        ({"environment": {"class": GUESS, "max_turn": 4}}, r"environment.max_turn: .* \(did you mean 'max_turns'\?\)"),
        ({"environment": {"class": GUESS, "max_turns": "four"}}, "environment.max_turns: expected a whole number, got"),
        ({"environment": {"class": GUESS, "timeout": 0}}, "environment.timeout: expected more than 0, got 0"),
        ({"environment": {"class": "my_env.py:Gues"}}, r"environment.class: .* no 'Gues' \(did you mean 'Guess'\?\)"),
        ({"environment": {"class": {"a": "my_env.py:Gues"}}}, r"environment.class.a: .*did you mean 'Guess'"),
        ({"environment": {"class": [GUESS]}}, r"expected file.py:Class or \{NAME: file.py:Class, ...\}, got a list"),
        ({"environment": {"class": {}}}, r"environment.class: expected file.py:Class or \{NAME: file.py:Class, ...\}"),
        ({"environment": {"class": {"a": 3}}}, "environment.class.a: expected text, got 3"),
        ({"environment": GUESS}, r"environment: .* got the text 'my_env.py:Guess': write \{class: my_env.py:Guess\}"),
        ({"environment": {"class": GUESS, "turns": "my_env.py:Game"}}, "environment: has both class: and turns:"),
        ({"environment": {"max_turns": 4}}, "only limits: set class: or turns: in it, or tools: in the stage"),
        ({"environment": {"class": GUESS, "reward_at": "turns"}}, "reward_at: turns needs turns:"),
        ({"environment": {"turns": "my_env.py:Game", "reward_at": "turn"}}, r"\(did you mean 'turns'\?\)"),
        ({"tools": ["my_env.py:guess"], "reward": ZERO, "environment": {"arguments": {"a": 1}}}, "needs class: or"),
        ({"tools": "my_env.py:guess", "reward": ZERO}, "tools: expected a list, got the text 'my_env.py:guess'"),
        ({"tools": ["my_env.py:gues"], "reward": ZERO}, r"tools.0: .* defines no 'gues' \(did you mean 'guess'\?\)"),
        ({"tools": ["my_env.py:guess"]}, "method 'grpo' needs a reward"),
        ({"method": {"name": "sft"}, "environment": {"class": GUESS}}, "environment: method 'sft' has no episodes"),
        # what only the user's code shows
        ({"environment": {"class": GUESS, "arguments": {"least": 1}}}, "'least': check environment.arguments"),
        ({"environment": {"class": "my_env.py:guess"}}, "missing a required argument: 'number'"),
        ({"environment": {"class": "my_env.py:VALUE"}}, "my_env.py:VALUE: VALUE is a int, not a function"),
        ({"environment": {"class": "my_env.py:NoReset"}}, r"NoReset: needs a method reset\(\*\*columns\)"),
        ({"environment": {"class": "my_env.py:NoTools"}}, "NoTools: has no public method besides reset"),
        (
            {"environment": {"class": "my_env.py:NoHint"}},
            "tool guess: Argument number is missing a type hint .*a tool needs",
        ),
        ({"environment": {"turns": GUESS}}, "a turn environment needs a method respond"),
        ({"environment": {"class": "my_env.py:Game"}}, "has a method respond, .*: set turns: instead of class:"),
        ({"environment": {"class": GUESS}, "tools": ["my_env.py:guess"]}, "has the name of a function in tools:"),
        ({"tools": [GUESS], "reward": ZERO}, "Guess is a class, not a function: set environment.class"),
    ],
)
def test_a_mistake_is_named(made: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        made(**keys)
    assert re.search(message, str(caught.value)), caught.value
    assert "pydantic" not in str(caught.value) and "str]" not in str(caught.value)


def test_what_is_right_is_loaded(made: Any) -> None:
    environments = made(environment={"class": GUESS, "arguments": {"most": 20}, "max_turns": 2})
    assert environments.limits.max_turns == 2 and environments.has_reward
    assert list(made(tools=["my_env.py:guess"], reward=ZERO).functions) == ["guess"]
    assert list(made(environment={"class": {"a": GUESS, "b": GUESS}}).kinds) == ["a", "b"]


def test_later_stages_may_select_by_the_reward_of_an_environment(made: Any, tmp_path: Path) -> None:
    made(environment={"class": GUESS})
    text = """
name: two
stages:
  - name: play
    method: {name: sample}
    model: model
    environment: {class: "my_env.py:Guess"}
    data: {rows: p.jsonl}
  - name: learn
    method: {name: sft}
    model: model
    data: {train: {stage: play, file: samples.jsonl}, select: {above: 0.5}}
"""
    Path("two.yaml").write_text(text, "utf-8")
    assert len(load("two.yaml").stages) == 2
    Path("two.yaml").write_text(text.replace('    environment: {class: "my_env.py:Guess"}\n', ""), "utf-8")
    with pytest.raises(UserError, match="has no reward:, so its samples have no score"):
        load("two.yaml")


def test_a_prompt_is_held_out_if_its_environment_does_something_else(made: Any) -> None:
    made(environment={"class": GUESS})
    text = """
name: two
stages:
  - {name: learn, method: {name: grpo}, model: model, environment: &e {class: "my_env.py:Guess"},
     generation: {samples: 2}, data: {train: p.jsonl}}
  - {name: test, method: {name: eval}, model: model, environment: *e, data: {rows: q.jsonl}}
"""
    Path("two.yaml").write_text(text, "utf-8")
    for number, same in ((1, True), (2, False)):
        Path("p.jsonl").write_text(json.dumps({"prompt": "Guess.", "number": 1}) + "\n", "utf-8")
        Path("q.jsonl").write_text(json.dumps({"prompt": "Guess.", "number": number}) + "\n", "utf-8")
        recipe = load("two.yaml")
        stage = recipe.stages[1]
        assert stage.data is not None
        rows = read(stage.data, "rows", recipe.folder, (Prompt,), 0).rows
        assert bool(in_training(rows, recipe, stage)) is same
