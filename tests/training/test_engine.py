"""What methods and loaders see of the engine, and that rows are encoded once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from burnish.methods.dpo import DPO
from burnish.methods.pretrain import Pretrain
from burnish.methods.reward import RewardModel
from burnish.methods.sft import SFT
from burnish.methods.step_value import StepValue
from burnish.models.forward import learned_logprobs
from burnish.protocols import Method
from burnish.types import Conversation, Messages, Steps, Text

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


QUESTION: Messages = ({"role": "user", "content": "q"},)
EIGHT = [("abcdefgh"[i] * (i + 1), "xyz"[: i % 3 + 1]) for i in range(8)]
PAIRS = [{"prompt": "p", "chosen": a, "rejected": b} for a, b in EIGHT]
PAIRED: dict[str, tuple[Any, list[Any], str]] = {
    "sft": (SFT, [{"prompt": a, "completion": b} for a, b in EIGHT], "loss perplexity"),
    "pretrain": (Pretrain, [{"text": a + b} for a, b in EIGHT], "loss perplexity"),
    "reward": (partial(RewardModel, centering=0.5), PAIRS, "loss accuracy margin"),
    "dpo": (DPO, PAIRS, "loss accuracy margin"),
    "orpo": (partial(DPO, loss="orpo"), PAIRS, "loss accuracy margin"),
    "kto": (
        partial(DPO, loss="kto", reference="live"),
        [{"prompt": a, "completion": b, "label": len(a) % 2 == 0} for a, b in EIGHT],
        "loss accuracy margin",
    ),
    "step_value": (
        StepValue,
        [Steps(QUESTION, (a, b), (0.5, 1.0 if len(a) % 2 else -1.0), f"s:{i}") for i, (a, b) in enumerate(EIGHT)],
        "loss value sign_accuracy explained_variance",
    ),
}


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("own", [{"packed": True}, {"token_budget": 1}], ids=str)
def test_the_sums_of_rows_add_up_to_the_metrics(
    name: str, own: dict[str, Any], make_trainer: Any, tiny_llama: Any
) -> None:
    make_method, rows, keys = PAIRED[name]
    method, model = make_method(), tiny_llama()
    if name == "reward":
        torch.manual_seed(3)
        labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
        model = LlamaForSequenceClassification(LlamaConfig.from_dict(model.config.to_dict() | labels))
    trainer = make_trainer(method, model, rows, own={"eval_dataset": rows, **own})
    metrics, measured = trainer.evaluate(), trainer.start
    assert measured.keys() == set(keys.split())
    for key, one in measured.items():
        assert len(one.rows) == 8
        sums = torch.tensor(list(one.rows.values()), dtype=torch.float64).sum(0, keepdim=True)
        of_rows = one.of(sums).item() + (key == "explained_variance")
        assert of_rows == pytest.approx(metrics[f"eval_{key}"], rel=1e-5, abs=1e-7), key
    # a row has the sums that it has if it is evaluated alone
    if name in ("sft", "dpo"):
        examples = trainer.eval_examples.examples
        ready = method.referenced(examples, trainer.engine) if name == "dpo" else examples
        for example in ready:
            alone, _ = trainer.engine.evaluate(method, [example])
            values = measured["loss"].rows[example.source]
            assert values[0] / values[1] == pytest.approx(alone["loss"], rel=1e-4, abs=1e-6)


def test_changes_are_paired_with_the_first_evaluation_also_after_a_resume(
    make_trainer: Any, tiny_llama: Any, tmp_path: Path
) -> None:
    rows = PAIRED["sft"][1]

    def make() -> Any:
        settings = {"max_steps": 3, "save_steps": 2, "save_strategy": "steps"}
        return make_trainer(
            SFT(), tiny_llama(), rows, own={"eval_dataset": rows}, lr=1e-2, output_dir=str(tmp_path), **settings
        )

    whole = make()
    first = whole.evaluate()
    assert not any("_change_" in key for key in first)
    whole.train()
    last = whole.evaluate()
    low, high = last["eval_loss_change_low"], last["eval_loss_change_high"]
    assert low < last["eval_loss"] - first["eval_loss"] < high < 0  # every row was learned
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.start == whole.start
    again = resumed.evaluate()
    assert {key: again[key] for key in last} == last
    assert not any("_change_" in key for key in make().evaluate(rows))  # other rows than the trainer's own


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
