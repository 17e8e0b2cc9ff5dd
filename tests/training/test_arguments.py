"""Arguments that the trainer cannot use are errors, and those that it ignores are named."""

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from transformers import TrainingArguments

from burnish import SFT, Trainer
from burnish.errors import UserError
from burnish.training.arguments import check_arguments, warn_ignored
from tiny_runs import PROMPTS, ROWS, arguments, grpo, ppo


def test_a_missing_tokenizer_or_evaluation_set_is_an_error(make, tiny_llama, tmp_path):
    with pytest.raises(UserError, match="needs processing_class"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path), method=SFT(), train_dataset=ROWS)
    with pytest.raises(UserError, match="nothing to evaluate on"):
        make().evaluate()


def test_packing_is_refused_for_a_model_that_mixes_the_sequences_of_a_row(make):
    config = hf.Lfm2Config(
        vocab_size=105, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, full_attn_idxs=[1],
    )  # fmt: skip
    model = hf.Lfm2ForCausalLM(config)
    with pytest.raises(UserError, match="packed: Lfm2ForCausalLM does not keep the sequences of a row apart"):
        make(SFT(), model, ROWS, packed=True)
    make(SFT(), model, ROWS)


@pytest.mark.parametrize("method", [ppo, grpo])
def test_noise_is_refused_if_completions_are_sampled(method, make):
    with pytest.raises(UserError, match=r"neftune_noise_alpha=5: .* completions were sampled\. Remove this setting"):
        make(method(), rows=PROMPTS, neftune_noise_alpha=5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("label_smoothing_factor", 0.1), ("per_device_eval_batch_size", 2), ("dataloader_num_workers", 2)],
)
def test_an_ignored_field_causes_a_warning(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{field}={value} is ignored"):
        warn_ignored(TrainingArguments(str(tmp_path), **{field: value}))


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_other_ways_to_shard_are_refused_with_advice(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    given = arguments(tmp_path)
    check_arguments(given, "error")
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(UserError, match=rf"{name}: .*parallel\.shard: fsdp2"):
        check_arguments(given, "error")
    monkeypatch.undo()
    setattr(given, name, "zero3.json")
    with pytest.raises(UserError, match=rf"{name}: .*sharded=True"):
        check_arguments(given, "error")
