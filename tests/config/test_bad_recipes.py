"""A recipe that is wrong in any way ends in one message: never in a traceback, a hang, or a loss of memory."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pydantic
import pytest

from burnish.config import load
from burnish.config.schema import Data, Part, Recipe, RewardFromFunction, RewardFromModel, Stage
from burnish.config.sources import references
from burnish.config.stage import TrainingStage
from burnish.errors import UserError
from burnish.generate.sampling import Sampling
from burnish.generate.settings import GeneratorSettings
from burnish.methods import METHODS
from burnish.models.settings import AdapterConfig
from burnish.training.arguments import TrainerConfig
from hostile import Record, examples, try_all

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "out": "there",
    "threads": 1,
    "stages": [
        {"name": "made", "run": "code.py:rows", "with": {"n": 3}},
        {
            "name": "sft",
            "method": {"name": "sft"},
            "model": "model",
            "precision": "float32",
            "adapter": {"r": 2},
            "data": {"train": [{"from": "chat.jsonl", "weight": 1.0}], "eval": "chat.jsonl", "max_length": 64},
            "trainer": {
                "learning_rate": 1e-4,
                "eval_strategy": "epoch",
                "save_strategy": "best",
                "metric_for_best_model": "loss",
            },
        },
        {
            "name": "ppo",
            "method": {"name": "ppo", "critic": {"name": "separate"}, "advantage": {"name": "gae", "lam": 0.9}},
            "model": {"stage": "sft"},
            "reward": [{"function": "code.py:score", "weight": 0.5}, {"model": "model"}],
            "generation": {"max_new_tokens": 4, "stop": ["x"]},
            "generator": {"name": "local", "slots": 4},
            "data": {"train": {"stage": "made", "file": "p.jsonl"}},
            "trainer": {"optim": "sgd"},
        },
    ],
}


class Raw(str):
    """YAML that is written as it is: ``Raw("!!int foo")``."""


BOMB = Raw(
    "[&a [x, x, x, x, x, x, x, x, x], "
    + ", ".join(f"&{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(7))
    + "]"
)
EXTREMES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    10**12,
    2**63 - 1,
    -(2**63),
    0.5,
    -0.0,
    1e-300,
    1e300,
    "",
    " ",
    "x",
    "a:b",
    ".py:f",
    "~nobody-here/x",
    "x" * 5000,
    "漢字 [/bold] {x}",
    [],
    [[]],
    {},
    {"name": "x"},
    {"stage": "sft"},
    [{"from": "chat.jsonl"}],
    *map(
        Raw,
        [
            ".nan",
            ".inf",
            "-.inf",
            "9" * 5000,
            "1e400",
            "!!int foo",
            "!!float x",
            "!!bool x",
            "!!binary x",
            "!!set {a, b}",
            "!!python/object:os.system x",
            "!own {a: 1}",
            '"\\0"',
            '"\\ud800"',
            "&x [*x]",
            "*nowhere",
            "2020-01-01",
            "0x1F",
            "=",
            "<<",
            "{<<: 3}",
            "{1: 2}",
            "{? [a] : b}",
            "{a: 1, a: 2}",
            "[" * 200,
            "'",
            "@",
            "%",
            "`",
            "| x",
        ],
    ),
    BOMB,
]


def yaml(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml(key)}: {yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml, value)) + "]"
    return json.dumps(value)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path, which may be new. ``...`` removes the key."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, list):
        items = [replaced(item, rest, new) if i == key else item for i, item in enumerate(value)]
        return [item for item in items if item is not ...]
    block = value if isinstance(value, dict) else {}
    block = {**block, key: replaced(block.get(key), rest, new)}
    return {name: item for name, item in block.items() if item is not ...}


def schema_paths() -> Iterator[tuple[Any, ...]]:
    """The path of every key that a recipe may have."""
    blocks: dict[tuple[Any, ...], type[pydantic.BaseModel]] = {
        (): Recipe,
        ("stages", 1): Stage,
        ("stages", 1, "adapter"): AdapterConfig,
        ("stages", 1, "data"): Data,
        ("stages", 1, "data", "train", 0): Part,
        ("stages", 1, "trainer"): TrainerConfig,
        ("stages", 2, "generation"): Sampling,
        ("stages", 2, "generator"): GeneratorSettings,
        ("stages", 2, "method"): METHODS["ppo"].config,
        ("stages", 2, "reward", 0): RewardFromFunction,
        ("stages", 2, "reward", 1): RewardFromModel,
    }
    for at, model in blocks.items():
        for name, field in model.model_fields.items():
            yield (*at, field.alias or name)
    for name, spec in METHODS.items():
        yield from (("stages", 1, "method", name, key) for key in spec.config.model_fields)


def mutated(chance: random.Random) -> Iterator[str]:
    """Recipes with an extreme value at a key of the schema, in turn with recipes with several changes anywhere."""
    everywhere, keys = list(paths(RECIPE)), list(schema_paths())
    chance.shuffle(keys)
    for path in cycle(keys):
        if path[:3] == ("stages", 1, "method") and len(path) == 5:
            method, key = path[3:]
            yield yaml(replaced(RECIPE, path[:3], {"name": method, key: chance.choice(EXTREMES)}))
        else:
            yield yaml(replaced(RECIPE, path, chance.choice(EXTREMES)))
        recipe: Any = RECIPE
        for _ in range(chance.choice([1, 1, 2, 5])):
            path = chance.choice(everywhere)
            new = chance.choice([..., *EXTREMES]) if chance.random() < 0.8 else find(chance.choice(everywhere))
            recipe = replaced(recipe, path, chance.choice(EXTREMES) if new is ... and not path else new)
        text = yaml(recipe)
        if chance.random() < 0.3:  # cut it, or write something into the middle
            at = chance.randrange(len(text))
            noise = "".join(chance.choice("{}[]:,-&*!|>'\"%@`#\t\n\\\0é0~<? ") for _ in range(chance.randrange(4)))
            text = text[:at] + noise + (text[at:] if chance.random() < 0.5 else "")
        yield text


def find(path: tuple[Any, ...]) -> Any:
    """The value at a path of the recipe."""
    value: Any = RECIPE
    for key in path:
        value = value[key]
    return value


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text("def rows(folder, seed, n):\n    pass\n\n\ndef score(answers):\n    pass\n")
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "r.yaml").write_text(yaml(RECIPE))
    return tmp_path


def check(*overrides: str) -> str | None:
    """Load the recipe and make what can be made without models and rows. Returns the message, or None."""
    try:
        recipe = load("r.yaml", overrides)
        json.dumps(recipe.resolved())
        for stage in recipe.stages:
            if stage.method is not None and stage.method.name in METHODS:
                TrainingStage(recipe, stage).arguments("float32")
    except UserError as error:
        return str(error)
    return None


def test_the_recipe_itself_is_right(here: Path) -> None:
    assert check() is None


@examples(few=100, many=700)
def test_no_mutated_recipe_ends_in_a_traceback_or_a_hang(here: Path, examples: int, record_property: Record) -> None:
    refused = 0

    def load_it(text: str) -> None:
        nonlocal refused
        Path("r.yaml").write_text(text)
        if message := check():
            assert len(message) < 10_000 and message.startswith(("r.yaml", "stages."))
            refused += 1

    try_all(islice(mutated(random.Random(13)), examples), load_it, examples, record_property)
    assert examples // 2 < refused < examples


NAMED = {
    "a tag that does not fit": ("seed: !!int foo", "r.yaml:1: expected a whole number of at most 64 bits, got 'foo'"),
    "a tag of Python": ("seed: !!python/name:os.system x", "r.yaml:1: expected text, a number"),
    "a set": ("seed: !!set {a, b}", "a value with the tag !!set"),
    "a huge integer": (f"seed: {'9' * 5000}", "r.yaml:1: expected a whole number of at most 64 bits, got '999"),
    "deep nesting": ("a:\n- " + "[" * 5000, "r.yaml:2: more than 32 blocks inside each other"),
    "aliases of aliases": (f"seed: 1\nwith: {BOMB}", "r.yaml:2: more than 20,000 values, counting those of aliases"),
    "an alias of itself": ("a: &x [*x]", "r.yaml:1: more than 32 blocks inside each other"),
    "a block that merges itself": ("a: &x\n  <<: *x", "r.yaml:1: more than 32 blocks inside each other"),
    "a list of blocks that merges itself": ("<<: &x {<<: [*x]}", "r.yaml:1: more than 32 blocks inside each other"),
    "too long": ("# " + "x" * 400_000, "r.yaml: 400,002 characters: a recipe has at most 300,000"),
    "a NUL": ('out: "a\\0b"', "r.yaml:1: text with the character '\\x00'"),
    "a lone surrogate": ('out: "\\ud800"', "r.yaml:1: text with the character '\\ud800'"),
}


@pytest.mark.parametrize(("text", "expected"), NAMED.values(), ids=NAMED)
def test_yaml_that_cannot_be_a_recipe(text: str, expected: str, here: Path) -> None:
    Path("r.yaml").write_text(text)
    began = time.process_time()
    message = check()
    assert message is not None and expected in message
    assert time.process_time() - began < 1.5


SETTINGS = {
    "seed=1e400": "command line: seed: expected a whole number",
    "seed=4294967296": "command line: seed: expected less than 4.29497e+09",
    "threads=1000000000000": "command line: threads: expected 4096 or less, got 1000000000000",
    "out=code.py": "command line: out: code.py is a file: expected a folder for the run",
    "out=code.py/a/b": "command line: out: code.py is a file",
    f"out={'x' * 300}": "its name is too long",
    f"out={'/x' * 5000}": "its name is too long",
    "out=dangling": "out: dangling is a link to nowhere, which does not exist",
    "stages.sft.model=./dangling": "model: ./dangling is a link to nowhere, which does not exist",
    "stages.sft.data.eval=dangling": "data.eval: dangling is a link to nowhere, which does not exist",
    "stages.sft.data.eval=loop": "data.eval: loop is a link to loop, which does not exist",
    f"stages.sft.data.eval={'x' * 5000}": "its name is too long",
    "stages.sft.model=~nobody-here/model": "model: ~nobody-here/model: Could not determine home directory",
    "stages.sft.data.eval=~nobody-here/rows.jsonl": "eval: ~nobody-here/rows.jsonl: Could not determine home directory",
    "stages.made.run=~nobody-here/code.py:rows": "run: ~nobody-here/code.py: Could not determine home directory",
    "out=~nobody-here/run": "out: ~nobody-here/run: Could not determine home directory",
    "stages.sft.name=manifest.json": "manifest.json is a file in the folder of every run",
    "stages.sft.name=Report.html": "Report.html is a file in the folder of every run",
    f"stages.sft.name={'x' * 101}": "expected a name of at most 100 letters",
    "stages.sft.run=..x:f": "has both run: and method:",
    "stages.made.run=..x:f": "run: there is no module '..x'",
    "stages.sft.trainer.learning_rate=.nan": "learning_rate: expected a finite number, got nan",
    "stages.sft.trainer.per_device_train_batch_size=0": "per_device_train_batch_size: expected 1 or more, got 0",
    "stages.sft.trainer.accelerator_config={split_batches: junk}": "accelerator_config: this key is not allowed",
    "stages.sft.trainer.lr_scheduler_kwargs={junk: 1}": "lr_scheduler_kwargs: linear takes no 'junk'; it takes none",
    "stages.sft.trainer={lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycle: 1}}": "mean 'num_cycles'?",
    "stages.sft.trainer={lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: x}}": "not take the value 'x'",
    "stages.sft.trainer.lr_scheduler_type=cosine_with_min_lr": "needs either min_lr or min_lr_rate",
    "stages.sft.trainer.lr_scheduler_type=warmup_stable_decay": "needs num_decay_steps",
    "stages.sft.trainer.optim=adalomo": "adalomo needs the package lomo_optim, which is not installed: pip install",
    "stages.sft.trainer={eval_strategy: epoch, save_strategy: best}": "best needs metric_for_best_model",
    "stages.sft.trainer.metric_for_best_model=acuracy": "there is no metric 'acuracy' (did you mean 'accuracy'?)",
    "stages.ppo.data.train={stage: sft, file: p.jsonl}": "stage 'sft' trains a model and writes no rows",
    "stages.ppo.reward=[{model: {stage: sft}}]": "reward.0.model: stage 'sft' trains a model that gives no score",
    "stages.ppo.reward=[{model: {stage: sft}, steps: raw}]": "stage 'sft' trains no values of steps: expected a stage",
    "stages.ppo.reward=[{model: model}, {model: ./model}]": "two rewards are named model: give each its own name:",
    "stages.ppo.reward=[{function: 'code.py:score'}, {model: model, name: score}]": "two rewards are named score",
    "stages.ppo.reward.0.weight=.nan": "weight: expected a finite number, got nan",
    "stages.ppo.reward.0.timeout=1e300": "timeout: expected 9.22337e+09 or less, got 1e+300",
    "stages.ppo.generation.temperature=1e-300": "temperature 1e-300 is too small to divide logits by: expected 0",
    "stages.ppo.generation.samples=100000000000": "samples: expected 65536 or less",
    "x" + ".x" * 5000 + "=1": "more than 32 blocks inside each other",
    "stages.²=1": "stages has no '²'",
    f"stages.{'9' * 5000}=1": "stages has no '999",
}


@pytest.mark.parametrize(("setting", "expected"), SETTINGS.items(), ids=[text[:60] for text in SETTINGS])
def test_a_setting_that_cannot_work_is_explained(setting: str, expected: str, here: Path) -> None:
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    message = check(setting)
    assert message is not None and expected in message, message


FUNCTIONS = {
    "in a block": "try:\n    import json\nexcept ImportError:\n    pass\nelse:\n    def other(rows): ...\n",
    "with a type": "from typing import Any\nother: Any = len\n",
    "in a tuple": "other, another = len, len\n",
    "by any import": "from builtins import *\n",
}


@pytest.mark.parametrize("code", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_may_be_defined_in_any_way(code: str, here: Path) -> None:
    Path("other.py").write_text(code)
    assert check("stages.ppo.reward.0.function=other.py:other") is None


def test_a_name_inside_of_a_function_is_not_defined(here: Path) -> None:
    Path("other.py").write_text("def outer():\n    def other(rows): ...\n")
    message = check("stages.ppo.reward.0.function=other.py:other")
    assert message is not None and "other.py defines no 'other'" in message


def test_home_folders_in_paths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    recipe = load("r.yaml", ["out=~/runs/tiny", "stages.sft.data.eval=~/chat.jsonl"])
    data = recipe.stages[1].data
    assert data is not None and recipe.folder == here / "runs" / "tiny"
    assert references(data, "eval", recipe.folder) == [str(here / "chat.jsonl")]
