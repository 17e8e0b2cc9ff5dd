"""Direct preference optimization and related losses, computed from the log-probabilities of whole answers.

In each pair, w is the better answer and l the worse one. lr = log p(answer) - log p_ref(answer), summed over its
tokens, or averaged if lengths are given. h = lr_w - lr_l; b is beta and e is the label smoothing.

| kind | loss of a pair | source |
| --- | --- | --- |
| sigmoid | -log sig(b h); with e: -(1 - e) log sig(b h) - e log sig(-b h) | DPO, Rafailov et al. 2023; cDPO |
| robust | ((1 - e) L(h) - e L(-h)) / (1 - 2 e), L that of sigmoid | rDPO, Chowdhury et al. 2024 |
| ipo | (h - 1 / (2 b))^2 | Azar et al. 2023 |
| hinge | max(0, 1 - b h) | Zhao et al. 2023; Liu et al. 2023 |
| sppo | (lr_w - 1 / (2 b))^2 + (lr_l + 1 / (2 b))^2 | Wu et al. 2024 |
| apo_zero | 1 - sig(b lr_w) + sig(b lr_l) | D'Oosterlinck et al. 2024 |
| apo_down | sig(b lr_w) + 1 - sig(b h) | D'Oosterlinck et al. 2024 |
| nca_pair | -log sig(b lr_w) - 1/2 log sig(-b lr_w) - 1/2 log sig(-b lr_l) | Chen et al. 2024 |
| simpo | -log sig(b h - gamma), h from averages, no reference | Meng et al. 2024 |
| orpo | -log sig(logit(exp l_w) - logit(exp l_l)), l averages, no reference | Hong et al. 2024 |

ORPO adds its loss, times a weight, to the negative log-likelihood of the better answer (``losses.nll``). A margin m
replaces b h by b h - m (Amini et al. 2024). A soft label p gives the expected loss p L(h) + (1 - p) L(-h).

Every loss and gradient is finite, because lr is clamped to [-1e6, 1e6]. If the log-probability of an answer is -inf
under the policy alone, lr is -1e6; under the reference alone, 1e6; under both, 0 without a gradient.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.errors import UserError
from burnish.math.choices import WITH_MARGIN, WITH_SMOOTHING, WITH_SOFT_LABELS, WITHOUT_REFERENCE, PreferenceLoss
from burnish.math.tensors import same_shape, upcast
from burnish.types import Metric

# Bound of log-ratios: differences of infinite ones would be NaN.
LIMIT = 1e6
# Its exp is just below 1 in float32: a probability of 1 would have infinite odds.
LARGEST_LOGPROB = -1e-7


def preference(
    kind: PreferenceLoss,
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    beta: float = 0.1,
    *,
    lengths: tuple[Tensor, Tensor] | None = None,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
    margin: Tensor | None = None,
    p_chosen: Tensor | None = None,
    weights: Tensor | None = None,
) -> Metric:
    """Loss of pairs of answers. The module docstring lists the formulas.

    Args:
        kind: the name of a loss in the table above.
        chosen: (P,), log-probability of the better answer, summed over its tokens.
        rejected: (P,), log-probability of the worse answer.
        ref_chosen: (P,), log-probability of the better answer under the reference; None means 0, so that ``chosen`` can
            hold log-ratios.
        ref_rejected: (P,), log-probability of the worse answer under the reference; None means 0.
        beta: above 0; not used by orpo.
        lengths: numbers of tokens in the better and the worse answers, each (P,), for averaging; required by simpo and
            orpo.
        gamma: the margin of simpo, the same for all pairs.
        label_smoothing: e in [0, 1/2), the assumed fraction of wrong labels; for sigmoid, robust and simpo.
        margin: (P,), at least 0, None means 0; for sigmoid, robust, hinge and simpo.
        p_chosen: (P,), in [0, 1], None means 1; for sigmoid, ipo, hinge and simpo.
        weights: (P,), at least 0; None means 1.

    Returns:
        The weighted sum over pairs, and the sum of the weights.

    Raises:
        ValueError: if the shapes differ.
        UserError: if the kind is unknown, needs lengths, or does not use one of the arguments.
    """
    _check(kind, lengths, ref_chosen=ref_chosen, ref_rejected=ref_rejected, gamma=gamma or None,
           label_smoothing=label_smoothing or None, margin=margin, p_chosen=p_chosen)  # fmt: skip
    better, worse = _log_ratio(chosen, ref_chosen), _log_ratio(rejected, ref_rejected)
    margin = torch.zeros_like(better) if margin is None else upcast(margin)
    share = torch.ones_like(better) if p_chosen is None else upcast(p_chosen)
    weights = torch.ones_like(better) if weights is None else upcast(weights)
    same_shape(chosen=better, rejected=worse, margin=margin, p_chosen=share, weights=weights)
    if lengths is not None:
        same_shape(chosen=better, lengths=lengths[0], rejected_lengths=lengths[1])
        better, worse = (x / upcast(n).clamp(min=1) for x, n in zip((better, worse), lengths, strict=True))
    if kind in ("sppo", "apo_zero", "apo_down", "nca_pair", "orpo"):
        losses = _two_sided(kind, better, worse, beta)
    else:
        share = share * (1 - label_smoothing) + (1 - share) * label_smoothing
        if kind == "robust":  # labels are right with probability 1 - e; these weights make the expected loss L(h)
            share = share / (1 - 2 * label_smoothing)
        losses = _of_difference(kind, better - worse, beta, gamma + margin, share)
    return Metric.of(losses, weights)


def kto(
    logratios: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weights: Tensor | None = None,
) -> Metric:
    """Loss of single answers: w_d (1 - sig(b (lr - z0))) for good ones, w_u (1 - sig(b (z0 - lr))) for bad ones.

    Source: Ethayarajh et al., "KTO: Model alignment as prospect theoretic optimization", 2024.

    Args:
        logratios: (N,), lr, the log-probability of each answer minus its log-probability under the reference, summed
            over its tokens; clamped to [-1e6, 1e6].
        desirable: (N,) bool, True for answers that are labeled good.
        baseline: (N,) or (), z0 from ``kto_baseline``; no gradient flows into it.
        beta: b, above 0.
        desirable_weight: w_d, at least 0.
        undesirable_weight: w_u, at least 0.
        weights: (N,), at least 0; None means 1.

    Returns:
        The weighted sum over answers, and the sum of ``weights``.

    Raises:
        ValueError: if the shapes differ.
    """
    x = _limited(logratios)
    weights = torch.ones_like(x) if weights is None else upcast(weights)
    same_shape(logratios=x, desirable=desirable, weights=weights)
    x = beta * (x - _limited(baseline.detach()))
    losses = torch.where(desirable, desirable_weight * torch.sigmoid(-x), undesirable_weight * torch.sigmoid(x))
    return Metric.of(losses, weights)


def kto_baseline(logratios: Tensor) -> Tensor:
    """z0 = max(0, mean of lr) over answers paired with the wrong prompts, which estimates the KL to the reference.

    Args:
        logratios: (M,), lr of each prompt with an answer to another prompt; clamped as in ``kto``.

    Returns:
        (), detached; 0 if ``logratios`` is empty.
    """
    return (_limited(logratios.detach()).sum() / max(len(logratios), 1)).clamp(min=0)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate both near 0 and far from it (Maechler 2012)."""
    x = upcast(x)
    near = x > -math.log(2)
    # the unused branch must be finite too, or its gradient would be NaN
    close = torch.log(-torch.expm1(torch.where(near, x, -0.1)))
    return torch.where(near, close, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def _check(kind: str, lengths: object, **given: object) -> None:
    """Raise a UserError if the kind is unknown, or does not use all of its arguments."""
    if kind not in get_args(PreferenceLoss):
        raise UserError(f"unknown preference loss {kind!r}: expected one of {', '.join(get_args(PreferenceLoss))}")
    readers = {
        "ref_chosen": [k for k in get_args(PreferenceLoss) if k not in WITHOUT_REFERENCE],
        "gamma": ["simpo"],
        "label_smoothing": WITH_SMOOTHING,
        "margin": WITH_MARGIN,
        "p_chosen": WITH_SOFT_LABELS,
    }
    readers["ref_rejected"] = readers["ref_chosen"]
    for name, value in given.items():
        if value is not None and kind not in readers[name]:
            raise UserError(f"{kind} does not use {name}; it is for {', '.join(readers[name])}")
    if kind in WITHOUT_REFERENCE and lengths is None:
        raise UserError(f"{kind} averages log-probabilities over tokens: pass lengths")


def _log_ratio(logprobs: Tensor, reference: Tensor | None) -> Tensor:
    if reference is None:
        return _limited(logprobs)
    same_shape(logprobs=logprobs, reference=reference)
    logprobs, reference = upcast(logprobs), upcast(reference.detach())
    both = logprobs.isinf() & (logprobs == reference)  # their difference would be NaN
    return _limited((logprobs - reference).masked_fill(both, 0.0))


def _limited(x: Tensor) -> Tensor:
    return upcast(x).clamp(-LIMIT, LIMIT)


def _two_sided(kind: str, better: Tensor, worse: Tensor, beta: float) -> Tensor:
    """Losses (P,) that depend on both log-ratios, not only on their difference."""
    if kind == "sppo":
        return (better - 1 / (2 * beta)).square() + (worse + 1 / (2 * beta)).square()
    if kind == "apo_zero":
        return torch.sigmoid(-beta * better) + torch.sigmoid(beta * worse)
    if kind == "apo_down":
        return torch.sigmoid(beta * better) + torch.sigmoid(-beta * (better - worse))
    if kind == "nca_pair":
        one_sided = F.logsigmoid(-beta * better) + F.logsigmoid(-beta * worse)
        return -F.logsigmoid(beta * better) - one_sided / 2
    better, worse = better.clamp(max=LARGEST_LOGPROB), worse.clamp(max=LARGEST_LOGPROB)
    return -F.logsigmoid(better - worse - (log1mexp(better) - log1mexp(worse)))


def _of_difference(kind: str, h: Tensor, beta: float, margin: Tensor, share: Tensor) -> Tensor:
    """Losses (P,) that depend only on h, with soft labels: share L(h) + (1 - share) L(-h)."""
    if kind == "ipo":
        target = 1 / (2 * beta)
        return (h - target).square() + (1 - share) * 4 * target * h
    x = beta * h - margin
    if kind == "hinge":
        return share * F.relu(1 - x) + (1 - share) * F.relu(1 + x)
    return -F.logsigmoid(x) + (1 - share) * x
