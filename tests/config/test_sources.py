"""Mixtures and streams from a recipe: what is drawn and reported, and which mistakes stop a run before it starts."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from burnish.commands import inspect
from burnish.config import Data, Recipe, load, sources
from burnish.config import run as pipeline
from burnish.data.streaming import RowStream
from burnish.errors import UserError
from burnish.recipes import tiny
from burnish.report.display import Display
from burnish.types import Conversation

RECIPE = """
name: mixed
method: {name: sft}
model: model
data:
  train:
    - {from: a.jsonl, weight: 2}
    - {from: b.jsonl, weight: 1, keys: {prompt: question}}
trainer: {per_device_train_batch_size: 4}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    write("a.jsonl", [{"prompt": f"{i}+{i}", "completion": str(i)} for i in range(8)])
    write("b.jsonl", [{"question": f"{i}+1", "completion": str(i + 1)} for i in range(2)])
    tiny.write_model(Path("model"), 0)
    Path("mixed.yaml").write_text(RECIPE)
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*overrides: str) -> tuple[dict[str, Any], str]:
    """Run the recipe. Returns the stage's entry in the manifest, and the output."""
    shown = io.StringIO()
    with Display(Console(file=shown, width=250)) as screen:
        folder = pipeline.run(load("mixed.yaml", overrides), display=screen)
    return json.loads((folder / "manifest.json").read_text())["stages"][0], shown.getvalue()


def read(recipe: Recipe) -> Counter[str]:
    data = recipe.stages[0].data
    assert data is not None
    read = sources.read(data, "train", recipe.folder, (Conversation,), recipe.seed)
    return Counter(row.source for row in read.rows)


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load("mixed.yaml", overrides)
    return str(caught.value)


def test_sources_are_mixed_by_weight_with_their_lines(home):
    """Eight rows of weight 2 are drawn once; four of weight 1 go with them, so each of two comes twice."""
    assert read(load("mixed.yaml")) == {f"a.jsonl:{i}": 1 for i in range(1, 9)} | {"b.jsonl:1": 2, "b.jsonl:2": 2}
    limited = load("mixed.yaml", ["data.train.0.limit=3"])
    assert sum(read(limited).values()) == 5 and set(read(limited)) == {
        *(f"a.jsonl:{i}" for i in (1, 2, 3)),
        "b.jsonl:1",
        "b.jsonl:2",
    }
    unweighted = "data.train=[{from: a.jsonl}, {from: b.jsonl, keys: {prompt: question}}]"
    assert sorted(read(load("mixed.yaml", [unweighted])).values()) == [1] * 10


def test_a_mixture_trains_and_is_reported(home):
    stage, shown = run()
    assert "12 rows (8 from a.jsonl; 4 from b.jsonl, which has 2)" in shown
    assert stage["rows"]["train"]["mixed"] == [
        {"source": "a.jsonl", "rows": 8, "drawn": 8},
        {"source": "b.jsonl", "rows": 2, "drawn": 4},
    ]
    assert set(stage["data"]) == {"a.jsonl", "b.jsonl"}
    assert all(len(digest) == 64 for digest in stage["data"].values())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train.1.wieght=2", "data.train.1.wieght: unknown key (did you mean 'weight'?)"),
        ("data.train.1.weight=-1", "data.train.1.weight: expected more than 0, got -1"),
        ("data.train.1.weight=null", "1 of 2 sources have a weight: give a weight to all of them or to none"),
        ("data.train.1.limit=0", "data.train.1.limit: expected more than 0, got 0"),
        ("data.train.1.from=c.jsonl", "data.train.1.from: no such file: c.jsonl"),
        ("data.train.1.from={stage: make, file: a.jsonl}", "data.train.1.from.stage: 'make' is not a stage"),
        ("data.train=[]", "data.train: expected a list of 1 or more"),
        ("data.train=3", "expected a file, a folder, a hub id, {stage: NAME, file: FILE}, or a list of"),
        ("data.limit=3", "limit does not apply to a list of sources; limit each source"),
        ("data.shuffle_buffer=3", "shuffle_buffer requires stream: true"),
        ("data.stream=true", "data.stream: a stream has no end: set trainer.max_steps"),
    ],
)
def test_mistakes_are_named(home, override, said):
    assert said in message(override)


