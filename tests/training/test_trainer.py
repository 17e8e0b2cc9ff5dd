"""One step is one item of the loader, all that HF users know works, and a run that goes on ends with the same bytes."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import TrainerCallback, TrainingArguments, get_linear_schedule_with_warmup

from burnish import DPO, PPO, SFT, Reinforce, RewardModel, Trainer, files
from burnish.data.readers import load
from burnish.errors import UserError
from burnish.generate.sampling import Sampling
from burnish.models import layout
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.report.metrics import Recorder, is_timing, read_metrics
from burnish.training.arguments import warn_ignored
from burnish.types import Conversation

NUMBERS = random.Random(0)
ROWS = [
    {"prompt": f"{'abcde'[i % 5]} + {i} =", "completion": "x" * (1 + i % 4) + str(NUMBERS.randrange(1000))}
    for i in range(10)
]
PROMPTS = [{"prompt": f"{i} + {i} ="} for i in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in ROWS]


# named otherwise in older versions of transformers
CHECKPOINTING = {
    next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n)): True
}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "max_grad_norm": 0,
    }
    return TrainingArguments(str(folder), **(defaults | settings))


@pytest.fixture
def make(tiny_llama, tiny_tokenizer, tmp_path):
    """Makes a trainer: ``make(method, model, rows, token_budget=..., learning_rate=...)``."""

    def trainer(method: Any = None, model: Any = None, rows: Any = ROWS, **settings: Any) -> Trainer:
        own = (
            "token_budget",
            "padding_side",
            "packed",
            "recorder",
            "callbacks",
            "eval_dataset",
            "optimizers",
            "length",
        )
        others = {name: settings.pop(name) for name in own if name in settings}
        return Trainer(
            model=tiny_llama() if model is None else model,
            args=arguments(settings.pop("folder", tmp_path / "out"), **settings),
            method=method or SFT(),
            train_dataset=rows,
            processing_class=tiny_tokenizer,
            **others,
        )

    return trainer


class Gradients(TrainerCallback):
    """Keeps the gradient of every step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        assert model is not None
        self.found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert list(a) == list(b)
    flat = [torch.cat([x.flatten() for x in gradients.values()]) for gradients in (a, b)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in trainer.network.state_dict().items()}


def gradient(make, **settings: Any) -> dict[str, torch.Tensor]:
    keep = Gradients()
    make(callbacks=[keep], max_steps=1, **settings).train()
    return keep.found[0]


def with_dropout(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 105, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **ends, attn_pdrop=0.0, resid_pdrop=0.2, embd_pdrop=0.2))


def lora(model: Any, dropout: float = 0.0, **more: Any) -> Any:
    settings: dict[str, Any] = {"r": 4, "dropout": dropout} | more
    torch.manual_seed(3)
    return add_adapter(model, AdapterConfig(**settings), "CAUSAL_LM")


