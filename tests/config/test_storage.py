"""Storage that fails: one message names the file, nothing complete is lost, and the run can resume later."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from burnish import files
from burnish.cli import app
from burnish.config import load
from burnish.config import run as pipeline
from burnish.config.manifest import open_manifest, read_manifest
from burnish.errors import UserError
from burnish.report import page
from burnish.report.display import Display
from burnish.report.metrics import Recorder, read_lines
from burnish.report.page import write as write_report
from tiny_runs import run_until

RECIPE = """
name: small
stages:
  - name: sft
    method: {name: sft}
    model: base
    data: {train: chat.jsonl, eval: chat.jsonl}
    trainer: {per_device_train_batch_size: 2, save_steps: 1, max_steps: 3}
  - name: again
    method: {name: sft}
    model: {stage: sft}
    data: {train: chat.jsonl}
    trainer: {per_device_train_batch_size: 2, max_steps: 1}
"""


@pytest.fixture
def home(run_folder: Path) -> Path:
    Path("small.yaml").write_text(RECIPE)
    rows = [{"prompt": str(i), "completion": str(i + 1)} for i in range(6)]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_folder


def run(*overrides: str) -> str:
    shown = io.StringIO()
    with Display(Console(file=shown, width=200)) as screen:
        pipeline.run(load("small.yaml", overrides), display=screen)
    return shown.getvalue()


def weights(folder: str = "runs/small") -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).glob("*/model/*.safetensors")}


def error(*arguments: str) -> str:
    """Run a command that must fail because of the user's mistake, and return its only message."""
    result = CliRunner().invoke(app, list(arguments), terminal_width=200)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr.removeprefix("error: ").rstrip("\n")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file can grow beyond a size: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- full disks ----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_the_run_resumes_with_the_same_bytes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    expected = weights()
    model = Path("runs/small/sft/model/model.safetensors").stat().st_size
    manifest = Path("runs/small/manifest.json").stat().st_size
    optimizer = 2 * model  # of AdamW
    for size, wrong in [(manifest // 4, "manifest.json"), (model - 1, "checkpoint-1"), (optimizer - 1, "checkpoint-1")]:
        shutil.rmtree("runs")
        with file_size_limit(size), pytest.raises(UserError, match="cannot be written: the disk is full") as caught:
            run()
        assert wrong in str(caught.value) and "a run resumes from its last complete checkpoint" in str(caught.value)
        assert [path for path in Path("runs").rglob("*") if path.name.endswith((".partial", ".old"))] == []
        run()
        assert weights() == expected
    shutil.rmtree("runs")
    run_until(run, "sft", 1, monkeypatch)
    with file_size_limit(model - 1), pytest.raises(UserError, match=r"checkpoint-2: .* were needed, .* were written"):
        run()
    assert "resumes after step 1" in run()
    assert weights() == expected


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "report.html", "RUN.lock", "manifest.json"])
@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission denied")],
)
def test_a_file_that_cannot_be_opened_is_named(
    name: str, number: int, reason: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if name in self.name and mode != "rb" and mode != "r":
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, mode, *args, **kwargs)

    monkeypatch.setattr(page, "write", write_report)
    monkeypatch.setattr(Path, "open", refuse)
    message = error("run", "small.yaml", "stages.sft.trainer.max_steps=1")
    assert f"{name}: cannot be written: " in message and reason in message
    monkeypatch.undo()


