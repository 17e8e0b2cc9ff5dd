"""Every mistake a user can make: one message that names the place and the way out, exit code 2, no traceback."""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from builders import byte_tokenizer
from burnish.cli import app

SFT = """\
name: tiny
seed: 0
stages:
  - name: sft
    method: {name: sft, learn: all}
    model: model
    data: {train: chat.jsonl, max_length: 64}
    trainer: {learning_rate: 1e-4}
  - name: reward
    method: {name: reward}
    model: {stage: sft}
    data: {train: pairs.jsonl}
  - name: ppo
    method: {name: ppo, kl_coef: 0.1}
    model: {stage: sft}
    reward: [{model: {stage: reward}}, {function: rewards.py:brevity, weight: 0.1}]
    data: {train: prompts.jsonl}
    generation: {max_new_tokens: 8}
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Bye"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    byte_tokenizer(template, special=("<|end|>",), eos_token="<|end|>").save_pretrained(folder)
    LlamaConfig(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "rewards.py").write_text("def brevity(answers):\n    return [0.0 for _ in answers]\n")
    (tmp_path / "r.yaml").write_text(SFT)
    for name, row in {"chat": CHAT, "pairs": PAIR, "prompts": {"prompt": "Hi"}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def error(*arguments: str) -> str:
    """Run a command that must fail because of the user's mistake, and return its only message."""
    result = CliRunner().invoke(app, list(arguments), terminal_width=200)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").rstrip("\n")


def test_the_recipe_without_a_mistake_is_accepted(here):
    (here / "rewards.py").write_text("async def brevity(answers):\n    return [0.0 for _ in answers]\n")
    (here / "r.yaml").write_text(SFT.replace("max_length: 64", "max_length: 64, too_long: [truncate_left, drop]"))
    result = CliRunner().invoke(app, ["inspect", "r.yaml"])
    assert result.exit_code == 0, result.output


