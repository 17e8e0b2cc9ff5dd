"""The sums of a process's memory: numbers that were computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from burnish.plan.memory import ModelSize, Needs, Sampling, logits_bytes, memory, state_bytes

POLICY = ModelSize(
    "policy",
    weights=1000,
    rest=200,
    layer=100,
    trained=1000,
    trained_rest=200,
    trained_layer=100,
    states=2000,
    embedding=150,
    tied=True,
)
CRITIC = ModelSize(
    "critic", weights=900, rest=100, layer=100, trained=900, trained_rest=100, trained_layer=100, states=1800
)
REFERENCE = ModelSize("reference", weights=1000, rest=200, layer=100)
REWARD = ModelSize("reward model", weights=500)


def test_a_step_of_several_micro_batches_has_gradients_beside_activations() -> None:
    found = memory(Needs(trained=(POLICY,), activations=5000, logits=700, micro_batches=2, reserved=30))
    assert found.phases == {
        "training": {
            "policy": 1000,
            "optimizer": 2000,
            "activations": 5000,
            "logits": 700,
            "gradients": 1000,
            "reserved": 30,
        }
    }
    assert found.peak == found.totals["training"] == 9730


def test_a_step_of_one_micro_batch_has_activations_or_gradients() -> None:
    large = memory(Needs(trained=(POLICY,), activations=5000, logits=700))
    small = memory(Needs(trained=(POLICY,), activations=500, logits=700))
    assert large.peak == 1000 + 2000 + 5000 + 700
    assert small.peak == 1000 + 2000 + (1000 + 2 * 150)  # the end of the backward pass, with tied embeddings


def test_frozen_models_and_a_generator_stay_in_memory() -> None:
    sampling = Sampling(cache=4000, passes=60, copy=1000)
    needs = Needs(trained=(POLICY, CRITIC), frozen=(REFERENCE,), whole=(REWARD,), activations=9000, sampling=sampling)
    found = memory(needs)
    held = 1000 + 900 + 1000 + 500 + 3800 + 1000
    assert found.totals == {"training": held + 9000, "sampling": held + 4060}


def test_merging_loads_the_policy_again_beside_what_is_held() -> None:
    found = memory(Needs(trained=(POLICY,), whole=(REWARD,), activations=100, merged=2500, reserved=30))
    assert found.phases["merging"] == {"policy": 2500, "reward model": 500, "optimizer": 2000, "reserved": 30}
    assert found.peak == 5030 and "merging" not in memory(Needs(trained=(POLICY,))).phases


def test_shards() -> None:
    """Weights, gradients and states are divided; frozen embeddings are not, and gathered layers come on top."""
    needs = Needs(
        trained=(POLICY, CRITIC), frozen=(REFERENCE,), whole=(REWARD,), activations=50, micro_batches=3, processes=4
    )
    whole, shards = memory(needs), memory(replace(needs, sharded=True))
    assert whole.phases["training"]["policy"] == 1000
    assert shards.phases["training"] == {
        "policy": 250,
        "critic": 225,
        "reference": 800 / 4 + 200,
        "reward model": 500,
        "optimizer": 950,
        "gathered layers": (200 + 200) + (100 + 100) + 2 * (100 + 100),
        "activations": 50,
        "gradients": 475,
    }


def test_two_judges_share_a_row_and_add_up() -> None:
    found = memory(Needs(whole=(REWARD, REWARD)))
    assert found.phases == {"sampling": {"reward model": 1000}} and found.peak == 1000


def test_logits_and_their_gradient() -> None:
    assert logits_bytes(10, 100, 0) == 4 * 10 * 100
    assert logits_bytes(10, 100, 9999) == 4 * 10 * 100 + 9999  # and the gradient of the head's weights
    assert logits_bytes(10, 100, 0, item=2) == 2 * 10 * 100
    assert logits_bytes(10, 100, 0, filtered=True) == 3 * 4 * 10 * 100
    assert logits_bytes(10, 100, 9999, filtered=True) == 2 * 4 * 10 * 100 + 9999
    assert logits_bytes(10, 100, 0, item=2, filtered=True) == (3 * 4 + 2) * 10 * 100
    most = logits_bytes(2**20, 2**16, 0)
    assert most == 4 * 2**26  # chunks


@pytest.mark.parametrize(
    ("optimizer", "arguments", "expected"),
    [
        ("adamw_torch_fused", None, 8000),
        ("adamw_bnb_8bit", None, 2000),
        ("adamw_torch_4bit", None, 1000),
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 4000),
        ("lion_32bit", None, 4000),
        ("paged_lion_8bit", None, 1000),
        ("ademamix", None, 12000),
        ("adafactor", None, 0),
    ],
)
def test_states_of_a_thousand_weights(optimizer: str, arguments: str | None, expected: int) -> None:
    assert state_bytes(optimizer, arguments, trained=4000, count=1000) == expected
