"""Policy losses: numbers by hand, and identities between them; corrections for samplers that are not the trainer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.math import policy
from burnish.math.reductions import sequence_mean

F64 = torch.float64
CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
LOSSES: dict[str, Any] = {
    "reinforce": partial(policy.reinforce, floor=None, unlikelihood=False),
    "clip": partial(policy.clip, **CLIPS),
    "gspo": partial(policy.gspo, **CLIPS),
    "gspo_token": partial(policy.gspo_token, **CLIPS),
    "cispo": partial(policy.cispo, clip_high=0.3, dual_clip=None),
    "sapo": partial(policy.sapo, tau_positive=1.0, tau_negative=1.5, dual_clip=None),
}


def batch(seed: int, rows: int = 3, width: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities now and before, advantages, a mask, and two sequences a row, each with a learned token."""
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages = torch.randn(3, rows, width, dtype=F64, generator=generator)
    old = -old.abs()
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[:, [1, width - 1]] = True
    segments = (torch.arange(width) >= width // 2).long().repeat(rows, 1) + 1
    return old + 0.3 * noise, old, advantages, mask, segments


def gradient(
    losses: Tensor, mask: Tensor, segments: Tensor, logprobs: Tensor, reduction: Any = sequence_mean
) -> Tensor:
    term = reduction(losses, mask, segments)
    return torch.autograd.grad(term.total / term.count, logprobs)[0]


def of_sequences(x: Tensor, segments: Tensor) -> Tensor:
    """The first number of each sequence for all of its tokens."""
    return torch.where(segments == 1, x[:, :1], x[:, -1:])


# --- by hand ------------------------------------------------------------------------------------------------------

# Two sequences in a row, of two tokens and of one; between them is a token that is not learned.
OLD = torch.tensor([[-1.0, -2.0, -9.0, -0.5]], dtype=F64)
NEW = torch.tensor([[-0.7, -2.1, -3.0, -0.3]], dtype=F64)
MASK = torch.tensor([[True, True, False, True]])
SEGMENTS = torch.tensor([[1, 1, 2, 2]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 5.0, -2.0]], dtype=F64)


def test_gspo_by_hand() -> None:
    new = NEW.clone().requires_grad_()
    # the mean of 0.3 and -0.1 is 0.1, and exp(0.1) = 1.105171; exp(0.2) = 1.221403
    losses, metrics = policy.gspo(new, OLD, ADVANTAGES, MASK, SEGMENTS, clip_low=0.3, clip_high=0.2, dual_clip=None)
    assert losses.tolist() == [pytest.approx([-1.105171, -1.105171, 0.0, 2.442806], abs=1e-6)]
    assert metrics["clipfrac"].tolist() == [[0, 0, 0, 0]]
    # the mean of a sequence has the gradient -A s / 2 in each of its two tokens; there are two sequences
    found = gradient(losses, MASK, SEGMENTS, new)
    assert found.tolist() == [pytest.approx([-0.276293, -0.276293, 0.0, 1.221403], abs=1e-6)]
    losses, metrics = policy.gspo(new, OLD, ADVANTAGES, MASK, SEGMENTS, clip_low=0.3, clip_high=0.05, dual_clip=1.1)
    assert losses.tolist() == [pytest.approx([-1.05, -1.05, 0.0, 2.2])]
    assert metrics["clipfrac"].tolist() == [[1, 1, 0, 0]]
    assert not gradient(losses, MASK, SEGMENTS, new).any()


def test_gspo_of_tokens_by_hand() -> None:
    new = NEW.clone().requires_grad_()
    settings: dict[str, Any] = {"clip_low": 0.3, "clip_high": 0.2, "dual_clip": None}
    advantages = torch.tensor([[1.0, -0.5, 5.0, -2.0]], dtype=F64)
    losses, _ = policy.gspo_token(new, OLD, advantages, MASK, SEGMENTS, **settings)
    assert losses.tolist() == [pytest.approx([-1.105171, 0.552585, 0.0, 2.442806], abs=1e-6)]
    found = gradient(losses, MASK, SEGMENTS, new)  # -A s / 2 of its own token, and two sequences
    assert found.tolist() == [pytest.approx([-0.276293, 0.138146, 0.0, 1.221403], abs=1e-6)]


