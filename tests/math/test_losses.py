import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.math import advantages, losses, value
from burnish.math import policy as policies
from burnish.math.reductions import reduce, sequence_mean, sequence_sum, token_mean
from burnish.types import Metric

F64 = torch.float64


def clip(new, old, a, mask, clip_low=0.2, clip_high=0.3, dual_clip=None):
    segments = torch.ones_like(mask, dtype=torch.long)
    return policies.clip(new, old, a, mask, segments, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def reduced(reduction, values, mask):
    term = reduction(values, mask, torch.ones_like(mask, dtype=torch.long))
    return Metric(term.total, term.count)


def policy(new, old, a, mask, *clips, reduction=token_mean, **settings):
    return reduced(reduction, clip(new, old, a, mask, *clips, **settings)[0], mask)


def clipfrac(new, old, a, mask):
    return reduce(clip(new, old, a, mask)[1]["clipfrac"], mask)


def ratio(new, old, mask):
    return reduce(policies.log_ratios(new, old, mask).exp(), mask)


def approxkl(new, old, mask):
    return reduce(policies.log_ratios(new, old, mask).square() / 2, mask)


def sig(x):
    return 1 / (1 + math.exp(-x))


def batch(seed, rows=3, width=7):
    """Four (B, T) float64 tensors, the last two like log-probabilities that are close, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    a, b, noise = torch.randn(3, rows, width, dtype=F64, generator=generator)
    old = -torch.rand(rows, width, dtype=F64, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[0, 0] = True
    return a, b, old, old + 0.4 * noise, mask


# --- language model -----------------------------------------------------------------------------------------------


def test_nll_by_hand():
    term = losses.nll(
        torch.tensor([[-9.0, -1.0, -0.5], [-2.0, -9.0, -9.0]]),
        torch.tensor([[False, True, True], [True, False, False]]),
    )
    assert (term.total.item(), term.count.item()) == (3.5, 3.0)


def test_nll_of_uniform_predictions_is_ln_v():
    logprobs = torch.full((2, 5), -math.log(11))
    assert losses.nll(logprobs, torch.rand(2, 5) < 2).mean.item() == pytest.approx(math.log(11))


# --- reward model -------------------------------------------------------------------------------------------------


def pair(d, margin=None, p=None):
    """Loss of one pair whose scores differ by d."""
    one = [None if x is None else torch.tensor([x], dtype=F64) for x in (margin, p)]
    return losses.bradley_terry(torch.tensor([d + 0.7], dtype=F64), torch.tensor([0.7], dtype=F64), *one).mean.item()


def test_bradley_terry_by_hand():
    assert pair(0.0) == pytest.approx(math.log(2))
    assert pair(2.0) == pytest.approx(math.log(1 + math.exp(-2)))
    assert pair(2.0, margin=0.5) == pytest.approx(-math.log(sig(1.5)))
    assert pair(2.0, p=0.8) == pytest.approx(-0.8 * math.log(sig(2.0)) - 0.2 * math.log(sig(-2.0)))
    assert pair(0.0, p=0.5) == pytest.approx(math.log(2))
    assert pair(-1000.0) == pytest.approx(1000.0)
    assert pair(1000.0) == 0


@given(st.floats(-30, 30), st.floats(0, 10), st.floats(-50, 50))
def test_bradley_terry_identities(d, margin, shift):
    zero, one = torch.tensor([shift], dtype=F64), torch.tensor([d + shift], dtype=F64)
    assert losses.bradley_terry(one, zero).mean.item() == pytest.approx(pair(d), rel=1e-9, abs=1e-12)
    assert pair(d) - pair(-d) == pytest.approx(-d, abs=1e-9)
    assert pair(d, margin=margin) == pytest.approx(pair(d - margin), rel=1e-9, abs=1e-12)


@given(st.floats(0.02, 0.98))
def test_soft_label_has_its_minimum_at_the_logit_and_the_entropy_as_value(p):
    logit = math.log(p / (1 - p))
    assert pair(logit, p=p) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    difference = torch.tensor([logit], dtype=F64, requires_grad=True)
    term = losses.bradley_terry(difference, torch.zeros(1, dtype=F64), p_chosen=torch.tensor([p], dtype=F64))
    assert torch.autograd.grad(term.total, difference)[0].item() == pytest.approx(0, abs=1e-12)
    assert min(pair(logit - 0.1, p=p), pair(logit + 0.1, p=p)) > pair(logit, p=p)


def test_pair_weights_of_a_ranking():
    scores = [0.3, -0.1, 1.2]
    better, worse = [0, 0, 1], [1, 2, 2]
    weights = torch.full((3,), 1 / 3, dtype=F64)
    chosen, rejected = (torch.tensor([scores[i] for i in side], dtype=F64) for side in (better, worse))
    term = losses.bradley_terry(chosen, rejected, weights=weights)
    expected = np.mean([-math.log(sig(scores[i] - scores[j])) for i, j in zip(better, worse, strict=True)])
    assert term.total.item() == pytest.approx(expected)
    assert term.count.item() == pytest.approx(1)
    two = losses.bradley_terry(chosen[:1], rejected[:1], weights=torch.ones(1, dtype=F64))
    assert two == losses.bradley_terry(chosen[:1], rejected[:1])


def test_centering_and_accuracy_by_hand():
    chosen, rejected = torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 2.0, 4.0, -1.0])
    assert losses.centering(chosen, rejected).total.item() == 1 + 16 + 49 + 1
    assert losses.pair_accuracy(chosen, rejected).mean.item() == pytest.approx(2.5 / 4)
    weights = torch.tensor([0.5, 0.0, 1.0, 0.5])
    assert losses.pair_accuracy(chosen, rejected, weights).mean.item() == pytest.approx(0.5)
    assert losses.centering(chosen, rejected, weights).mean.item() == pytest.approx((0.5 + 49 + 0.5) / 2)


def test_bradley_terry_gradient_and_shapes():
    chosen, rejected = torch.randn(2, 4, dtype=F64).requires_grad_()
    margin, p, weights = torch.rand(3, 4, dtype=F64)
    assert torch.autograd.gradcheck(
        lambda c, r: (losses.bradley_terry(c, r, margin, p, weights).total, losses.centering(c, r, weights).total),
        (chosen, rejected),
    )
    with pytest.raises(ValueError, match=r"margin must align with chosen: got shape \(1,\), expected \(4,\)"):
        losses.bradley_terry(chosen, rejected, margin[:1])


# --- PPO ----------------------------------------------------------------------------------------------------------


def test_policy_worked_example():
    old, new = torch.tensor([[-1.0, -0.5]], dtype=F64), torch.tensor([[-0.9, -0.5]], dtype=F64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    a = torch.tensor([[0.45, 0.60]], dtype=F64)
    term = policy(new, old, a, mask, 0.2, 0.2)
    assert term.total.item() == pytest.approx(-1.09733, abs=5e-6)
    assert term.count.item() == 2


@pytest.mark.parametrize("seed", range(5))
def test_policy_against_a_loop(seed):
    a, _, old, new, mask = batch(seed)
    for dual in (None, 1.5):
        expected = 0.0
        for b, t in mask.nonzero().tolist():
            r, advantage = math.exp(new[b, t] - old[b, t]), a[b, t].item()
            loss = -min(r * advantage, min(max(r, 0.8), 1.3) * advantage)
            expected += min(loss, -dual * advantage) if dual and advantage < 0 else loss
        term = policy(new, old, a, mask, dual_clip=dual)
        assert term.total.item() == pytest.approx(expected, abs=1e-10)
        assert term.count.item() == mask.sum().item()


def test_first_mini_batch_has_ratio_1_and_the_loss_is_minus_the_mean_advantage():
    a, _, old, _, mask = batch(0)
    new = old.clone().requires_grad_()
    assert ratio(new, old, mask).mean.item() == 1
    assert approxkl(new, old, mask).mean.item() == 0
    assert clipfrac(new, old, a, mask).mean.item() == 0
    term = policy(new, old, a, mask)
    assert term.mean.item() == pytest.approx(-a[mask].numpy().mean(), abs=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(term.total, new)[0], torch.where(mask, -a, 0), atol=1e-12)


@given(st.integers(0, 10_000))
def test_clipped_region_has_no_gradient_and_no_smaller_loss(seed):
    a, _, old, new, mask = batch(seed)
    new.requires_grad_()
    term = policy(new, old, a, mask)
    (gradient,) = torch.autograd.grad(term.total, new)
    a, r = a.numpy(), np.exp((new - old).detach().numpy())
    region = ((a > 0) & (r > 1.3)) | ((a < 0) & (r < 0.8))
    learned = mask.numpy()
    np.testing.assert_allclose(gradient, np.where(learned & ~region, -a * r, 0), atol=1e-12)
    assert term.total.item() >= -(a * r)[learned].sum() - 1e-12
    fraction = clipfrac(new, old, torch.tensor(a), mask)
    assert fraction.mean.item() == pytest.approx(region[learned].mean(), abs=1e-12)
    assert ratio(new, old, mask).mean.item() == pytest.approx(r[learned].mean(), abs=1e-12)
    assert approxkl(new, old, mask).mean.item() == pytest.approx((np.log(r)[learned] ** 2 / 2).mean(), abs=1e-12)


@given(st.integers(0, 10_000), st.floats(0.05, 2))
def test_clipped_value_identities(seed, clip):
    returns, old, _, noise, mask = batch(seed)
    values = old + noise
    term = value.clipped_value(values, old, returns, mask, clip)
    plain = value.clipped_value(values, old, returns, mask, None)
    expected, decided = 0.0, 0
    for b, t in mask.nonzero().tolist():
        v, o, r = values[b, t].item(), old[b, t].item(), returns[b, t].item()
        inside = o + max(-clip, min(clip, v - o))
        expected += 0.5 * max((v - r) ** 2, (inside - r) ** 2)
        decided += abs(v - o) > clip and (inside - r) ** 2 > (v - r) ** 2
    assert term.total.item() == pytest.approx(expected, abs=1e-10)
    assert plain.total.item() == pytest.approx(0.5 * ((values - returns)[mask].numpy() ** 2).sum(), abs=1e-10)
    assert term.total.item() >= plain.total.item() - 1e-12
    assert value.value_clipfrac(values, old, returns, mask, clip).total.item() == decided
    near = old + noise.clamp(-clip, clip) * 0.99
    close = value.clipped_value(near, old, returns, mask, clip)
    assert close[:2] == value.clipped_value(near, old, returns, mask, None)[:2]
    assert value.value_clipfrac(near, old, returns, mask, clip).total.item() == 0


def test_clipped_value_by_hand():
    mask = torch.ones(1, 3, dtype=torch.bool)
    values = torch.tensor([[1.0, 0.1, -1.0]], dtype=F64, requires_grad=True)
    term = value.clipped_value(values, torch.zeros(1, 3, dtype=F64), torch.ones(1, 3, dtype=F64), mask, 0.2)
    assert term.total.item() == pytest.approx(0.5 * (0.8**2 + 0.9**2 + 2.0**2))
    assert torch.autograd.grad(term.total, values)[0].tolist() == [pytest.approx([0, -0.9, -2.0])]


def test_gradcheck_of_policy_and_value():
    a, returns, old, new, mask = batch(4)
    assert torch.autograd.gradcheck(
        lambda x: policy(x, old, a, mask, dual_clip=2.0, reduction=sequence_mean).total,
        new.requires_grad_(),
    )
    values = torch.randn(3, 7, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: value.clipped_value(x, old, returns, mask, 0.5).total, values)


def test_only_the_trained_tensors_get_a_gradient():
    a, returns, _, new, mask = batch(5)
    new.requires_grad_()
    (gradient,) = torch.autograd.grad(policy(new, new, new * a, mask).total, new)
    np.testing.assert_allclose(gradient, torch.where(mask, -new * a, 0).detach(), atol=1e-12)
    old, returns = torch.zeros_like(new).requires_grad_(), returns.requires_grad_()
    value.clipped_value(new, old, returns, mask, 0.2).total.backward()
    assert old.grad is None
    assert returns.grad is None


def test_extreme_ratios_stay_finite():
    new = torch.tensor([[-500.0, -math.inf, 0.0]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1.0, -500.0]]), torch.ones(1, 3, dtype=torch.bool)
    term = policy(new, old, torch.tensor([[1.0, -1.0, -1.0]]), mask)
    (gradient,) = torch.autograd.grad(term.total, new)
    assert term.total.isfinite()
    assert gradient.isfinite().all()
    assert approxkl(new, old, mask).mean.item() == pytest.approx(200.0)


# --- what lies outside the mask -----------------------------------------------------------------------------------


def every_loss(tensors, mask):
    a, returns, old, new = tensors
    return {
        "nll": losses.nll(new, mask),
        "sequence_mean": reduced(sequence_mean, -new, mask),
        "policy": policy(new, old, a, mask, dual_clip=2.0),
        "value": value.clipped_value(new, old, returns, mask, 0.2),
        "ratio": ratio(new, old, mask),
        "approxkl": approxkl(new, old, mask),
        "clipfrac": clipfrac(new, old, a, mask),
        "value_clipfrac": value.value_clipfrac(new, old, returns, mask, 0.2),
    }


@pytest.mark.parametrize("fill", [0.0, 3.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (1, 20)])
def test_padding_changes_neither_losses_nor_gradients(before, after, fill):
    *tensors, mask = batch(6)
    tensors[3].requires_grad_()
    wide = [torch.nn.functional.pad(x.detach(), (before, after), value=fill) for x in tensors]
    wide[3].requires_grad_()
    narrow_terms = every_loss(tensors, mask)
    wide_terms = every_loss(wide, torch.nn.functional.pad(mask, (before, after)))
    for name, term in narrow_terms.items():
        found, expected = ((one.total, one.count) for one in (wide_terms[name], term))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
        if term.total.requires_grad:
            (narrow,) = torch.autograd.grad(term.total, tensors[3])
            (padded,) = torch.autograd.grad(wide_terms[name].total, wide[3])
            expected = torch.nn.functional.pad(narrow, (before, after))
            torch.testing.assert_close(padded, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_a_mask_equals_a_deletion(seed):
    *tensors, mask = batch(seed, rows=1, width=12)
    deleted = [x[mask].unsqueeze(0) for x in tensors]
    expected = every_loss(deleted, torch.ones_like(deleted[0], dtype=torch.bool))
    for name, term in every_loss(tensors, mask).items():
        wanted = (expected[name].total, expected[name].count)
        torch.testing.assert_close((term.total, term.count), wanted, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, sequence_sum])
def test_micro_batches_add_up_to_the_batch(reduction):
    *tensors, mask = batch(7, rows=6)

    def part(rows):
        return policy(tensors[3][rows], tensors[2][rows], tensors[0][rows], mask[rows], reduction=reduction)

    whole, parts = part(slice(0, 6)), [part(slice(0, 1)), part(slice(1, 3)), part(slice(3, 6))]
    assert sum(p.total.item() for p in parts) == pytest.approx(whole.total.item(), abs=1e-12)
    assert sum(p.count.item() for p in parts) == whole.count.item()


def test_nothing_learned_is_0_with_gradient_0():
    *tensors, mask = batch(8)
    tensors[3].requires_grad_()
    for term in every_loss(tensors, torch.zeros_like(mask)).values():
        assert (term.total.item(), term.count.item(), term.mean.item()) == (0, 0, 0)
        if term.total.requires_grad:
            (gradient,) = torch.autograd.grad(term.total, tensors[3])
            assert not gradient.any()


def test_tokens_after_the_first_stop_have_no_effect():
    rewards, values, old, new, _ = batch(9)
    mask = torch.tensor([[True] * 4 + [False] * 3] * 3)
    scores = torch.ones(3, dtype=F64)

    def update(rewards, values, old, new):
        rewards = advantages.token_rewards(scores, rewards, mask, 0.1)
        a, returns = advantages.gae(rewards, values, mask, 1.0, 0.95)
        a = advantages.whiten(a, mask)
        return policy(new, old, a, mask).total, value.clipped_value(new, values, returns, mask, 0.2).total

    changed = [torch.where(mask, x, x * -3 + 1) for x in (rewards, values, old, new)]
    assert update(*changed) == update(rewards, values, old, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_at_least_float32(dtype):
    *tensors, mask = batch(10)
    expected = torch.promote_types(dtype, torch.float32)
    a, returns, old, new = (x.to(dtype) for x in tensors)
    for term in (
        losses.nll(new, mask),
        reduced(sequence_mean, -new, mask),
        policy(new, old, a, mask),
        value.clipped_value(new, old, returns, mask, 0.2),
        losses.bradley_terry(new[0], old[0]),
    ):
        assert (term.total.dtype, term.count.dtype) == (expected, expected)


def test_step_values_by_hand():
    values, targets = torch.tensor([[0.5, 9.0, -1.0], [0.25, 0.0, 9.0]]), torch.tensor([[1.0, 0, -1.0], [0.0, 0.5, 0]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    term = value.step_value(values, targets, mask)
    assert (term.total, term.count) == (0.25 + 0 + 0.0625 + 0.25, 4)  # a target of 0 counts where the mask is True
    nothing = value.step_value(values, targets, torch.zeros_like(mask))
    assert (nothing.total, nothing.count, nothing.mean) == (0, 0, 0)


def test_the_gradient_of_step_values_is_twice_the_error():
    values = torch.tensor([[0.5, 0.1, -1.0]], requires_grad=True)
    targets = torch.tensor([[1.0, 7.0, -1.0]], requires_grad=True)
    value.step_value(values, targets, torch.tensor([[True, False, True]])).total.backward()
    assert values.grad is not None and values.grad.tolist() == [[-1.0, 0.0, 0.0]] and targets.grad is None


def test_step_values_must_align():
    with pytest.raises(ValueError, match="targets must align with values"):
        value.step_value(torch.zeros(1, 3), torch.zeros(3), torch.ones(1, 3, dtype=torch.bool))
