"""Divergences between a student and its teacher: of whole distributions, or estimated from sampled tokens.

P is the teacher's distribution of a token, Q is the student's. Everything is in nats.
Source: Agarwal et al., "On-policy distillation of language models: learning from self-generated mistakes" (GKD), 2024.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.math.choices import Divergence
from burnish.math.tensors import NOTHING, blocks, same_shape, upcast


class Divergences(NamedTuple):
    """Divergences of N pairs of distributions: ``Divergences(tensor([0.31]), tensor([0.31]), tensor([0.42]))``.

    All are (N,) and at least 0. Only ``loss`` has a gradient.
    """

    loss: Tensor
    forward_kl: Tensor
    """KL(P || Q) = sum_v P_v log(P_v / Q_v)."""
    reverse_kl: Tensor
    """KL(Q || P) = sum_v Q_v log(Q_v / P_v)."""


def divergences(student: Tensor, teacher: Tensor, kind: Divergence, beta: float = 0.5) -> Divergences:
    """The divergence between the distributions of a student and its teacher, over the whole vocabulary.

    - forward: KL(P || Q). The student covers everything that the teacher would say.
    - reverse: KL(Q || P). The student says only what the teacher would.
    - jensen_shannon: beta KL(P || M) + (1 - beta) KL(Q || M), with M = beta P + (1 - beta) Q. It is at most ln 2.
      Divided by beta, it becomes the forward KL as beta goes to 0; divided by 1 - beta, the reverse KL as beta goes
      to 1.

    Of all (N, V) tensors, only the two arguments are kept for the backward pass. Source: GKD, section 2 and 3.

    Args:
        student: (N, V), logits of Q; half precision is computed in float32.
        teacher: (N, V), logits of P, without a gradient. A probability below exp(-10,000) counts as exp(-10,000) where
            its logarithm is needed, so that the reverse KL is finite.
        kind: which of them is ``loss``.
        beta: in (0, 1), for jensen_shannon only.

    Returns:
        The loss and both KL divergences of each pair.

    Raises:
        ValueError: if the shapes differ, the kind is unknown, or beta is not in (0, 1).
    """
    same_shape(student=student, teacher=teacher)
    if kind not in ("forward", "reverse", "jensen_shannon"):
        raise ValueError(f"unknown divergence {kind!r}: expected forward, reverse or jensen_shannon")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be above 0 and below 1, got {beta}")
    result: Any = _Divergence.apply(upcast(student), upcast(teacher.detach()), kind, beta)
    return Divergences(*result)


def sampled(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """The reverse KL, estimated from tokens that the student sampled: the policy gradient with A = -(l - l_teacher).

    The value of each token is l - l_teacher, an unbiased estimate of KL(Q || P), which can be negative. Its gradient is
    (l - l_teacher) dl, as in REINFORCE with the advantage A. Over tokens drawn from Q, its mean is the gradient of the
    reverse KL of the token.
    Source: Lu and Thinking Machines Lab, "On-policy distillation", 2025.

    Args:
        logprobs: l, log-probabilities of sampled tokens under the student, of any shape.
        teacher_logprobs: those under the teacher, without a gradient.

    Returns:
        Losses of the same shape.

    Raises:
        ValueError: if the shapes differ.
    """
    same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    logprobs, teacher_logprobs = upcast(logprobs), upcast(teacher_logprobs)
    difference = (logprobs - teacher_logprobs).detach()
    return difference + difference * (logprobs - logprobs.detach())


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, kind: Divergence, beta: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = len(student)
        forward_kl, reverse_kl, loss, lse, teacher_lse = (student.new_empty(n) for _ in range(5))
        center = student.new_zeros(n)  # what the gradient is centered at: the mean over Q of its log-ratio
        for rows, at in blocks(student):
            lse[at], teacher_lse[at] = rows.logsumexp(-1), teacher[at].logsumexp(-1)
            log_q, log_p = _log_softmax(rows, lse[at]), _log_softmax(teacher[at], teacher_lse[at])
            q, p, ratios = log_q.exp(), log_p.exp(), log_p - log_q
            forward_kl[at] = torch.linalg.vecdot(p, ratios)
            reverse_kl[at] = -torch.linalg.vecdot(q, ratios)
            if kind == "jensen_shannon":
                mixed = _log_mixture(ratios, beta)
                center[at] = -torch.linalg.vecdot(q, mixed)
                loss[at] = beta * torch.linalg.vecdot(p, ratios - mixed) + (1 - beta) * center[at]
            else:
                loss[at] = forward_kl[at] if kind == "forward" else reverse_kl[at]
                center[at] = reverse_kl[at]
        ctx.save_for_backward(student, teacher, lse, teacher_lse, center)
        ctx.kind, ctx.beta = kind, beta
        ctx.mark_non_differentiable(forward_kl, reverse_kl)
        return loss, forward_kl, reverse_kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        """With logits z of Q: dKL(P||Q)/dz = Q - P, and dKL(Q||X)/dz = Q (log(Q / X) - KL(Q||X)) for X = P.

        The derivative of beta KL(P||M) + (1 - beta) KL(Q||M) is (1 - beta) times the latter for X = M: the parts in
        which M changes cancel.
        """
        student, teacher, lse, teacher_lse, center = ctx.saved_tensors
        result = torch.empty_like(student)
        for rows, at in blocks(student):
            log_q, log_p = _log_softmax(rows, lse[at]), _log_softmax(teacher[at], teacher_lse[at])
            if ctx.kind == "forward":
                torch.sub(log_q.exp(), log_p.exp(), out=result[at])
            elif ctx.kind == "reverse":
                torch.mul(log_q.exp(), log_q - log_p - center[at, None], out=result[at])
            else:
                mixed = _log_mixture(log_p - log_q, ctx.beta)
                torch.mul(log_q.exp(), (1 - ctx.beta) * (-mixed - center[at, None]), out=result[at])
            result[at].mul_(gradient[at, None])
        return result, None, None, None


def _log_softmax(logits: Tensor, lse: Tensor) -> Tensor:
    return (logits - lse[:, None]).clamp_(min=NOTHING)


def _log_mixture(ratios: Tensor, beta: float) -> Tensor:
    """log(M / Q) from d = log(P / Q), which is exactly 0 for d = 0: log(1 + beta (e^d - 1)), without overflow."""
    small = torch.expm1(-ratios.abs())
    return torch.where(ratios <= 0, torch.log1p(beta * small), ratios + torch.log1p((1 - beta) * small))
