"""PPO through the trainer: which parts learn, when an update ends, and settings that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    TrainerCallback,
)

from burnish import PPO, UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion
from burnish.generate.sampling import Sampling
from burnish.models.forward import SamplingTransform
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rl.loader import Sampler

TOP_K = Sampling(max_new_tokens=6, top_k=20)


class Taken(TrainerCallback):
    """Notes each optimizer step that was taken."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


# --- which parts learn --------------------------------------------------------------------------------------------

CRITICS = [("separate", False), ("shared", False), ("separate", True), ("shared", True)]


@pytest.mark.parametrize(("kind", "lora"), CRITICS)
def test_warm_up_leaves_the_policy_alone_and_then_lets_it_go(kind: str, lora: bool, run: Any) -> None:
    critic = {"name": kind, "warmup": 2}
    found = run(critic=critic, lora=lora, rows=12, entropy_coef=0.1, arguments={"weight_decay": 0.1})
    assert len(found.policy) == 13
    assert len(set(found.policy[:9])) == 1, "two iterations of four steps"
    assert len(set(found.policy[8:])) == 5
    assert len(set(found.critic)) == 13


@pytest.mark.parametrize(("kind", "lora"), CRITICS)
def test_a_frozen_critic_keeps_its_bytes(kind: str, lora: bool, run: Any) -> None:
    found = run(critic={"name": kind, "frozen": True}, lora=lora, rows=4, arguments={"weight_decay": 0.1})
    assert len(set(found.critic)) == 1
    assert len(set(found.policy)) == 5


def test_the_base_of_an_adapter_keeps_its_bytes(run: Any, policy: Any) -> None:
    model = policy(lora=True)
    base = {name: x.clone() for name, x in model.state_dict().items() if "lora" not in name}
    found = run(model=model)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in base.items())
    critic = found.trainer.network.critic
    trained = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name or "score" in name for name in trained)


def test_the_critic_has_a_learning_rate_of_its_own(run: Any) -> None:
    # unclipped, since one gradient norm is taken of policy and critic together
    fast, slow = (
        run(rows=4, arguments={"max_grad_norm": 0.0}, critic={"learning_rate": rate}) for rate in (None, 1e-12)
    )
    assert slow.policy == fast.policy
    before, after = (torch.frombuffer(bytearray(slow.critic[i]), dtype=torch.float32) for i in (0, -1))
    assert (after - before).abs().max() < 1e-9
    assert fast.critic[-1] != fast.critic[0]


