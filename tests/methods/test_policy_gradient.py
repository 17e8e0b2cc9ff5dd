"""Presets, blocks and combinations of policy gradient; the user's own losses and estimators; what shapes a batch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import GRPO, PPO, RLOO, Reinforce, UserError
from burnish.config import load
from burnish.errors import UserCodeError
from burnish.generate.sampling import Sampling
from burnish.methods.settings import GRPOConfig, PPOConfig, preset_table
from burnish.types import Prompt

SAMPLING = Sampling(max_new_tokens=6, samples=4)


def by_tokens(answers: list[Any]) -> list[float]:
    """A score that follows from the tokens alone."""
    return [sum(a.tokens) % 9 / 4 - 1 for a in answers]


def prompts(n: int) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": f"{i} + 1"},), {}, f"prompts:{i}") for i in range(n)]


# --- settings -----------------------------------------------------------------------------------------------------


def test_what_each_preset_sets() -> None:
    assert preset_table() == {
        "ppo": {
            "policy_loss": "clip",
            "advantage": "gae",
            "critic": "separate",
            "reduction": "token_mean",
            "epochs": 4,
            "kl_coef": 0.05,
            "kl_in": "reward",
            "kl_estimate": "k1",
            "reference": True,
        },
        "reinforce": {
            "policy_loss": "reinforce",
            "advantage": "none",
            "critic": "none",
            "reduction": "sequence_sum",
            "epochs": 1,
            "kl_coef": 0.0,
            "kl_in": "reward",
            "kl_estimate": "k1",
            "reference": False,
        },
        "rloo": {
            "policy_loss": "reinforce",
            "advantage": "rloo",
            "critic": "none",
            "reduction": "sequence_sum",
            "epochs": 1,
            "kl_coef": 0.05,
            "kl_in": "reward",
            "kl_estimate": "k1",
            "reference": False,
        },
        "grpo": {
            "policy_loss": "clip",
            "advantage": "group_std",
            "critic": "none",
            "reduction": "sequence_mean",
            "epochs": 1,
            "kl_coef": 0.04,
            "kl_in": "loss",
            "kl_estimate": "k3",
            "reference": False,
        },
    }


def test_a_block_without_a_name_keeps_that_of_the_preset() -> None:
    settings = PPOConfig.model_validate({"policy_loss": {"clip_low": 0.1}, "critic": "shared"})
    assert settings.policy_loss.model_dump() == {"name": "clip", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": None}
    assert settings.critic.name == "shared"
    assert GRPOConfig.model_validate({"policy_loss": "gspo"}).policy_loss.model_dump()["clip_low"] == 3e-4


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (RLOO, {"advantage": "gae"}, "advantage gae needs a critic, but critic is none"),
        (PPO, {"critic": "none"}, "advantage gae needs a critic"),
        (PPO, {"advantage": "rloo"}, "critic separate would be trained but never used, because advantage rloo"),
        (RLOO, {"epochs": 2}, "epochs 2: after the first optimizer step the rollouts are off-policy"),
        (GRPO, {"kl_estimate": "k1"}, "k1 has no gradient as a loss"),
        (GRPO, {"policy_loss": "clipp"}, "name: reinforce, clip, gspo, gspo_token, cispo, sapo or file.py:name"),
        (GRPO, {"policy_loss": {"name": "sapo", "clip_low": 0.1}}, "clip_low"),
        (GRPO, {"reduction": "mean"}, "name: token_mean, sequence_mean, sequence_sum, fixed_length or file.py:name"),
        (GRPO, {"reduction": {"name": "token_mean", "length": 5}}, "length"),
        (GRPO, {"reduction": {"name": "fixed_length", "length": 0}}, "reduction.length: expected 1 or more, got 0"),
        (PPO, {"critic": {"name": "shared", "start": "policy"}}, "critic.start applies only to a separate critic"),
        (PPO, {"critic": {"name": "none", "coef": 1.0}}, "coef"),
        (PPO, {"correction": {"mode": "mask", "cap": 3.0}}, "mode mask does not use cap"),
        (PPO, {"correction": {"mode": "mask", "low": 3.0}}, "low 3 must be below high 2"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(method: Any, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        method(by_tokens, SAMPLING, **settings)


@pytest.mark.parametrize(
    ("sampling", "settings", "message"),
    [
        ({}, {}, "generation.samples: advantage group_std compares completions of a prompt: got 1"),
        ({}, {"advantage": "reinforce++-baseline"}, "reinforce\\+\\+-baseline compares completions"),
        ({}, {"advantage": "none", "dynamic_sampling": 1}, "one completion always has"),
        ({"samples": 2}, {"overlong": {"buffer": 7}}, "at most the 6 tokens of a completion, got 7"),
        ({"samples": 2, "temperature": 0.0}, {}, "generation.temperature"),
    ],
)
def test_settings_that_do_not_fit_the_samples_are_refused(sampling: dict, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPO(by_tokens, Sampling(max_new_tokens=6, **sampling), **settings)


# --- the user's own -----------------------------------------------------------------------------------------------

OWN = '''
import torch
from burnish.types import Term

def squared(logprobs, old_logprobs, advantages, mask, segments, *, pull=1.0):
    """-A l, and a pull towards the old log-probabilities."""
    moved = torch.where(mask, logprobs - old_logprobs, 0.0)
    losses = torch.where(mask, -advantages * logprobs, 0.0) + pull * moved.square()
    return losses, {"moved": moved.abs()}

def ranks(rewards, mask, groups, values, *, scale):
    """The rank of a rollout among all of them."""
    order = rewards.sum(1).argsort().argsort().double()
    return scale * torch.where(mask, order.unsqueeze(1), 0.0), None

def halves(losses, mask, segments, *, length):
    return Term(losses.sum() / length, "sequences")

def rows(losses, mask, segments):
    return Term(losses.sum(), "rows")

def short(rewards, mask, groups, values):
    return rewards.sum(1), None

def broken(logprobs, old_logprobs, advantages, mask, segments):
    raise ZeroDivisionError("oh")
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "my_loss.py").write_text(OWN)
    return tmp_path / "my_loss.py"


def test_a_loss_and_an_estimator_from_a_file_of_the_users_own(own: Path, make_trainer: Any, tiny_llama: Any) -> None:
    method = GRPO(
        by_tokens,
        SAMPLING,
        policy_loss={"name": f"{own}:squared", "pull": 0.5},
        advantage={"name": f"{own}:ranks", "scale": 0.25},
        reduction="token_mean",
        epochs=2,
        kl_coef=0.0,
    )
    trainer = make_trainer(method, tiny_llama(), prompts(2), batch=2, lr=1e-2)
    steps: list[Any] = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *rest: (steps.append(inputs[0]), step(model, inputs, *rest))[1]
    trainer.train()
    first, second, _ = trainer.state.log_history
    advantages = [float(e.sequences[0].arrays["advantages"][e.sequences[0].loss_mask][0]) for e in steps[0]]
    assert sorted(advantages) == [0.25 * i for i in range(8)]
    total = sum(a * e.sequences[0].arrays["old_logprobs"].sum() for a, e in zip(advantages, steps[0], strict=True))
    assert first["policy"] == pytest.approx(-total / sum(e.sequences[0].loss_mask.sum() for e in steps[0]), abs=1e-4)
    assert first["moved"] == pytest.approx(0, abs=1e-5) and second["moved"] > 1e-3


def test_a_reduction_from_a_file_of_the_users_own(own: Path, make_trainer: Any, tiny_llama: Any) -> None:
    """The user's function, fixed_length with a length, and fixed_length with max_new_tokens give the same loss."""
    losses = {}
    for name, reduction in {
        "own": {"name": f"{own}:halves", "length": 6},
        "fixed": {"name": "fixed_length", "length": 6},
        "longest": "fixed_length",
        "shorter": {"name": "fixed_length", "length": 3},
    }.items():
        # with a KL in the loss, which is reduced in the same way
        method = GRPO(by_tokens, SAMPLING, reduction=reduction, kl_coef=0.1, epochs=2)
        trainer = make_trainer(method, tiny_llama(), prompts(2), batch=2, lr=1e-2)
        trainer.train()
        losses[name] = [(line["policy"], line["kl_loss"]) for line in trainer.state.log_history[:2]]
    assert losses["own"] == losses["fixed"] == losses["longest"]
    assert losses["longest"][1][1] > 0
    policy, kl = losses["shorter"][0]
    assert (policy / 2, kl / 2) == pytest.approx(losses["longest"][0], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss": {"name": "my_loss.py:squared", "pul": 1.0}}, r"policy_loss.pul: .*did you mean 'pull'"),
        ({"reduction": {"name": "my_loss.py:halves", "len": 3}}, r"reduction.len: .*did you mean 'length'"),
        ({"advantage": "my_loss.py:ranks"}, r"advantage.scale: .*my_loss.py:ranks needs this setting"),
        ({"policy_loss": "my_loss.py:squard"}, "has no squard"),
    ],
)
def test_settings_that_the_users_function_does_not_take_are_refused(
    settings: dict, message: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    with pytest.raises(UserError, match=message):
        GRPO(by_tokens, SAMPLING, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "my_loss.py:short"}, r"advantage my_loss.py:short: expected \(advantages, returns or None\)"),
        ({"reduction": "my_loss.py:rows"}, r"reduction my_loss.py:rows: expected Term\(total, unit\) .*unit='rows'"),
        ({"policy_loss": "my_loss.py:broken"}, "policy_loss my_loss.py:broken raised ZeroDivisionError: oh"),
        ({"critic": "shared", "advantage": {"name": "my_loss.py:ranks", "scale": 1.0}}, "computes no returns"),
    ],
)
def test_what_the_users_function_does_wrong_is_named(
    settings: dict, message: str, own: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any, tiny_llama: Any
) -> None:
    monkeypatch.chdir(own.parent)
    with pytest.raises((UserError, UserCodeError), match=message):
        make_trainer(GRPO(by_tokens, SAMPLING, **settings), tiny_llama(), prompts(2), batch=2).train()


