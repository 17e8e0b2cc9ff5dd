import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.math import advantages, kl

F64 = torch.float64


def row_gae(rewards, values, gamma, lam):
    """Advantages of one row of steps as the exponential mix of k-step advantages, by enumeration."""
    n, result = len(rewards), []
    for t in range(n):
        total = 0.0
        for k in range(1, n - t + 1):
            bootstrap = gamma**k * values[t + k] if t + k < n else 0.0
            k_step = sum(gamma**i * rewards[t + i] for i in range(k)) + bootstrap - values[t]
            total += k_step * (lam ** (k - 1) if k == n - t else (1 - lam) * lam ** (k - 1))
        result.append(total)
    return result


def batch(seed, rows=3, width=9):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, dtype=F64, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    return rewards, values, mask


def test_worked_example():
    kl_t = kl.estimate(torch.tensor([[-1.0, -0.5]], dtype=F64), torch.tensor([[-1.2, -0.5]], dtype=F64))
    mask = torch.ones(1, 2, dtype=torch.bool)
    rewards = advantages.token_rewards(torch.tensor([1.0], dtype=F64), kl_t, mask, 0.1)
    assert rewards.tolist() == [pytest.approx([-0.02, 1.0])]
    result, returns = advantages.gae(rewards, torch.tensor([[0.5, 0.4]], dtype=F64), mask, 1.0, 0.95)
    assert result.tolist() == [pytest.approx([0.45, 0.60])]
    assert returns.tolist() == [pytest.approx([0.95, 1.00])]


def test_gae_steps_over_what_the_policy_did_not_write():
    mask = torch.tensor([[True] * 5 + [False] * 100 + [True] * 5])
    values = torch.where(mask, 0.5, 0.0)
    rewards = torch.zeros(1, 110)
    rewards[0, -1] = 1.0
    result, _ = advantages.gae(rewards, values, mask, 1.0, 0.95)
    assert result[0, 4].item() == pytest.approx(0.5 * 0.95**5, rel=1e-5)
    assert result[0, 4].item() == pytest.approx(0.3869, abs=5e-5)


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_a_mask_equals_a_deletion_and_gae_is_the_mix_of_k_step_advantages(seed, gamma, lam):
    rewards, values, mask = batch(seed)
    result, returns = advantages.gae(rewards, values, mask, gamma, lam)
    for b in range(len(mask)):
        kept = mask[b]
        expected = row_gae(rewards[b, kept].tolist(), values[b, kept].tolist(), gamma, lam)
        np.testing.assert_allclose(result[b, kept], expected, atol=1e-10)
        np.testing.assert_allclose(returns[b, kept], values[b, kept] + result[b, kept], atol=1e-10)
        assert not result[b, ~kept].any()
        assert not returns[b, ~kept].any()


def plain_gae(rewards, values, mask, gamma, lam):
    """The recursion itself, one token after the other."""
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    result = torch.zeros_like(rewards)
    next_advantage = next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(mask.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        result[:, t] = torch.where(mask[:, t], advantage, 0)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return result


UNIT = st.one_of(st.sampled_from([0.0, 1.0, 0.95, 0.999]), st.floats(0, 1))


@settings(max_examples=40)
@given(st.integers(0, 10_000), UNIT, UNIT, st.integers(1, 600), st.sampled_from([0.02, 0.6, 1.0]))
def test_gae_is_the_plain_recursion(seed, gamma, lam, width, density):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, width, generator=generator)
    mask = torch.rand(3, width, generator=generator) < density
    expected = plain_gae(rewards.double(), values.double(), mask, gamma, lam)
    for dtype, tolerance in ((torch.float32, 1e-6), (F64, 1e-12)):
        result, returns = advantages.gae(rewards.to(dtype), values.to(dtype), mask, gamma, lam)
        assert result.dtype == returns.dtype == dtype
        scale = expected.abs().amax(1, keepdim=True)
        assert bool(((result - expected).abs() <= tolerance * scale).all())