# --- a step --------------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_loss_of_transformers(make, tiny_llama, tiny_tokenizer):
    found = gradient(make, per_device_train_batch_size=10)
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
    assert distance(found, {f"policy.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_pad_token_does_not_matter(side, make, tiny_tokenizer):
    before = gradient(make, padding_side=side)
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    assert distance(gradient(make, padding_side=side), before) < 1e-6


def test_rows_of_a_step_are_batch_size_times_accumulation(make):
    both = make(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    whole = make(per_device_train_batch_size=6)
    assert both.rows_per_step == whole.rows_per_step == 6
    for trainer in (both, whole):
        trainer.train()
        assert trainer.state.global_step == 4  # 10 rows: steps of 6 and 4, twice
    assert weights(both) == weights(whole)


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
    assert distance(keep.found[0], straight) < 1e-5


def test_out_of_memory_after_a_part_of_the_step_counts_nothing_twice(make, monkeypatch):
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
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="out of memory"):
        make().train()


def test_a_fault_of_a_method_is_no_lack_of_memory(make, monkeypatch):
    monkeypatch.setattr(SFT, "loss", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        make().train()


def test_a_count_that_is_not_what_was_divided_by_is_found(make, monkeypatch):
    loss = SFT.loss

    def lies(self, network, batch):
        terms: Any = loss(self, network, batch)
        return {name: term._replace(count=batch.counts["tokens"] + torch.ones(())) for name, term in terms.items()}

    monkeypatch.setattr(SFT, "loss", lies)
    with pytest.raises(AssertionError, match=r"nll: counted \d+\.0, divided by \d+\.0"):
        make().train()


def test_a_learning_rate_of_zero_changes_no_byte(make, tiny_llama):
    trainer = make(learning_rate=0.0, weight_decay=0.1)
    before = weights(trainer)
    trainer.train()
    assert weights(trainer) == before
    assert before == {f"policy.{n}": v.numpy().tobytes() for n, v in tiny_llama().state_dict().items()}


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_training_an_adapter_leaves_the_bytes_of_its_base(kind, make, tiny_llama):
    trainer = make(model=lora(tiny_llama(), **kind))
    before = weights(trainer)
    trainer.train()
    changed = {name for name, value in weights(trainer).items() if value != before[name]}
    assert changed == {name for name in before if "lora_" in name}


# --- what HF users know --------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_with_a_callback_and_tensorboard(tiny_llama, tiny_tokenizer, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen: list[str] = []

    class Callback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, processing_class=None, **_):
            assert model is not None and model.config.vocab_size == 105 and processing_class is tiny_tokenizer
            seen.append("begin")

        def on_log(self, args, state, control, logs=None, **_):
            seen.extend(key for key in ("loss", "nll", "learning_rate", "grad_norm") if key in (logs or {}))

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(
            str(tmp_path),
            learning_rate=1e-3,
            report_to="tensorboard",
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            per_device_train_batch_size=4,
        ),
        method=SFT(),
        train_dataset=ROWS,
        processing_class=tiny_tokenizer,
        callbacks=[Callback()],
    )
    result = trainer.train()
    assert seen == ["begin", *["loss", "nll", "learning_rate", "grad_norm"] * 2]
    assert result.global_step == 2
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(logged) and len(logged) == 2


def test_what_is_logged_is_the_loss_of_the_step(make, tmp_path):
    trainer = make(num_train_epochs=1, learning_rate=0.0)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["epoch"] for line in lines] == pytest.approx([1 / 3, 2 / 3, 1])
    for line in lines:
        assert line["loss"] == pytest.approx(line["nll"], rel=1e-4)
        assert line["tokens"] > 0 and line["seconds"] > 0
    # each row's tokens are counted once
    examples = trainer.train_examples.examples
    assert sum(line["tokens"] for line in lines) == sum(len(e.sequences[0].tokens) for e in examples)
    # at a learning rate of 0 the token-weighted mean of the steps is the loss over all rows
    counts = {id(e): e.counts["tokens"] for e in examples}
    order = [[examples.index(e) for e in step] for step in make(num_train_epochs=1).get_train_dataloader()]
    learned = [sum(counts[id(examples[i])] for i in step) for step in order]
    mean = sum(line["nll"] * n for line, n in zip(lines, learned, strict=True)) / sum(learned)
    assert trainer.evaluate(ROWS)["eval_nll"] == pytest.approx(mean, rel=1e-4)


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


def test_evaluation_comes_every_so_many_steps(make):
    trainer = make(eval_strategy="steps", eval_steps=2, eval_dataset=ROWS[:3])
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["eval_loss"] == pytest.approx(lines[-1]["eval_nll"])
    assert lines[0]["eval_loss"] > lines[-1]["eval_loss"]


def test_evaluation_does_not_change_the_run(make):
    plain = make(model=with_dropout())
    plain.train()
    evaluated = make(model=with_dropout(), eval_strategy="steps", eval_steps=1, eval_dataset=ROWS[:3])
    evaluated.train()
    assert weights(plain) == weights(evaluated)


