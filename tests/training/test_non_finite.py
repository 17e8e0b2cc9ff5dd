"""A run stops at the first loss, gradient or weight that is not finite, and keeps its last good checkpoint."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import DPO, SFT, Reinforce, RewardModel
from burnish.errors import UserError
from burnish.methods.pretrain import Pretrain
from burnish.methods.step_value import StepValue
from burnish.models.loading import load_policy, load_reward_model
from burnish.training import checkpoint
from burnish.types import Conversation, Example, Messages, Preference, Scored, Steps, Text


def messages(i: int) -> Messages:
    return ({"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)})


CHATS = [Conversation(messages(i), None, f"chat:{i}") for i in range(12)]
PAIRS = [Preference(messages(i)[:1], messages(i)[1:], messages(i + 1)[1:], None, None, f"pair:{i}") for i in range(12)]
METHODS: dict[str, tuple[Any, list[Any]]] = {
    "sft": (SFT, CHATS),
    "pretrain": (Pretrain, [Text(f"text {i}", f"text:{i}") for i in range(12)]),
    "reward": (RewardModel, PAIRS),
    "dpo": (DPO, PAIRS),
    "reinforce": (Reinforce, [Scored(messages(i), 1.0, f"scored:{i}") for i in range(12)]),
    "step_value": (StepValue, [Steps(messages(i)[:1], (f"{i}", "1"), (0.5, 1.0), f"steps:{i}") for i in range(12)]),
}


@pytest.fixture
def model(tiny_llama: Any, tiny_folder: Path) -> Any:
    def make(name: str) -> Any:
        return load_reward_model(str(tiny_folder)) if name == "reward" else tiny_llama()

    return make


@pytest.mark.parametrize("name", METHODS)
def test_a_far_too_high_learning_rate_stops_the_run(name: str, model: Any, make_trainer: Any, tmp_path: Path) -> None:
    """Otherwise a run would continue with NaN, report success, and remove its finite checkpoints."""
    method, rows = METHODS[name]
    trainer = make_trainer(
        method(), model(name), rows, lr=1e20, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=8
    )
    with pytest.raises(UserError, match=r"step \d: .*Usually the learning rate is too high \(it is 1e\+20\)"):
        trainer.train()
    saved = checkpoint.latest(tmp_path / "run")[0]
    for path in saved.glob("*.safetensors") if saved else []:
        loaded = load_reward_model(str(saved)) if name == "reward" else load_policy(str(saved))
        assert all(weight.isfinite().all() for weight in loaded.parameters()), path


class Bad(SFT):
    """SFT with a loss, or only a gradient, that is not finite for some rows."""

    def __init__(self, rows: set[str], kind: str) -> None:
        super().__init__()
        self.rows, self.kind = rows, kind

    def loss(self, network: Any, batch: Any) -> Any:
        terms = super().loss(network, batch)
        if self.rows & set(batch.sources):
            nll = terms["nll"]
            weight = next(p for p in network.parameters() if p.requires_grad).flatten()[:1].sum()
            zero = weight - weight.detach()
            # the root of 0 has the slope infinity
            worse = zero.abs().sqrt() if self.kind == "gradient" else zero + math.inf
            terms["nll"] = nll._replace(total=nll.total + worse)
        return terms


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_the_rows_and_the_last_good_checkpoint_are_named(
    kind: str, tiny_llama: Any, make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(Bad({"chat:7"}, kind), tiny_llama(), CHATS, save_strategy="steps", save_steps=1)
    order: list[list[str]] = []
    steps = trainer.training_step

    def spy(network: Any, inputs: Any, *others: Any) -> Any:
        order.append([example.source for example in inputs[0]])
        return steps(network, inputs, *others)

    trainer.training_step = spy
    with pytest.raises(UserError) as error:
        trainer.train()
    step = len(order)
    assert "chat:7" in order[-1] and "chat:7" in str(error.value) and f"step {step}: " in str(error.value)
    assert ("the loss is inf" if kind == "loss" else "the norm of the gradient is") in str(error.value)
    kept = f"the last good checkpoint is {tmp_path / 'run' / f'checkpoint-{step - 1}'}"
    assert (kept if step > 1 else "there is no checkpoint before it") in str(error.value)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_skipped_step_changes_nothing_and_is_counted(
    kind: str, tiny_llama: Any, make_trainer: Any, weights: Any
) -> None:
    """Three steps of four rows, twice: the run equals one whose loader gives nothing in the place of the bad step."""
    own = {"on_non_finite": "skip"}
    bad = make_trainer(Bad({"chat:7"}, kind), tiny_llama(), CHATS, own=own, num_train_epochs=2)
    with pytest.warns(UserWarning, match=r"skipped step \d: .*chat:7"):
        bad.train()
    good = make_trainer(SFT(), tiny_llama(), CHATS, num_train_epochs=2)
    steps = good.training_step

    def without(network: Any, inputs: list[list[Example]], *others: Any) -> Any:
        there = any(example.source == "chat:7" for example in inputs[0])
        return steps(network, [[]] if there else inputs, *others)

    good.training_step = without
    good.train()
    assert weights(bad.network) == weights(good.network)
    lines = [line for line in bad.state.log_history if "loss" in line]
    counts = [line.get("non_finite_steps", 0) for line in lines]
    assert counts == sorted(counts) and counts[-1] == 2
    assert sum(not math.isfinite(line["loss"]) for line in lines) == (2 if kind == "loss" else 0)


def test_the_logged_loss_is_the_mean_over_steps_that_were_not_skipped(tiny_llama: Any, make_trainer: Any) -> None:
    def losses(method: Any, **own: Any) -> list[float]:
        trainer = make_trainer(method, tiny_llama(), CHATS, lr=0.0, own=own, logging_steps=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    every = make_trainer(SFT(), tiny_llama(), CHATS, lr=0.0)
    every.train()
    single = [line["loss"] for line in every.state.log_history if "loss" in line]
    (whole,) = losses(SFT())
    assert whole == pytest.approx(sum(single) / 3, rel=1e-5)
    (rest,) = losses(Bad({"chat:7"}, "loss"), on_non_finite="skip")
    assert any(rest == pytest.approx((sum(single) - single[i]) / 2, rel=1e-5) for i in range(3))


def test_a_run_without_any_finite_step_stops_even_with_skip(tiny_llama: Any, make_trainer: Any) -> None:
    every = {row.source for row in CHATS}
    trainer = make_trainer(
        Bad(every, "loss"), tiny_llama(), CHATS, batch=1, own={"on_non_finite": "skip"}, num_train_epochs=2
    )
    with warnings.catch_warnings(), pytest.raises(UserError, match="step 10: .*the 10th step in a row"):  # noqa: RUF043
        warnings.simplefilter("ignore")
        trainer.train()


def test_a_good_step_before_skipped_ones_does_not_reset_their_count(tiny_llama: Any, make_trainer: Any) -> None:
    """One good step since the last line of the log reset the count at every bad one."""
    trainer = make_trainer(
        Bad({row.source for row in CHATS[1:]}, "loss"),
        tiny_llama(),
        CHATS,
        batch=1,
        own={"on_non_finite": "skip"},
        num_train_epochs=3,
        logging_steps=100,
    )
    with warnings.catch_warnings(), pytest.raises(UserError, match="the 10th step in a row"):
        warnings.simplefilter("ignore")
        trainer.train()


def test_an_unknown_value_of_the_setting_is_an_error(tiny_llama: Any, make_trainer: Any) -> None:
    with pytest.raises(UserError, match="on_non_finite: expected error or skip, got 'Skip'"):
        make_trainer(SFT(), tiny_llama(), CHATS, own={"on_non_finite": "Skip"})


def test_the_count_of_skipped_steps_is_part_of_a_checkpoint(
    tiny_llama: Any, make_trainer: Any, weights: Any, tmp_path: Path
) -> None:
    def train(start: str | None = None) -> tuple[bytes, list[dict[str, Any]]]:
        own = {"on_non_finite": "skip"}
        settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "batch": 3}
        trainer = make_trainer(Bad({"chat:7"}, "loss"), tiny_llama(), CHATS, own=own, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train(resume_from_checkpoint=start)
        return weights(trainer.network), trainer.state.log_history

    expected, log = train()
    resumed, again = train(str(tmp_path / "run" / "checkpoint-5"))
    keys = ("step", "loss", "non_finite_steps")
    last = [[{k: str(line.get(k)) for k in keys} for line in lines if "loss" in line][-3:] for lines in (log, again)]
    assert resumed == expected and last[0] == last[1] and "non_finite_steps" in again[-2]


def test_a_model_with_non_finite_weights_is_refused(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """A base with NaN was trained, saved, and reported as done."""
    for value in (math.nan, math.inf):
        broken = tiny_llama()
        with torch.no_grad():
            broken.model.layers[1].mlp.up_proj.weight[3, 5] = value
        broken.save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        for load in (load_policy, load_reward_model):
            with pytest.raises(UserError, match=r"the weight .*layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
                load(str(tmp_path))


def test_a_non_finite_evaluation_loss_stops_the_run(tiny_llama: Any, make_trainer: Any) -> None:
    trainer = make_trainer(Bad({"chat:7"}, "loss"), tiny_llama(), CHATS[:4], own={"eval_dataset": CHATS[4:8]})
    with pytest.raises(UserError, match="step 0: the loss on held-out rows is inf"):
        trainer.evaluate()