def test_gae_over_a_long_row_is_the_plain_recursion():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 4096, generator=generator)
    mask = torch.rand(2, 4096, generator=generator) < 0.8
    for gamma, lam in ((1.0, 1.0), (0.999, 1.0)):
        expected = plain_gae(rewards.double(), values.double(), mask, gamma, lam)
        result, _ = advantages.gae(rewards, values, mask, gamma, lam)
        assert (result - expected).abs().max() <= 1e-6 * expected.abs().max()


@settings(max_examples=40)
@given(st.integers(0, 10_000), UNIT, UNIT, st.integers(0, 40), st.integers(0, 40))
def test_gae_and_whiten_do_not_depend_on_the_layout_to_the_last_bit(seed, gamma, lam, before, after):
    rewards, values, mask = (x.float() if x.is_floating_point() else x for x in batch(seed, width=37))
    r, v, m = (torch.nn.functional.pad(x, (before, after)) for x in (rewards, values, mask))
    inside = slice(before, before + 37)
    for a, b in zip(
        advantages.gae(rewards, values, mask, gamma, lam), advantages.gae(r, v, m, gamma, lam), strict=True
    ):
        assert torch.equal(a, b[:, inside])
    assert torch.equal(advantages.whiten(rewards, mask), advantages.whiten(r, m)[:, inside])
    result, _ = advantages.gae(rewards, values, mask, gamma, lam)
    for b in range(3):  # a mask equals a deletion, and a row does not depend on the others
        r, v, m = (x[b : b + 1, mask[b]] for x in (rewards, values, mask))
        assert torch.equal(advantages.gae(r, v, m, gamma, lam)[0][0], result[b, mask[b]])


def test_gae_of_integers_by_hand():
    rewards, values = torch.tensor([[0, 1]]), torch.tensor([[1, 1]])
    result, returns = advantages.gae(rewards, values, torch.ones(1, 2, dtype=torch.bool), 0.5, 0.5)
    # deltas: 0 + 0.5 * 1 - 1 = -0.5 and 1 - 1 = 0
    assert (result.tolist(), returns.tolist()) == ([[-0.5, 0.0]], [[0.5, 1.0]])


def test_gae_at_lambda_1_and_0():
    rewards, values, _ = batch(0)
    mask = torch.ones_like(values, dtype=torch.bool)
    monte_carlo, returns = advantages.gae(rewards, values, mask, 1.0, 1.0)
    later = np.array([[rewards[b, t:].sum() for t in range(9)] for b in range(3)])
    np.testing.assert_allclose(monte_carlo, later - values.numpy(), atol=1e-12)
    np.testing.assert_allclose(returns, later, atol=1e-12)
    residual, _ = advantages.gae(rewards, values, mask, 0.9, 0.0)
    following = np.concatenate([values[:, 1:], np.zeros((3, 1))], axis=1)
    np.testing.assert_allclose(residual, rewards.numpy() + 0.9 * following - values.numpy(), atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_values_equal_to_the_true_return_leave_no_advantage(lam):
    rewards, _, mask = batch(1)
    kept = torch.where(mask, rewards, 0)
    values = kept.flip(1).cumsum(1).flip(1)
    result, _ = advantages.gae(rewards, values, mask, 1.0, lam)
    assert result.abs().max() < 1e-12


@pytest.mark.parametrize("fill", [0.0, -7.5, math.nan, math.inf])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side, fill):
    rewards, values, mask = batch(2)
    before, after = (4, 0) if side == "left" else (0, 4)

    def padded(x, value):
        return torch.nn.functional.pad(x, (before, after), value=value)

    wide = padded(mask, False)
    scores = torch.tensor([1.0, -2.0, 3.0], dtype=F64)
    for function in (
        lambda r, v, m: advantages.gae(r, v, m, 0.99, 0.95)[0],
        lambda r, v, m: advantages.gae(r, v, m, 0.99, 0.95)[1],
        lambda r, v, m: advantages.whiten(r, m),
        lambda r, v, m: advantages.token_rewards(scores, r, m, 0.3),
    ):
        narrow = function(rewards, values, mask)
        result = function(padded(rewards, fill), padded(values, fill), wide)
        torch.testing.assert_close(result, padded(narrow, 0.0), rtol=1e-12, atol=1e-12)


