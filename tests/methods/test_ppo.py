"""PPO through the trainer on models with random weights: identities of the update, and what each setting does."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from burnish.errors import UserError
from burnish.generate.sampling import Sampling
from burnish.rewards.functions import NamedReward
from burnish.types import Example, Sequence, Trajectory

MONTE_CARLO = {"lam": 1.0, "whiten": False}


@torch.no_grad()
def plain_logprobs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities (T - 1,) of tokens 1 to T - 1 by transformers alone."""
    tokens = torch.tensor([sequence.tokens.tolist()])
    logits = model(input_ids=tokens).logits[0].double() / temperature
    return logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


# --- identities of the update -------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"critic": "shared"},
    "lora": {"lora": True},
    "lora shared": {"lora": True, "critic": "shared"},
    "warped": {"sampling": Sampling(max_new_tokens=6, temperature=0.7, top_k=20, top_p=0.9)},
    "groups": {"sampling": Sampling(max_new_tokens=6, samples=4), "arguments": {"batch": 2}},
    "cut": {"arguments": {"own": {"token_budget": 80}}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_mini_batch_has_ratio_one_and_the_loss_of_its_advantages(kind: str, run: Any) -> None:
    found = run(**KINDS[kind])
    per_iteration = 4
    assert len(found.log) == len(found.steps) == per_iteration * len(found.batches)
    for number, (line, examples) in enumerate(zip(found.log, found.steps, strict=True)):
        if number % per_iteration == 0:
            advantages = found.learned(examples, "advantages")
            assert line["ratio"] == pytest.approx(1, abs=1e-5)
            assert line["approxkl"] < 1e-5 and line["clipfrac"] < 1e-5
            assert line["policy"] == pytest.approx(-math.fsum(advantages) / len(advantages), abs=1e-5)
        assert 0 <= line["entropy"] <= math.log(105)
    assert any(abs(line["ratio"] - 1) > 1e-3 for line in found.log)
    assert max(found.experience("sampler_mismatch")) < 1e-5


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("warp", [{}, {"temperature": 0.7}, {"top_k": 3, "top_p": 0.9}], ids=str)
def test_the_first_kl_is_exactly_zero(lora: bool, warp: dict, run: Any) -> None:
    found = run(lora=lora, mini_batches=1, sampling=Sampling(max_new_tokens=6, **warp))
    first, second = found.experience("kl")
    assert first == 0.0 and abs(second) > 1e-3
    assert (found.trainer.method.reference.frozen is None) == lora
    assert found.experience("rlhf_reward")[0] == pytest.approx(found.experience("score")[0])
    assert found.experience("rlhf_reward")[1] == pytest.approx(found.experience("score")[1] - 0.05 * second)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_summed_rewards_are_the_score_less_the_sequence_log_ratio(temperature: float, run: Any, policy: Any) -> None:
    model = policy()
    reference = copy.deepcopy(model)
    found = run(
        model=model,
        sampling=Sampling(max_new_tokens=6, temperature=temperature),
        kl_coef=0.3,
        advantage={"lam": 1.0, "whiten": False},
        mini_batches=1,
    )
    ratios = []
    for example in found.batches[1]:
        (sequence,) = example.sequences
        at = sequence.loss_mask.tolist().index(True)
        now = math.fsum(found.learned([example], "old_logprobs"))
        ratios.append(now - plain_logprobs(reference, sequence, temperature)[at - 1 :].sum().item())
        # undiscounted, the first return is the sum of all rewards
        assert sequence.arrays["returns"][at] == pytest.approx(found.score(example) - 0.3 * ratios[-1], abs=1e-4)
        returns, values, advantages = (found.learned([example], x) for x in ("returns", "values", "advantages"))
        assert [r - v for r, v in zip(returns, values, strict=True)] == pytest.approx(advantages, abs=1e-5)
    assert max(map(abs, ratios)) > 0.01
    assert found.experience("kl")[1] == pytest.approx(sum(ratios) / 4, abs=1e-4)


def test_tokens_at_the_edge_of_the_nucleus_keep_a_probability(run: Any, tiny_llama: Any) -> None:
    # sampler and trainer round differently, and updates move tokens out of what top-p keeps
    sampling = Sampling(max_new_tokens=12, top_p=0.5, samples=8)
    found = run(model=tiny_llama(dtype=torch.bfloat16), sampling=sampling, rows=16, arguments={"lr": 1e-4})
    assert max(found.experience("sampler_mismatch")) < 0.05
    moved = run(sampling=Sampling(max_new_tokens=6, top_k=2, samples=4), epochs=4)
    assert max(line["approxkl"] for line in moved.log) < 20  # 200 where a ratio is taken for 0


def test_whitening_is_over_the_whole_batch(run: Any) -> None:
    found = run(rows=4)
    (examples,) = found.batches
    pooled = torch.tensor(found.learned(examples, "advantages"), dtype=torch.float64)
    assert pooled.mean().item() == pytest.approx(0, abs=1e-6)
    assert pooled.var().item() == pytest.approx(1, abs=1e-5)
    assert all(abs(torch.tensor(found.learned([e], "advantages")).mean()) > 1e-2 for e in examples)


def test_whitened_rewards_keep_their_mean(run: Any) -> None:
    runs = [run(rows=4, advantage={"gamma": 0.0, "lam": 0.0}, whiten_rewards=whiten) for whiten in (False, True)]
    plain, white = (torch.tensor(found.learned(found.batches[0], "returns")).double() for found in runs)
    assert white.var().item() == pytest.approx(1, abs=1e-4) and abs(plain.var().item() - 1) > 0.05
    assert white.mean().item() == pytest.approx(plain.mean().item(), abs=1e-6)
    assert torch.allclose(white - white.mean(), (plain - plain.mean()) / plain.std(), atol=1e-5)


def test_every_pass_is_a_fresh_permutation_of_the_batch(run: Any) -> None:
    sampling = Sampling(max_new_tokens=4, samples=4)
    found = run(epochs=3, mini_batches=4, sampling=sampling, arguments={"lr": 1e-4})
    number = {id(example): i for batch in found.batches for i, example in enumerate(batch)}
    orders = [[number[id(e)] for step in found.steps[i : i + 4] for e in step] for i in range(0, 24, 4)]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    again = run(epochs=3, mini_batches=4, sampling=sampling, arguments={"lr": 1e-4})
    assert [[tuple(e.sequences[0].tokens) for e in s] for s in again.steps] == [
        [tuple(e.sequences[0].tokens) for e in s] for s in found.steps
    ]
    assert again.policy == found.policy


def test_what_follows_the_stop_token_has_no_effect(run: Any) -> None:
    found = run(rows=4, entropy_coef=0.01)
    stopped = [e for e in found.batches[0] if found.ends(e)]
    assert stopped and all(found.ends(e) == [len(found.completion(e)) - 1] for e in stopped)
    (sequence,) = stopped[0].sequences

    def after(*tokens: int) -> dict[str, tuple[float, float]]:
        more = len(tokens)
        longer = Sequence(
            (*sequence.tokens, *tokens),
            (*sequence.loss_mask, *[False] * more),
            "longer",
            {name: [*values, *[7.0] * more] for name, values in sequence.arrays.items()},
        )
        with torch.no_grad():
            terms = found.trainer.method.loss(
                found.trainer.network, found.trainer.engine.layout.collate([Example((longer,))])
            )
        return {name: (float(term.total), float(term.count)) for name, term in terms.items()}

    expected = after()
    for tokens in ((9,), (50, 2, 60)):
        for name, values in after(*tokens).items():
            assert values == pytest.approx(expected[name], abs=1e-5), name


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "expected"), [("subtract", lambda s: s - 0.75), ("replace", lambda s: 0.75)])
def test_the_rule_for_missing_ends_changes_only_rows_without_one(rule: str, expected: Any, run: Any) -> None:
    settings = {"rows": 16, "arguments": {"batch": 16}, "advantage": MONTE_CARLO, "kl_coef": 0.0}
    free, found = (run(missing_eos=name, missing_eos_penalty=0.75, **settings) for name in ("none", rule))
    stopped = 0
    for a, b in zip(free.batches[0], found.batches[0], strict=True):
        if found.ends(a):
            stopped += 1
            assert a == b
        else:
            returned = found.learned([b], "returns")
            assert returned == pytest.approx([expected(found.score(a))] * len(returned), abs=1e-6)
    assert 0 < stopped < 16


