"""The key ``generator`` of a stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish import config
from burnish.config import manifest
from burnish.errors import UserError
from burnish.generate.continuous import ContinuousGenerator
from burnish.generate.local import LocalGenerator
from burnish.generate.settings import GeneratorSettings, factory

RECIPE = """
name: chosen
stages:
  - name: ppo
    method: {{name: ppo}}
    model: {folder}
    data: {{train: {folder}/prompts.jsonl}}
    reward: [{{function: "rewards.py:brevity"}}]
    {line}
"""


def load(folder: Path, line: str = "") -> Any:
    (folder / "config.json").write_text("{}")
    (folder / "rewards.py").write_text("def brevity(answers): return [0.0 for _ in answers]")
    (folder / "prompts.jsonl").write_text('{"prompt": "2+2="}')
    (folder / "recipe.yaml").write_text(RECIPE.format(line=line, folder=folder))
    return config.load(str(folder / "recipe.yaml")).stages[0].generator


def test_a_stage_chooses_its_generator(tmp_path: Path) -> None:
    assert load(tmp_path) == GeneratorSettings(name="local")
    assert load(tmp_path, "generator: {name: process, slots: 8}") == GeneratorSettings(name="process", slots=8)
    chosen = load(tmp_path, "generator: {name: continuous, page_size: 16}")
    assert chosen == GeneratorSettings(name="continuous", page_size=16)
    model = SimpleNamespace()
    made: Any = factory(chosen)(model, None)
    assert type(made) is ContinuousGenerator and (made.slots, made.page_size) == (256, 16)
    assert type(factory(GeneratorSettings())(model, None)) is LocalGenerator


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "generator: {name: proces}",
            r"generator.name: expected 'local', 'continuous', 'process', 'ray' or 'vllm', .*did you mean",
        ),
        ("generator: local", "generator: expected a block"),
        ("generator: {name: local, page_size: 16}", "page_size applies only to {name: continuous}"),
        ("generator: {name: local, url: 'http://a:8000', wait: 3}", "url applies only to {name: vllm}"),
        ("generator: {name: ray, url: 'http://a:8000'}", "url applies only to {name: vllm}"),
        ("generator: {name: local, timeout: 3}", "timeout applies only to {name: ray} and {name: vllm}"),
        ("generator: {name: ray, workers: 0}", "generator.workers: "),
        ("generator: {name: ray, cpus: 0}", "generator.cpus: "),
        ("generator: {name: vllm}", "vllm needs url:, the address of a vLLM server"),
        ("generator: {name: vllm, url: 'http://me:word@a:8000'}", "expected an address without a password"),
        ("generator: {name: vllm, url: 'http://a:8000/v1'}", "expected an address without /v1"),
        ("generator: {name: vllm, url: 'http://a:8000', key: 'sk-123'}", "generator.key: "),
    ],
)
def test_invalid_generator_settings_are_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, line)


def test_a_run_may_resume_with_a_server_elsewhere_but_not_with_another_generator() -> None:
    for key in ("url", "key", "timeout", "wait", "folder", "address"):
        assert key in GeneratorSettings.model_fields and manifest.MAY_CHANGE.match(f"stages.3.generator.{key} was 1")
    for key in ("name", "slots", "workers", "cpus", "gpus"):
        assert not manifest.MAY_CHANGE.match(f"stages.3.generator.{key} was 1")


def test_the_settings_import_no_torch() -> None:
    code = "import sys, burnish.generate.settings, burnish.generate.protocol; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_generator_is_refused_for_a_method_that_does_not_sample(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}')
    (tmp_path / "recipe.yaml").write_text(
        f"name: chosen\nstages: [{{name: sft, method: {{name: sft}}, model: {tmp_path}, "
        f"data: {{train: {tmp_path}/chat.jsonl}}, generator: {{name: local}}}}]"
    )
    with pytest.raises(UserError, match="method 'sft' does not sample: remove this key"):
        config.load(str(tmp_path / "recipe.yaml"))