def test_gae_takes_no_gradient_and_names_wrong_shapes():
    rewards, values, mask = batch(3)
    result, returns = advantages.gae(rewards, values.requires_grad_(), mask, 1.0, 0.95)
    assert not result.requires_grad
    assert not returns.requires_grad
    with pytest.raises(ValueError, match=r"rewards must align with mask: got shape \(3,\), expected \(3, 9\)"):
        advantages.gae(rewards[:, 0], values, mask, 1.0, 0.95)


def test_the_score_lands_on_the_last_learned_token():
    mask = torch.tensor([[False, True, True, False], [True, False, True, True], [False] * 4])
    rewards = advantages.token_rewards(torch.tensor([5.0, -3.0, 9.0]), torch.full((3, 4), 2.0), mask, 0.1)
    expected = [[0, -0.2, 4.8, 0], [-0.2, 0, -0.2, -3.2], [0] * 4]
    assert [row.tolist() for row in rewards] == [pytest.approx(row) for row in expected]
    with pytest.raises(ValueError, match=r"scores must align with rows: got shape \(1, 4\), expected \(3,\)"):
        advantages.token_rewards(torch.zeros(1, 4), torch.zeros(3, 4), mask, 0.1)


@pytest.mark.parametrize("seed", range(3))
def test_summed_k1_rewards_are_the_log_ratio_of_the_sequence(seed):
    logprobs, ref, mask = batch(seed)
    rewards = advantages.token_rewards(torch.zeros(3, dtype=F64), kl.estimate(logprobs, ref), mask, 0.05)
    for b in range(3):
        log_ratio = sum(float(logprobs[b, t] - ref[b, t]) for t in range(9) if mask[b, t])
        assert rewards[b].sum().item() == pytest.approx(-0.05 * log_ratio, abs=1e-12)


def test_whiten_by_hand():
    mask = torch.tensor([[True, True], [False, True]])
    result = advantages.whiten(torch.tensor([[1.0, 2.0], [99.0, 6.0]]), mask)  # mean 3, variance (4 + 1 + 9) / 2
    root = math.sqrt(7)
    assert result.tolist() == [pytest.approx([-2 / root, -1 / root]), pytest.approx([0, 3 / root])]
    kept = advantages.whiten(torch.tensor([[1.0, 2.0], [99.0, 6.0]]), mask, shift_mean=False)
    assert kept.tolist() == [pytest.approx([3 - 2 / root, 3 - 1 / root]), pytest.approx([0, 3 + 3 / root])]


@given(st.integers(0, 10_000), st.floats(0.1, 10), st.floats(-5, 5))
def test_whitened_entries_have_mean_0_and_variance_1_whatever_the_scale(seed, scale, shift):
    x, _, mask = batch(seed)
    mask[0, :3] = True
    learned = advantages.whiten(x, mask)[mask].numpy()
    assert learned.mean() == pytest.approx(0, abs=1e-9)
    assert learned.var(ddof=1) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(advantages.whiten(scale * x + shift, mask)[mask], learned, atol=1e-4)
    unshifted = advantages.whiten(x, mask, shift_mean=False)[mask].numpy()
    assert unshifted.mean() == pytest.approx(x[mask].mean().item(), abs=1e-9)
    assert unshifted.var(ddof=1) == pytest.approx(1, abs=1e-4)