def test_mistakes_are_reported_with_their_line(home):
    Path("mixed.yaml").write_text(RECIPE.replace("weight: 1, keys", "wieght: 1, keys"))
    assert "mixed.yaml:8: data.train.1.wieght: unknown key" in message()


def test_a_method_that_needs_all_rows_does_not_stream(home):
    ppo = ["method={name: ppo}", "reward=[{function: burnish.recipes.tiny:exact}]", "data.train=a.jsonl"]
    said = message(*ppo, "data.stream=true", "trainer.max_steps=3")
    assert "data.stream: method 'ppo' needs all of its rows at once" in said


def test_a_stream_trains_and_reports_skipped_rows(home):
    with Path("a.jsonl").open("a") as file:
        file.write('{"prompt": "1+1", "completion": ""}\n')
    stage, shown = run("data.stream=true", "data.shuffle_buffer=8", "data.on_bad_row=skip", "trainer.max_steps=6")
    rows = stage["rows"]["train"]
    assert rows["rows"] == 24 and rows["skipped in all"] == 1 and rows["dropped"] == rows["shortened"] == []
    assert rows["skipped"] == ["a.jsonl:9: empty text"]
    assert "train: read as a stream" in shown and "train: 24 rows (1 skipped: a.jsonl:9: empty text)" in shown


def test_a_stream_is_checked_before_the_first_step(home):
    write("a.jsonl", [{"prompt": "1+1"}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*missing key"):
        run("data.stream=true", "trainer.max_steps=6")


def test_rows_that_cannot_be_encoded_are_skipped_and_named(home):
    """Without an end token, a text of one token has nothing to learn."""
    write("texts.jsonl", [{"text": "1+1=2"}, {"text": "1"}, {"text": "2+2=4"}])
    path = Path("model/tokenizer_config.json")
    settings = json.loads(path.read_text()) | {"eos_token": None}
    path.write_text(json.dumps(settings))
    assert AutoTokenizer.from_pretrained("model").eos_token is None
    texts = ["method={name: pretrain}", "data={train: texts.jsonl}"]
    with pytest.raises(UserError, match=r"texts\.jsonl:2: one token"):
        run(*texts)
    stage, shown = run(*texts, "data.on_bad_row=skip", "out=again")
    assert stage["rows"]["train"] == {
        "rows": 2,
        "skipped": ["texts.jsonl:2: one token: there is nothing to learn"],
        "dropped": [],
        "shortened": [],
    }
    assert "2 rows (1 skipped: texts.jsonl:2: one token" in shown
    write("texts.jsonl", [{"text": "1"}])
    with pytest.raises(UserError, match=r"all 1 rows were skipped, the first as texts\.jsonl:1: one token"):
        run(*texts, "data.on_bad_row=skip", "out=third")


def test_inspect_shows_mixtures_and_the_beginning_of_a_stream(home):
    for overrides, said in [((), "12"), (("data.stream=true", "trainer.max_steps=6", "data.shuffle_buffer=5"), "5")]:
        shown = io.StringIO()
        inspect.show(load("mixed.yaml", overrides), None, Console(file=shown, width=200))
        (line,) = [line for line in shown.getvalue().splitlines() if line.startswith("rows ")]
        assert line.split() == ["rows", said]
    assert "a stream: showing the first 5 rows" in shown.getvalue()


@pytest.mark.parametrize("stream", [(), ("data.stream=true", "trainer.max_steps=6")])
def test_columns_that_are_kept_are_listed_in_the_recipe(home, stream):
    write("a.jsonl", [{"prompt": f"{i}+{i}", "completion": str(i), "lang": "en"} for i in range(8)])
    with pytest.raises(UserError, match=r"a\.jsonl:1: lang: unknown column: .*data\.keep: \[lang\]"):
        run(*stream)
    assert run("data.keep=[lang]", *stream)[0]["state"] == "done"
    shown = io.StringIO()
    inspect.show(load("mixed.yaml", ["data.keep=[lang]"]), None, Console(file=shown, width=200))
    assert "ignored columns (data.keep): lang" in shown.getvalue()
    assert "data.kep: unknown key (did you mean 'keep'?)" in message("data.kep=[lang]")
    assert "data.keep: expected a list, got the text 'lang'" in message("data.keep=lang")


def test_training_on_held_out_rows_is_a_warning(home):
    """However the file is spelled, and also as one source of a mixture. Training continues."""
    Path("link.jsonl").symlink_to("b.jsonl")
    write("held.jsonl", [{"prompt": "1+1", "completion": "2"}])
    one = "data.train=[{from: ./a.jsonl}, {from: held.jsonl}]"
    stage, shown = run("data.eval=a.jsonl", one)
    assert stage["state"] == "done"
    assert shown.count("warning: data.eval is a.jsonl, which data.train reads too") == 1

    def inspected(*overrides: str) -> str:
        console = Console(file=io.StringIO(), width=300)
        inspect.show(load("mixed.yaml", overrides), None, console)
        return console.file.getvalue()  # type: ignore[attr-defined]

    keys = "data.keys={prompt: question}"
    assert "warning: data.eval is link.jsonl" in inspected("data.eval=link.jsonl", "data.train=b.jsonl", keys)
    assert "warning" not in inspected("data.eval=held.jsonl", "data.train=a.jsonl")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("a/b", "a/b:train", True), ("a/b", "a/b:test", False), ("a/b/c", "a/b/d", False)],
)
def test_hub_ids_are_compared_with_their_split(one, other, same):
    data = Data.model_validate({"train": one, "eval": other})
    assert (sources.overlap(data, Path("run")) is not None) == same


