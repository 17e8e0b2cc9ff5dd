"""Losses of the DPO family against their formulas, written again here in plain Python."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.math import losses
from burnish.math.choices import WITH_SOFT_LABELS, WITHOUT_REFERENCE, PreferenceLoss
from burnish.math.preference import log1mexp

KINDS = get_args(PreferenceLoss)
preference: Any = losses.preference
F64 = torch.float64
LN2 = math.log(2)
number = st.floats(-8, 8)


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def value(kind: Any, better: float, worse: float, beta: float = 0.1, **more: Any) -> float:
    """Loss of one pair with these log-ratios."""
    if kind in WITHOUT_REFERENCE:
        more = {"lengths": (column(1.0), column(1.0))} | more
    return preference(kind, column(better), column(worse), beta=beta, **more).total.item()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sigmoid", LN2),
        ("robust", LN2),
        ("ipo", 1 / (4 * 0.2**2)),
        ("hinge", 1.0),
        ("sppo", 1 / (2 * 0.2**2)),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("nca_pair", 2 * LN2),
    ],
)
def test_values_where_the_policy_is_the_reference(kind, expected):
    more = {"label_smoothing": 0.1} if kind == "robust" else {}
    logprobs = column(-12.0, -3.5)
    term = preference(kind, logprobs, logprobs - 1, logprobs, logprobs - 1, 0.2, **more)
    assert term.mean.item() == pytest.approx(expected, abs=1e-12) and term.count.item() == 2


@given(w=number, r=number, beta=st.floats(0.05, 2))
def test_formulas(w, r, beta):
    h, t = w - r, 1 / (2 * beta)
    by_hand = {
        "sigmoid": -math.log(sig(beta * h)),
        "ipo": (h - t) ** 2,
        "hinge": max(0.0, 1 - beta * h),
        "sppo": (w - t) ** 2 + (r + t) ** 2,
        "apo_zero": 1 - sig(beta * w) + sig(beta * r),
        "apo_down": sig(beta * w) + 1 - sig(beta * h),
        "nca_pair": -math.log(sig(beta * w)) - (math.log(sig(-beta * w)) + math.log(sig(-beta * r))) / 2,
    }
    for kind, expected in by_hand.items():
        assert value(kind, w, r, beta) == pytest.approx(expected, rel=1e-9, abs=1e-9), kind
    assert value("simpo", w, r, beta, gamma=0.7) == pytest.approx(-math.log(sig(beta * h - 0.7)), rel=1e-9)


@given(h=number, beta=st.floats(0.05, 2))
def test_the_slope_of_dpo_and_the_difference_of_a_swap(h, beta):
    chosen = column(h).requires_grad_()
    preference("sigmoid", chosen, column(0.0), beta=beta).total.backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-beta * sig(-beta * h), rel=1e-9)
    assert value("sigmoid", h, 0, beta) - value("sigmoid", -h, 0, beta) == pytest.approx(-beta * h, abs=1e-9)


@pytest.mark.parametrize("e", [0.05, 0.2, 0.4])
def test_smoothed_labels_stop_where_the_model_is_as_sure_as_they_are(e):
    beta = 0.3
    best = math.log((1 - e) / e) / beta
    chosen = column(best - 0.1, best, best + 0.1).requires_grad_()
    term = preference("sigmoid", chosen, torch.zeros(3, dtype=F64), beta=beta, label_smoothing=e)
    term.total.backward()
    assert chosen.grad is not None
    below, at, above = chosen.grad.tolist()
    assert below < 0 < above and at == pytest.approx(0, abs=1e-12)
    expected = -(1 - e) * math.log(sig(beta * 2)) - e * math.log(sig(-beta * 2))
    assert value("sigmoid", 2, 0, beta, label_smoothing=e) == pytest.approx(expected)
    assert value("simpo", 2, 0, beta, label_smoothing=e) == pytest.approx(expected)


@given(h=number, e=st.floats(0.0, 0.45))
def test_robust_has_the_mean_of_clean_labels_when_that_share_is_flipped(h, e):
    noisy = (1 - e) * value("robust", h, 0, label_smoothing=e) + e * value("robust", -h, 0, label_smoothing=e)
    assert noisy == pytest.approx(value("sigmoid", h, 0), rel=1e-6)
    clean, swapped = (-math.log(sig(0.1 * x)) for x in (h, -h))
    by_hand = ((1 - e) * clean - e * swapped) / (1 - 2 * e)
    assert value("robust", h, 0, label_smoothing=e) == pytest.approx(by_hand, rel=1e-9)


@given(h=number, p=st.floats(0, 1))
def test_soft_labels_are_the_mean_over_who_wins(h, p):
    for kind in WITH_SOFT_LABELS:
        expected = p * value(kind, h, 0) + (1 - p) * value(kind, 0, h)
        assert value(kind, h, 0, p_chosen=column(p)) == pytest.approx(expected, rel=1e-9, abs=1e-9), kind


def test_ipo_is_least_at_its_target_on_sums_and_on_averages():
    beta = 0.25
    assert value("ipo", 1 / (2 * beta) - 3, -3, beta) == pytest.approx(0, abs=1e-12)
    lengths = (column(4.0), column(2.0))
    averaged = preference("ipo", column(-4.0), column(-6.0), beta=beta, lengths=lengths)
    assert averaged.total.item() == pytest.approx(0, abs=1e-12)  # -1 - (-3) = 1 / (2 * 0.25)
    assert preference("ipo", column(-4.0), column(-6.0), beta=beta).total.item() == pytest.approx(0, abs=1e-12)
    assert preference("ipo", column(-4.0), column(-8.0), beta=beta, lengths=lengths).total.item() == 1.0


def test_dpo_is_bradley_terry_on_implicit_rewards():
    g = torch.Generator().manual_seed(0)
    w, r, ref_w, ref_r, margin, p, weights = torch.rand(7, 5, dtype=F64, generator=g)
    rewards = [0.3 * (x - reference) for x, reference in ((w, ref_w), (r, ref_r))]
    more = {"margin": margin, "p_chosen": p, "weights": weights}
    torch.testing.assert_close(
        preference("sigmoid", w, r, ref_w, ref_r, 0.3, **more), losses.bradley_terry(*rewards, **more)
    )


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in WITHOUT_REFERENCE])
def test_what_the_policy_and_the_reference_say_of_the_prompt_cancels(kind):
    four = [column(x) for x in (-4.0, -7.0, -5.0, -6.0)]
    answer_only = preference(kind, *four, 0.2).total.item()
    with_prompt = [x - 11.0 for x in four]
    assert preference(kind, *with_prompt, 0.2).total.item() == pytest.approx(answer_only, abs=1e-9)
    if kind not in ("sppo", "apo_zero", "apo_down", "nca_pair"):  # of which the parts of the two models cancel alone
        policy, reference = [x - 5.0 for x in four[:2]], [x + 3.0 for x in four[2:]]
        assert preference(kind, *policy, *reference, 0.2).total.item() == pytest.approx(answer_only, abs=1e-9)


@given(w=st.floats(-6, -0.01), r=st.floats(-6, -0.01))
def test_orpo_compares_odds_of_averages(w, r):
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (w, r)]
    expected = -math.log(sig(math.log(odds[0] / odds[1])))
    lengths = (column(3.0), column(5.0))
    assert preference("orpo", column(3 * w), column(5 * r), lengths=lengths).total.item() == pytest.approx(
        expected, rel=1e-6
    )


def test_log1mexp():
    x = column(-1e-12, -1e-6, -0.5, -LN2, -1.0, -40.0, -1e4)
    expected = [math.log(1e-12), math.log(1e-6), math.log(1 - math.exp(-0.5)), -LN2, math.log(1 - math.exp(-1))]
    assert log1mexp(x)[:5].tolist() == pytest.approx(expected, rel=1e-6)
    assert log1mexp(x)[5].item() == pytest.approx(-math.exp(-40), rel=1e-9) and log1mexp(x)[6].item() == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_input_makes_it_infinite(kind, dtype):
    ends = (-1e4, -1.0, -1e-9, 0.0, 1e4)
    w, r = (x.flatten().to(dtype).requires_grad_() for x in torch.meshgrid(*[torch.tensor(ends)] * 2, indexing="ij"))
    more = {"lengths": (torch.ones(25), torch.ones(25))} if kind in WITHOUT_REFERENCE else {}
    term = preference(kind, w, r, **more)
    term.total.backward()
    assert term.total.dtype == torch.float32 and bool(term.total.isfinite())
    for x in (w, r):
        assert x.grad is not None and bool(x.grad.isfinite().all())


ENDS = (-math.inf, -1e4, -1.0, math.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_infinite_log_probabilities_give_finite_losses_and_gradients(kind, dtype):
    four = torch.cartesian_prod(*[torch.tensor(ENDS, dtype=dtype)] * 4).unbind(1)
    w, r = (x.clone().requires_grad_() for x in four[:2])
    more = {"lengths": (torch.full((256,), 3), torch.full((256,), 7))} if kind in WITHOUT_REFERENCE else {}
    references = () if kind in WITHOUT_REFERENCE else four[2:]
    for beta in (0.05, 2.0):
        term = preference(kind, w, r, *references, beta=beta, **more)
        assert bool(term.total.isfinite())
        for x, gradient in zip((w, r), torch.autograd.grad(term.total, (w, r)), strict=True):
            assert bool(gradient.isfinite().all())
            assert not gradient[x.isinf()].any()


@pytest.mark.parametrize(
    ("better", "worse", "expected", "slopes"),
    [  # (policy, reference) of each answer
        ((-math.inf, -3.0), (-math.inf, -5.0), LN2, (0, 0)),
        ((-math.inf, -3.0), (-5.0, -5.0), 0.1 * 1e6, (0, 0.1)),
        ((-3.0, -3.0), (-math.inf, -5.0), 0.0, (0, 0)),
        ((-math.inf, -math.inf), (-5.0, -5.0), LN2, (0, 0.05)),
        ((-3.0, -math.inf), (-5.0, -5.0), 0.0, (0, 0)),
        ((-math.inf, -math.inf), (-math.inf, -math.inf), LN2, (0, 0)),
    ],
)
def test_the_limits_of_dpo_by_hand(better, worse, expected, slopes):
    w, r = column(better[0]).requires_grad_(), column(worse[0]).requires_grad_()
    term = preference("sigmoid", w, r, column(better[1]), column(worse[1]), 0.1)
    assert term.total.item() == pytest.approx(expected)
    gradients = torch.autograd.grad(term.total, (w, r))
    assert [x.item() for x in gradients] == pytest.approx(slopes)


def test_nothing_is_ignored():
    one = column(1.0)
    for kind, more in (
        ("simpo", {"ref_chosen": one}),
        ("orpo", {"ref_rejected": one}),
        ("ipo", {"margin": one}),
        ("sppo", {"p_chosen": one}),
        ("robust", {"p_chosen": one}),
        ("hinge", {"label_smoothing": 0.1}),
        ("sigmoid", {"gamma": 0.5}),
    ):
        with pytest.raises(UserError, match=f"{kind} does not use {next(iter(more))}; it is for .*"):
            preference(kind, one, one, lengths=(one, one), **more)
    with pytest.raises(UserError, match="simpo averages log-probabilities over tokens: pass lengths"):
        preference("simpo", one, one)
    with pytest.raises(UserError, match="unknown preference loss 'dpo': expected one of sigmoid"):
        preference("dpo", one, one)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"rejected must align with chosen: got shape \(2,\), expected \(1,\)"):
        preference("sigmoid", one, column(1.0, 2.0))


# --- KTO ----------------------------------------------------------------------------------------------------------


@given(good=number, bad=number, z0=st.floats(0, 3))
def test_kto_by_hand(good, bad, z0):
    term = losses.kto(column(good, bad), torch.tensor([True, False]), column(z0, z0), 0.2, 2.0, 0.5)
    expected = 2 * (1 - sig(0.2 * (good - z0))) + 0.5 * (1 - sig(0.2 * (z0 - bad)))
    assert term.total.item() == pytest.approx(expected, rel=1e-9) and term.count.item() == 2


def test_kto_where_the_policy_is_the_reference_is_half_the_weight():
    zero = column(0.0, 0.0)
    for label, weight in ((True, 3.0), (False, 0.25)):
        term = losses.kto(zero, torch.tensor([label] * 2), zero, 0.2, 3.0, 0.25)
        assert term.mean.item() == pytest.approx(weight / 2)


def test_the_baseline_is_a_mean_at_least_0_without_gradient():
    assert losses.kto_baseline(column(1.0, 4.0, -2.0)).item() == 1.0
    assert losses.kto_baseline(column(1.0, -4.0)).item() == 0.0
    x = column(2.0).requires_grad_()
    z0 = losses.kto_baseline(x * 3)
    assert not z0.requires_grad
    losses.kto(column(1.0).requires_grad_(), torch.tensor([True]), x, 0.1).total.backward()
    assert x.grad is None


@pytest.mark.parametrize("baseline", [-math.inf, 0.0, math.inf])
def test_kto_of_infinite_log_ratios_is_finite(baseline):
    x = column(-math.inf, math.inf, 0.0).repeat(2).requires_grad_()
    desirable = torch.tensor([True] * 3 + [False] * 3)
    term = losses.kto(x, desirable, torch.full_like(x, baseline))
    (gradient,) = torch.autograd.grad(term.total, x)
    assert bool(term.total.isfinite()) and bool(gradient.isfinite().all())
    if baseline == 0:
        assert term.total.item() == pytest.approx((1 + 0 + 0.5) + (0 + 1 + 0.5))
        assert gradient.tolist() == pytest.approx([0, 0, -0.025, 0, 0, 0.025])
    assert losses.kto_baseline(x).item() == 0
    assert losses.kto_baseline(column(-math.inf, -math.inf)).item() == 0
    assert losses.kto_baseline(column(math.inf, 1.0)).isfinite()


def test_no_gradient_flows_into_the_reference():
    ours, reference = column(1.0).requires_grad_(), column(0.5).requires_grad_()
    preference("sigmoid", ours, 2 * ours, reference, 3 * reference).total.backward()
    assert ours.grad is not None and reference.grad is None
