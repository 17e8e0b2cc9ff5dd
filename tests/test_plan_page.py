"""docs/plan.md: its tables are what the code computes, from a config with the sizes of Qwen2-7B."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Qwen2Config
from typer.testing import CliRunner

from builders import character_tokenizer
from burnish import cli
from burnish.plan.stage import CPU_RESERVED

PAGE = (Path(__file__).parent.parent / "docs" / "plan.md").read_text("utf-8")
MODELS = {"Qwen/Qwen2-7B-Instruct": "Qwen2ForCausalLM", "my-name/my-reward-7b": "Qwen2ForSequenceClassification"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, architecture in MODELS.items():
        config = Qwen2Config(
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            max_position_embeddings=32768,
            tie_word_embeddings=False,
            architectures=[architecture],
        )
        config.save_pretrained(name)
        character_tokenizer().save_pretrained(name)
    (recipe,) = re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL)
    Path("ppo-7b.yaml").write_text(recipe)
    Path("my_prompts.py").write_text("def make(folder, seed): ...\n")
    return tmp_path


def planned(*overrides: str) -> list[str]:
    result = CliRunner().invoke(cli.app, ["plan", "ppo-7b.yaml", *overrides, "--gpus", "8", "--memory", "80"])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_table_of_7b_adds_up_and_is_that_of_the_page(folder: Path) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:2] == "| "]
    header, _, *parts, totals = rows
    assert header == ["each process", "training", "sampling"] and totals[0] == "total"
    shown = [re.split(r" {2,}", line) for line in planned()]
    assert [[cell for cell in row if cell] for row in rows if row[0] != "---"] == [
        [cell for cell in row if cell] for row in shown if row[0] in {row[0] for row in rows}
    ]
    for column in (1, 2):
        sizes = [float(row[column].removesuffix(" GiB") or 0) for row in parts]
        assert sum(sizes) == pytest.approx(float(totals[column].removesuffix(" GiB")), abs=0.05)
        assert float(totals[column].removesuffix(" GiB")) < 80


@pytest.mark.slow
def test_the_changes_are_those_of_the_page(folder: Path) -> None:
    (block,) = re.findall(r"```text\n(change, .*?)```", PAGE, re.DOTALL)
    own = ("stages.ppo.precision=float32", "parallel.shard=none", "stages.ppo.trainer.activation_checkpointing=false")
    lines = planned(*own)
    start = next(i for i, line in enumerate(lines) if line.startswith("change, "))
    assert [line.split() for line in lines[start:]] == [line.split() for line in block.splitlines()]


def test_what_is_reserved_on_a_cpu() -> None:
    assert f"on a CPU, {CPU_RESERVED / 2**30:.2f} GiB" in PAGE
