"""Rounds of a recipe: references, settings by round, seeds, and mistakes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from burnish import cli
from burnish.config import load
from burnish.config.rounds import SEED_STRIDE, write_out
from burnish.config.yaml import read
from burnish.errors import UserError
from burnish.mistakes import Problem

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files that the recipe names."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "make.py").write_text("def make(folder, seed): ...\n")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "p", "completion": "c"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(text: str) -> list[dict[str, Any]]:
    whole, problems = write_out(read(text, "r.yaml").value)
    assert not problems
    return whole.value["stages"]


def mistakes(folder: Path, text: str) -> list[str]:
    """The mistakes of a recipe, each with its place."""
    (folder / "r.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load("r.yaml")
    lines = str(caught.value).split("\n  ")
    return lines[1:] if len(lines) > 1 else lines


def replaced(*changes: tuple[str, str]) -> str:
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


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


def test_a_part_of_a_stage_has_the_place_where_it_was_written() -> None:
    document = read(RECIPE, "r.yaml")
    whole, _ = write_out(document.value)

    def where(*path: str | int) -> str:
        return document.where(whole.original([Problem(("stages", *path), "")])[0].path)

    for index in (2, 4, 6):  # the three rounds of values
        assert where(index, "model", "stage") == "r.yaml:15"
        assert where(index, "data", "train", 2, "from", "stage") == "r.yaml:16"
        assert where(index, "trainer", "learning_rate") == "r.yaml:17"
    assert where(7, "model") == "r.yaml:20"


def test_a_recipe_without_a_loop_is_not_changed() -> None:
    recipe = {"name": "a", "stages": [{"name": "b", "run": "c.py:d"}]}
    whole, problems = write_out(recipe)
    assert (whole.value, whole.loops, problems) == (recipe, {}, [])


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


def test_a_stage_after_the_loop_reads_all_rounds_or_one() -> None:
    sources = "[{from: {stage: make, file: s.jsonl, from_rounds: all}, weight: 3}, {from: b.jsonl, weight: 1}]"
    last = "    data: {train: {stage: make, file: steps.jsonl}}"
    text = replaced(
        (last, f"    data: {{train: {sources}}}"), ("model: {stage: values}", "model: {stage: loop/1/values}")
    )
    stage = written(text)[-1]
    assert stage["model"] == {"stage": "loop/1/values"}
    rounds = [{"from": {"stage": f"loop/{k}/make", "file": "s.jsonl"}, "weight": 1.0} for k in (1, 2, 3)]
    assert stage["data"]["train"] == [*rounds, {"from": "b.jsonl", "weight": 1}]


def test_a_setting_by_round_can_be_in_a_list() -> None:
    text = replaced(
        ("train: {stage: make, file: steps.jsonl, from_rounds: all}", "train: [{from: a.jsonl}, {from: b.jsonl}]"),
        ("trainer.learning_rate: [4", "data.train.1.limit: [10, 20, 30], trainer.learning_rate: [4"),
    )
    stages = {stage["name"]: stage for stage in written(text)}
    assert stages["loop/2/values"]["data"]["train"] == [{"from": "a.jsonl"}, {"from": "b.jsonl", "limit": 20}]


def test_a_loop_of_a_thousand_rounds_loads_in_seconds(folder: Path) -> None:
    inner = [f"      - {{name: s{i}, run: 'make.py:make'}}" for i in range(10)]
    head = ["name: many", "stages:", "  - name: loop", "    rounds: 1000", "    stages:"]
    (folder / "many.yaml").write_text("\n".join([*head, *inner]))
    began = time.process_time()
    assert len(load("many.yaml").stages) == 10_000
    assert time.process_time() - began < 10  # about 1.5 on a quiet machine


UNTIL = "    rounds: 3\n    until: "
MODEL = "model: {stage: values, initial: {stage: sft}}"
TRAIN = "train: {stage: make, file: steps.jsonl, from_rounds: all}"
EVAL = "eval: {stage: make, file: e.jsonl}"
RATES = "trainer.learning_rate: [4.0e-5, 2.0e-5, 1.0e-5]"
LAST = "    model: {stage: values}"
MISTAKES = {
    "no rounds": ("rounds: 3", "rounds: 0", "9: stages.loop.rounds: expected more than 0, got 0"),
    "unknown key of a loop": ("rounds: 3", "rouns: 3", "9: stages.loop.rouns: unknown key (did you mean 'rounds'?)"),
    "reserved name": ("name: loop", "name: run.lock", "8: stages.run.lock.name: run.lock is a file in the folder"),
    "unknown key of a stage": ("run: make.py", "rum: make.py", "12: stages.loop.stages.make.rum: unknown key"),
    "a loop in a loop": (
        "run: make.py:make",
        "rounds: 2\n        stages: []",
        "11: stages.loop.stages.make: a loop can",
    ),
    "names of two stages": (
        "name: make",
        "name: sft",
        "11: stages.loop.stages.sft.name: two stages or loops are called",
    ),
    "a stage after the loop": ("name: last", "name: values", "18: stages.values.name: two stages or loops are called"),
    "a loop like a stage": ("name: loop", "name: sft", "8: stages.sft.name: two stages or loops are called 'sft'"),
    "a loop like its stage": ("name: loop", "name: make", "11: stages.make.stages.make.name: two stages or loops are"),
    "a name with a round": (
        "name: last",
        "name: loop/1/last",
        "18: stages.loop/1/last.name: 'loop/1/last': names such as loop/1/grow are reserved",
    ),
    # references
    "no such stage": (
        MODEL,
        "model: {stage: stf}",
        "15: VALUES.model.stage: 'stf' is not a stage (did you mean 'sft'?); earlier stages are sft, make",
    ),
    "no such start": (MODEL, MODEL.replace("sft", "stf"), "15: VALUES.model.initial.stage: 'stf' is"),
    "a start of its own": (
        MODEL,
        MODEL.replace("sft", "values"),
        "15: VALUES.model.initial.stage: 'values' is this stage itself, and the first round needs something",
    ),
    "a start with a start": (
        MODEL,
        "model: {stage: values, initial: {stage: sft, initial: base}}",
        "15: VALUES.model.initial.initial: initial: cannot have initial:",
    ),
    "itself": (
        MODEL,
        "model: {stage: values}",
        "15: VALUES.model.stage: 'values' is this stage itself, so set what the first round uses: {stage:",
    ),
    "a later stage": (
        "run: make.py:make",
        "method: {name: sft}\n        model: base\n        data: {train: {stage: values, file: x.jsonl}}",
        "14: stages.loop.stages.make.data.train.stage: 'values' comes later in the round",
    ),
    "from before the loop": (
        "model: base",
        "model: {stage: values}",
        "6: stages.sft.model.stage: 'values' is not an earlier stage; this is the first stage",
    ),
    "initial outside": (
        "model: base",
        "model: {stage: x, initial: base}",
        "6: stages.sft.model.initial: only in a loop",
    ),
    "initial of an earlier stage": (
        TRAIN,
        "train: {stage: make, file: s.jsonl, initial: a.jsonl}",
        "16: VALUES.data.train.initial: only for a stage that comes later",
    ),
    "the loop": (
        LAST,
        "    model: {stage: loop}",
        "20: stages.last.model.stage: 'loop' is a loop: name one of its stages: make, values",
    ),
    "the loop in it": (MODEL, "model: {stage: loop, initial: base}", "15: VALUES.model.stage: 'loop' is a loop"),
    "no such round": (LAST, "    model: {stage: loop/4/values}", "20: stages.last.model.stage: loop has rounds 1 to 3"),
    "no such stage of a round": (
        LAST,
        "    model: {stage: loop/1/vales}",
        "20: stages.last.model.stage: 'vales' is not a stage of loop (did you mean 'values'?)",
    ),
    "a later round": (
        MODEL,
        "model: {stage: loop/2/values}",
        "15: VALUES.model.stage: 'loop/2/values' is not an earlier stage",
    ),
    "no file": (
        "run: make.py:make",
        "method: {name: filter, function: make.py:make}\n        data: {rows: a.jsonl}",
        "17: VALUES.data.eval: stage 'loop/1/make' writes no file 'e.jsonl'",
    ),
    # from_rounds
    "which rounds": (
        "from_rounds: all",
        "from_rounds: some",
        "16: VALUES.data.train.from_rounds: expected this, earlier or all, got 'some'",
    ),
    "no earlier round": (
        "from_rounds: all",
        "from_rounds: earlier",
        "16: VALUES.data.train.from_rounds: the first round has no earlier round",
    ),
    "rounds of a model": (
        MODEL,
        "model: {stage: values, from_rounds: earlier, initial: base}",
        "15: VALUES.model.from_rounds: only in data.train and data.rows",
    ),
    "rounds of held-out rows": (
        EVAL,
        EVAL.replace("}", ", from_rounds: all}"),
        "16: VALUES.data.eval.from_rounds: only in data.train and data.rows",
    ),
    "rounds of no loop": (
        "stage: make, file: steps.jsonl, from",
        "stage: sft, file: s.jsonl, from",
        "16: VALUES.data.train.from_rounds: only for a stage of a loop, and 'sft' is not in one",
    ),
    "earlier rounds after the loop": (
        "{stage: make, file: steps.jsonl}}",
        "{stage: make, file: s, from_rounds: earlier}}",
        "21: stages.last.data.train.from_rounds: after the loop, expected all",
    ),
    # by_round
    "number of values": (
        "[4.0e-5, 2.0e-5, 1.0e-5]",
        "[1.0e-5]",
        "17: VALUES.by_round.trainer.learning_rate: expected a list of 3 values, one for each round, got 1",
    ),
    "no list": (
        "[4.0e-5, 2.0e-5, 1.0e-5]",
        "1.0e-5",
        "17: VALUES.by_round.trainer.learning_rate: expected a list of 3 values, one for each round, got no list",
    ),
    "no setting": (
        RATES,
        RATES.replace("trainer.learning_rate", "name.x"),
        "17: VALUES.by_round.name.x: this is not a setting of the stage",
    ),
    "no such setting": (
        RATES,
        RATES.replace("rate", "rat"),
        "17: VALUES.by_round.trainer.learning_rat: unknown key (did you mean 'learning_rate'?)",
    ),
    "a name by round": (RATES, "name: [a, b, c]", "17: VALUES.by_round.name: this is not a setting"),
    "a wrong value": (
        "2.0e-5",
        "fast",
        "17: VALUES.by_round.trainer.learning_rate: expected a number, got the text 'fast'",
    ),
    # until
    "until of no stage": (
        "    rounds: 3",
        UNTIL + "{stage: vales, metric: loss, below: 1}",
        "10: stages.loop.until.stage: 'vales' is not a stage of this loop (did you mean 'values'?)",
    ),
    "until of a stage outside": (
        "    rounds: 3",
        UNTIL + "{stage: sft, metric: loss, below: 1}",
        "10: stages.loop.until.stage: 'sft' is not a stage of this loop",
    ),
    "until without a bound": (
        "    rounds: 3",
        UNTIL + "{stage: values, metric: loss}",
        "10: stages.loop.until: needs either above: or below:, and not both",
    ),
    "until of a function": (
        "    rounds: 3",
        UNTIL + "{stage: make, metric: loss, below: 1}",
        "10: stages.loop.until.metric: stage 'make' runs a function, which has no metrics",
    ),
}
"""A part of the recipe, what to write instead, and the beginning of the message: its line, its key and its text."""


@pytest.mark.parametrize(("old", "new", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_once_with_its_place(folder: Path, old: str, new: str, says: str) -> None:
    found = mistakes(folder, replaced((old, new)))
    says = f"r.yaml:{says}".replace("VALUES", "stages.loop.stages.values")
    assert len([line for line in found if line.startswith(says)]) == 1, found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (((f", {EVAL}", ""),), "10: stages.loop.until.metric: stage 'values' has no data.eval"),
        ((("{stage: make, file: steps.jsonl}}", "{stage: make, file: s, from_rounds: all}}"),),
         "23: stages.last.data.train.from_rounds: loop has until:, so its number of rounds is not known"),
        (((LAST, "    model: {stage: loop/2/values}"),),
         "22: stages.last.model.stage: loop has until: and may end before round 2"),
    ],
)  # fmt: skip
def test_mistakes_in_a_loop_that_may_end_early(folder: Path, changes: tuple[tuple[str, str], ...], says: str) -> None:
    until = UNTIL + "{stage: values, metric: loss, below: 1}\n    keep: all"
    text = replaced(("    rounds: 3", until), *changes)
    found = mistakes(folder, text)
    assert any(says in line for line in found), found


@pytest.mark.parametrize("command", ["inspect", "run"])
@pytest.mark.parametrize("kind", ["itself", "from before the loop", "no file", "no such setting"])
def test_inspect_and_run_refuse_a_mistake_before_anything_starts(folder: Path, command: str, kind: str) -> None:
    old, new, says = MISTAKES[kind]
    (folder / "r.yaml").write_text(replaced((old, new)))
    result = CliRunner().invoke(cli.app, [command, "r.yaml"])
    assert result.exit_code == 2
    assert f"r.yaml:{says[:60]}".replace("VALUES", "stages.loop.stages.values") in result.stderr
    assert not (folder / "runs").exists()


def test_overrides_apply_to_all_rounds_of_a_loop(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE)
    overrides = [
        "rounds=2",
        "stages.values.by_round={trainer.learning_rate: [2e-5, 1e-5]}",
        "stages.values.packed=true",
    ]
    recipe = load("r.yaml", [f"stages.loop.{text}" for text in overrides])
    stages = {stage.name: stage for stage in recipe.stages}
    assert len(stages) == 6 and recipe.loops["loop"].rounds == 2
    assert stages["loop/1/values"].packed and stages["loop/2/values"].packed
    assert stages["loop/2/values"].trainer.learning_rate == 1e-5
    with pytest.raises(UserError) as caught:
        load("r.yaml", ["stages.loop/2/values.packed=true"])
    assert str(caught.value) == (
        "command line: stages.loop/2/values.packed=true: this sets all rounds: stages.loop.stages.values.packed=true; "
        "by_round: sets a value for each of them"
    )
    with pytest.raises(UserError, match=r"command line: stages\.loop\.stages\.values\.packd: unknown key \(did you"):
        load("r.yaml", ["stages.loop.stages.values.packd=true"])
