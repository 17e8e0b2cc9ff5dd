"""Fixtures for all tests, such as a character-level tokenizer and small random models."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from logging import ERROR
from pathlib import Path
from typing import Any

# torch reads this when it is imported. Idle threads that spin would slow down everything else on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import builders
from builders import character_tokenizer, llama

# A busy machine takes longer, which is no failure.
settings.register_profile("burnish", deadline=None)
settings.load_profile("burnish")

MakeLlama = Callable[..., LlamaForCausalLM]
MakeTrainer = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One thread, and a new cache, so that no test reads what another run wrote."""
    torch.set_num_threads(1)
    os.environ["BURNISH_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> None:
    """Exclude what has been imported from garbage collections: transformers runs one, 0.2 s long, in each training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _transformers_verbosity() -> Iterator[None]:
    """A run reduces the verbosity of transformers for the whole process."""
    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, with different pad, BOS and EOS tokens, and ChatML with generation marks."""
    return character_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama() -> MakeLlama:
    """Creates Llamas with random weights for ``tiny_tokenizer``: ``tiny_llama(seed, dtype, **config)``."""
    return llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: MakeLlama) -> Path:
    """A model folder that tests must not change: ``tiny_llama(0)`` with ``tiny_tokenizer``."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run_folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, with a model in ``base`` and its own cache. Runs write an empty report."""
    from burnish.config import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run.report, "write", lambda folder: (folder / "report.html").touch())
    shutil.copytree(tiny_folder, "base")
    return tmp_path


@pytest.fixture
def make_trainer(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeTrainer:
    """Creates trainers that log every step: ``make_trainer(method, model, rows, batch=4, lr=1e-3, **arguments)``.

    ``own`` holds what is not of ``TrainingArguments``: truncation, token_budget, recorder, callbacks, ...
    """
    from transformers import PrinterCallback, TrainingArguments

    from burnish import Trainer

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))

    def make(
        method: Any,
        model: Any,
        rows: list[Any],
        *,
        batch: int = 4,
        lr: float = 1e-3,
        own: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Trainer:
        settings = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "per_device_train_batch_size": batch,
            "learning_rate": lr,
            "lr_scheduler_type": "constant",
            "num_train_epochs": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        own = {"processing_class": tiny_tokenizer} | (own or {})
        trainer = Trainer(
            model=model, args=TrainingArguments(**(settings | arguments)), method=method, train_dataset=rows, **own
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make


@pytest.fixture(scope="session")
def weights() -> Callable[[Any], bytes]:
    """Returns the bytes of all weights of a module, for exact comparisons."""

    def of(module: Any) -> bytes:
        return b"".join(
            x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes() for x in module.state_dict().values()
        )

    return of


@pytest.fixture(scope="session")
def artifacts() -> Callable[..., dict[str, dict[str, list[float]]]]:
    """Logits of the folders of stages (model, adapter, base, checkpoint-N), by transformers and peft in a new process.

    ``artifacts(run / "sft")["sft"]["model"]``. Loading by Burnish has to give the same.
    """

    def logits(*stages: Path) -> dict[str, dict[str, list[float]]]:
        from burnish.models import loading

        kinds = ("config.json", "adapter_config.json")
        folders = [path for stage in stages for path in sorted(stage.iterdir())]
        folders = [path for path in folders if any((path / name).is_file() for name in kinds)]
        command = [sys.executable, str(Path(__file__).parent / "artifacts_job.py"), *map(str, folders)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # another number of threads changes the order of sums, and so the rounding
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        by_stage: dict[str, dict[str, list[float]]] = {stage.name: {} for stage in stages}
        for path, numbers in zip(folders, json.loads(done.stdout.splitlines()[-1]).values(), strict=True):
            load = loading.load_reward_model if len(numbers) == 1 else loading.load_policy
            model: Any = load(str(path)).eval()
            with torch.no_grad():
                own = model(input_ids=torch.tensor([[1, 5, 9, 14, 6]])).logits.flatten().tolist()
            assert own == pytest.approx(numbers, abs=1e-6), path
            by_stage[path.parent.name][path.name] = numbers
        return by_stage

    return logits


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """``byte_tokenizer(template, merges)``: one token a byte, which ChatML is the template of unless said otherwise."""
    return builders.byte_tokenizer


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray, with a cluster of four CPUs. It starts in some 16 seconds."""
    ray = pytest.importorskip("ray")
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": ERROR}
    ray.init(address="local", num_cpus=4, **quiet)
    yield ray
    ray.shutdown()
