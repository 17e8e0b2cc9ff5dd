"""Negative controls: nothing is learned if there is nothing to learn. And a well-known run as a reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from burnish import DPO, PPO, SFT, RewardModel
from burnish.generate.sampling import Sampling
from burnish.math.kl import AdaptiveKL
from burnish.types import Conversation, Messages, Preference, Prompt, Trajectory


def said(text: str, role: str = "assistant") -> Messages:
    return ({"role": role, "content": text},)


def classifier(llama: Any) -> LlamaForSequenceClassification:
    labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    torch.manual_seed(3)
    return LlamaForSequenceClassification(LlamaConfig.from_dict(llama.config.to_dict() | labels)).eval()


def conversations() -> list[Any]:
    return [Conversation((*said(f"{i}?", "user"), *said("abc")), None, f"chat:{i}") for i in range(8)]


def prompts(n: int) -> list[Any]:
    return [Prompt(said(f"{i}?", "user"), {}, f"prompts:{i}") for i in range(n)]


def pairs(n: int, seed: int, *, shuffled: bool) -> list[Any]:
    """The answer with more digits is preferred. If shuffled, the preferred answer is chosen at random."""
    r = random.Random(seed)
    made = []
    for i in range(n):
        few, many = ("".join(r.choices("abcdefgh", k=6 - k) + r.choices("0123456789", k=k)) for k in (1, 4))
        chosen, rejected = (few, many) if shuffled and r.random() < 0.5 else (many, few)
        made.append(Preference(said("?", "user"), said(chosen), said(rejected), None, None, f"pairs:{seed}:{i}"))
    return made


@pytest.mark.parametrize("shuffled", [False, True])
def test_shuffled_preferences_teach_nothing(shuffled: bool, make_trainer: Any, tiny_llama: Any) -> None:
    trainer = make_trainer(
        RewardModel(),
        classifier(tiny_llama(initializer_range=0.05)),
        pairs(256, 1, shuffled=shuffled),
        batch=32,
        lr=3e-3,
        num_train_epochs=3,
        own={"eval_dataset": pairs(1000, 2, shuffled=shuffled)},
    )
    trainer.train()
    results = trainer.evaluate()
    if shuffled:
        assert 0.45 <= results["eval_accuracy"] <= 0.55
        assert results["eval_accuracy_low"] < 0.5 < results["eval_accuracy_high"]
        assert results["eval_preference"] > 0.99 * math.log(2)  # not better than chance
    else:
        assert results["eval_accuracy_low"] > 0.9


@pytest.mark.parametrize("shuffled", [False, True])
def test_shuffled_preferences_teach_a_policy_nothing(shuffled: bool, make_trainer: Any, tiny_llama: Any) -> None:
    trainer = make_trainer(
        DPO(),
        tiny_llama(initializer_range=0.05),
        pairs(256, 1, shuffled=shuffled),
        batch=32,
        lr=3e-3,
        num_train_epochs=2,
        own={"eval_dataset": pairs(1000, 2, shuffled=shuffled), "token_budget": 8192},
    )
    trainer.train()
    results = trainer.evaluate()
    if shuffled:
        assert 0.45 <= results["eval_accuracy"] <= 0.55
        assert results["eval_accuracy_low"] < 0.5 < results["eval_accuracy_high"]
        assert results["eval_preference"] > 0.99 * math.log(2)
    else:
        assert results["eval_accuracy_low"] > 0.9 and results["eval_margin"] > 0


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "ppo", "ppo shared"])
def test_a_learning_rate_of_zero_changes_no_byte(name: str, make_trainer: Any, tiny_llama: Any, weights: Any) -> None:
    def brevity(answers: list[Trajectory]) -> list[float]:
        return [-float(len(a.tokens)) for a in answers]

    method, model, rows = {
        "sft": lambda: (SFT(), tiny_llama(), conversations()),
        "reward": lambda: (RewardModel(), classifier(tiny_llama()), pairs(8, 0, shuffled=False)),
        "dpo": lambda: (DPO(), tiny_llama(), pairs(8, 0, shuffled=False)),
        "ppo": lambda: (PPO(brevity, Sampling(max_new_tokens=4)), tiny_llama(), prompts(8)),
        "ppo shared": lambda: (PPO(brevity, Sampling(max_new_tokens=4), critic="shared"), tiny_llama(), prompts(8)),
    }[name]()
    after = []
    for rate in (0.0, 1e-6):
        trainer = make_trainer(method, model, rows, lr=rate, weight_decay=0.1)
        before = weights(trainer.network)
        trainer.train()
        assert len([line for line in trainer.state.log_history if "loss" in line]) == trainer.state.global_step > 1
        after.append(weights(trainer.network) == before)
    assert after == [True, False]


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_constant_reward_that_the_critic_expects_changes_nothing(
    critic: str, make_trainer: Any, tiny_llama: Any, weights: Any
) -> None:
    def train(constant: float) -> tuple[list[float], bool, list[dict[str, float]]]:
        method = PPO(
            lambda answers: [constant] * len(answers),
            Sampling(max_new_tokens=5),
            kl_coef=0.0,
            critic={"name": critic} | ({"start": "policy"} if critic == "separate" else {}),
            epochs=2,
            mini_batches=2,
        )
        trainer = make_trainer(method, tiny_llama(), prompts(8), lr=1e-2)
        torch.nn.init.constant_(trainer.network.critic.score.bias, 0.75)  # of a head that is else 0: every value is it
        loader, advantages = trainer.get_train_dataloader(), []
        gather = loader._collect

        def collecting(indices: list[int]) -> None:
            gather(indices)
            advantages.extend(x for e in loader.pending for x in e.sequences[0].arrays["advantages"])

        loader._collect = collecting
        before = weights(trainer.network)
        trainer.train()
        return advantages, weights(trainer.network) == before, trainer.state.log_history[:-1]

    advantages, same, log = train(0.75)
    assert set(advantages) == {0.0} and same
    assert all(line["policy"] == line["value"] == line["grad_norm"] == 0.0 for line in log)
    advantages, same, log = train(-0.75)  # what it does not expect moves it
    assert set(advantages) != {0.0} and not same


def test_a_well_known_run_has_313_iterations_and_holds_its_coefficient(make_trainer: Any, tiny_llama: Any) -> None:
    trainer = make_trainer(
        PPO(lambda answers: [0.0] * len(answers), kl_coef=0.2, kl_target=6.0, epochs=1),
        tiny_llama(),
        prompts(10000),
        batch=32,
    )
    loader = trainer.get_train_dataloader()
    assert len(loader) == 313  # ceil(10000 / 32)
    low = high = wild = loader.kl
    r = random.Random(0)
    for _ in range(len(loader)):
        low, high, wild = low.update(-1e9, 32), high.update(1e9, 32), wild.update(r.uniform(-50, 50), 32)
        assert low.coef <= wild.coef <= high.coef
    assert isinstance(low, AdaptiveKL)
    assert low.coef == pytest.approx(0.1637, abs=5e-5) and high.coef == pytest.approx(0.2443, abs=5e-5)
    assert low.coef == pytest.approx(0.2 * (1 - 0.2 * 32 / 10000) ** 313)
    assert high.coef == pytest.approx(0.2 * (1 + 0.2 * 32 / 10000) ** 313)