def test_noise_is_of_training_passes_alone_and_leaves_nothing_behind(make, tiny_llama, tmp_path):
    plain = make(eval_dataset=ROWS[:3]).evaluate()
    options = {"model": tiny_llama(), "neftune_noise_alpha": 5, "eval_dataset": ROWS[:3], "learning_rate": 0.0}
    trainer = make(**options, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    embeddings = trainer.network.policy.get_input_embeddings()
    attributes = list(vars(embeddings))
    trainer.train()
    found = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert found == [plain["eval_loss"]] * 6
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    quiet = make(**(options | {"neftune_noise_alpha": None}))
    quiet.train()
    expected = [line["loss"] for line in quiet.state.log_history if "loss" in line]
    assert all(abs(a - b) > 1e-5 for a, b in zip(losses, expected, strict=True))
    assert not embeddings._forward_hooks and list(vars(embeddings)) == attributes
    saved = tmp_path / "out" / "checkpoint-6"
    assert "neftune" not in (saved / "config.json").read_text()
    assert weights(trainer) == weights(make())
    # training goes on with noise where it is called again
    trainer.args.max_steps = 7
    trainer.state.log_history.clear()
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"] - expected[0]) > 1e-5


def test_noise_of_no_strength_is_none_and_of_a_negative_one_is_refused(make):
    assert distance(gradient(make, neftune_noise_alpha=0), gradient(make)) == 0
    with pytest.raises(UserError, match="neftune_noise_alpha: expected a number above 0, got -5"):
        make(neftune_noise_alpha=-5)


def test_the_best_model_is_loaded_at_the_end(make, tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_dataset": ROWS[:3],
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best is the first
        "save_total_limit": 1,
    }
    trainer = make(**options)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-1")
    loaded = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    trainer.network.load_weights(tmp_path / "out" / "checkpoint-1")
    assert all(torch.equal(value, loaded[name]) for name, value in trainer.network.state_dict().items())
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1"]


def test_a_users_optimizer_and_schedule_are_used(make, tiny_llama):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    keep = Gradients()
    trainer = make(model=model, optimizers=(optimizer, schedule), max_steps=1, callbacks=[keep])
    trainer.train()
    before = tiny_llama().state_dict()
    for name, value in trainer.network.policy.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.5 * keep.found[0][f"policy.{name}"])


def test_rows_may_be_what_load_returned_or_a_dataset(make, tmp_path):
    import datasets

    first = gradient(make)
    for rows in (load(ROWS, (Conversation,)), load(ROWS, (Conversation,)).rows, datasets.Dataset.from_list(ROWS)):
        assert distance(gradient(make, rows=rows), first) < 1e-6


def test_a_trainer_without_a_tokenizer_or_rows_is_told(make, tiny_llama, tmp_path):
    with pytest.raises(UserError, match="needs processing_class"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path), method=SFT(), train_dataset=ROWS)
    with pytest.raises(UserError, match="nothing to evaluate on"):
        make().evaluate()


def test_packing_is_refused_where_a_model_does_not_keep_sequences_apart(make):
    config = hf.Lfm2Config(
        vocab_size=105, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, full_attn_idxs=[1],
    )  # fmt: skip
    model = hf.Lfm2ForCausalLM(config)
    with pytest.raises(UserError, match="packed: Lfm2ForCausalLM does not keep the sequences of a row apart"):
        make(SFT(), model, ROWS, packed=True)
    make(SFT(), model, ROWS)


def test_how_rows_lie_is_decided_in_the_precision_of_the_passes(make, monkeypatch):
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


# --- going on ------------------------------------------------------------------------------------------------------


def reward(answers: list) -> list[float]:
    return [answer.text.count("1") - 0.1 * len(answer.tokens) for answer in answers]


def ppo(**settings: Any) -> PPO:
    defaults: dict[str, Any] = {"epochs": 2, "mini_batches": 2, "kl_target": 0.5, "kl_horizon": 20}
    return PPO(reward, Sampling(max_new_tokens=5), **(defaults | settings))


def grpo() -> Reinforce:
    settings: dict[str, Any] = {
        "epochs": 2,
        "policy_loss": "clip",
        "correction": {"mode": "truncate", "cap": 2.0},
        "score_normalize": True,
    }
    kl: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimate": "k3"}
    return Reinforce(reward, Sampling(max_new_tokens=5, samples=3), advantage="group_std", **settings, **kl)


PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no" + str(i)} for i, row in enumerate(ROWS)
]


CASES = {
    "sft with dropout": lambda llama: (SFT(), with_dropout(), ROWS),
    "sft with an adapter": lambda llama: (SFT(), lora(llama(), 0.2), ROWS),
    "reinforce on scored rows": lambda llama: (
        Reinforce(advantage="rloo", kl_coef=0.1, kl_in="loss", kl_estimate="k2", policy_loss={"floor": -4.0}),
        llama(),
        [
            {
                "text": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"]},
                ],
                "reward": (-1) ** i / (i % 3 + 1),
            }
            for i, row in enumerate(ROWS)
        ],
    ),
    "reinforce on prompts, as grpo": lambda llama: (grpo(), llama(), PROMPTS),
    "dpo with an adapter": lambda llama: (DPO(nll_weight=0.1), lora(llama()), PAIRS),
    "kto": lambda llama: (DPO(loss="kto"), llama(), PAIRS),
    "ppo, separate critic": lambda llama: (ppo(critic={"learning_rate": 3e-2}), llama(), PROMPTS),
    "ppo, shared critic, early stops": lambda llama: (ppo(critic="shared", target_kl=1e-3), llama(), PROMPTS),
    "ppo, adapters": lambda llama: (ppo(critic={"warmup": 1}), lora(llama()), PROMPTS),
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not is_timing(key)} for line in read_metrics(folder)]


class Record(TrainerCallback):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_log(self, args, state, control, logs=None, **_):
        self.recorder.metrics(state.global_step, logs or {})


@pytest.mark.parametrize("method", [ppo, grpo])
def test_noise_is_refused_where_completions_are_sampled(method, make):
    with pytest.raises(UserError, match=r"neftune_noise_alpha=5: .* completions were sampled\. Take this setting away"):
        make(method(), rows=PROMPTS, neftune_noise_alpha=5)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_ends_with_the_bytes_of_one_that_never_stopped(case, make, tiny_llama, tmp_path):
    def trainer(folder: Path, save: str = "no") -> Trainer:
        method, model, rows = CASES[case](tiny_llama)
        recorder = Recorder(folder)
        return make(
            method,
            model,
            rows,
            folder=folder,
            recorder=recorder,
            callbacks=[Record(recorder)],
            save_strategy=save,
            save_steps=1,
            num_train_epochs=1 if isinstance(method, PPO) else 2 if rows is not PROMPTS else 3,
            token_budget=120,
            max_grad_norm=1.0,
            neftune_noise_alpha=5 if isinstance(method, SFT) else None,
        )

    straight = trainer(tmp_path / "straight", "steps")
    straight.train()
    last = straight.state.max_steps
    assert last == straight.state.global_step and last >= 6
    expected, start = weights(straight), weights(trainer(tmp_path / "unused"))
    assert expected != start
    # every step of the first kind, every second one of the variants
    for step in range(1, last, 2 if "adapter" in case or "shared" in case else 1):
        folder = tmp_path / f"from {step}"
        folder.mkdir()
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = tmp_path / "straight" / name
            (folder / name).write_bytes(path.read_bytes() if path.exists() else b"")
        torch.manual_seed(step)
        again = trainer(folder)
        again.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert again.state.global_step == last
        assert weights(again) == expected, step
        a, b = ([line for line in lines(f) if "train_loss" not in line] for f in (folder, tmp_path / "straight"))
        assert a == b, step
        state, other = (t.optimizer.state_dict()["state"] for t in (again, straight))  # type: ignore[union-attr]
        assert all(torch.equal(state[i][key], other[i][key]) for i in state for key in state[i])
        assert again.loader.state_dict() == straight.loader.state_dict()  # type: ignore[union-attr]