def test_a_recipe_finds_the_users_functions_beside_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own.parent
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    (folder / "rewards.py").write_text("def one(answers): return [1.0] * len(answers)\n")
    recipe = (
        f'method: {{name: grpo, policy_loss: {{name: "my_loss.py:squared", pull: 2.0}}}}\nmodel: {folder}\n'
        f'data: {{train: {folder}/prompts.jsonl}}\nreward: [{{function: "rewards.py:one"}}]\n'
    )
    (folder / "config.json").write_text("{}")
    (folder / "mine.yaml").write_text(recipe)
    stage = (loaded := load(folder / "mine.yaml")).stages[0]
    assert stage.method is not None
    assert loaded.method_settings(stage.method) == {"policy_loss": {"name": f"{own}:squared", "pull": 2.0}}
    (folder / "mine.yaml").write_text(recipe.replace("squared", "cubed"))
    with pytest.raises(UserError, match=r"mine.yaml:1: method.policy_loss: .*my_loss.py defines no 'cubed'"):
        load(folder / "mine.yaml")
    (folder / "mine.yaml").write_text(recipe.replace("{name: grpo,", "{name: ppo, critic_warmup: 1,"))
    with pytest.raises(UserError, match=r"mine.yaml:1: method.critic_warmup: .*renamed: write critic: \{warmup: ...\}"):
        load(folder / "mine.yaml")