def test_scores_are_scaled_then_clipped(run: Any) -> None:
    found = run(rows=4, score_scale=2.0, score_clip=0.8, advantage=MONTE_CARLO, kl_coef=0.0)
    for example in found.batches[0]:
        expected = min(max(2 * found.score(example), -0.8), 0.8)
        assert found.learned([example], "returns")[0] == pytest.approx(expected, abs=1e-6)
    raw = [found.score(e) for e in found.batches[0]]
    assert found.experience("score") == [pytest.approx(sum(raw) / 4)]  # of what the rewards gave


def test_rewards_are_weighed_and_weight_zero_only_measures(run: Any, by_tokens_reward: Any) -> None:
    def lengths(answers: list[Trajectory]) -> list[float]:
        return [float(len(a.tokens)) for a in answers]

    both = [NamedReward("by_tokens", 2.0, by_tokens_reward), NamedReward("length", -0.5, lengths)]
    found = run(reward=both, advantage=MONTE_CARLO, kl_coef=0.0, rows=4)
    for example in found.batches[0]:
        expected = 2 * found.score(example) - 0.5 * len(found.completion(example))
        assert found.learned([example], "returns")[0] == pytest.approx(expected, abs=1e-5)
    line = found.log[0]
    assert line["score"] == pytest.approx(2 * line["reward_by_tokens"] - 0.5 * line["reward_length"])
    assert line["reward_length"] == line["length"]
    alone = run(reward=[NamedReward("by_tokens", 1.0, by_tokens_reward)])
    watched = run(reward=[NamedReward("by_tokens", 1.0, by_tokens_reward), NamedReward("length", 0.0, lengths)])
    assert watched.policy == alone.policy and "reward_length" in watched.log[0]


