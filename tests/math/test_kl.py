import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.math import kl


def test_estimates_by_hand():
    logprobs, ref = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-1.2, -1.5]])
    assert kl.estimate(logprobs, ref).tolist() == [pytest.approx([0.2, 1.0])]
    assert kl.estimate(logprobs, ref, "k2").tolist() == [pytest.approx([0.02, 0.5])]
    assert kl.estimate(logprobs, ref, "k3").tolist() == [pytest.approx([math.exp(-0.2) - 0.8, math.exp(-1)], rel=1e-5)]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_policy_equal_to_reference_is_exactly_0(kind):
    logprobs = torch.randn(3, 5)
    assert kl.estimate(logprobs, logprobs.clone(), kind).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k2_and_k3_are_never_negative(dtype):
    difference = torch.cat([torch.logspace(-12, 4, 20_000), -torch.logspace(-12, 4, 20_000)]).to(dtype)
    zero = torch.zeros_like(difference)
    for kind in ("k2", "k3"):
        result = kl.estimate(difference, zero, kind)
        assert result.isfinite().all()
        assert result.min() >= 0


def test_k3_is_accurate_for_close_policies_and_cannot_overflow():
    near = torch.tensor([1e-3, -1e-3])
    assert kl.estimate(near, torch.zeros(2), "k3").tolist() == pytest.approx([5e-7, 5e-7], rel=1e-3)
    far = torch.tensor([-1000.0, -math.inf, 1000.0], requires_grad=True)
    result = kl.estimate(far, torch.zeros(3), "k3")
    (gradient,) = torch.autograd.grad(result.sum(), far)
    assert result.tolist() == pytest.approx([math.exp(20) - 21, math.exp(20) - 21, 999.0])
    assert gradient.tolist() == [0, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_expectations_by_enumeration(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    for kind in ("k1", "k3"):
        each = kl.estimate(torch.tensor(p).log(), torch.tensor(q).log(), kind)
        assert (each.numpy() * p).sum() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_expected_gradient_of_each_as_a_loss(kind, seed):
    """k1 has none, k2 that of the reverse KL(p || q), k3 that of the forward KL(q || p)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    expectation = (kl.estimate(logprobs, ref, kind) * logprobs.exp().detach()).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    p, q = logprobs.detach().exp().numpy(), ref.exp().numpy()
    reverse = p * (np.log(p / q) - (p * np.log(p / q)).sum())
    expected = {"k1": np.zeros(5), "k2": reverse, "k3": p - q}[kind]
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradcheck(kind):
    logprobs = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: kl.estimate(a, b, kind), (logprobs, ref))


def test_estimate_refuses_bad_arguments():
    with pytest.raises(UserError, match="unknown KL estimate 'k4': expected k1, k2 or k3"):
        kl.estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ref_logprobs must align with logprobs"):
        kl.estimate(torch.zeros(2, 2), torch.zeros(2))


def test_controller_by_hand():
    controller = kl.AdaptiveKL(0.2, target=6.0, horizon=10000)
    assert controller.update(6.0, 256).coef == 0.2
    assert controller.update(6.6, 100).coef == pytest.approx(0.2 * 1.001)
    assert controller.update(100.0, 32).coef == pytest.approx(0.2 * 1.00064)
    assert controller.update(-3.0, 32).coef == pytest.approx(0.2 * 0.99936)
    assert controller.coef == 0.2


def test_controller_stays_in_the_known_range_over_a_whole_run():
    low = high = kl.AdaptiveKL(0.2)
    for _ in range(313):
        low, high = low.update(0.0, 32), high.update(1e9, 32)
    assert low.coef == pytest.approx(0.1637, abs=5e-5)
    assert high.coef == pytest.approx(0.2443, abs=5e-5)


@given(st.floats(1e-3, 10), st.floats(0.1, 100), st.floats(-50, 500), st.floats(0, 50), st.integers(0, 4999))
def test_controller_is_bounded_and_monotone(coef, target, value, more, n):
    controller = kl.AdaptiveKL(coef, target, horizon=1000)
    bound = 0.2 * n / 1000
    low, high = controller.update(value, n).coef, controller.update(value + more, n).coef
    assert low <= high
    assert low > 0
    assert coef * (1 - bound) * (1 - 1e-12) <= low <= high <= coef * (1 + bound) * (1 + 1e-12)
    assert controller.update(target, n) == controller


def test_controller_refuses_what_could_turn_its_sign():
    with pytest.raises(UserError, match=r"horizon of 10 is too short for 50 sequences per update.*above 10"):
        kl.AdaptiveKL(0.2, horizon=10).update(1.0, 50)
    with pytest.raises(ValueError, match="must be finite, got nan"):
        kl.AdaptiveKL(0.2).update(math.nan, 1)
    for wrong in ({"coef": -0.1}, {"coef": 0.1, "target": 0.0}, {"coef": 0.1, "horizon": 0}):
        with pytest.raises(UserError, match="coef >= 0, target > 0 and horizon > 0"):
            kl.AdaptiveKL(**wrong)


def test_controller_state_goes_through_a_plain_dict():
    controller = kl.AdaptiveKL(0.2, 6.0, 100.0).update(9.0, 10)
    assert kl.AdaptiveKL(**dataclasses.asdict(controller)) == controller