# A text in the recipe, what replaces it, and what the message must contain.
RECIPES = {
    "unknown key at the top": ("seed: 0", "sede: 0", ["r.yaml:2: sede: unknown key", "mean 'seed'?"]),
    "unknown key of a stage": ("    trainer:", "    trainers:", ["r.yaml:8: stages.sft.trainers", "mean 'trainer'?"]),
    "unknown key of a method": ("learn: all", "lern: all", ["r.yaml:5: stages.sft.method.lern", "mean 'learn'?"]),
    "unknown key of the data": ("max_length", "max_len", ["r.yaml:7: stages.sft.data.max_len", "mean 'max_length'?"]),
    "unknown key of generation": (
        "max_new_tokens",
        "max_tokens",
        ["r.yaml:18: stages.ppo.generation.max_tokens", "mean 'max_new_tokens'?"],
    ),
    "unknown key of a reward": (
        "weight: 0.1",
        "wieght: 0.1",
        [
            "r.yaml:16: stages.ppo.reward.1.wieght",
            "mean 'weight'?",
            "keys here are function, name, ray, timeout, weight",
        ],
    ),
    "unknown field of TrainingArguments": (
        "learning_rate",
        "learnig_rate",
        ["r.yaml:8: stages.sft.trainer.learnig_rate", "mean 'learning_rate'?"],
    ),
    "a setting of a method beside it": (
        "    trainer: {learning_rate: 1e-4}",
        "    learn: all",
        ["r.yaml:8: stages.sft.learn: unknown key here", "method.learn"],
    ),
    "a key that burnish owns": (
        "learning_rate: 1e-4",
        "output_dir: here",
        ["r.yaml:8: stages.sft.trainer.output_dir", "set out:"],
    ),
    "the device, which is not a setting": (
        "learning_rate: 1e-4",
        "use_cpu: true",
        ["r.yaml:8: stages.sft.trainer.use_cpu", "CUDA_VISIBLE_DEVICES="],
    ),
    "text for a number": (
        "max_length: 64",
        "max_length: long",
        ["r.yaml:7: stages.sft.data.max_length: expected a whole number, got the text 'long'"],
    ),
    "an unknown way in a list": (
        "max_length: 64",
        "max_length: 64, too_long: [truncate_lft, drop]",
        ["r.yaml:7: stages.sft.data.too_long.0: expected", "mean 'truncate_left'?"],
    ),
    "a way that is never tried": (
        "max_length: 64",
        "max_length: 64, too_long: [drop, truncate_left]",
        ["r.yaml:7: stages.sft.data.too_long: truncate_left is never tried"],
    ),
    "a fraction for a whole number": ("seed: 0", "seed: 0.5", ["r.yaml:2: seed: expected a whole number, got 0.5"]),
    "a negative number": (
        "kl_coef: 0.1",
        "kl_coef: -0.1",
        ["r.yaml:14: stages.ppo.method.kl_coef: expected 0 or more, got -0.1"],
    ),
    "a negative learning rate": ("1e-4", "-1e-4", ["r.yaml:8: stages.sft.trainer.learning_rate: expected 0 or more"]),
    "text for a learning rate": ("1e-4", "small", ["learning_rate: expected a number, got the text 'small'"]),
    "a list for a block": (
        "{learning_rate: 1e-4}",
        "[1]",
        ["r.yaml:8: stages.sft.trainer: expected a block of keys, got a list"],
    ),
    "an unknown choice": (
        "learn: all",
        "learn: al",
        ["r.yaml:5: stages.sft.method.learn", "'last', 'all'", "mean 'all'?"],
    ),
    "an unknown precision": (
        "    model: model",
        "    model: model\n    precision: b16",
        ["r.yaml:7: stages.sft.precision", "mean 'bf16'?"],
    ),
    "an old name of the precision": (
        "    model: model",
        "    model: model\n    dtype: bfloat16",
        ["r.yaml:7: stages.sft.dtype", "this key was renamed: write precision"],
    ),
    "the precision of TrainingArguments": (
        "learning_rate: 1e-4",
        "bf16: true",
        ["r.yaml:8: stages.sft.trainer.bf16", "the stage's key precision decides: float32, bf16 or fp16"],
    ),
    "an unknown scheduler": (
        "learning_rate: 1e-4",
        "lr_scheduler_type: cosin",
        ["r.yaml:8: stages.sft.trainer.lr_scheduler_type", "mean 'cosine'?"],
    ),
    "an unknown method": (
        "name: reward}",
        "name: rewards}",
        ["r.yaml:10: stages.reward.method.name", "mean 'reward'?"],
    ),
    "a method in no module": ("name: reward}", "name: 'nowhere:Nothing'}", ["there is no module 'nowhere'"]),
    "an unknown stage": (
        "reward: [{model: {stage: reward}}",
        "reward: [{model: {stage: rewards}}",
        ["r.yaml:16: stages.ppo.reward.0.model.stage: 'rewards' is not a stage", "mean 'reward'?"],
    ),
    "a stage that comes later": (
        "    model: model",
        "    model: {stage: ppo}",
        ["r.yaml:6: stages.sft.model.stage: 'ppo' is not an earlier stage", "first stage"],
    ),
    "two stages of one name": ("name: ppo\n", "name: sft\n", ["r.yaml:13: ", "two stages are called 'sft'"]),
    "a model that is none": (
        "    model: model",
        "    model: {stag: sft}",
        ["r.yaml:6: stages.sft.model: expected a folder, a hub id, {stage: NAME}"],
    ),
    "run and method": (
        "    model: model",
        "    model: model\n    run: rewards.py:brevity",
        ["r.yaml:4: stages.sft: has both run: and method:"],
    ),
    "neither run nor method": ("    method: {name: reward}\n", "", ["stages.reward: has neither run: nor method:"]),
    "no model": ("    model: model\n", "", ["r.yaml:4: stages.sft: model missing"]),
    "ppo without a reward": ("    reward: [", "    #", ["stages.ppo.reward: method 'ppo' needs a reward"]),
    "sft with a reward": (
        "    model: model",
        "    model: model\n    reward: [{function: rewards.py:brevity}]",
        ["r.yaml:7: stages.sft.reward: method 'sft' does not use rewards"],
    ),
    "a reward that is none": (
        "{function: rewards.py:brevity, weight: 0.1}",
        "{weight: 0.1}",
        ["stages.ppo.reward.1: a reward needs exactly one of model:, function:, url:, judge:"],
    ),
    "a reward of two kinds": (
        "{function: rewards.py:brevity, weight: 0.1}",
        "{function: rewards.py:brevity, model: model}",
        ["stages.ppo.reward.1: a reward needs exactly one of model:, function:, url:, judge:"],
    ),
    "a reward that is no block": (
        "{function: rewards.py:brevity, weight: 0.1}",
        "rewards.py:brevity",
        ["stages.ppo.reward.1: a reward needs exactly one of model:, function:, url:, judge:"],
    ),
    "a setting of another kind of reward": (
        "weight: 0.1",
        "label: 1",
        ["r.yaml:16: stages.ppo.reward.1: label: only for a reward with model:, but this one has function:"],
    ),
    "a time limit for a model": (
        "{function: rewards.py:brevity, weight: 0.1}",
        "{model: model, timeout: 1.0}",
        ["stages.ppo.reward.1: timeout: only for a reward with function:, but this one has model:"],
    ),
    "a misspelled key of a reward's model": (
        "reward: [{model: {stage: reward}}",
        "reward: [{model: {stag: reward}}",
        ["r.yaml:16: stages.ppo.reward.0.model: expected a folder, a hub id, {stage: NAME}"],
    ),
    "a function that is not there": ("py:brevity", "py:brevty", ["rewards.py defines no 'brevty'", "mean 'brevity'?"]),
    "a function in no file": ("rewards.py:brevity", "reward.py:brevity", ["no such file", "rewards.py'?"]),
    "an unknown template": (
        "    model: model",
        "    model: model\n    template: question_anser",
        ["r.yaml:7: stages.sft.template", "mean 'question_answer'?"],
    ),
    "evaluation of nothing": (
        "learning_rate: 1e-4",
        "eval_strategy: epoch",
        ["r.yaml:8: stages.sft.trainer.eval_strategy", "data.eval is missing"],
    ),
    "a file that is not there": (
        "chat.jsonl",
        "chats.jsonl",
        ["r.yaml:7: stages.sft.data.train: no such file: chats.jsonl", "mean 'chat.jsonl'?"],
    ),
    "a file that cannot be read": ("chat.jsonl", "rewards.py", ["r.yaml:7: ", "cannot read .py", ".jsonl"]),
    "a folder without a model": (
        "    model: model",
        "    model: empty",
        ["r.yaml:6: stages.sft.model: empty", "config.json is missing"],
    ),
    "a folder that is not there": (
        "    model: model",
        "    model: ./modle",
        ["r.yaml:6: stages.sft.model: no such model", "'model'?"],
    ),
    "a key written twice": (
        "seed: 0",
        "seed: 0\nseed: 1",
        ["r.yaml:3: seed: this key is written twice, first in line 2"],
    ),
    "no YAML": ("seed: 0", "seed: [0", ["r.yaml:", "not valid YAML"]),
    "a tab": ("    method: {name: reward}", "\tmethod: {name: reward}", ["r.yaml:10: not valid YAML", "\\t"]),
}