# --- the coefficient of the KL ------------------------------------------------------------------------------------


def test_the_coefficient_follows_the_kl_as_computed_by_hand(run: Any) -> None:
    found = run(rows=24, kl_coef=0.2, kl_target=0.3, kl_horizon=40.0, mini_batches=1)
    coefficients, kls = found.experience("kl_coef"), found.experience("kl")
    assert len(coefficients) == 6 and coefficients[0] == 0.2
    for (now, after), kl in zip(pairwise(coefficients), kls, strict=False):
        assert after == pytest.approx(now * (1 + min(max(kl / 0.3 - 1, -0.2), 0.2) * 4 / 40), rel=1e-9)
    assert coefficients[1] == pytest.approx(0.2 * 0.98) and len(set(coefficients)) == 6


def test_without_a_reference_there_is_no_kl(run: Any) -> None:
    found = run(reference=False, kl_coef=0.0)
    assert found.trainer.method.reference is None
    assert not {"kl", "kl_coef", "rlhf_reward"} & {key for line in found.log for key in line}
    assert found.policy[-1] != found.policy[0]
    assert found.policy == run(kl_coef=0.0).policy


def test_iterations_limit_a_run_whose_model_stays_usable(run: Any) -> None:
    found = run(iterations=1, epochs=2, mini_batches=2)
    assert len(found.log) == 4 and found.trainer.method.steps_per_iteration == 4
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(found.trainer.model(ids).logits, found.trainer.network.policy(input_ids=ids).logits)
    with pytest.raises(UserError, match="max_steps 3 and iterations 1: set only one of them"):
        run(iterations=1, arguments={"max_steps": 3})