@pytest.mark.parametrize(("method", "rows"), [(SFT, ROWS), (ppo, PROMPTS)])
def test_a_checkpoint_between_lines_of_the_log_loses_none(method, rows, make, tmp_path):
    def trained(folder: Path, start: str | None = None) -> list[dict[str, Any]]:
        recorder = Recorder(folder)
        steps = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "max_steps": 6}
        options = {"folder": folder, "recorder": recorder, "callbacks": [Record(recorder)], **steps}
        make(method(), rows=rows, **options).train(resume_from_checkpoint=start)
        return [line for line in lines(folder) if "train_loss" not in line]

    straight = trained(tmp_path / "run")
    assert [line["step"] for line in straight][-1] == 6
    assert trained(tmp_path / "run", str(tmp_path / "run" / "checkpoint-2")) == straight


def test_a_critics_own_learning_rate_survives(make, tiny_llama, tmp_path):
    def trainer() -> Trainer:
        options = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 1, "warmup_steps": 2}
        return make(ppo(critic={"learning_rate": 3e-2}), rows=PROMPTS, **options)

    def rates(trainer: Trainer) -> dict[str, set[float]]:
        names = {id(p): name.split(".")[0] for name, p in trainer.network.named_parameters()}
        found: dict[str, set[float]] = {}
        optimizer: Any = trainer.optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(names[id(parameter)], set()).add(group["initial_lr"])
        return found

    first = trainer()
    first.train()
    assert rates(first) == {"policy": {1e-2}, "critic": {3e-2}}
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert rates(again) == {"policy": {1e-2}, "critic": {3e-2}}
    assert weights(again) == weights(first)


def test_the_last_checkpoint_is_found_by_itself(make, tmp_path):
    first = make(save_strategy="steps", save_steps=4)
    first.train()
    for path in (tmp_path / "out").glob("checkpoint-6"):
        path.rename(tmp_path / "kept")
    again = make()
    again.train(resume_from_checkpoint=True)
    assert weights(again) == weights(first)


def test_a_checkpoint_is_sealed_and_holds_what_plain_transformers_loads(make, tiny_tokenizer, tmp_path):
    trainer = make(save_strategy="steps", save_steps=6)
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-6"
    assert files.damage(folder) is None and files.latest(tmp_path / "out") == (folder, [])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["checkpoint-6"]
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[1, 5, 9, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trainer.network.policy.eval()(tokens).logits)
    text = hf.AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "a"}])["input_ids"]
    assert text == tiny_tokenizer.apply_chat_template([{"role": "user", "content": "a"}])["input_ids"]


def test_a_damaged_checkpoint_is_refused(make, tmp_path):
    make(save_strategy="steps", save_steps=6).train()
    file = tmp_path / "out" / "checkpoint-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"checkpoint-6: the checkpoint is damaged: model\.safetensors has changed"):
        make().train(resume_from_checkpoint=True)


def test_old_checkpoints_make_room(make, tmp_path):
    make(save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint-5", "checkpoint-6"]


def test_a_run_keeps_its_rows_a_step(make, tmp_path):
    first = make(save_strategy="steps", save_steps=2, save_total_limit=3)
    first.train()
    again = make(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    with pytest.warns(UserWarning, match="the run goes on with its 4 rows a step"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert weights(again) == weights(first)


@pytest.mark.parametrize("method", [SFT, RewardModel, ppo])
def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(method, make, tiny_llama):
    def run(seed: int) -> dict[str, bytes]:
        model = with_dropout() if method is SFT else tiny_llama()
        if method is RewardModel:
            config = copy.deepcopy(model.config)
            config.num_labels = 1
            torch.manual_seed(0)
            model = hf.LlamaForSequenceClassification(config)
        rows = {SFT: ROWS, RewardModel: PAIRS, ppo: PROMPTS}[method]
        trainer = make(method(), model, rows, seed=seed, num_train_epochs=1)
        trainer.train()
        return weights(trainer)

    assert run(0) == run(0) != run(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("label_smoothing_factor", 0.1), ("per_device_eval_batch_size", 2), ("dataloader_num_workers", 2)],
)
def test_a_field_that_does_nothing_is_warned_about(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{field}={value} is ignored"):
        warn_ignored(TrainingArguments(str(tmp_path), **{field: value}))