def test_a_misspelled_kind_of_reward(here):
    (here / "r.yaml").write_text(SFT.replace("function: rewards.py:brevity", "funktion: rewards.py:brevity"))
    title, missing, unknown = error("inspect", "r.yaml").splitlines()
    assert title == "r.yaml: 2 mistakes"
    assert missing == "  r.yaml:16: stages.ppo.reward.1.function: this key is missing"
    assert unknown.startswith("  r.yaml:16: stages.ppo.reward.1.funktion: unknown key (did you mean 'function'?)")


@pytest.mark.parametrize(("old", "new", "expected"), RECIPES.values(), ids=RECIPES)
def test_a_mistake_in_the_recipe(here, old, new, expected):
    assert old in SFT
    (here / "r.yaml").write_text(SFT.replace(old, new, 1))
    message = error("inspect", "r.yaml")
    for part in expected:
        assert part in message
    assert len(message.splitlines()) == 1


ARGUMENTS = {
    "an unknown recipe": (["run", "r.yml"], ["r.yml: no such recipe", "mean 'r.yaml'?"]),
    "a folder for a recipe": (["run", "empty"], ["empty: this is a folder"]),
    "an override without a value": (["run", "r.yaml", "seed"], ["'seed' is not key=value"]),
    "an override of an unknown key": (
        ["run", "r.yaml", "stages.sft.modl=x"],
        ["command line: stages.sft.modl", "mean 'model'?"],
    ),
    "an override of an unknown stage": (
        ["run", "r.yaml", "stages.sfd.model=x"],
        ["has no 'sfd'", "mean 'sft'?", "sft, reward, ppo"],
    ),
    "an override beyond the list": (["run", "r.yaml", "stages.7.model=x"], ["has no '7'", "sft, reward, ppo"]),
    "an override inside a number": (["run", "r.yaml", "seed.x=1"], ["seed is 0, not a block"]),
    "an override that is no YAML": (["run", "r.yaml", "seed={1"], ["command line: seed", "not valid YAML"]),
    "an override of a wrong type": (["run", "r.yaml", "seed=x"], ["command line: seed: expected a whole number"]),
    "a report of no run": (["report", "empty"], ["empty", "manifest.json is missing"]),
    "generation without a prompt": (["generate", "model"], ["prompts on the command line"]),
    "generation by no model": (["generate", "./modle", "Hi"], ["./modle", "did you mean 'model'?"]),
    "generation from no file": (["generate", "model", "--input", "promts.jsonl"], ["promts.jsonl", "prompts.jsonl"]),
    "a row that is not there": (["inspect", "r.yaml", "--row", "5"], ["--row 5: there are only 1 rows"]),
}


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_mistake_in_the_arguments(here, arguments, expected):
    message = error(*arguments)
    for part in expected:
        assert part in message
    assert len(message.splitlines()) == 1


