"""How the processes of a run in a Ray cluster are reported. ``tests/test_ray_jobs.py`` starts some."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish import config, ray_cluster
from burnish.config.parallel import Parallel
from burnish.config.ray_launch import Failure, _Console, _environment, _reported, launch
from burnish.errors import LostProcessError, UserError

FIRST = Failure(1, 77, "b", 2, "error: no such file\n")
LATER = Failure(0, 76, "a", 1, "")
KILLED = Failure(2, 78, "c", -9, "")


def test_the_message_of_the_first_process_that_failed_is_shown_with_its_code(capsys: pytest.CaptureFixture) -> None:
    assert _reported([LATER, FIRST], RuntimeError("rank 0 ended")) == 2
    assert capsys.readouterr().err == "error: no such file\n"


def test_a_killed_process_is_named_before_what_it_caused() -> None:
    with pytest.raises(LostProcessError, match=r"^rank 2 \(process 78 on c\) was killed by signal 9, and the other "):
        _reported([LATER, FIRST, KILLED], RuntimeError("rank 0 ended"))


def test_without_a_message_ray_says_what_happened() -> None:
    with pytest.raises(LostProcessError, match=r"^Ray Train ended the processes: a node died \(logs: "):
        _reported([LATER], RuntimeError("a node died"))


def test_the_console_collects_what_is_written_until_it_is_read() -> None:
    console = _Console()
    assert not console.write("a\n")
    console.stop()
    assert console.write("b\n")
    assert (console.read(), console.read()) == ("a\nb\n", "")
    console.fail(*KILLED)
    assert [Failure(*failure) for failure in console.failures()] == [KILLED]


def test_tokens_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    passed = _environment()
    assert passed["OMP_NUM_THREADS"] == "3"
    assert "secret" not in passed.values() and "PYTHONPATH" in passed


def test_a_launcher_needs_several_processes(tmp_path: Path) -> None:
    assert Parallel(processes=2, launcher="ray").launcher == "ray"
    (tmp_path / "small.yaml").write_text(
        "parallel: {launcher: ray}\nmethod: {name: sft}\nmodel: a/b\ndata: {train: c/d}"
    )
    with pytest.raises(UserError, match="launcher: ray starts several processes: set processes, or remove launcher"):
        config.load(tmp_path / "small.yaml")


def test_a_missing_ray_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^Ray is not installed: run pip install"):
        launch(2, ["run", "tiny"])
