"""A run's folder: what --fresh removes, missing stages, changed inputs, damaged checkpoints, and open generators."""

import io
import json
import logging
import multiprocessing
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders import PLAIN_CHATML
from burnish import files
from burnish.config import Data, load
from burnish.config import run as pipeline
from burnish.config.inputs import Checksums, of_rows
from burnish.errors import UserCodeError, UserError
from burnish.report.display import Display
from burnish.training.trainer import Trainer
from tiny_runs import Killed, run_until

RECIPE = """
name: small
stages:
  - {name: made, run: "make.py:rows"}
  - name: sft
    method: {name: sft}
    model: MODEL
    data: {train: {stage: made, file: chat.jsonl}, eval: own.jsonl}
    trainer: {per_device_train_batch_size: 2, save_steps: 1, max_steps: 3}
  - name: ppo
    method: {name: ppo, epochs: 1, critic: shared}
    model: {stage: sft}
    reward: [{function: "make.py:short"}]
    data: {train: prompts.jsonl}
    generation: {max_new_tokens: 2}
    trainer: {per_device_train_batch_size: 2, save_steps: 1, max_steps: 2}
"""
CODE = """
import json
import logging
import multiprocessing

def rows(folder, seed):
    (folder / "data").mkdir()
    chats = [{"prompt": str(i), "completion": str(i + 1)} for i in range(6)]
    (folder / "data" / "chat.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in chats))

def short(answers):
    return [-float(len(answer.tokens)) for answer in answers]

def alone(answers):
    assert len(multiprocessing.active_children()) == 1
    return short(answers)

def fails(answers):
    raise ValueError(f"the generator has {len(multiprocessing.active_children())} process")
"""


@pytest.fixture
def home(run_folder: Path) -> Path:
    """The working folder, with a recipe, its code, its rows and its model."""
    Path("small.yaml").write_text(RECIPE.replace("MODEL", "base"))
    Path("make.py").write_text(CODE)
    Path("own.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(4)))
    return run_folder


def run(*overrides: str, fresh: bool = False) -> str:
    shown = io.StringIO()
    with Display(Console(file=shown, width=200)) as screen:
        pipeline.run(load("small.yaml", overrides), fresh=fresh, display=screen)
    return shown.getvalue()


def manifest() -> dict[str, Any]:
    return json.loads(Path("runs/small/manifest.json").read_text("utf-8"))


def weights(folder: str = "runs/small") -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).glob("*/model/*.safetensors")}


# --- the generator -------------------------------------------------------------------------------------------------


def test_a_stage_closes_its_generator(home: Path) -> None:
    run("stages.ppo.generator={name: process}", "stages.ppo.reward=[{function: make.py:alone}]")
    assert not multiprocessing.active_children()


def test_a_stage_that_fails_closes_its_generator(home: Path) -> None:
    with pytest.raises(UserCodeError, match="the generator has 1 process"):
        run("stages.ppo.generator={name: process}", "stages.ppo.reward=[{function: make.py:fails}]")
    assert not multiprocessing.active_children()


# --- starting over -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/precious", "../precious", "..", ".", "a/../../precious", "", "made\n", 3, None])
def test_fresh_removes_nothing_if_the_manifest_names_other_folders(name: Any, home: Path) -> None:
    """A manifest that names /precious had that folder removed."""
    precious = home / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    name = str(precious) if name == "/precious" else name
    folder = Path("runs/small")
    (folder / "made").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"stages": [{"name": "made"}, {"name": name}]}))
    with pytest.raises(UserError, match=r"manifest\.json: .* cannot be the name of a stage"):
        run(fresh=True)
    assert (precious / "thesis.txt").read_text() == "mine" and (folder / "made").is_dir()