@pytest.mark.parametrize("labels", [1, 3])
def test_a_critic_starts_from_a_causal_reward_model_with_one_label(
    labels: int, run: Any, policy: Any, tiny_tokenizer: Any
) -> None:
    torch.manual_seed(5)
    names = {i: f"label {i}" for i in range(labels)}
    config = LlamaConfig.from_dict(
        policy().config.to_dict() | {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    )
    classifier = LlamaForSequenceClassification(config).eval()

    # the critic starts at the scale of the model's part in the score: 0.5 * 4 * (logit - 0.25) / 2
    classifier.config.score_mean, classifier.config.score_std = 0.25, 2.0
    scorer = NamedReward("model", 0.5, ModelReward(classifier, tiny_tokenizer, label=0, normalize=True))
    found = run(reward=[scorer], score_scale=4.0, critic={"frozen": True}, rows=4)
    critic = found.trainer.network.critic
    assert torch.equal(critic.model.layers[0].mlp.up_proj.weight, classifier.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(critic.score.weight, classifier.score.weight if labels == 1 else torch.zeros(1, 32))
    (sequence,) = found.batches[0][0].sequences
    at = sequence.loss_mask.tolist().index(True)
    with torch.no_grad():
        hidden = classifier.model(torch.tensor([sequence.tokens.tolist()])).last_hidden_state
    value = classifier.score(hidden)[0, at - 1, 0].item() - 0.25 if labels == 1 else 0.0
    assert sequence.arrays["values"][at] == pytest.approx(value, abs=1e-5)  # before the token is chosen
    copied = run(reward=[scorer], critic={"start": "policy", "frozen": True}, rows=4).trainer.network
    assert torch.equal(copied.critic.score.weight, torch.zeros(1, 32))


# --- ends of an update --------------------------------------------------------------------------------------------


def test_the_rest_of_an_update_is_left_out_once_the_policy_moved_too_far(run: Any) -> None:
    free = run(epochs=3, arguments={"weight_decay": 0.1})
    found = run(epochs=3, target_kl=1e-6, arguments={"weight_decay": 0.1})
    taken = [bool(step) for step in found.steps]
    assert len(taken) == len(free.steps) == found.trainer.state.global_step == 12
    # the second step's own pass tells that the first went too far
    assert taken == [True, True, False, False, False, False] * 2
    for number, step in enumerate(taken):
        assert (found.policy[number + 1] == found.policy[number]) != step
        assert (found.critic[number + 1] == found.critic[number]) != step
    lines = [line for line in found.log if "tokens" in line]
    assert [line["stopped_fraction"] == 0 for line in lines] == taken
    assert ["loss" in line for line in lines] == taken, "a step that is left out has no loss"
    first = free.log[1]["approxkl"]
    for limit, goes_on in ((first / 1.5 * 0.99, False), (first / 1.5 * 1.01, True)):
        near = run(epochs=3, target_kl=limit, arguments={"weight_decay": 0.1})
        assert bool(near.steps[2]) == goes_on


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
def test_every_reduction_divides_by_its_own_count(reduction: str, run: Any) -> None:
    found = run(
        rows=4,
        reduction=reduction,
        policy_loss={"dual_clip": 3.0},
        critic={"clip": 0.2},
        entropy_coef=0.01,
        mini_batches=1,
    )
    examples, line = found.steps[0], found.log[0]
    sums = [math.fsum(found.learned([e], "advantages")) for e in examples]
    sizes = [len(found.completion(e)) for e in examples]
    expected = {
        "token_mean": sum(sums) / sum(sizes),
        "sequence_mean": sum(s / n for s, n in zip(sums, sizes, strict=True)) / 4,
        "sequence_sum": sum(sums) / 4,
        "fixed_length": sum(sums) / 6 / 4,
    }[reduction]
    assert line["policy"] == pytest.approx(-expected, abs=1e-5)
    assert line["loss"] == pytest.approx(line["policy"] + 0.5 * line["value"] - 0.01 * line["entropy"], abs=1e-4)


# --- sizes --------------------------------------------------------------------------------------------------------


def test_a_last_batch_may_be_smaller(run: Any) -> None:
    found = run(rows=10, epochs=1, arguments={"num_train_epochs": 2})
    assert [len(batch) for batch in found.batches] == [4, 4, 2] * 2
    assert [len(step) for step in found.steps] == [2, 2, 2, 2, 1, 1] * 2
    for epoch in (found.batches[:3], found.batches[3:]):
        assert sorted(e.source for batch in epoch for e in batch) == sorted(f"prompts:{i}" for i in range(10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 3}, "3 prompts do not fill one batch of 4"),
        ({"rows": 4, "mini_batches": 3}, "4 prompts x 1 samples cannot be divided into 3 equal mini-batches"),
        ({"rows": 9, "mini_batches": 2}, "1 prompts x 1 samples cannot be divided into 2 equal mini-batches"),
        ({"kl_target": 1.0, "kl_horizon": 0.5}, "horizon of 0.5 is too short for 4 sequences"),
        ({"arguments": {"own": {"truncation": None}}, "sampling": Sampling(temperature=0.0)}, "temperature"),
    ],
)
def test_sizes_that_do_not_fit_are_told(settings: dict, message: str, run: Any) -> None:
    with pytest.raises(UserError, match=message):
        run(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": False}, "kl_coef 0.05 needs a reference"),
        ({"kl_target": 6.0, "kl_coef": 0.0}, "0 stays 0"),
        ({"critic": {"warmup": 1, "frozen": True}}, "would train nothing"),
        ({"critic": {"warmup": 1, "coef": 0.0}}, "would train nothing"),
        ({"kl_coeff": 0.1}, "kl_coeff"),
    ],
)
def test_settings_that_contradict_each_other_are_told(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PPO(lambda answers: [0.0] * len(answers), **settings)


def test_a_sampler_that_lies_stops_the_run(run: Any) -> None:
    class Liar(LocalGenerator):
        def poll(self, timeout: float | None) -> list[tuple[int, Completion]]:
            return [(handle, replace(c, logprobs=c.logprobs - 0.06)) for handle, c in super().poll(timeout)]

    with pytest.raises(RuntimeError, match=r"differ by 0\.06 nats per token on average \(limit 0\.05\)"):
        run(generator=Liar)
    found = run(generator=Liar, max_sampler_mismatch=0.07, rows=4)
    assert found.experience("sampler_mismatch") == [pytest.approx(0.06, abs=1e-5)]
    assert found.log[0]["ratio"] == pytest.approx(1, abs=1e-5)  # of the trainer's own log-probabilities


def test_a_critic_with_a_window_of_its_own_decides_how_rows_lie(run: Any, tiny_tokenizer: Any) -> None:
    shape = {"vocab_size": len(tiny_tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": tiny_tokenizer.pad_token_id}
    common: dict[str, Any] = shape | heads | {"num_labels": 1}

    def start(window: int | None) -> dict[str, Any]:
        """A policy that sees all, and a reward model, of which the critic is made, that sees a window."""
        torch.manual_seed(0)
        policy = MistralForCausalLM(MistralConfig(**common, sliding_window=None))
        scorer = MistralForSequenceClassification(MistralConfig(**common, sliding_window=window))
        reward = [NamedReward("reward", 1.0, ModelReward(scorer, tiny_tokenizer))]
        return {"model": policy, "reward": reward, "sampling": Sampling(max_new_tokens=6, samples=2), "rows": 4}

    for window, fits in ((None, True), (4, False)):
        how = {"optim": "sgd"}  # of Adam's steps the least rounding decides
        found = run(**start(window), arguments=how)
        layout = found.trainer.engine.layout
        assert (layout.packed, layout.can_share()) == (fits, fits)
        padded = run(**start(window), arguments=how | {"own": {"packed": False, "shared_prompts": False}})
        for name in ("policy", "value"):
            ours, theirs = ([line[name] for line in run.log] for run in (found, padded))
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_lie_about_a_rollout_that_is_not_looked_at_before_stops_the_first_step(run: Any, epochs: int) -> None:
    class Liar(LocalGenerator):
        def submit(self, requests: Any, version: int) -> list[int]:
            _, self.second, *_ = handles = super().submit(requests, version)
            return handles

        def poll(self, timeout: float | None) -> list[tuple[int, Completion]]:
            done = super().poll(timeout)
            return [(n, replace(c, logprobs=c.logprobs - 0.3 * (n == self.second))) for n, c in done]

    how = {"epochs": epochs, "mini_batches": 1, "rows": 4}  # one batch: the last iteration is looked at too
    taken: list[Any] = []
    with pytest.raises(RuntimeError, match=r"differ by 0\.\d+ nats per token in the first step .* \(limit 0\.05\)"):
        run(generator=Liar, arguments={"own": {"callbacks": [Taken(taken)]}}, **how)
    assert not taken
    found = run(generator=Liar, max_sampler_mismatch=0.5, **how)
    assert len(found.steps) == epochs
    # rounding of half precision between two passes of the trainer is no gap to the sampler
    loader = found.trainer.loader
    loader.run.last = lambda: {"approxkl": 1.0}
    loader.mismatch_checked = False
    with pytest.raises(RuntimeError, match=r"differ by 1\.4 nats per token in the first step"):
        loader.check()
    loader.use_sampler_logprobs = False
    loader.check()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [1, 0]), ({"correction": {"mode": "truncate"}}, [8, 0]), ({"sampling": TOP_K}, [1, 8])],
    ids=str,
)
def test_what_was_sampled_needs_no_second_pass_of_the_policy(
    settings: dict, expected: list[int], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any, int]] = []
    logprobs = Sampler.logprobs

    def watched(self: Any, model: Any, batch: Any, how: Any, *rest: Any) -> torch.Tensor:
        seen.append((model, how, len(batch.ends)))
        return logprobs(self, model, batch, how, *rest)

    monkeypatch.setattr(Sampler, "logprobs", watched)
    found = run(rows=16, arguments={"batch": 8}, **settings)
    policy, reference = found.trainer.network.policy, found.trainer.method.reference.frozen
    whole = SamplingTransform(1.0)

    def rollouts(model: Any, sampled: bool) -> int:
        return sum(n for m, how, n in seen if m is model and (how == found.trainer.method.sampler.transform) == sampled)

    assert rollouts(reference, whole == found.trainer.method.sampler.transform) == 16
    # of the second iteration alone for the KL: in the first the policy still is the reference
    assert [rollouts(policy, True), rollouts(policy, False)] == [2 * expected[0], expected[1]]
    assert max(found.experience("sampler_mismatch")) < 1e-5