def test_cispo_by_hand() -> None:
    old = torch.tensor([[-1.2, -0.5, -1.2]], dtype=F64)
    new = torch.tensor([[-0.7, -1.5, -0.7]], dtype=F64, requires_grad=True)
    advantages = torch.tensor([[2.0, -1.0, -2.0]], dtype=F64)
    mask, segments = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.long)
    # exp(0.5) = 1.648721 is above 1.2; exp(-1) = 0.367879
    losses, metrics = policy.cispo(new, old, advantages, mask, segments, clip_high=0.2, dual_clip=None)
    assert losses.tolist() == [pytest.approx([1.2 * 2 * 0.7, -0.367879 * 1.5, -1.2 * 2 * 0.7], abs=1e-6)]
    assert metrics["clipfrac"].tolist() == [[1, 0, 1]]
    assert torch.autograd.grad(losses.sum(), new)[0].tolist() == [pytest.approx([-2.4, 0.367879, 2.4], abs=1e-6)]
    losses, metrics = policy.cispo(new, old, advantages, mask, segments, clip_high=None, dual_clip=1.5)
    assert torch.autograd.grad(losses.sum(), new)[0].tolist() == [pytest.approx([-3.297443, 0.367879, 3.0], abs=1e-6)]
    assert metrics["clipfrac"].tolist() == [[0, 0, 1]]


def test_sapo_by_hand() -> None:
    old = torch.zeros(1, 3, dtype=F64)
    new = torch.tensor([[0.0, math.log(2), math.log(2)]], dtype=F64, requires_grad=True)
    advantages = torch.tensor([[3.0, 1.0, -1.0]], dtype=F64)
    mask, segments = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.long)
    losses, _ = policy.sapo(new, old, advantages, mask, segments, tau_positive=1.0, tau_negative=2.0, dual_clip=None)
    # sigmoid(0) = 1/2, sigmoid(1) = 0.731059, sigmoid(2) = 0.880797
    assert losses.tolist() == [pytest.approx([-6.0, -4 * 0.731059, 2 * 0.880797], abs=1e-5)]
    # the derivative of f is 4 sigmoid (1 - sigmoid), and that of r is r
    expected = [-3.0, -2 * 4 * 0.731059 * 0.268941, 2 * 4 * 0.880797 * 0.119203]
    assert torch.autograd.grad(losses.sum(), new)[0].tolist() == [pytest.approx(expected, abs=1e-5)]


# --- identities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 10_000))
def test_at_ratio_one_every_loss_has_the_gradient_of_reinforce(name: str, seed: int) -> None:
    new, _, advantages, mask, segments = batch(seed)
    advantages = of_sequences(advantages, segments)
    new.requires_grad_()
    found, expected = (
        gradient(LOSSES[kind](new, new.detach(), advantages, mask, segments)[0], mask, segments, new)
        for kind in (name, "reinforce")
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10_000))
def test_gspo_of_sequences_with_one_token_is_clip(seed: int) -> None:
    new, old, advantages, mask, _ = batch(seed)
    new.requires_grad_()
    segments = torch.arange(1, 9).repeat(3, 1)
    expected, clipped = LOSSES["clip"](new, old, advantages, mask, segments)
    expected_gradient = gradient(expected, mask, segments, new)
    for name in ("gspo", "gspo_token"):
        found, metrics = LOSSES[name](new, old, advantages, mask, segments)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(metrics["clipfrac"], clipped["clipfrac"])
        torch.testing.assert_close(gradient(found, mask, segments, new), expected_gradient, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10_000))
def test_gspo_of_tokens_is_gspo_where_a_sequence_has_one_advantage(seed: int) -> None:
    new, old, advantages, mask, segments = batch(seed)
    new.requires_grad_()
    advantages = of_sequences(advantages, segments)
    one, two = (LOSSES[name](new, old, advantages, mask, segments)[0] for name in ("gspo", "gspo_token"))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        gradient(one, mask, segments, new), gradient(two, mask, segments, new), rtol=1e-9, atol=1e-12
    )


@given(st.integers(0, 10_000))
def test_cispo_without_a_cap_is_the_ratio_times_reinforce(seed: int) -> None:
    new, old, advantages, mask, segments = batch(seed)
    found, metrics = policy.cispo(new, old, advantages, mask, segments, clip_high=None, dual_clip=None)
    expected = -(new - old).exp() * advantages * new
    torch.testing.assert_close(found, torch.where(mask, expected, 0), rtol=1e-9, atol=1e-12)
    assert not metrics["clipfrac"].any()


