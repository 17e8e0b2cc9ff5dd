"""Every block of docs/environments.md runs, in a folder like a reader's, with a tiny model."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from builders import llama
from burnish.cli import app
from burnish.report.metrics import FINISH_REASONS, TOOL_ERRORS
from burnish.rl.environment import Environments
from burnish.rl.sandbox.client import enforced
from burnish.rl.settings import EnvironmentSettings
from burnish.types import Prompt
from chat_families import FAMILIES
from rl.test_episodes import sample
from test_docs import DOCS, blocks
from tiny_runs import json_rows

PAGE = DOCS / "environments.md"
YAMLS, (FIRST_ROW, TWO_ROWS) = blocks(PAGE, "yaml"), blocks(PAGE, "json")
CODE = {code.partition("\n")[0].removeprefix("# "): code for code in blocks(PAGE, "python")}
FAST = {"generation": {"max_new_tokens": 6, "samples": 2}, "trainer": {"max_steps": 1}}
BASE = {"method": {"name": "grpo"}, "model": "runs/my-sft/sft/model", "data": {"train": "data/guess.jsonl"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reader has: the files of the page, rows, and a model."""
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = FAMILIES["qwen 2.5"].tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0, "pad_token_id": tokenizer.eos_token_id}
    model = llama(vocab_size=len(tokenizer), max_position_embeddings=4096, **ends)
    for one in (tokenizer, model):
        one.save_pretrained(folder / "runs/my-sft/sft/model")
    for name, code in CODE.items():
        if name.endswith(".py"):
            (folder / name).write_text(code, "utf-8")
    (folder / "data").mkdir()
    row = json.loads(FIRST_ROW) | {"answer": 7}
    rows = {"guess": [row] * 8, "several": list(map(json.loads, TWO_ROWS.splitlines())) * 4}
    for name, given in rows.items():
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in given), "utf-8")
    return folder


@pytest.fixture(autouse=True)
def in_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    yield
    for name in CODE:
        sys.modules.pop(name.removesuffix(".py"), None)


def stages(block: str, number: int) -> dict[str, Any]:
    """The recipe of a block, or a recipe with it, made fast."""
    given: Any = YAML(typ="safe").load(block)
    whole = "name" in given
    recipe = given if whole else BASE | {"name": f"part-{number}"} | given
    if isinstance(recipe.get("environment", {}).get("class"), dict):
        recipe["data"] = {"train": "data/several.jsonl"}
    for stage in recipe.get("stages", [recipe]):
        if "environment" in stage or "tools" in stage:
            stage["generation"] = stage.get("generation", {}) | FAST["generation"]
        if "train" in stage["data"]:
            stage["trainer"] = stage.get("trainer", {}) | FAST["trainer"] | {"per_device_train_batch_size": 4}
    return recipe


@pytest.mark.parametrize("number", range(len(YAMLS)))
def test_a_recipe_runs(number: int) -> None:
    recipe = stages(YAMLS[number], number)
    if "burnish.rl.python" in YAMLS[number] and "protection" in enforced():
        pytest.skip("this machine has no sandbox")
    with Path("recipe.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(recipe, file)
    for command in ("inspect", "run"):
        result = CliRunner().invoke(app, [command, "recipe.yaml"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    for stage in recipe.get("stages", [recipe]):
        name = stage["name"] if "stages" in recipe else stage["method"]["name"]
        rows = json_rows(Path("runs") / recipe["name"] / name / "samples.jsonl")
        assert all("messages" in row for row in rows) and (rows or name == "imitate")


def test_the_python_code_runs() -> None:
    (code,) = [code for name, code in CODE.items() if not name.endswith(".py")]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/environments.md", "exec"), names)
    assert names["trainer"].state.global_step == 4


def play(environments: Environments, script: Any, **columns: Any) -> Any:
    prompt = Prompt(({"role": "user", "content": "Play. "},), columns, "a:1")
    return sample("qwen 2.5", script, environments, [prompt])[0]


def calling(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def test_the_environments_of_the_page_can_be_won() -> None:
    guess, vault, game, tools = map(importlib.import_module, ("my_env", "my_vault", "my_game", "my_tools"))

    def bisects(text: str) -> str:
        low, high = 1, 20
        for said, answer in re.findall(r'"number": (\d+).*?Too (low|high)', text, re.DOTALL):
            low, high = (int(said) + 1, high) if answer == "low" else (low, int(said) - 1)
        return calling("guess", number=(low + high) // 2)

    won = play(Environments({"": guess.Guess}), bisects, most=20)
    assert (won.finish_reason, won.score) == ("done", 1.0) and won.prompt[0]["content"].endswith("between 1 and 20.")
    assert play(Environments({"": guess.Guess}, max_turns=1), lambda _: calling("guess", number=0), most=20).score == 0
    opened = play(Environments({"": vault.Vault}), lambda _: calling("open_with", code=7), code=7)
    assert (opened.turns[0].replies[0]["content"], opened.score) == ('{"open": true}', 1.0)
    counts = iter(["3", "2", "1", "0"])
    down = play(Environments({"": game.Countdown}, turns=True), lambda _: f"{next(counts)}<|im_end|>")
    assert (down.finish_reason, down.score) == ("done", 4.0)
    turns = iter([calling("look_up", word="lapidary") + "", calling("add", a=1, b=2), "3<|im_end|>"])
    both = play(Environments(functions=[tools.add, tools.look_up]), lambda _: next(turns))
    assert [turn.replies[0]["content"] for turn in both.turns[:2]] == ["concerned with stones", "3"]
    rewards = importlib.import_module("my_rewards")
    assert rewards.careful([both]) == [-2.0] and rewards.solved([replace(both, columns={"answer": 3})]) == [1.0]


def test_the_tables_of_the_page_are_complete() -> None:
    text = PAGE.read_text("utf-8")
    for name in {"stop", *FINISH_REASONS, *TOOL_ERRORS}:
        assert f"\n| `{name}` |" in text, name
    limits = set(EnvironmentSettings.model_fields) - {"class_", "turns", "arguments"}
    assert all(re.search(rf"\b{name}\b", text) for name in limits)


@pytest.mark.parametrize("makes_rows", [False, True])
def test_inspect_shows_how_an_episode_begins(makes_rows: bool) -> None:
    rows: dict[str, Any] = {"method": {"name": "sample"}, "data": {"rows": "data/guess.jsonl"}} if makes_rows else {}
    recipe = stages(YAMLS[0], 0)
    if makes_rows:
        del recipe["trainer"]
    with Path("recipe.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(recipe | rows, file)
    result = CliRunner().invoke(app, ["inspect", "recipe.yaml"], catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "Find my number by calling guess. It is between 1 and 20.<|im_end|>" in result.output
    assert '"name": "guess", "description": "Guess the number."' in result.output
    facts = "environment my_env.py:Guess limits max_turns 6, max_tool_tokens 512, timeout 60"
    assert facts in " ".join(result.output.split())
    assert "tools are described by the chat template tools of Guess guess" in " ".join(result.output.split())


def test_inspect_says_if_the_template_shows_no_tools(home: Path) -> None:
    tokenizer = FAMILIES["gemma"].tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "<end_of_turn>"
    tokenizer.save_pretrained("plain")
    llama(vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained("plain")
    with Path("recipe.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(stages(YAMLS[0], 0) | {"model": "plain"}, file)
    result = CliRunner().invoke(app, ["inspect", "recipe.yaml"], catch_exceptions=False, env={"COLUMNS": "200"})
    assert "not shown, as the chat template has no tools: <tool>name(...)</tool>" in result.output
    assert "between 1 and 20." in result.output
