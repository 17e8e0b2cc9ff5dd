"""REINFORCE on scored conversations, through the trainer, against plain torch."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from burnish import Reinforce, Trainer, UserError
from burnish.config.yaml import read
from burnish.methods import METHODS
from burnish.render.truncate import Truncation
from burnish.types import Row, Scored, Sequence

SHARED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
]
DATA = [
    {"text": [*SHARED, {"role": "assistant", "content": "Yes."}], "reward": 1},
    {"text": [*SHARED, {"role": "assistant", "content": "No, it is 5."}], "reward": -1},
]


def scored(text: str, reward: float, source: str = "row") -> Scored:
    return Scored(({"role": "user", "content": "a"}, {"role": "assistant", "content": text}), reward, source)


class Keep(TrainerCallback):
    """The gradient of the first step."""

    gradient: torch.Tensor | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten().clone() for p in model.policy.parameters()])


def test_ten_lines_of_plain_torch_give_the_same_loss(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Any) -> None:
    model, keep = tiny_llama(), Keep()
    start = copy.deepcopy(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path), logging_steps=1, report_to="none", use_cpu=True, max_grad_norm=0),
        method=Reinforce(),
        train_dataset=Dataset.from_list(DATA),
        processing_class=tiny_tokenizer,
        callbacks=[keep],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    sums = []
    for row in DATA:
        encoded = tiny_tokenizer.apply_chat_template(row["text"], return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = torch.tensor([encoded["input_ids"]]), torch.tensor(encoded["assistant_masks"])
        logprobs = start(tokens).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        sums.append((chosen * mask[1:]).sum())
    loss = -(sums[0] - sums[1]) / 2
    loss.backward()

    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-4)
    expected = torch.cat([p.grad.flatten() for p in start.parameters()])
    assert keep.gradient is not None
    assert (keep.gradient - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shared", [True, False])
def test_what_two_rows_share_cancels(shared: bool, side: str, make_trainer: Any, tiny_llama: Any) -> None:
    data = [{**row, "text": row["text"][: 2 if shared else 4]} for row in DATA]
    keep = Keep()
    own = {"callbacks": [keep], "padding_side": side}
    trainer = make_trainer(Reinforce(), tiny_llama(dtype=torch.float64), data, own=own, max_grad_norm=0)
    trainer.train()
    assert keep.gradient is not None
    assert (keep.gradient.norm().item() < 1e-12) == shared
    assert (trainer.state.log_history[0]["loss"] == 0.0) == shared


def test_both_sides_of_padding_give_the_same(make_trainer: Any, tiny_llama: Any) -> None:
    gradients = []
    for layout in ({}, {"padding_side": "left"}, {"pad_to": 150, "padding_side": "left"}, {"packed": True}):
        keep = Keep()
        own = {"callbacks": [keep], **layout}
        make_trainer(Reinforce(), tiny_llama(dtype=torch.float64), DATA, own=own, max_grad_norm=0).train()
        gradients.append(keep.gradient)
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() < 1e-9 * gradients[0].norm()


@pytest.mark.parametrize(("learn_eos", "expected"), [(True, "4<|im_end|>Yes.<|im_end|>"), (False, "4Yes.")])
def test_every_turn_of_the_assistant_is_learned(learn_eos: bool, expected: str, tiny_tokenizer: Any) -> None:
    row = Scored(tuple(DATA[0]["text"]), 0.5, "row")
    (example,) = Reinforce(learn_eos=learn_eos).examples([row], tiny_tokenizer, Truncation()).examples
    (sequence,) = example.sequences
    assert (
        tiny_tokenizer.decode([t for t, on in zip(sequence.tokens, sequence.loss_mask, strict=True) if on]) == expected
    )
    assert sequence.arrays["advantages"].tolist() == [0.5] * len(sequence)


# --- settings -----------------------------------------------------------------------------------------------------


def first_loss(make_trainer: Any, model: Any, rows: list[Any], **settings: Any) -> tuple[float, Any]:
    trainer = make_trainer(Reinforce(**settings), model, rows, batch=len(rows), lr=0.0)
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer


@torch.no_grad()
def likelihoods(model: Any, sequence: Sequence) -> torch.Tensor:
    """Log-probabilities of the learned tokens by transformers alone."""
    tokens = torch.tensor([sequence.tokens.tolist()])
    found = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return found[torch.tensor(sequence.loss_mask[1:].tolist())]


@pytest.mark.parametrize(
    ("baseline", "less"),
    [
        ("none", lambda r: r),
        ("mean", lambda r: [x - sum(r) / len(r) for x in r]),
        ("rloo", lambda r: [x - (sum(r) - x) / (len(r) - 1) for x in r]),
    ],
)
@pytest.mark.parametrize("reduction", ["sequence_sum", "sequence_mean", "token_mean"])
def test_rows_are_compared_with_those_of_their_step(
    reduction: str, baseline: str, less: Any, make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    rewards = [1.0, -0.5, 0.25]
    rows: list[Row] = [scored("abcdef"[: 2 * i + 1], r, f"row {i}") for i, r in enumerate(rewards)]
    found, _ = first_loss(make_trainer, tiny_llama(), rows, advantage=baseline, reduction=reduction)
    examples = Reinforce().examples(rows, tiny_tokenizer, Truncation()).examples
    each = [likelihoods(tiny_llama(), e.sequences[0]) for e in examples]
    means = [x.mean() if reduction == "sequence_mean" else x.sum() for x in each]
    total = torch.dot(torch.tensor(less(rewards)), torch.stack(means)).item()
    count = sum(len(x) for x in each) if reduction == "token_mean" else 3
    assert found == pytest.approx(-total / count, abs=2e-4)


def test_a_fixed_length_divides_each_row_by_a_constant(make_trainer: Any, tiny_llama: Any) -> None:
    rows: list[Row] = [scored("ab", 1.0, "row 1"), scored("cde", -0.5, "row 2")]
    whole, _ = first_loss(make_trainer, tiny_llama(), rows)
    part, _ = first_loss(make_trainer, tiny_llama(), rows, reduction={"name": "fixed_length", "length": 4})
    assert abs(whole) > 0.1 and part == pytest.approx(whole / 4, abs=2e-5)


def test_the_likelihood_of_good_and_bad_rows_is_logged(make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    rows: list[Row] = [scored("ab", 1.0, "row 1"), scored("cde", -1.0, "row 2"), scored("f", 0.0, "row 3")]
    _, trainer = first_loss(make_trainer, tiny_llama(), rows)
    good, bad, _ = (
        likelihoods(tiny_llama(), e.sequences[0]).mean().item()
        for e in Reinforce().examples(rows, tiny_tokenizer, Truncation()).examples
    )
    line = trainer.state.log_history[0]
    assert (line["logprob_positive_advantage"], line["logprob_negative_advantage"]) == (
        pytest.approx(good),
        pytest.approx(bad),
    )


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_to_the_start_is_part_of_the_loss(kind: str, make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any):
    rows = [scored("ab", 1.0, "row 1"), scored("cde", -1.0, "row 2")]
    model = tiny_llama()
    trainer = make_trainer(
        Reinforce(kl_coef=0.3, kl_in="loss", kl_estimate=kind), model, rows, lr=1e-2, num_train_epochs=2
    )
    trainer.train()
    first, second, _ = trainer.state.log_history
    assert first["kl_loss"] == 0.0 and second["kl_loss"] > 0
    assert second["loss"] == pytest.approx(second["policy"] + 0.3 * second["kl_loss"], abs=1e-4)
    free = make_trainer(Reinforce(), tiny_llama(), rows, lr=1e-2, num_train_epochs=2)
    free.train()
    assert free.state.log_history[0]["loss"] == pytest.approx(first["loss"], abs=1e-4)
    assert "kl_loss" not in free.state.log_history[0]


# --- warnings -----------------------------------------------------------------------------------------------------


def test_what_is_punished_without_end_is_told(make_trainer: Any, tiny_llama: Any) -> None:
    rows = [scored("aaaa", -1.0, f"row {i}") for i in range(4)]
    trainer = make_trainer(Reinforce(), tiny_llama(), rows, lr=3e-2, num_train_epochs=20)
    with pytest.warns(
        UserWarning, match=r"mean log-probability of -\d+\.\d \(chance is -4\.7\).*method\.policy_loss\.floor"
    ):
        trainer.train()
    assert trainer.state.log_history[-2]["logprob_negative_advantage"] < -9.3
    held = make_trainer(Reinforce(policy_loss={"floor": -3.0}), tiny_llama(), rows, lr=3e-2, num_train_epochs=20)
    held.train()
    assert held.state.log_history[-2]["logprob_negative_advantage"] > -9.3


def test_what_a_baseline_punishes_is_told_too(make_trainer: Any, tiny_llama: Any) -> None:
    rows = [scored("aaaa" if i % 2 else "bbbb", float(i % 2), f"row {i}") for i in range(4)]
    trainer = make_trainer(Reinforce(advantage="mean"), tiny_llama(), rows, lr=3e-2, num_train_epochs=20)
    with pytest.warns(UserWarning, match=r"mean log-probability of -\d+\.\d \(chance is -4\.7\)"):
        trainer.train()


def test_rewards_that_are_large_are_told(make_trainer: Any, tiny_llama: Any) -> None:
    rows = [scored("a", 1.0, "r.jsonl:1"), scored("b", 3.0, "r.jsonl:2"), scored("c", -2.0, "r.jsonl:3")]
    with pytest.warns(UserWarning, match=r"2 of 3 rewards are not in \[-1, 1\], the first is 3 of r\.jsonl:2"):
        make_trainer(Reinforce(), tiny_llama(), rows).train()


def test_mistakes_are_told(make_trainer: Any, tiny_llama: Any) -> None:
    with pytest.raises(UserError, match="choose one"):
        Reinforce(policy_loss={"floor": -5.0, "unlikelihood": True})
    with pytest.raises(UserError, match="floor"):
        Reinforce(policy_loss={"floor": 5.0})
    with pytest.raises(UserError, match="leave a step of one"):
        make_trainer(Reinforce(advantage="rloo"), tiny_llama(), [scored("a", 1.0)]).train()


# --- its page -----------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "policy_gradient.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_settings_on_its_page_are_valid() -> None:
    parts = [read(block, "docs").value for block in blocks("yaml")]
    methods = [part["method"] for part in parts if "method" in part and "name" not in part]
    names = [method.pop("name") for method in methods]
    assert names == ["reinforce", "rloo", "grpo", "reinforce"]
    settings: list[Any] = [METHODS[name].config(**method) for name, method in zip(names, methods, strict=True)]
    assert [s.advantage.name for s in settings] == [
        "mean", "rloo", "group_std", "batch_whitened"
    ]  # fmt: skip


def test_the_code_on_its_page_runs(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("my-model")
    tiny_tokenizer.save_pretrained("my-model")
    (code,) = (block for block in blocks("python") if "Reinforce()" in block)
    found: dict[str, Any] = {}
    exec(code.replace("learning_rate=1e-5", "learning_rate=1e-5, use_cpu=True, report_to='none'"), found)
    assert found["trainer"].state.global_step == 3
