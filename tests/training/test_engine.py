"""What methods and loaders see of the engine, and that rows are encoded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from burnish.methods.pretrain import Pretrain
from burnish.methods.reward import RewardModel
from burnish.methods.sft import SFT
from burnish.models.forward import learned_logprobs
from burnish.protocols import Method
from burnish.types import Conversation, Text

ROWS = [
    Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}), None, f"c:{n}")
    for n in range(1, 6)
]


def test_rows_are_encoded_only_once_for_all_evaluations(make_trainer: Any, tiny_llama: Any) -> None:
    calls: list[int] = []

    class Counted(SFT):
        def examples(self, rows: Any, *others: Any) -> Any:
            calls.append(len(rows))
            return super().examples(rows, *others)

    trainer = make_trainer(Counted(), tiny_llama(), ROWS, own={"eval_dataset": ROWS[:2]})
    assert not calls
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert sorted(calls) == [2, 5]
    assert [len(split.examples) for split in (trainer.train_examples, trainer.eval_examples)] == [5, 2]


def test_held_out_text_has_a_separate_chop_length(make_trainer: Any, tiny_llama: Any) -> None:
    rows, method = [Text("a" * 19, "t:1")], Pretrain(packing="chop", chop_length=4, eval_chop_length=10)
    trainer = make_trainer(method, tiny_llama(), rows, own={"eval_dataset": rows})
    lengths = [
        [len(e.sequences[0]) for e in split.examples] for split in (trainer.train_examples, trainer.eval_examples)
    ]
    assert lengths == [[4] * 5, [10, 10]]  # 19 letters and the end token


def test_a_pass_adds_arrays_without_gradient_and_restores_the_mode(make_trainer: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    engine = make_trainer(SFT(), model, ROWS).engine
    engine.network.train()
    examples = make_trainer(SFT(), model, ROWS).train_examples.examples

    def function(batch: Any) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled() and not engine.network.training
        return {"logprobs": learned_logprobs(engine.network.policy, batch)}

    for before, after in zip(examples, engine.run(function, examples), strict=True):
        (old,), (new,) = before.sequences, after.sequences
        assert new.tokens.tolist() == old.tokens.tolist() and "logprobs" not in old.arrays
        assert (new.arrays["logprobs"] != 0).tolist() == old.loss_mask.tolist()
    assert engine.network.training


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked for by peft
def test_weights_yields_only_trained_weights(make_trainer: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    whole = dict(make_trainer(SFT(), model, ROWS).engine.weights())
    assert whole.keys() == dict(model.named_parameters()).keys()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapter = dict(make_trainer(SFT(), adapted, ROWS).engine.weights())
    assert adapter and all("lora_" in name and isinstance(x, nn.Parameter) for name, x in adapter.items())


def test_optional_parts_of_a_method_have_defaults() -> None:
    method: Method = RewardModel()
    assert method.learning_rates == {}
