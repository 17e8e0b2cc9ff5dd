"""``burnish run --from STAGE``: what runs again, what stays, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from burnish import cli
from burnish.config import load, repeat
from burnish.config import run as pipeline
from burnish.errors import UserError
from tiny_runs import Killed

RECIPE = """
name: test
threads: 1
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 16, pairs: 2, prompts: 2, held_out: 8}
  - name: loop
    rounds: 3
    keep: all
    stages:
      - name: more
        run: burnish.recipes.tiny:prepare
        with: {rows: 8, pairs: 2, prompts: 2, held_out: 8}
      - name: tune
        method: {name: sft}
        model: {stage: tune, initial: {stage: prepare}}
        data:
          train: {stage: more, file: sft.jsonl, from_rounds: all}
          eval: {stage: prepare, file: sft-eval.jsonl}
        trainer: {per_device_train_batch_size: 8, max_steps: 1}
  - name: last
    method: {name: sft}
    model: {stage: tune}
    data: {train: {stage: prepare, file: sft.jsonl}}
    trainer: {per_device_train_batch_size: 8, max_steps: 1}
"""
ALL = [
    "prepare", "loop/1/more", "loop/1/tune", "loop/2/more", "loop/2/tune", "loop/3/more", "loop/3/tune", "last"
]  # fmt: skip
THIN = "stages.loop.keep=last"
EARLY = "stages.loop.until={stage: tune, metric: loss, below: 100}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "test.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    return pipeline.run(load(home / "test.yaml", [f"out={home / 'whole'}"]))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def run(home: Path, folder: Path, *overrides: str, start: str | None = None) -> list[str]:
    """Run the recipe, and return the stages that started."""
    started: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        verify = pipeline.verify
        patch.setattr(pipeline, "verify", lambda r, stage, *rest: (started.append(stage.name), verify(r, stage, *rest)))
        pipeline.run(load(home / "test.yaml", [f"out={folder}", *overrides]), start=start)
    return started


def stages(folder: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((folder / "manifest.json").read_text())["stages"]}


def contents(folder: Path) -> dict[str, Any]:
    """The states of all stages, the bytes of all weights, and the names of all files."""
    found: dict[str, Any] = {name: (entry["state"], entry.get("thinned")) for name, entry in stages(folder).items()}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.suffix == ".safetensors" else path.is_file()
    return found


@pytest.mark.parametrize("start", ["loop/2/tune", "last"])
def test_a_stage_and_all_later_ones_run_again_and_make_the_same(
    home: Path, whole: Path, copy: Path, start: str
) -> None:
    stray = copy / start / "stray.txt"
    stray.write_text("made by hand")
    assert run(home, copy, start=start) == ALL[ALL.index(start) :]
    assert not stray.exists()
    assert contents(copy) == contents(whole)


def test_a_stage_that_was_forgotten_is_removed_before_anything_runs_even_after_a_kill(
    home: Path, whole: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def killed(path: Path, *rest: Any, **more: Any) -> None:
        if path == copy / "loop/3/more":
            rmtree(path / "data")
            raise Killed
        rmtree(path, *rest, **more)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", killed)
        run(home, copy, start="loop/3/more")
    assert (copy / "loop/3/tune/model").is_dir()  # it was not yet removed
    assert {name for name, entry in stages(copy).items() if entry["state"] == "pending"} == set(ALL[5:])
    assert run(home, copy) == ALL[5:]
    for name in ("loop/3/tune", "last"):
        weights = "model/model.safetensors"
        assert (copy / name / weights).read_bytes() == (whole / name / weights).read_bytes()


def test_a_run_that_was_stopped_after_the_removal_continues(
    home: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(pipeline, "write_manifest", lambda *_: (_ for _ in ()).throw(Killed()))
        run(home, copy, start="loop/3/more")
    assert not any((copy / name).exists() for name in ALL[5:])
    assert run(home, copy) == ALL[5:]


def test_a_model_that_was_removed_is_named_with_the_stage_to_repeat_from(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "thin"
    run(home, folder, THIN)
    before = contents(folder)
    says = r"loop/3/tune reads the model of loop/2/tune, .* \(keep: last\): repeat the run with --from loop/1/tune$"
    for start in ("loop/3/tune", "loop/3/more"):
        with pytest.raises(UserError, match=says):
            run(home, folder, THIN, start=start)
    assert contents(folder) == before
    shutil.rmtree(folder / "loop/3/tune")
    with pytest.raises(UserError, match=says):
        run(home, folder, THIN)
    assert run(home, folder, THIN, start="loop/1/tune") == ALL[2:]


def test_a_stage_after_a_loop_that_ended_early_reads_the_same_round_again(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "early"
    first = ["prepare", "loop/1/more", "loop/1/tune", "last"]
    assert run(home, folder, EARLY, THIN) == first
    before = contents(folder)
    assert run(home, folder, EARLY, THIN, start="last") == ["last"]
    assert contents(folder) == before
    with pytest.raises(UserError, match="--from loop/2/tune: loop ended after round 1, so this stage was not run"):
        run(home, folder, EARLY, THIN, start="loop/2/tune")
    assert run(home, folder, EARLY, THIN, start="loop/1/tune") == first[2:]
    assert contents(folder) == before


def test_a_folder_that_is_a_link_is_refused(home: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "loop/2/tune").rename(tmp_path / "elsewhere")
    (copy / "loop/2/tune").symlink_to(tmp_path / "elsewhere")
    before = (copy / "manifest.json").read_bytes()
    with pytest.raises(UserError, match=r"loop/2/tune is a link to .*elsewhere, and only files inside"):
        run(home, copy, start="loop/1/more")
    assert (copy / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--from", "lats"], "--from lats: there is no such stage (did you mean 'last'?); stages are prepare, loop/1/"),
        (["--from", "loop/9/tune"], "--from loop/9/tune: there is no such stage"),
        (["--from", "tune"], "--from tune: a stage of a loop is named with its round, such as --from loop/1/tune"),
        (["--from", "loop/2"], "--from loop/2: a stage of a loop is named with its round, such as --from loop/2/more"),
        (["--from", "last", "--fresh"], "--from keeps the earlier stages, and --fresh removes them"),
    ],
)
def test_a_wrong_start_is_refused_before_anything_is_removed(
    home: Path, whole: Path, options: list[str], says: str
) -> None:
    before = (whole / "manifest.json").read_bytes()
    result = CliRunner().invoke(cli.app, ["run", str(home / "test.yaml"), f"out={whole}", *options])
    assert result.exit_code == 2 and says in result.stderr
    assert (whole / "manifest.json").read_bytes() == before


def test_the_command_line_repeats_a_stage(home: Path, copy: Path) -> None:
    result = CliRunner().invoke(cli.app, ["run", str(home / "test.yaml"), f"out={copy}", "--from", "last"])
    assert result.exit_code == 0, result.output
    assert result.output.count("already done") == 7


def test_names_are_listed_in_full_only_if_they_are_few() -> None:
    assert repeat._listed([str(i) for i in range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, ..., 17, 18, 19"