@pytest.mark.parametrize("cache", ["file", "file/inside", "dangling", "/proc/nowhere"])
def test_a_cache_folder_that_cannot_be_written_stops_nothing(
    cache: str, home: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    Path("file").write_text("")
    Path("dangling").symlink_to("nowhere")
    monkeypatch.setenv("BURNISH_CACHE", cache)
    run("stages.sft.trainer.max_steps=1")
    assert any("encoded rows are not kept for the next run" in str(warning.message) for warning in recwarn)


def test_a_text_that_cannot_be_replaced_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    files.write_text(path, "old")
    with file_size_limit(1000), pytest.raises(UserError, match=r"manifest\.json: .*\(2\.0 kB were needed, .* free\)"):
        files.write_text(path, "x" * 2000)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# --- damaged manifests and logs ------------------------------------------------------------------------------------

FOREIGN = {
    "empty": "",
    "cut": '{"format": 1, "stages": [{"na',
    "of another program": '{"manifest_version": 3, "name": "x"}',
    "a list": "[]",
    "not text": "\udcff",
    "without a recipe": '{"format": 1, "stages": [{"name": "sft"}]}',
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_damaged_manifest_is_explained(text: str, home: Path) -> None:
    folder = Path("runs/small")
    (folder / "sft").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for arguments in (["report", str(folder)], ["run", "small.yaml"]):
        assert "runs/small/manifest.json: not a valid manifest" in error(*arguments)


def test_every_key_of_a_manifest_is_checked_before_it_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any key may be missing, or have a value of another type."""
    draw, drawn = page.panels, dict[str, Any]()

    def draw_once(stage: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Curves take long, and show nothing of the manifest but the name of the stage."""
        if stage not in drawn:
            drawn[stage] = draw(stage, lines)
        return drawn[stage]

    monkeypatch.setattr(page, "panels", draw_once)
    run("stages.sft.trainer.max_steps=1")
    recipe = load("small.yaml", ["stages.sft.trainer.max_steps=1"])
    path = Path("runs/small/manifest.json")
    whole = json.loads(path.read_text())
    checks = [lambda: read_manifest(path) and write_report(path.parent), lambda: open_manifest(recipe)]
    refused = 0
    blocks: list[dict[str, Any]] = [whole, whole["stages"][0]]
    for block in blocks:
        for key in list(block):
            kept = block.pop(key)
            for wrong in (None, 3, {"y": [1]}):
                if wrong is not None:
                    block[key] = wrong
                path.write_text(json.dumps(whole))
                for check in checks:
                    try:
                        check()
                    except UserError as error:
                        refused += 1
                        assert "runs/small" in str(error)
            block[key] = kept
    assert refused > 50


def test_what_is_read_of_a_manifest_is_there(home: Path) -> None:
    run("stages.sft.trainer.max_steps=1")
    path = Path("runs/small/manifest.json")
    whole = json.loads(path.read_text())
    for key in ("recipe", "versions", "checksums"):
        path.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
        assert f"manifest.json: not a valid manifest: {key}: Field required" in error("run", "small.yaml")
    del whole["stages"][0]["files"]
    path.write_text(json.dumps(whole))
    assert "a stage that is done lists its files" in error("run", "small.yaml")


@pytest.mark.parametrize("line", ["{", '{"step": 1, "loss": NaN}}', "3", '{"step": "x"}', "\0\0", "[" * 100_000])
def test_a_damaged_line_of_a_log_is_named(line: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("run")
    recorder = Recorder(folder)
    recorder.metrics(1, {"loss": 1.0})
    recorder.samples([{"step": 1, "prompt": "a"}])
    offsets = recorder.offsets()
    for name in offsets:
        path = folder / name
        text = path.read_text()
        path.write_text(line + "\n" + text)
        for read in (read_lines, lambda path: recorder.truncate(offsets)):
            with pytest.raises(UserError, match=f"{path}:1: this line is damaged"):
                read(path)
        path.write_text(text + line)  # a line that was not finished, which resuming removes
        assert len(read_lines(path)) == 1
        recorder.truncate(offsets)
        assert path.read_text() == text


def test_a_damaged_log_is_reported_by_its_commands(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until(run, "sft", 1, monkeypatch)
    monkeypatch.setattr(page, "write", write_report)
    path = Path("runs/small/sft/metrics.jsonl")
    path.write_text("{\n" + path.read_text())
    for arguments in (["report", "runs/small"], ["run", "small.yaml"]):
        assert f"{path}:1: this line is damaged: expected a JSON object, got '{{'" in error(*arguments)


# --- moved runs ----------------------------------------------------------------------------------------------------


def test_a_moved_run_resumes_where_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    expected = weights()
    shutil.rmtree("runs")
    run_until(run, "sft", 2, monkeypatch)
    shutil.move("runs/small", home / "elsewhere")
    hashed: list[str] = []
    sha256 = files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: hashed.append(str(path)) or sha256(path))
    assert "resumes after step 2" in run(f"out={home / 'elsewhere'}")
    assert weights("elsewhere") == expected
    shutil.move("elsewhere", "third")
    hashed.clear()
    assert run("out=third").count("already done") == 2
    assert hashed == []
    manifest = json.loads(Path("third/manifest.json").read_text())
    assert manifest["recipe"]["out"] == "third"
    assert all(path.startswith(("third/", "base/", "chat.jsonl")) for path in manifest["checksums"])
    with pytest.raises(UserError, match=r"name was 'small' and is 'other'; .* only out= may change"):
        run("out=third", "name=other")
