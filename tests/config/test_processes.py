"""The processes of a run agree on who decides, which error is shown, and how many there are."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from rich.console import Console

from burnish.config import load, processes
from burnish.config import run as pipeline
from burnish.config.launch import _raise_if_killed, _reported
from burnish.config.parallel import Parallel
from burnish.config.processes import Processes
from burnish.errors import LostProcessError, UserError
from burnish.report.display import Display

RECIPE = """
name: small
method: {name: sft}
model: base
data: {train: rows.jsonl}
trainer: {per_device_train_batch_size: 2, save_steps: 1, max_steps: 2}
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and the handlers of signals that a failed process changes."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", processes.OUTCOME):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.01)
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


def pair() -> tuple[Processes, Processes]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Processes(0, 2, store), Processes(1, 2, store)


# --- how many there are --------------------------------------------------------------------------------------------


def test_processes_are_started_only_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Processes()
    assert one.to_start(Parallel()) == 0 and one.to_start(Parallel(processes=3)) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = Processes(0, 2)
    assert two.to_start(Parallel()) == two.to_start(Parallel(processes=2)) == 0
    with pytest.raises(UserError, match=r"parallel.processes is 3, but WORLD_SIZE=2.*remove parallel.processes"):
        two.to_start(Parallel(processes=3))


def test_what_a_launcher_did_not_do_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert Processes().to_start(Parallel()) == 0
    monkeypatch.setenv("MASTER_PORT", "29500")  # accelerate launch --cpu sets it for more than one process
    with pytest.raises(UserError, match=r"accelerate launch has started one process.*torchrun"):
        Processes().to_start(Parallel())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="WORLD_SIZE=2, but RANK, MASTER_ADDR not set: start the processes with torchrun"
    ):
        Processes.join()


def test_one_process_does_not_shard() -> None:
    Processes.join().connect(Parallel())
    with pytest.raises(UserError, match=r"parallel.shard: fsdp2 needs several processes"):
        Processes.join().connect(Parallel(shard="fsdp2"))


@pytest.mark.parametrize(
    "setting, message",
    [
        ("trainer.optim=adafactor", "optim adafactor does not work: use adamw_torch, adamw_torch_fused, sgd"),
        ("precision=fp16", "fp16 does not work: use bf16"),
        ("trainer.torch_compile=true", "torch_compile does not work: remove it"),
        ("trainer.push_to_hub=true", "push_to_hub does not work: remove it, and upload the finished folder"),
        ("adapter={quantize: nf4}", "adapter.quantize does not work: remove it, or remove parallel.shard"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_a_stage_starts(setting: str, message: str, run_folder: Path) -> None:
    Path("small.yaml").write_text(RECIPE)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    processes = Processes()
    processes.sharded = True
    with pytest.raises(UserError, match=f"stages.sft: with parallel.shard, {message}"):
        pipeline.run(load("small.yaml", [setting]), processes=processes)
    assert not Path("runs").exists()


# --- who decides ---------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_the_last_one_ends_the_others() -> None:
    first, second = pair()
    assert first.first and not second.first
    said: list[object] = []

    def follow() -> None:
        while (message := second.told()) is not None:
            said.append(message)
        second.leave()

    thread = threading.Thread(target=follow)
    thread.start()
    first.tell({"number": 1, "checkpoint": None})
    first.tell({"number": 3, "checkpoint": "runs/a/sft/checkpoint-2"})
    first.leave()  # waits for the other
    thread.join(10)
    assert said == [{"number": 1, "checkpoint": None}, {"number": 3, "checkpoint": "runs/a/sft/checkpoint-2"}]


def test_a_process_that_waits_notices_that_another_failed(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair()
    with pytest.raises(UserError), first.one_message():
        raise UserError("no such file")
    with pytest.raises(LostProcessError, match="another process has failed"):
        second.told()


def test_a_folder_that_is_not_shared_is_an_error(run_folder: Path) -> None:
    Path("small.yaml").write_text(RECIPE)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    first, second = pair()
    first.tell({"number": 1, "last": {}, "checkpoint": None, "lock": "of another machine"})
    with pytest.raises(UserError, match=r"runs/small is not the folder of rank 0.*name a folder on it with out=FOLDER"):
        pipeline.run(load("small.yaml"), processes=second)
    assert not Path("runs").exists()
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/RUN.lock").write_text("left by a killed run")
    first.tell({"number": 1, "last": {}, "checkpoint": None, "lock": "of another machine"})
    with pytest.raises(UserError, match="not the folder of rank 0"):
        pipeline.run(load("small.yaml"), processes=second)


def test_another_number_of_processes_is_reported_and_may_resume(run_folder: Path) -> None:
    Path("small.yaml").write_text(RECIPE)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    pipeline.run(load("small.yaml"))
    manifest = Path("runs/small/manifest.json")
    manifest.write_text(
        manifest.read_text()
        .replace('"state": "done"', '"state": "running"')
        .replace('"processes": 1,\n   "shard": "none"', '"processes": 4,\n   "shard": "fsdp2"')
        .replace('"timeout": 1800.0', '"timeout": 60.0')
    )
    shown = io.StringIO()
    with Display(Console(file=shown, width=300)) as screen:
        pipeline.run(load("small.yaml"), display=screen)
    assert "started with processes: 4, shard: fsdp2 and resumes with processes: 1, shard: none" in shown.getvalue()
    assert manifest.read_text().count('"shard": "none"') == 2  # of the recipe and of the stage


# --- which error is shown ------------------------------------------------------------------------------------------


def test_only_the_first_that_fails_shows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    for process, message in zip(pair(), ("the cause", "a consequence"), strict=True):
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(UserError), process.one_message():
            raise UserError(message)
        print(message, file=sys.stderr)  # as the command line does
    assert terminal.getvalue() == "the cause\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # a launcher that ends the others lets it finish


def test_a_process_of_burnish_leaves_its_message_for_the_one_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(processes.OUTCOME, str(tmp_path))
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    with pytest.raises(UserError), pair()[1].one_message():
        raise UserError("the cause")
    print("error: the cause", file=sys.stderr)
    processes.end_now(2)
    sys.stderr.close()
    monkeypatch.undo()
    assert _reported(tmp_path, 1) == 2
    assert capsys.readouterr().err == "error: the cause\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[gloo/transport/tcp/pair.cc:537] Connection closed by peer", "lost its connection to another process"),
        ("[gloo/transport/tcp/buffer.cc:72] Timed out waiting 600000ms for recv", r"the time limit, parallel\.timeout"),
    ],
)
def test_an_error_of_a_collective_says_what_it_means(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(LostProcessError, match=expected), pair()[1].one_message():
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="of another kind"), pair()[1].one_message():
        raise RuntimeError("of another kind")


def test_a_killed_process_is_named() -> None:
    died = {1: SimpleNamespace(exitcode=-9, pid=77), 0: SimpleNamespace(exitcode=1, pid=76)}
    with pytest.raises(LostProcessError, match=r"^rank 1 \(process 77\) was killed by SIGKILL, and the other"):
        _raise_if_killed(died)
    _raise_if_killed({0: died[0]})