# --- what shapes a batch ------------------------------------------------------------------------------------------


def test_prompts_whose_completions_all_score_alike_are_replaced(make_trainer: Any, tiny_llama: Any) -> None:
    seen: list[str] = []
    scores = itertools.count()

    def some(answers: list[Any]) -> list[float]:
        """Prompts outside of 4 to 8 teach nothing."""
        numbers = [int(a.source.partition(":")[2]) for a in answers]
        seen.extend(a.source for a in answers)
        return [float(next(scores)) if 4 <= n <= 8 else 0.5 for n in numbers]

    def first_batch(limit: int) -> tuple[list[str], dict[str, float]]:
        method = GRPO(some, SAMPLING, dynamic_sampling=limit, kl_coef=0.0)
        trainer = make_trainer(method, tiny_llama(), prompts(12), batch=4, max_steps=1)
        trainer.train()
        loader = trainer.get_train_dataloader()
        return list(dict.fromkeys(seen)), trainer.state.log_history[0] | {"steps": len(loader)}

    drawn, line = first_batch(0)
    seen.clear()
    assert "replaced_prompts" not in line and line["zero_advantage_fraction"] == 0.5  # two of four
    again, replaced = first_batch(5)
    assert again[:4] == drawn[:4] and len(set(again)) == len(again)
    dull = [s for s in again if not 4 <= int(s.partition(":")[2]) <= 8]
    assert replaced["zero_advantage_fraction"] == 0.0
    assert replaced["replaced_prompts"] == len(again) - 4 == len(dull)
    assert replaced["steps"] == line["steps"] == 3
    seen.clear()
    assert first_batch(5)[0] == again  # in a fixed order
    seen.clear()
    limited, line = first_batch(1)
    assert line["replaced_prompts"] == len(limited) - 4 == 2


