"""One item of the loader is one optimizer step, however much memory there is; the optimizer is that of transformers."""

from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments, get_linear_schedule_with_warmup

from burnish import SFT
from burnish.data.readers import load
from burnish.errors import UserError
from burnish.models import layout
from burnish.types import Conversation
from tiny_runs import ROWS, Gradients, distance, gradient, lora, weights

# named otherwise in older versions of transformers
CHECKPOINTING = {
    next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n)): True
}


def test_the_gradient_equals_that_of_the_loss_of_transformers(make, tiny_llama, tiny_tokenizer):
    ours = gradient(make, per_device_train_batch_size=10)
    model = tiny_llama()
    ids, labels = [], []
    for row in ROWS:
        message = [{"role": "user", "content": row["prompt"]}]
        prompt = tiny_tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        answer = [*tiny_tokenizer.encode(row["completion"], add_special_tokens=False), tiny_tokenizer.eos_token_id]
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    tokens, targets = pad(ids, True, 0), pad(labels, True, -100)
    model(tokens, attention_mask=pad([torch.ones_like(i) for i in ids], True, 0), labels=targets).loss.backward()
    assert distance(ours, {f"policy.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_pad_token_does_not_matter(side, make, tiny_tokenizer):
    before = gradient(make, padding_side=side)
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    assert distance(gradient(make, padding_side=side), before) < 1e-6


def test_a_step_has_batch_size_times_accumulation_rows(make):
    both = make(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    whole = make(per_device_train_batch_size=6)
    assert both.rows_per_step == whole.rows_per_step == 6
    for trainer in (both, whole):
        trainer.train()
        assert trainer.state.global_step == 4  # 10 rows: steps of 6 and 4, twice
    assert weights(both) == weights(whole)


def test_rows_may_come_from_load_or_from_a_dataset(make, tmp_path):
    import datasets

    first = gradient(make)
    for rows in (load(ROWS, (Conversation,)), load(ROWS, (Conversation,)).rows, datasets.Dataset.from_list(ROWS)):
        assert distance(gradient(make, rows=rows), first) < 1e-6


def test_activation_checkpointing_does_not_change_the_gradient(make, tiny_llama):
    for alpha in (None, 5):
        options = {"neftune_noise_alpha": alpha}
        off = gradient(make, model=tiny_llama(dtype=torch.float64), **options)
        on = gradient(make, model=tiny_llama(dtype=torch.float64), **options, **CHECKPOINTING)
        assert distance(on, off) < 1e-12


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("alpha", [None, 5])
def test_activation_checkpointing_reaches_an_adapter(dropout, alpha, make, tiny_llama):
    off = gradient(make, model=lora(tiny_llama(), dropout), neftune_noise_alpha=alpha)
    on = gradient(make, model=lora(tiny_llama(), dropout), neftune_noise_alpha=alpha, **CHECKPOINTING)
    assert distance(on, off) < 1e-6 and all("lora_" in name for name in on)


def test_packing_is_chosen_for_the_precision_of_the_passes(make, monkeypatch):
    seen = []
    monkeypatch.setattr(layout, "prefers_packed", lambda model: bool(seen.append(torch.is_autocast_enabled("cpu"))))
    for half in (False, True):
        make(bf16=half)
    assert seen == [False, True]


def test_mixed_precision_trains(make):
    for options in ({}, {"packed": True}):
        trainer = make(bf16=True, **options)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert losses[-1] < losses[0]


def test_a_term_with_a_wrong_count_is_an_error(make, monkeypatch):
    loss = SFT.loss

    def lies(self, network, batch):
        terms: Any = loss(self, network, batch)
        return {name: term._replace(count=batch.counts["tokens"] + torch.ones(())) for name, term in terms.items()}

    monkeypatch.setattr(SFT, "loss", lies)
    with pytest.raises(AssertionError, match=r"nll: counted \d+\.0, divided by \d+\.0"):
        make().train()


def test_a_term_of_the_loss_without_a_gradient_is_an_error(make, monkeypatch):
    loss = SFT.loss

    def detached(self, network, batch):
        return {name: term._replace(total=term.total.detach()) for name, term in loss(self, network, batch).items()}

    monkeypatch.setattr(SFT, "loss", detached)
    with pytest.raises(UserError, match="the term 'nll' of the loss has no gradient"):
        make().train()


# --- out of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("can't allocate memory: 9 bytes")])
def test_out_of_memory_halves_the_budget_and_gives_the_same_gradient(error, make, monkeypatch):
    straight = gradient(make, per_device_train_batch_size=10)
    loss, calls = SFT.loss, []

    def once(self, network, batch):
        calls.append(batch.tokens.numel())
        if len(calls) == 1:
            raise error
        return loss(self, network, batch)

    monkeypatch.setattr(SFT, "loss", once)
    keep = Gradients()
    trainer = make(callbacks=[keep], max_steps=1, per_device_train_batch_size=10)
    with pytest.warns(UserWarning, match="out of memory: the step is repeated with token_budget="):
        trainer.train()
    assert len(calls) > 2 and max(calls[1:]) <= trainer.engine.token_budget < calls[0]
    assert distance(keep.gradients[0], straight) < 1e-5


def test_out_of_memory_in_the_middle_of_a_step_counts_nothing_twice(make, monkeypatch):
    straight = gradient(make, per_device_train_batch_size=10)
    loss, calls = SFT.loss, []

    def third(self, network, batch):
        calls.append(batch.tokens.numel())
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return loss(self, network, batch)

    monkeypatch.setattr(SFT, "loss", third)
    with pytest.warns(UserWarning, match="out of memory"):
        assert distance(gradient(make, per_device_train_batch_size=10, token_budget=120), straight) < 1e-5


def test_out_of_memory_for_one_row_is_an_error(make, monkeypatch):
    def full(self, network, batch):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(SFT, "loss", full)
    said = (
        r"out of memory with a micro-batch of one example \(the longest has \d+ tokens, .*\): full: .*data\.max_length"
    )
    with pytest.raises(UserError, match=said), pytest.warns(UserWarning, match="out of memory"):
        make().train()


def test_other_errors_of_a_method_are_not_taken_for_out_of_memory(make, monkeypatch):
    monkeypatch.setattr(SFT, "loss", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        make().train()


# --- the optimizer ---------------------------------------------------------------------------------------------------


def test_a_learning_rate_of_zero_leaves_the_weights_unchanged(make, tiny_llama):
    trainer = make(learning_rate=0.0, weight_decay=0.1)
    before = weights(trainer)
    trainer.train()
    assert weights(trainer) == before
    assert before == {f"policy.{n}": v.numpy().tobytes() for n, v in tiny_llama().state_dict().items()}


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_training_an_adapter_leaves_its_base_unchanged(kind, make, tiny_llama):
    trainer = make(model=lora(tiny_llama(), **kind))
    before = weights(trainer)
    trainer.train()
    changed = {name for name, value in weights(trainer).items() if value != before[name]}
    assert changed == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_gradients_are_clipped_to_a_norm(limit, make):
    norms = []

    class Norm(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            assert model is not None
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item())

    trainer = make(max_grad_norm=limit, num_train_epochs=1, callbacks=[Norm()])
    trainer.train()
    logged = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert norms == pytest.approx([min(limit, norm) for norm in logged], rel=1e-4)


def test_the_learning_rate_follows_the_schedule_of_transformers(make):
    trainer = make(learning_rate=3e-3, warmup_steps=2)
    trainer.train()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 6)
    expected = []
    for _ in range(6):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    logged = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert logged == pytest.approx(expected)


def test_a_users_optimizer_and_schedule_are_used(make, tiny_llama):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    keep = Gradients()
    trainer = make(model=model, optimizers=(optimizer, schedule), max_steps=1, callbacks=[keep])
    trainer.train()
    before = tiny_llama().state_dict()
    for name, value in trainer.network.policy.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.5 * keep.gradients[0][f"policy.{name}"])


# --- noise on embeddings (NEFTune) -----------------------------------------------------------------------------------


def test_noise_is_added_only_in_training_passes_and_leaves_nothing_behind(make, tiny_llama, tmp_path):
    plain = make(eval_dataset=ROWS[:3]).evaluate()
    options = {"model": tiny_llama(), "neftune_noise_alpha": 5, "eval_dataset": ROWS[:3], "learning_rate": 0.0}
    trainer = make(**options, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    embeddings = trainer.network.policy.get_input_embeddings()
    attributes = list(vars(embeddings))
    trainer.train()
    losses_held_out = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert losses_held_out == [plain["eval_loss"]] * 6
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    quiet = make(**(options | {"neftune_noise_alpha": None}))
    quiet.train()
    expected = [line["loss"] for line in quiet.state.log_history if "loss" in line]
    assert all(abs(a - b) > 1e-5 for a, b in zip(losses, expected, strict=True))
    assert not embeddings._forward_hooks and list(vars(embeddings)) == attributes
    saved = tmp_path / "out" / "checkpoint-6"
    assert "neftune" not in (saved / "config.json").read_text()
    assert weights(trainer) == weights(make())
    # a second call of train adds noise again
    trainer.args.max_steps = 7
    trainer.state.log_history.clear()
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"] - expected[0]) > 1e-5


def test_an_alpha_of_zero_adds_no_noise_and_a_negative_one_is_refused(make):
    assert distance(gradient(make, neftune_noise_alpha=0), gradient(make)) == 0
    with pytest.raises(UserError, match="neftune_noise_alpha: expected a number above 0, got -5"):
        make(neftune_noise_alpha=-5)
