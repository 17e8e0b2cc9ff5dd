"""Every model's own limit applies to training, held-out rows, inspection and generation, and is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, RobertaConfig
from typer.testing import CliRunner

from builders import SIZES
from burnish import SFT, RewardModel
from burnish.cli import app
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request
from burnish.generate.sampling import Sampling
from burnish.models.limits import limits_of
from burnish.render.truncate import Truncation
from burnish.rewards.model import ModelReward
from burnish.types import Messages, Trajectory

LONG = [{"prompt": "a", "chosen": "b" * 90, "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]


def encoder(positions: int = 64, vocabulary: int = 105) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"vocab_size": vocabulary, "max_position_embeddings": positions, "num_labels": 1}
    return BertForSequenceClassification(BertConfig(**sizes, pad_token_id=0))


def test_rows_beyond_the_positions_of_an_encoder_are_refused_before_training(make_trainer: Any) -> None:
    """They crashed in the middle of a run: the expanded size of the tensor must match the existing size."""
    trainer = make_trainer(RewardModel(), encoder(), LONG)
    assert trainer.truncation.max_length == 64
    instead = r"set too_long: drop or truncate_left, or use a model that reads more than 64 tokens$"
    with pytest.raises(UserError, match=rf"row 1: .* tokens, max_length 64: {instead}"):
        trainer.train()
    trainer = make_trainer(RewardModel(), encoder(), LONG, own={"truncation": Truncation(too_long="drop")})
    trainer.train()
    assert [changed.reason.partition(":")[0] for changed in trainer.train_examples.changed] == ["drop"]


def test_a_maximum_above_the_limit_is_refused_with_the_row(make_trainer: Any) -> None:
    trainer = make_trainer(RewardModel(), encoder(), LONG, own={"truncation": Truncation(max_length=512)})
    with pytest.raises(UserError, match=r"tokens, but the model reads at most 64: set data\.max_length: 64"):
        trainer.train()
    trainer = make_trainer(RewardModel(), encoder(), LONG[1:], own={"truncation": Truncation(max_length=512)})
    trainer.train()


def test_a_larger_max_length_is_advised_only_within_the_limit_of_the_model(make_trainer: Any, tiny_llama: Any) -> None:
    """Rows beyond the context window got the advice to raise max_length, which cannot be followed."""
    rows = [{"prompt": "a" * 50, "completion": "b"}]
    for positions, advice in ((80, "raise max_length"), (48, "use a model that reads more than 48 tokens")):
        for too_long in ("error", "truncate_right"):
            own = {"truncation": Truncation(max_length=24, too_long=too_long)}
            trainer = make_trainer(SFT(), tiny_llama(max_position_embeddings=positions), rows, own=own)
            with pytest.raises(UserError, match=rf"row 1: \d+ tokens, max_length 24: .*too_long: .*, or {advice}$"):
                trainer.train()


def test_token_ids_without_an_embedding_are_refused_with_the_row(make_trainer: Any, tiny_llama: Any) -> None:
    """They crashed with an index error, or on a GPU with an assertion of the device."""
    rows = [{"prompt": "a", "completion": "b"}]
    with pytest.raises(UserError, match=r"row 1: the token id .*, but the model has embeddings only for the 20"):
        make_trainer(SFT(), tiny_llama(vocab_size=20), rows).train()
    generator = LocalGenerator(tiny_llama(vocab_size=20))
    with pytest.raises(UserError, match="request 0: the token id 20, but the model has embeddings only for the 20"):
        generator.submit([Request((1, 20), 0, Sampling(), frozenset())], 0)


EVERY_WAY = {
    "generate": (["generate", "model", "ab"], "row 1"),
    "generate with beams": (["generate", "model", "ab", "--beams", "2"], "row 1"),
    "eval of conversations": (["eval", "model", "data.eval=chat.jsonl"], "chat.jsonl:1"),
    "eval of pairs": (["eval", "model", "data.eval=pairs.jsonl", "reference=model"], "pairs.jsonl:1"),
    "eval of prompts": (["eval", "model", "data.eval=prompts.jsonl", "reward=[{model: scorer}]"], "prompts.jsonl:1"),
    "eval of a reward model": (["eval", "scorer", "data.eval=pairs.jsonl"], "pairs.jsonl:1"),
    "eval with a reward model": (["eval", "whole", "data.eval=prompts.jsonl", "reward=[{model: scorer}]"], "prompts"),
}


@pytest.mark.parametrize(("arguments", "source"), EVERY_WAY.values(), ids=EVERY_WAY)
def test_a_model_that_is_smaller_than_its_tokenizer_is_refused_wherever_it_reads_text(
    arguments: list[str],
    source: str,
    tiny_folder: Path,
    tiny_llama: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores and perplexities ended in an index error; only training and generating were checked."""
    monkeypatch.chdir(tmp_path)
    for name, model in {"model": tiny_llama(vocab_size=20), "scorer": encoder(256, vocabulary=20)}.items():
        model.save_pretrained(name)
        tiny_tokenizer.save_pretrained(name)
    Path("whole").symlink_to(tiny_folder)
    Path("chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("pairs.jsonl").write_text(json.dumps(LONG[1]) + "\n")
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    refused = CliRunner().invoke(app, [*arguments, *(["generation.max_new_tokens=2"] if "prompts" in source else [])])
    assert refused.exit_code == 2, refused.output
    assert source in refused.stderr and "but the model has embeddings only for the 20 ids below" in refused.stderr


def test_a_pad_id_without_an_embedding_changes_no_score(tiny_tokenizer: Any) -> None:
    """It is common: a pad token was added to a tokenizer, but the embeddings were not resized."""
    prompt: Messages = ({"role": "user", "content": "a"},)
    answers = [Trajectory.from_text("b" * length, prompt, source=f"row {length}") for length in (3, 9)]
    expected = ModelReward(encoder(), tiny_tokenizer)(answers)
    tiny_tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tiny_tokenizer.pad_token_id == 105
    assert ModelReward(encoder(), tiny_tokenizer)(answers) == expected


def test_a_generation_config_that_cannot_be_saved_is_found_before_training(make_trainer: Any, tiny_llama: Any) -> None:
    """It was found at the first checkpoint."""
    model = tiny_llama()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5
    with pytest.raises(UserError, match=r"generation_config.json cannot be saved again: .*temperature"):
        make_trainer(SFT(), model, [{"prompt": "a", "completion": "b"}])


def test_roberta_reads_as_many_tokens_as_its_tokenizer_knows(tiny_tokenizer: Any) -> None:
    config = RobertaConfig(max_position_embeddings=514)
    tiny_tokenizer.model_max_length = 512
    assert limits_of(config, tiny_tokenizer).longest == 512
    tiny_tokenizer.model_max_length = int(1e30)
    assert limits_of(config, tiny_tokenizer).longest == 514


def test_inspect_says_the_limit_and_sees_what_training_would_see(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder().save_pretrained("model")
    tiny_tokenizer.save_pretrained("model")
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LONG))
    Path("r.yaml").write_text("method: {name: reward}\nmodel: model\ndata: {train: pairs.jsonl}\n")
    refused = CliRunner().invoke(app, ["inspect", "r.yaml"])
    assert refused.exit_code == 2 and "pairs.jsonl:1: " in refused.stderr and "max_length 64" in refused.stderr
    shown = CliRunner().invoke(app, ["inspect", "r.yaml", "data.too_long=drop"])
    assert "data.max_length is not set: it is 64, the most that the model reads" in shown.stdout