def test_each_round_of_dynamic_sampling_has_its_own_random_numbers(make_trainer: Any, tiny_llama: Any) -> None:
    drawn: list[float] = []

    def noise(answers: list[Any]) -> list[float]:
        """One random number for all completions of a call, so that the second round replaces every prompt."""
        drawn.append(random.random())
        return [drawn[-1]] * len(answers)

    for _ in range(2):
        method = GRPO(noise, SAMPLING, dynamic_sampling=2, kl_coef=0.0)
        trainer = make_trainer(method, tiny_llama(), prompts(12), batch=4, max_steps=1)
        next(iter(trainer.get_train_dataloader()))
    assert len(drawn) == 6 and drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_long_completions_lose_score(make_trainer: Any, tiny_llama: Any) -> None:
    def returns(**settings: Any) -> tuple[list[tuple[int, float]], dict[str, float]]:
        advantage = {"lam": 1.0, "whiten": False}
        method = PPO(by_tokens, SAMPLING, kl_coef=0.0, critic="shared", epochs=1, advantage=advantage, **settings)
        model = tiny_llama()
        model.generation_config.eos_token_id = [2, *range(15, 25)]
        trainer = make_trainer(method, model, prompts(4), batch=4)
        (step,) = iter(trainer.get_train_dataloader())
        sequences = [example.sequences[0] for example in step]
        first = [float(s.arrays["returns"][s.loss_mask][0]) for s in sequences]
        return [(int(s.loss_mask.sum()), x) for s, x in zip(sequences, first, strict=True)], trainer.pending

    free, penalized = (returns(**settings) for settings in ({}, {"overlong": {"buffer": 4, "penalty": 2.0}}))
    losses = []
    for (n, a), (m, b) in zip(free[0], penalized[0], strict=True):
        losses.append(2.0 * max(0, n - 2) / 4)
        assert n == m and b == pytest.approx(a - losses[-1], abs=1e-6)
    assert len(set(losses)) > 1
    assert penalized[1]["overlong"] == [pytest.approx(-sum(losses) / len(losses))]


def test_a_correction_weighs_the_loss_and_not_the_advantage(make_trainer: Any, tiny_llama: Any) -> None:
    method = Reinforce(by_tokens, SAMPLING, correction={"mode": "mask", "level": "sequence"}, reduction="token_mean")
    trainer = make_trainer(method, tiny_llama(), prompts(2), batch=2)
    (step,) = iter(trainer.get_train_dataloader())
    assert trainer.pending["correction_touched"] == [0.0]
    assert trainer.pending["effective_sample_size"] == [pytest.approx(1.0, abs=1e-6)]
    half = [type(e)((e.sequences[0].with_arrays(correction=0.5 * e.sequences[0].arrays["correction"]),)) for e in step]
    batches = [trainer.engine.layout.collate(examples) for examples in (step, half)]
    whole, less = (method.loss(trainer.network, batch)["policy"].total.item() for batch in batches)
    assert abs(whole) > 0.1 and less == pytest.approx(whole / 2, rel=1e-5)
    with torch.no_grad():
        terms = method.loss(trainer.network, batches[1])
    assert terms["ratio"].total == pytest.approx(sum(int(e.sequences[0].loss_mask.sum()) for e in step), abs=1e-3)
