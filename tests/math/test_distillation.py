"""Divergences against their definitions in float64, with gradients by autograd, and their identities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.math import tensors
from burnish.math.distillation import divergences, sampled

KINDS: list[Any] = ["forward", "reverse", "jensen_shannon"]


def logits(seed: int, rows: int = 5, vocabulary: int = 7, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, dtype=torch.float64, generator=generator)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def defined(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The definition, over the whole vocabulary, for autograd."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    m = beta * p + (1 - beta) * q
    both = beta * kl(p, m) + (1 - beta) * kl(q, m)
    return {"forward": kl(p, q), "reverse": kl(q, p), "jensen_shannon": both}[kind]


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a weighted sum of losses."""
    at = at.clone().requires_grad_()
    losses = loss(at)
    weights = torch.arange(1, len(losses) + 1, dtype=losses.dtype)
    return torch.autograd.grad((weights * losses).sum(), at)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [1e-3, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("block", [1, 2**18])
def test_values_and_gradients_are_those_of_the_definition(
    kind: Any, beta: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tensors.BLOCKS, "cpu", block)
    student, teacher = logits(0), logits(1)
    found = divergences(student, teacher, kind, beta)
    torch.testing.assert_close(found.loss, defined(student, teacher, kind, beta), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.forward_kl, defined(student, teacher, "forward", beta), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.reverse_kl, defined(student, teacher, "reverse", beta), rtol=1e-12, atol=0)
    ours = gradient(lambda z: divergences(z, teacher, kind, beta).loss, student)
    expected = gradient(lambda z: defined(z, teacher, kind, beta), student)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_two_tokens_by_hand() -> None:
    """P = (3/4, 1/4) and Q = (1/2, 1/2), whose mixture by halves is M = (5/8, 3/8)."""
    student, teacher = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    forward, reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    of_p = 0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3)
    of_q = 0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)
    for kind, loss in (("forward", forward), ("reverse", reverse), ("jensen_shannon", (of_p + of_q) / 2)):
        found = divergences(student, teacher, kind)  # type: ignore[arg-type]
        assert [x.item() for x in found] == pytest.approx([loss, forward, reverse], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_equal_models_give_no_loss_and_no_gradient(dtype: torch.dtype, kind: Any, beta: float) -> None:
    same = logits(0).to(dtype)
    found = divergences(same, same.clone(), kind, beta)
    assert not any(x.any() for x in found)
    assert not gradient(lambda z: divergences(z, same.clone(), kind, beta).loss, same).any()


@pytest.mark.parametrize(("beta", "kind"), [(1e-6, "forward"), (1 - 1e-6, "reverse")])
def test_the_limits_of_beta_are_the_kl_divergences(beta: float, kind: Any) -> None:
    """JSD(beta) / beta goes to the forward KL, and JSD(beta) / (1 - beta) to the reverse KL, and so do gradients."""
    student, teacher, scale = logits(0, scale=1.0), logits(1, scale=1.0), min(beta, 1 - beta)

    def scaled(z: Tensor) -> Tensor:
        return divergences(z, teacher, "jensen_shannon", beta).loss / scale

    torch.testing.assert_close(scaled(student), divergences(student, teacher, kind).loss, rtol=1e-4, atol=0)
    expected = gradient(lambda z: divergences(z, teacher, kind).loss, student)
    torch.testing.assert_close(gradient(scaled, student), expected, rtol=1e-3, atol=1e-5)


def test_divergences_are_at_least_0_and_that_of_jensen_and_shannon_at_most_ln_2() -> None:
    for seed in range(20):
        student, teacher = logits(seed, scale=50.0), logits(seed + 100, scale=50.0)
        for kind in KINDS:
            loss = divergences(student, teacher, kind).loss
            assert (loss >= -1e-12).all() and (kind != "jensen_shannon" or (loss <= math.log(2) + 1e-12).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_0_give_finite_values_and_gradients(kind: Any, dtype: torch.dtype) -> None:
    student = torch.tensor([[0.0, 1.0, 2000.0], [0.0, 3e4, -3e4]], dtype=dtype)
    teacher = torch.tensor([[3000.0, 1.0, -torch.inf], [-torch.inf, 0.0, 0.0]], dtype=dtype)
    found = divergences(student, teacher, kind)
    assert all(x.isfinite().all() for x in found)
    assert gradient(lambda z: divergences(z, teacher, kind).loss, student).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_adding_a_constant_to_logits_changes_nothing(kind: Any) -> None:
    student, teacher = logits(0), logits(1)
    expected = divergences(student, teacher, kind).loss
    torch.testing.assert_close(divergences(student + 7, teacher - 5, kind).loss, expected)
    moved = gradient(lambda z: divergences(z, teacher, kind).loss, student)
    torch.testing.assert_close(moved.sum(-1), torch.zeros(len(student), dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_expected_sampled_form_is_the_reverse_kl_with_its_gradient() -> None:
    """The sum over all tokens, each weighted by its probability, instead of an average over samples."""
    student, teacher = logits(0), logits(1)
    n, vocabulary = student.shape

    def expected(z: Tensor) -> Tensor:
        losses = sampled(z.log_softmax(-1), teacher.log_softmax(-1))
        return (z.detach().softmax(-1) * losses).sum(-1)

    torch.testing.assert_close(expected(student), divergences(student, teacher, "reverse").loss)
    of_reverse_kl = gradient(lambda z: divergences(z, teacher, "reverse").loss, student)
    torch.testing.assert_close(gradient(expected, student), of_reverse_kl)
    assert sampled(torch.zeros(n, vocabulary), torch.zeros(n, vocabulary)).shape == (n, vocabulary)


def test_the_sampled_form_is_a_policy_gradient_by_hand() -> None:
    """The student gives the token 1/2, the teacher 1/4: the loss is ln 2, and its derivative in log p also."""
    logprob = torch.tensor(math.log(0.5), requires_grad=True)
    loss = sampled(logprob, torch.tensor(math.log(0.25)))
    (derivative,) = torch.autograd.grad(loss, logprob)
    assert loss.item() == pytest.approx(math.log(2)) == derivative.item()


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_computed_in_float32(kind: Any) -> None:
    student, teacher = logits(0).bfloat16(), logits(1).bfloat16()
    for found, expected in zip(
        divergences(student, teacher, kind), divergences(student.float(), teacher.float(), kind), strict=True
    ):
        assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert sampled(student, teacher).dtype == torch.float32


def test_no_rows_give_no_values() -> None:
    none = torch.zeros(0, 7, requires_grad=True)
    found = divergences(none, torch.zeros(0, 7), "reverse")
    assert [x.shape for x in found] == [(0,)] * 3
    assert torch.autograd.grad(found.loss.sum(), none)[0].shape == (0, 7)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"teacher must align with student: got shape \(2, 3\), expected \(1, 3\)"):
        divergences(torch.zeros(1, 3), torch.zeros(2, 3), "forward")
    with pytest.raises(ValueError, match="unknown divergence 'kl': expected forward, reverse or jensen_shannon"):
        divergences(torch.zeros(1, 3), torch.zeros(1, 3), "kl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beta must be above 0 and below 1, got 1"):
        divergences(torch.zeros(1, 3), torch.zeros(1, 3), "jensen_shannon", 1)
    with pytest.raises(ValueError, match="teacher_logprobs must align"):
        sampled(torch.zeros(3), torch.zeros(2))