def test_a_stream_whose_file_changes_stops_the_run(home, monkeypatch):
    """The rows of the second buffer are of another file, which training never sees."""
    made = RowStream.take

    def take(stream: RowStream, count: int) -> Any:
        taken = made(stream, count)
        if count == 4:  # a buffer of training, not the check before it
            write("a.jsonl", [{"prompt": "1+1", "completion": "3"} for _ in range(8)])
        return taken

    monkeypatch.setattr(RowStream, "take", take)
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was being read"):
        run("data.train=a.jsonl", "data.stream=true", "data.shuffle_buffer=4", "trainer.max_steps=6")


@pytest.mark.slow
def test_a_stream_that_is_killed_ends_with_the_same_bytes(home):
    """A mixture with a bad row, killed three times and started again."""
    with Path("a.jsonl").open("a") as file:
        file.write('{"prompt": "1+1", "completion": ""}\n')
    given = ["data.stream=true", "data.shuffle_buffer=5", "data.on_bad_row=skip", "trainer.max_steps=40"]
    command = [sys.executable, "-m", "burnish", "run", "mixed.yaml", "trainer.save_steps=2", *given]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    metrics = Path("run/sft/metrics.jsonl")

    def results() -> tuple[bytes, Any]:
        stage = json.loads(Path("run/manifest.json").read_text())["stages"][0]
        return Path("run/sft/model/model.safetensors").read_bytes(), stage["rows"]

    subprocess.run([*command, "out=run"], check=True, env=environment, capture_output=True, timeout=300)
    expected = results()
    shutil.rmtree("run")
    for lines in (5, 17, 30):
        process = subprocess.Popen(
            [*command, "out=run"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run([*command, "out=run"], check=True, env=environment, capture_output=True, timeout=300)
    assert results() == expected
    assert expected[1]["train"]["skipped in all"] > 1
