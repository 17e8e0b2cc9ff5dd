"""REINFORCE: the loss by hand and by identity, baselines by hand and by another formula."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.math import advantages, policy
from burnish.math.choices import Baseline
from burnish.math.reductions import sequence_mean, sequence_sum
from burnish.types import Metric, Term

F64 = torch.float64


def batch(seed: int, rows: int = 4, width: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, T), rewards (B,), and a mask with a learned token in every row."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(rows, width, dtype=F64, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[:, 1] = True
    return logprobs.requires_grad_(), torch.randn(rows, dtype=F64, generator=generator), mask


def reinforce(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    rewards: torch.Tensor,
    reduction: Callable[..., Term] = sequence_sum,
    segments: torch.Tensor | None = None,
    floor: float | None = None,
    unlikelihood: bool = False,
) -> Metric:
    """The loss with a reward for each row or each token, reduced to one number."""
    if rewards.dim() == 1:
        rewards = rewards.unsqueeze(1).expand_as(mask)
    segments = torch.ones_like(mask, dtype=torch.long) if segments is None else segments
    losses, metrics = policy.reinforce(
        logprobs, logprobs, rewards, mask, segments, floor=floor, unlikelihood=unlikelihood
    )
    assert not metrics
    term = reduction(losses, mask, segments)
    assert term.count is not None
    return Metric(term.total, term.count)


def gradient(logprobs: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    (found,) = torch.autograd.grad(reinforce(logprobs, *rest, **named).mean, logprobs)
    return found


# --- the loss -----------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    logprobs = torch.tensor([[0.0, -1.0, -0.5], [0.0, -2.0, -9.0]])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    term = reinforce(logprobs, mask, torch.tensor([1.0, -0.5]))
    # -(1 * (-1 - 0.5) - 0.5 * -2) / 2
    assert (term.total.item(), term.count.item(), term.mean.item()) == (0.5, 2.0, 0.25)


@given(st.integers(0, 10**6))
def test_identities(seed: int) -> None:
    logprobs, rewards, mask = batch(seed)
    ones = torch.ones(4, dtype=F64)
    # r = 1 is the summed negative log-likelihood over B; r = 0 is nothing
    assert reinforce(logprobs, mask, ones).mean.item() == pytest.approx(-logprobs[mask].sum().item() / 4)
    assert not gradient(logprobs, mask, 0 * ones).any()
    # the gradient is linear in r and nowhere but at learned tokens
    found = gradient(logprobs, mask, rewards)
    assert torch.allclose(found, torch.where(mask, -rewards[:, None] / 4, 0.0))
    assert torch.allclose(gradient(logprobs, mask, 3 * rewards - 2), 3 * found - 2 * gradient(logprobs, mask, ones))
    # doubling the batch changes nothing, and micro-batches add up
    twice = reinforce(logprobs.repeat(2, 1), mask.repeat(2, 1), rewards.repeat(2))
    assert twice.mean.item() == pytest.approx(reinforce(logprobs, mask, rewards).mean.item())
    parts = [reinforce(logprobs[i : i + 1], mask[i : i + 1], rewards[i : i + 1]) for i in range(4)]
    assert sum(p.total.item() for p in parts) / 4 == pytest.approx(twice.mean.item())
    assert sum(p.count.item() for p in parts) == 4


def test_the_same_row_at_plus_and_minus_one_is_nothing_at_all() -> None:
    logprobs, _, mask = batch(0)
    both = reinforce(logprobs.repeat(2, 1), mask.repeat(2, 1), torch.tensor([1.0] * 4 + [-1.0] * 4))
    assert both.mean.item() == 0.0
    assert not torch.autograd.grad(both.mean, logprobs)[0].any()


def test_as_many_rows_as_tokens_do_not_mix_up() -> None:
    logprobs, rewards, _ = batch(1, rows=6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    expected = -sum(rewards[b].item() * logprobs[b].sum().item() for b in range(6)) / 6
    assert reinforce(logprobs, mask, rewards).mean.item() == pytest.approx(expected)
    per_token = rewards.unsqueeze(1).expand(6, 6)
    assert reinforce(logprobs, mask, per_token).mean.item() == pytest.approx(expected)
    for one_a_row in (rewards, rewards[:5]):
        with pytest.raises(
            ValueError, match=r"advantages must align with mask: got shape \([56],\), expected \(6, 6\)"
        ):
            policy.reinforce(logprobs, logprobs, one_a_row, mask, mask.long(), floor=None, unlikelihood=False)


def test_packed_rows_take_a_reward_for_each_token() -> None:
    logprobs, rewards, mask = batch(2)
    segments = torch.arange(1, 5).repeat_interleave(6).unsqueeze(0)
    flat = logprobs.reshape(1, -1), mask.reshape(1, -1), rewards.repeat_interleave(6).unsqueeze(0)
    packed = reinforce(*flat, segments=segments)
    assert packed.mean.item() == pytest.approx(reinforce(logprobs, mask, rewards).mean.item())


def test_length_normalized_is_a_mean_in_each_row() -> None:
    logprobs, rewards, mask = batch(3)
    expected = -sum(rewards[b].item() * logprobs[b][mask[b]].mean().item() for b in range(4)) / 4
    assert reinforce(logprobs, mask, rewards, sequence_mean).mean.item() == pytest.approx(expected)


# --- negative rewards ---------------------------------------------------------------------------------------------


def test_a_floor_stops_only_what_is_pushed_down() -> None:
    logprobs = torch.tensor([[-9.0, -1.0], [-9.0, -1.0]], dtype=F64, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    found = gradient(logprobs, mask, torch.tensor([1.0, -1.0], dtype=F64), floor=-5.0)
    assert found.tolist() == [[-0.5, -0.5], [0.0, 0.5]]
    floored = reinforce(logprobs, mask, torch.tensor([0.0, -2.0], dtype=F64), floor=-5.0)
    assert floored.total.item() == 2 * (-5 - 1)


@given(st.floats(0.01, 0.99))
def test_unlikelihood_is_bounded(p: float) -> None:
    logprobs = torch.tensor([[math.log(p)]], dtype=F64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    down = torch.tensor([-2.0], dtype=F64)
    assert reinforce(logprobs, mask, down, unlikelihood=True).mean.item() == pytest.approx(-2 * math.log(1 - p))
    # d/dl of -2 log(1 - e^l)
    assert gradient(logprobs, mask, down, unlikelihood=True).item() == pytest.approx(2 * p / (1 - p))
    same = reinforce(logprobs, mask, -down, unlikelihood=True)
    assert same.mean.item() == reinforce(logprobs, mask, -down).mean.item()


def test_unlikelihood_is_finite_at_certainty_and_outside_the_mask() -> None:
    logprobs = torch.tensor([[0.0, -1e-9, -0.5]], dtype=F64, requires_grad=True)
    mask = torch.tensor([[False, True, True]])
    assert math.isfinite(reinforce(logprobs, mask, -torch.ones(1), unlikelihood=True).mean.item())
    found = gradient(logprobs, mask, -torch.ones(1), unlikelihood=True)
    assert found[0, :2].tolist() == [0.0, 0.0] and found[0, 2] > 0


# --- baselines ----------------------------------------------------------------------------------------------------

SCORES = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5]
GROUPS = [0, 0, 0, 7, 7, 7]
THIRD = [2 / 3, -1 / 3, -1 / 3, 1 / 6, 1 / 6, -1 / 3]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", SCORES),
        ("mean", [x - 3.5 / 6 for x in SCORES]),
        ("rloo", [1.0, -0.5, -0.5, 0.25, 0.25, -0.5]),
        ("group_mean", THIRD),
        ("group_std", [x / math.sqrt(2 / 9 if i < 3 else 1 / 18) for i, x in enumerate(THIRD)]),
    ],
)
def test_baselines_by_hand(kind: Baseline, expected: list[float]) -> None:
    mask = torch.tensor([[False, True, True, True]] * 3 + [[False, True, False, False]] * 3)
    rewards = torch.zeros(6, 4, dtype=F64)
    rewards[:, 1] = torch.tensor(SCORES)  # wherever a reward stands, its whole row gets it
    rewards[:3, 3] += 0.25
    rewards[:3, 1] -= 0.25
    rewards[:, 0] = torch.nan
    found = advantages.compute_advantages(rewards, mask, torch.tensor(GROUPS), kind)
    assert torch.allclose(found, torch.where(mask, torch.tensor(expected, dtype=F64)[:, None], 0.0), atol=1e-7)


def test_whitened_over_the_batch_are_the_rewards_from_a_token_on() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    rewards = torch.tensor([[9.0, -0.1, 1.0], [9.0, 0.3, 9.0]], dtype=F64)
    found = advantages.compute_advantages(rewards, mask, torch.tensor([0, 1]), "batch_whitened")
    later = torch.tensor([0.9, 1.0, 0.3], dtype=F64)
    assert torch.allclose(found[mask], (later - later.mean()) / later.std(), atol=1e-6)
    assert not found[~mask].any()


@given(st.integers(2, 8), st.data())
def test_binary_rewards_of_a_group_have_a_closed_form(size: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(1, size - 1))
    p = right / size
    rewards = torch.tensor([[1.0]] * right + [[0.0]] * (size - right), dtype=F64)
    mask, groups = torch.ones(size, 1, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    found = advantages.compute_advantages(rewards, mask, groups, "group_std")[:, 0].tolist()
    expected = [math.sqrt((1 - p) / p)] * right + [-math.sqrt(p / (1 - p))] * (size - right)
    assert found == pytest.approx(expected, rel=1e-6)
    rloo = advantages.compute_advantages(rewards, mask, groups, "rloo")
    assert rloo.sum().item() == pytest.approx(0, abs=1e-9)
    assert rloo[0, 0].item() == pytest.approx(1 - (right - 1) / (size - 1))  # less the mean of the others
    for kind in ("rloo", "group_mean", "group_std", "mean"):
        assert not advantages.compute_advantages(torch.ones_like(rewards), mask, groups, kind).any()


def test_leave_one_out_needs_another() -> None:
    one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(UserError, match="at least 2 completions"):
        advantages.compute_advantages(one, mask, torch.zeros(1), "rloo")


# --- off-policy ---------------------------------------------------------------------------------------------------


def test_importance_is_truncated() -> None:
    ours = torch.log(torch.tensor([[0.5, 0.9, 0.2, 0.3]], dtype=F64))
    theirs = torch.log(torch.tensor([[0.5, 0.1, 0.4, 0.9]], dtype=F64))
    mask = torch.tensor([[True, True, True, False]])
    found, touched = policy.correction_weights(
        ours, theirs, mask, mask.long(), level="token", mode="truncate", cap=2.0, low=0.0, high=1.0
    )
    assert touched.tolist() == [[False, True, False, False]]
    assert torch.allclose(found, torch.tensor([[1.0, 2.0, 0.5, 1.0]], dtype=F64))


# --- running moments ----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6))
def test_moments_are_those_of_all_numbers_at_once(batches: list[list[float]]) -> None:
    moments, seen = advantages.Moments(), []
    for batch in batches:
        moments, seen = moments.update(torch.tensor(batch, dtype=F64)), seen + batch
    assert moments.count == len(seen)
    assert moments.mean == pytest.approx(statistics.fmean(seen), abs=1e-9)
    if len(seen) > 1:
        assert moments.squares / (len(seen) - 1) == pytest.approx(statistics.variance(seen), rel=1e-9, abs=1e-6)
    else:
        assert moments.normalize(torch.tensor(seen, dtype=F64)).tolist() == [0.0]


def test_normalized_by_hand() -> None:
    moments = advantages.Moments().update(torch.tensor([1.0])).update(torch.tensor([2.0, 3.0]))
    assert moments.normalize(torch.tensor([3.0, 0.0], dtype=F64)).tolist() == pytest.approx([1.0, -2.0])


def test_a_group_mean_is_whitened_over_all_tokens() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False], [False, True, True], [False, True, True]])
    rewards = torch.zeros(4, 3, dtype=F64)
    rewards[:, 1] = torch.tensor([1.0, 0.0, 2.0, 6.0])
    groups = torch.tensor([0, 0, 1, 1])
    found = advantages.compute_advantages(rewards, mask, groups, "reinforce++-baseline")
    tokens = torch.tensor([0.5, 0.5, -0.5, -2.0, -2.0, 2.0, 2.0], dtype=F64)
    assert torch.allclose(found[mask], (tokens - tokens.mean()) / tokens.std(), atol=1e-6)


def test_the_penalty_of_long_completions_by_hand() -> None:
    found = advantages.overlong_penalty(torch.tensor([0, 12, 13, 14, 16]), longest=16, buffer=4)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]