def test_fresh_does_not_follow_links(home: Path) -> None:
    precious = home / "precious"
    precious.mkdir()
    folder = Path("runs/small")
    (folder / "made").mkdir(parents=True)
    (folder / "sft").symlink_to(precious)
    (folder / "manifest.json").write_text(json.dumps({"stages": [{"name": "made"}, {"name": "sft"}]}))
    with pytest.raises(UserError, match=r"sft is a link to .*precious"):
        run(fresh=True)
    assert precious.is_dir() and (folder / "made").is_dir() and (folder / "manifest.json").is_file()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stages": 3}', '{"stages": [3]}', "[" * 5000])
def test_an_invalid_manifest_is_reported(text: str, home: Path) -> None:
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/manifest.json").write_text(text)
    for fresh in (False, True):
        with pytest.raises(UserError, match=r"manifest\.json: not a valid manifest"):
            run(fresh=fresh)


@pytest.mark.parametrize("again", [False, True])
def test_a_killed_fresh_is_finished_by_the_next_run(again: bool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest was removed last: stages that were gone already counted as already done."""
    run()
    expected = weights()

    def kill(path: Any, *args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", kill)
        run(fresh=True)
    Path("runs/small/sft/model/model.safetensors").write_bytes(b"from before")
    shown = run(fresh=again)
    assert "already done" not in shown and weights() == expected
    assert {p.name for p in Path("runs/small").iterdir()} == {"manifest.json", "report.html", "made", "sft", "ppo"}


# --- stages that are done ------------------------------------------------------------------------------------------


def test_a_stage_that_is_done_without_its_folder_is_not_done(home: Path) -> None:
    run()
    expected = weights()
    shutil.rmtree("runs/small/sft")
    shown = run()
    assert "runs/small/sft is missing: the stage runs again" in shown and shown.count("already done") == 2
    assert weights() == expected and manifest()["state"] == "done"


def flip(path: str) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize(
    ("path", "harm", "wrong"),
    [
        ("runs/small/sft/model/model.safetensors", flip, "has changed since"),
        ("runs/small/sft/model/config.json", lambda path: Path(path).unlink(), "is missing;"),
    ],
)
def test_output_of_a_finished_stage_is_checked_before_it_is_used(
    path: str, harm: Any, wrong: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit in a model was accepted."""
    run_until(run, "ppo", 1, monkeypatch)
    shutil.copytree("runs/small/sft", "kept")
    harm(path)
    with pytest.raises(
        UserError, match=f"{path} {wrong} stage sft wrote it: restore it, or run that stage and all later"
    ):
        run()
    shutil.rmtree("runs/small/sft")
    shutil.copytree("kept", "runs/small/sft", copy_function=shutil.copy)  # with other modification times
    assert "resumes after step 1" in run()


def test_files_that_a_stage_does_not_read_may_change(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes files whose name begins with the name of a file that is read."""
    code = CODE.replace(
        '"data" / "chat.jsonl").write',
        '"data" / "chat.jsonl.bak").write_text("x")\n    (folder / "data" / "chat.jsonl").write',
    )
    Path("make.py").write_text(code)
    run_until(run, "sft", 1, monkeypatch)
    Path("runs/small/made/data/chat.jsonl.bak").write_text("y")
    assert "resumes after step 1" in run()


def test_a_model_card_may_be_edited(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until(run, "ppo", 1, monkeypatch)
    Path("runs/small/sft/model/README.md").write_text("# Mine")
    assert "resumes after step 1" in run()


def test_an_unchanged_file_is_not_hashed_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until(run, "ppo", 1, monkeypatch)
    read: list[str] = []
    sha256 = files.sha256

    def spy(path: Path) -> str:
        read.append(str(path))
        return sha256(path)

    monkeypatch.setattr(files, "sha256", spy)
    os.utime("runs/small/sft/model/config.json", (1, 1))
    run()
    models = [path for path in read if path.startswith("runs/small/sft/")]
    assert models == ["runs/small/sft/model/config.json"]


@pytest.mark.parametrize("path", ["base/model.safetensors", "base/tokenizer.json", "own.jsonl", "made"])
def test_inputs_that_were_replaced_between_two_runs_of_a_stage_are_refused(
    path: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model that was replaced between kill and resume was taken."""
    run_until(run, "sft", 1, monkeypatch)
    if path == "made":  # run the stage again, with other rows
        shutil.rmtree("runs/small/made")
        Path("make.py").write_text(CODE.replace("range(6)", "range(5)"))
        path = "made/data/chat.jsonl"
    else:
        Path(path).write_bytes(Path(path).read_bytes() + b" ")
    with pytest.raises(
        UserError, match=f"{path} has changed since sft started: restore it, or start over with --fresh"
    ):
        run()


def test_a_reward_that_was_edited_between_two_runs_of_a_stage_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(run, "ppo", 1, monkeypatch)
    Path("make.py").write_text(CODE.replace("-float", "float"))
    with pytest.raises(UserError, match=r"make\.py has changed since ppo started"):
        run()
    Path("make.py").write_text(CODE)
    assert "resumes after step 1" in run()


def test_inputs_may_change_before_the_first_checkpoint(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "_save_checkpoint", kill)
        run()
    Path("own.jsonl").write_text('{"prompt": "a", "completion": "c"}\n')
    run()


def test_a_run_that_was_moved_resumes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another spelling of out: was another recipe, and rows were known by the folder that they had been in."""
    run()
    expected = weights()
    shutil.rmtree("runs/small")
    run_until(run, "ppo", 1, monkeypatch)
    shutil.move("runs/small", "moved")
    Path("elsewhere").mkdir()
    for name in ("small.yaml", "make.py"):  # the reward is identified by its name in the recipe
        shutil.move(name, "elsewhere")
    shown = io.StringIO()
    with Display(Console(file=shown, width=200)) as screen:
        pipeline.run(load("elsewhere/small.yaml", [f"out={home / 'moved'}"]), display=screen)
    assert "resumes after step 1" in shown.getvalue() and weights("moved") == expected


def test_rows_that_were_moved_need_a_link_at_their_old_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of files outside of the run are part of its recipe. Those of its own stages move with it."""
    old, new = home / "old" / "own.jsonl", home / "new" / "own.jsonl"
    old.parent.mkdir()
    new.parent.mkdir()
    shutil.move("own.jsonl", old)
    out, end = f"out={home / 'there'}", "stages.ppo.trainer.max_steps=1"
    run_until(lambda: run(out, end, f"stages.sft.data.eval={old}"), "sft", 1, monkeypatch)
    shutil.move("there", "moved")
    shutil.move(old, new)
    with pytest.raises(UserError, match=r"data\.eval was '.*/old/own\.jsonl' .* moved needs a link at its old path$"):
        run("out=moved", end, f"stages.sft.data.eval={new}")
    old.symlink_to(new)
    assert "resumes after step 1" in run("out=moved", end, f"stages.sft.data.eval={old}")


def test_a_stage_that_ran_again_with_other_output_makes_later_stages_stale(home: Path) -> None:
    run()
    shutil.rmtree("runs/small/made")
    Path("make.py").write_text(CODE.replace("i + 1", "i + 2"))
    with pytest.raises(
        UserError, match=r"runs/small/sft was made from another made/data/chat\.jsonl: .* with --from sft"
    ):
        run()
    shutil.rmtree("runs/small/sft")
    with pytest.raises(UserError, match=r"runs/small/ppo was made from another sft/model/model\.safetensors"):
        run()


def test_rows_from_the_hub_have_no_local_checksums(home: Path) -> None:
    """The name without its split was empty, which is the working folder: all of it was hashed."""
    data = Data.model_validate({"train": "owner/name", "eval": "owner/name:test"})
    assert of_rows(data, ["train", "eval"], Path("runs/small"), Checksums({})) == {}


def test_a_folder_of_rows_may_hold_other_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rows").mkdir()
    shutil.move("prompts.jsonl", "rows/prompts.jsonl")
    Path("small.yaml").write_text(Path("small.yaml").read_text().replace("train: prompts.jsonl", "train: rows"))
    run_until(run, "ppo", 1, monkeypatch)
    Path("rows/.DS_Store").touch()
    Path("rows/notes.txt").touch()
    assert "resumes after step 1" in run()


def test_the_best_checkpoint_of_a_run_that_was_moved_stays_the_best(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers forgets it where its folder has another name, and says so only in its log."""
    best = "save_steps: 1, eval_strategy: steps, eval_steps: 1, load_best_model_at_end: true, learning_rate: 0.3"
    recipe = Path("small.yaml").read_text().replace("save_steps: 1, max_steps: 3", f"{best}, max_steps: 3")
    Path("small.yaml").write_text(recipe[: recipe.index("  - name: ppo")])
    run()
    expected = weights()
    state = json.loads(next(Path("runs/small/sft").glob("checkpoint-*/trainer_state.json")).read_text())
    assert state["best_global_step"] == 1  # each step makes the model worse
    shutil.rmtree("runs/small")
    run_until(run, "sft", 2, monkeypatch)
    shutil.move("runs/small", "moved")
    run("out=moved")
    assert weights("moved") == expected


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_reported_with_the_one_used_instead(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra file in a checkpoint voided it, and the stage started over without a word."""
    recipe = Path("small.yaml").read_text()
    Path("small.yaml").write_text(recipe.replace("save_steps: 1", "save_steps: 1, save_total_limit: 2"))
    run()
    expected = weights()
    shutil.rmtree("runs/small")
    run_until(run, "sft", 2, monkeypatch)
    Path("runs/small/sft/checkpoint-2/.DS_Store").touch()
    shutil.copytree("runs/small", "kept")
    assert "resumes after step 2" in run() and weights() == expected
    for damaged, said in [
        ([2], "checkpoint-2: model.safetensors has changed since .*checkpoint-1 is used instead"),
        ([2, 1], "checkpoint-1: model.safetensors has changed since it was saved: the stage starts over"),
    ]:
        shutil.rmtree("runs/small")
        shutil.copytree("kept", "runs/small")
        for step in damaged:
            flip(f"runs/small/sft/checkpoint-{step}/model.safetensors")
        shown = run()
        assert re.search(said, shown), shown
        assert ("resumes after step 1" in shown) == (damaged == [2])
        assert weights() == expected


def test_a_run_that_began_with_other_versions_reports_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until(run, "sft", 1, monkeypatch)
    said = manifest()
    said["versions"]["torch"] = "2.12.0"
    Path("runs/small/manifest.json").write_text(json.dumps(said))
    assert "this run started with torch 2.12.0 and resumes with" in run()
    said = manifest() | {"format": 0}
    Path("runs/small/manifest.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="holds a run of another version of Burnish: start over with --fresh"):
        run()
    run(fresh=True)


def test_warnings_of_the_package_are_messages_of_the_run(run_folder, tiny_tokenizer):
    """That a stream's conversations are learned turn by turn was said nowhere: a run hid what the package logs."""
    thinking = "(m['content'] if loop.last or m['role'] == 'user' else m['content'].split('>')[-1]) +"
    tiny_tokenizer.chat_template = PLAIN_CHATML.replace("m['content'] +", thinking)
    tiny_tokenizer.save_pretrained("base")
    turns = [("user", "1+1"), ("assistant", "<one>2"), ("user", "+1"), ("assistant", "<two>3")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    Path("chat.jsonl").write_text(f"{json.dumps(row)}\n" * 3 + '{"prompt": "a", "completion": ""}\n')
    Path("think.yaml").write_text(
        "{name: think, method: {name: sft}, model: base, trainer: {max_steps: 1, save_strategy: 'no', "
        "per_device_train_batch_size: 2}, data: {train: chat.jsonl, stream: true, shuffle_buffer: 4, "
        "on_bad_row: skip}}"
    )
    shown = io.StringIO()
    with Display(Console(file=shown, width=200)) as screen:
        pipeline.run(load("think.yaml"), display=screen)
    assert "[sft] the chat template rewrites earlier turns" in shown.getvalue()
    assert "4 with a sequence for each turn, because the chat template rewrites" in shown.getvalue()
    assert json.loads(Path("runs/think/manifest.json").read_text())["stages"][0]["rows"]["train"]["by_turn"] == 4
    assert shown.getvalue().count("skipped") == 1, "a stage reports skipped rows once"
    assert logging.getLogger("burnish.data.streaming").level == logging.NOTSET, "the run restores what it changes"


def test_a_function_that_removes_its_folder_is_reported(run_folder):
    Path("made.py").write_text("import shutil\ndef rows(folder, seed):\n    shutil.rmtree(folder)\n")
    Path("made.yaml").write_text("{name: made, stages: [{name: made, run: 'made.py:rows'}]}")
    with pytest.raises(UserError, match=r"stages.made.run: made.py:rows removed its folder"):
        pipeline.run(load("made.yaml"))