@pytest.mark.parametrize("name", ["clip", "gspo", "gspo_token", "sapo", "cispo"])
def test_a_dual_clip_bounds_only_negative_advantages(name: str) -> None:
    new, old, advantages, mask, segments = batch(0)
    new = new + 1.0
    free, bounded = (LOSSES[name](new, old, advantages, mask, segments, dual_clip=c)[0] for c in (None, 1.1))
    down = mask & (advantages < 0)
    assert torch.equal(free[~down], bounded[~down])
    assert not torch.equal(free[down], bounded[down])
    if name != "cispo":  # where the weight is bounded, and not the loss
        assert bool((bounded[down] <= -1.1 * advantages[down] + 1e-12).all())


@pytest.mark.parametrize("name", LOSSES)
def test_packing_does_not_change_a_loss(name: str) -> None:
    new, old, advantages, mask, segments = batch(3)
    found, _ = LOSSES[name](new, old, advantages, mask, segments)
    one_a_row = [x.reshape(6, 4) for x in (new, old, advantages, mask)]
    alone, _ = LOSSES[name](*one_a_row, torch.ones(6, 4, dtype=torch.long))
    torch.testing.assert_close(found.reshape(6, 4), alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    new = torch.tensor([[-500.0, -200.0, 0.0]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1.0, -500.0]]), torch.ones(1, 3, dtype=torch.bool)
    losses, _ = LOSSES[name](new, old, torch.tensor([[1.0, -1.0, -1.0]]), mask, mask.long())
    assert losses.isfinite().all()
    assert torch.autograd.grad(losses.sum(), new)[0].isfinite().all()


# --- corrections --------------------------------------------------------------------------------------------------

BOUNDS: dict[str, Any] = {"cap": 2.0, "low": 0.5, "high": 2.0}


def test_corrections_by_hand() -> None:
    sampler = torch.log(torch.tensor([[0.5, 0.1, 0.4, 0.9, 0.2]], dtype=F64))
    ours = torch.log(torch.tensor([[0.5, 0.9, 0.1, 0.3, 0.3]], dtype=F64))
    mask = torch.tensor([[True, True, True, False, True]])
    segments = torch.tensor([[1, 1, 1, 1, 2]])
    given = ours, sampler, mask, segments

    def found(level: str, mode: str) -> tuple[list[float], list[bool]]:
        weights, touched = policy.correction_weights(*given, level=level, mode=mode, **BOUNDS)  # type: ignore[arg-type]
        return weights[0].tolist(), touched[0].tolist()

    # of tokens 1, 9, 1/4 and 1.5; of sequences 9/4 and 1.5
    assert found("token", "truncate") == (pytest.approx([1, 2, 0.25, 1, 1.5]), [False, True, False, False, False])
    assert found("token", "mask") == (pytest.approx([1, 0, 0, 1, 1.5]), [False, True, True, False, False])
    assert found("sequence", "truncate") == (pytest.approx([2, 2, 2, 1, 1.5]), [True, True, True, False, False])
    assert found("sequence", "mask") == (pytest.approx([0, 0, 0, 1, 1.5]), [True, True, True, False, False])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_mask_that_keeps_everything_is_no_mask(level: Any) -> None:
    new, old, _, mask, segments = batch(1)
    masked, touched = policy.correction_weights(
        new, old, mask, segments, level=level, mode="mask", cap=1.0, low=0.0, high=math.inf
    )
    truncated, _ = policy.correction_weights(
        new, old, mask, segments, level=level, mode="truncate", cap=math.inf, low=0.0, high=1.0
    )
    assert torch.equal(masked, truncated) and not touched.any()
    same, _ = policy.correction_weights(new, new, mask, segments, level=level, mode="mask", **BOUNDS)
    assert torch.equal(same, torch.ones_like(new))


def test_the_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([[1.0, 3.0, 9.0]])
    mask = torch.tensor([[True, True, False]])
    assert policy.effective_sample_size(weights, mask).item() == pytest.approx(16 / (2 * 10))
    assert policy.effective_sample_size(torch.full((1, 3), 0.3), mask).item() == pytest.approx(1)
    assert policy.effective_sample_size(torch.zeros(1, 3), mask).item() == 0