def test_fewer_than_two_entries_are_only_centred():
    x = torch.tensor([[3.0, 8.0]])
    one, none = torch.tensor([[True, False]]), torch.tensor([[False, False]])
    assert advantages.whiten(x, one).tolist() == [[0, 0]]
    assert advantages.whiten(x, one, shift_mean=False).tolist() == [[3, 0]]
    assert advantages.whiten(x, none).tolist() == [[0, 0]]
    assert advantages.whiten(torch.full((1, 2), 3.0), torch.tensor([[True, True]])).tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
@settings(max_examples=25)
@given(st.floats(-1000, 1000), st.integers(1, 300))
def test_equal_entries_are_exactly_0_or_unchanged(dtype, value, n):
    x = torch.full((3, n), value, dtype=dtype)
    mask = torch.arange(3 * n).view(3, n) % 7 != 0
    assert not advantages.whiten(x, mask).any()
    unshifted = advantages.whiten(x, mask, shift_mean=False)
    assert torch.equal(unshifted, torch.where(mask, x, 0).to(unshifted.dtype))
    seen = advantages.Moments().update(x[0]).update(x[1])
    assert not seen.normalize(x[2]).any()


def test_gradcheck_of_whiten():
    x, _, mask = batch(4)
    x[1, 2] = math.nan
    mask[1, 2] = False
    for shift_mean in (True, False):
        assert torch.autograd.gradcheck(
            lambda y, s=shift_mean: advantages.whiten(y.where(mask, 0), mask, s), x.where(mask, 0).requires_grad_()
        )
        assert torch.autograd.grad(advantages.whiten(x.requires_grad_(), mask, shift_mean).sum(), x)[0].isfinite().all()


def test_group_by_hand():
    rewards, groups = torch.tensor([1.0, 5.0, 2.0, 9.0, 3.0]), torch.tensor([7, 4, 7, 4, 7])
    assert advantages.group(rewards, groups, "mean").tolist() == pytest.approx([-1, -2, 0, 2, 1])
    assert advantages.group(rewards, groups, "rloo").tolist() == pytest.approx([1 - 2.5, 5 - 9, 0, 9 - 5, 3 - 1.5])
    root = math.sqrt(2 / 3)
    assert advantages.group(rewards, groups, "std").tolist() == pytest.approx([-1 / root, -1, 0, 1, 1 / root])


@pytest.mark.parametrize("seed", range(5))
def test_leave_one_out_sums_to_0_and_is_the_reward_less_the_mean_of_the_others(seed):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(3), 4)
    rng.shuffle(groups)
    rewards = rng.normal(size=12)
    result = advantages.group(torch.tensor(rewards), torch.tensor(groups)).numpy()
    for i in range(12):
        others = [rewards[j] for j in range(12) if groups[j] == groups[i] and j != i]
        assert result[i] == pytest.approx(rewards[i] - np.mean(others), abs=1e-12)
    assert [result[groups == g].sum() for g in range(3)] == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("wins", [1, 3, 7])
def test_binary_rewards_divided_by_their_deviation(wins):
    rewards = torch.tensor([1.0] * wins + [0.0] * (8 - wins), dtype=F64)
    result = advantages.group(rewards, torch.zeros(8, dtype=torch.long), "std")
    p = wins / 8
    expected = [math.sqrt((1 - p) / p)] * wins + [-math.sqrt(p / (1 - p))] * (8 - wins)
    assert result.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["rloo", "mean", "std"])
def test_equal_rewards_give_exactly_0(kind):
    for size in range(2, 12):
        result = advantages.group(torch.full((size,), 100.1), torch.zeros(size, dtype=torch.long), kind)
        assert result.tolist() == [0] * size


def test_group_refuses_bad_arguments():
    with pytest.raises(UserError, match="at least 2 completions of every prompt, got 1"):
        advantages.group(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))
    with pytest.raises(UserError, match="unknown group baseline 'median': expected rloo, mean or std"):
        advantages.group(torch.zeros(2), torch.zeros(2), "median")  # pyright: ignore[reportArgumentType]