def said(*turns: tuple[str, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# The file, the row after a good one, and what the message must contain.
ROWS = {
    "broken JSON": ("chat", '{"messages": [', []),
    "no object": ("chat", "[1, 2]", []),
    "an unknown role": ("chat", said(("user", "Hi"), ("asistant", "Hello")), ["asistant", "assistant"]),
    "an empty conversation": ("chat", {"messages": []}, ["messages"]),
    "a user at the end": ("chat", said(("user", "Hi")), ["assistant"]),
    "content that is no text": ("chat", said(("user", 5), ("assistant", "Hello")), ["content"]),
    "content that is empty": ("chat", said(("user", "Hi"), ("assistant", "")), ["content"]),
    "a key that is misspelt": ("chat", {"mesages": CHAT["messages"]}, ["mesages", "messages"]),
    "a row that is too long": (
        "chat",
        said(("user", "Hi"), ("assistant", "o" * 100)),
        ["max_length", "64", "too_long"],
    ),
    "equal answers": ("pairs", PAIR | {"rejected": "Hello"}, ["chosen", "rejected"]),
    "an answer that is missing": (
        "pairs",
        {"prompt": "Hi", "chosen": "Hello", "rejcted": "Bye"},
        ["rejcted", "rejected"],
    ),
    "a probability above 1": ("pairs", PAIR | {"p_chosen": 1.5}, ["p_chosen", "1.5"]),
    "a negative margin": ("pairs", PAIR | {"margin": -1}, ["margin", "-1"]),
    "a margin that is no number": ("pairs", PAIR | {"margin": "big"}, ["margin", "big"]),
    "a column that nothing reads": ("pairs", PAIR | {"score_chosen": 2}, ["score_chosen", "data.keep: [score_chosen]"]),
    "a duplicate key": ("prompts", '{"prompt": "Hi", "prompt": "Ho"}', ["prompts.jsonl:2: prompt: duplicate key"]),
    "tools": ("prompts", {"prompt": "Hi", "tools": [{"nam": "add"}]}, ["tools[0]", "not a tool", "file.py:name"]),
    "a key of a message": (
        "chat",
        {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "a", "name": "b"}]},
        ["messages[1].name", "data.keep: [name]"],
    ),
    "a prompt that is empty": ("prompts", {"prompt": ""}, ["prompt"]),
    "a prompt that is missing": ("prompts", {"promt": "Hi"}, ["promt", "prompt"]),
}


@pytest.mark.parametrize(("name", "row", "expected"), ROWS.values(), ids=ROWS)
def test_a_bad_row(here, name, row, expected):
    with (here / f"{name}.jsonl").open("a") as file:
        file.write(row if isinstance(row, str) else json.dumps(row))
    message = error("inspect", "r.yaml")
    for part in [f"{name}.jsonl:2", *expected]:
        assert part in message
    assert len(message.splitlines()) == 1


def test_a_reward_that_scores_nothing(here):
    (here / "prompts.jsonl").write_text(json.dumps({"text": CHAT["messages"], "reward": 1.0}) + "\n")
    stage = SFT[SFT.index("  - name: ppo") :].replace("{name: ppo, kl_coef: 0.1}", "{name: reinforce}")
    stage = stage.replace("{stage: sft}", "model").replace("{model: {stage: reward}}, ", "")
    (here / "r.yaml").write_text(f"name: tiny\nstages:\n{stage}")
    for command in ("inspect", "run"):
        message = error(command, "r.yaml")
        assert "stages.ppo.reward: rewards score completions of prompts, but no row" in message
    (here / "r.yaml").write_text((here / "r.yaml").read_text().replace("train: ", "eval: held.jsonl, train: "))
    (here / "held.jsonl").write_text(json.dumps({"prompt": "Hi"}) + "\n")
    assert CliRunner().invoke(app, ["inspect", "r.yaml"]).exit_code == 0


def test_a_file_without_rows(here):
    (here / "chat.jsonl").write_text("")
    assert "chat.jsonl: no rows" in error("inspect", "r.yaml")


def test_keys_that_name_no_column(here):
    message = error("inspect", "r.yaml", "stages.reward.data.keys={chosen: beter}")
    assert "beter" in message and "pairs.jsonl:1" in message


def test_an_unknown_format(here):
    message = error("inspect", "r.yaml", "stages.sft.data.format=sharegtp")
    assert "sharegtp" in message and "sharegpt" in message


def test_an_empty_recipe_and_one_that_is_not_text(here):
    (here / "r.yaml").write_text("")
    assert error("inspect", "r.yaml") == "r.yaml: expected keys such as name: and stages:, got nothing"
    (here / "r.yaml").write_bytes(b"name: \xff\xfe")
    assert "UTF-8" in error("inspect", "r.yaml")
