"""What holds of every function of the pure math: masks, precision, integers and empty tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from burnish.math import advantages, kl, losses, policy, preference, reductions, segments, statistics, tensors, value
from burnish.math.advantages import Grouping, Moments
from burnish.math.choices import (
    WITH_MARGIN,
    WITH_SOFT_LABELS,
    WITHOUT_REFERENCE,
    Baseline,
    Estimate,
    PreferenceLoss,
)

# (B, T) wherever a parameter of this name is found
TOKENS = {
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "sampler_logprobs",
    "advantages",
    "values",
    "old_values",
    "returns",
}
TOKENS |= {"targets", "kl", "steps", "x", "rewards", "losses"}


@dataclass(frozen=True)
class Case:
    """A function and its settings. Its tensors are drawn by the names of its parameters; ``shapes`` says more."""

    function: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)


def pairs(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "pairs")


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: Estimate) -> Any:
    return reductions.reduce(kl.estimate(logprobs, ref_logprobs, kind, mask), mask)


CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
TAUS = {"tau_positive": 1.0, "tau_negative": 1.5}
BOUNDS = {"cap": 1.5, "low": 0.5, "high": 2.0}
MASKED = (
    {
        "nll": Case(losses.nll),
        "reinforce": Case(policy.reinforce, {"floor": None, "unlikelihood": False}),
        "reinforce with a floor": Case(policy.reinforce, {"floor": -1.0, "unlikelihood": False}),
        "reinforce with unlikelihood": Case(policy.reinforce, {"floor": None, "unlikelihood": True}),
        "cispo": Case(policy.cispo, {"clip_high": 0.3, "dual_clip": None}),
        "cispo without a clip": Case(policy.cispo, {"clip_high": None, "dual_clip": None}),
        "cispo, dual": Case(policy.cispo, {"clip_high": 3.0, "dual_clip": 1.5}),
        "sapo": Case(policy.sapo, TAUS | {"dual_clip": None}),
        "sapo, dual": Case(policy.sapo, TAUS | {"dual_clip": 1.5}),
        "log_ratios": Case(policy.log_ratios),
        "sequence_log_ratios": Case(policy.sequence_log_ratios),
        "effective_sample_size": Case(policy.effective_sample_size, shapes={"weights": "tokens"}),
        "clipped_value": Case(value.clipped_value, {"clip": 0.2}),
        "clipped_value without a clip": Case(value.clipped_value, {"clip": None}),
        "step_value": Case(value.step_value),
        "value_clipfrac": Case(value.value_clipfrac, {"clip": 0.2}),
        "reduce": Case(reductions.reduce),
        "token_mean": Case(reductions.token_mean),
        "sequence_mean": Case(reductions.sequence_mean),
        "sequence_sum": Case(reductions.sequence_sum),
        "fixed_length": Case(reductions.fixed_length, {"length": 9}),
        "token_rewards": Case(advantages.token_rewards, {"kl_coef": 0.3}, {"scores": "rows"}),
        "gae": Case(advantages.gae, {"gamma": 0.99, "lam": 0.95}),
        "whiten": Case(advantages.whiten),
        "whiten around the mean": Case(advantages.whiten, {"shift_mean": False}),
    }
    | {
        f"{function.__name__}, {kind}": Case(function, {"kind": kind})
        for function, kinds in (
            (advantages.compute_advantages, get_args(Baseline)),
            (kl.estimate, get_args(Estimate)),
            (kl_loss, get_args(Estimate)),
        )
        for kind in kinds
    }
    | {
        f"{function.__name__}, dual clip {dual_clip}": Case(function, CLIPS | {"dual_clip": dual_clip})
        for function in (policy.clip, policy.gspo, policy.gspo_token)
        for dual_clip in (None, 1.5)
    }
    | {
        f"correction_weights, {level}, {mode}": Case(policy.correction_weights, BOUNDS | {"level": level, "mode": mode})
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    }
)


def of_pairs(kind: PreferenceLoss) -> Case:
    shapes = pairs("chosen", "rejected", "weights") | {"lengths": "lengths"}
    if kind not in WITHOUT_REFERENCE:
        shapes |= pairs("ref_chosen", "ref_rejected")
    if kind in WITH_MARGIN:
        shapes |= pairs("margin")
    if kind in WITH_SOFT_LABELS:
        shapes |= pairs("p_chosen")

    def loss(lengths: Tensor, **given: Any) -> Any:
        return losses.preference(kind, lengths=(lengths, lengths) if kind in WITHOUT_REFERENCE else None, **given)

    return Case(loss, shapes=shapes)


def moments(x: Tensor) -> Any:
    seen = Moments(2, 1.5, 0.5)
    return seen.update(x), seen.normalize(x)


RANKED = pairs("chosen", "rejected", "weights")
UNMASKED = {
    "bradley_terry": Case(losses.bradley_terry, shapes=RANKED | pairs("margin", "p_chosen")),
    "centering": Case(losses.centering, shapes=RANKED),
    "pair_accuracy": Case(losses.pair_accuracy, shapes=RANKED),
    "kto": Case(losses.kto, shapes=pairs("logratios", "baseline", "weights") | {"desirable": "labels"}),
    "kto_baseline": Case(losses.kto_baseline, shapes=pairs("logratios")),
    "log1mexp": Case(preference.log1mexp, shapes=pairs("x")),
    "estimate": Case(kl.estimate),
    "moments": Case(moments, shapes=pairs("x")),
}
UNMASKED |= {f"preference, {kind}": of_pairs(kind) for kind in get_args(PreferenceLoss)}
UNMASKED |= {
    f"group, {kind}": Case(advantages.group, {"kind": kind}, {"rewards": "rows"}) for kind in get_args(Grouping)
}
EVERY = MASKED | UNMASKED


def draw(case: Case, seed: int, rows: int = 4, width: int = 6, whole: bool = False) -> dict[str, Tensor]:
    """Arguments of a case in float64; with ``whole`` all numbers are small whole ones below 0."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        found = -3 * torch.rand(*shape, dtype=torch.float64, generator=generator) - 0.01
        return found.floor() if whole else found

    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[1:2] = False  # a row without any
    made: dict[str, Callable[[], Tensor]] = {
        "tokens": lambda: numbers(rows, width),
        "rows": lambda: numbers(rows),
        "pairs": lambda: numbers(rows),
        "lengths": lambda: torch.randint(1, 5, (rows,), generator=generator),
        "labels": lambda: torch.rand(rows, generator=generator) < 0.5,
        "groups": lambda: torch.arange(rows) // 2,
        "segments": lambda: (torch.arange(width) // 3 + 1).repeat(rows, 1),
        "mask": lambda: mask,
    }
    names = inspect.signature(case.function).parameters
    shapes = {name: "tokens" for name in names if name in TOKENS}
    shapes |= {name: name for name in names if name in ("mask", "groups", "segments")}
    return {name: made[kind]() for name, kind in (shapes | case.shapes).items()}


def parts(found: Any) -> list[Any]:
    """The tensors and numbers of a result."""
    if isinstance(found, Tensor | float | int):
        return [found]
    if found is None or isinstance(found, str):  # the parts or the unit of a term
        return []
    if isinstance(found, dict):
        found = found.values()
    return [x for part in (vars(found).values() if isinstance(found, Moments) else found) for x in parts(part)]


def call(case: Case, given: dict[str, Tensor], gradients: bool = True) -> list[Tensor]:
    """All results, and their gradients with respect to all arguments that are floats."""
    given = {n: x.clone().requires_grad_(gradients and x.is_floating_point()) for n, x in given.items()}
    found = [torch.as_tensor(x) for x in parts(case.function(**given, **case.settings))]
    wanted = [x for x in given.values() if x.requires_grad]
    total = [x.sum() for x in found if x.requires_grad]
    taken = torch.autograd.grad(total, wanted, allow_unused=True) if total else []
    return [x.detach() for x in found] + [x for x in taken if x is not None]


def test_every_function_with_a_mask_is_among_the_cases() -> None:
    modules = (advantages, kl, losses, policy, preference, reductions, segments, tensors, value)
    functions = {x for m in modules for x in vars(m).values() if inspect.isfunction(x) and "mask" in _parameters(x)}
    public = {x for x in functions if not x.__name__.startswith("_") and x.__module__.startswith("burnish.math")}
    covered = {case.function for case in MASKED.values()}
    assert public - covered == {segments.sequence_count, tensors.learned}  # the first takes no floats


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_reaches_a_value_or_a_gradient(name: str, fill: float) -> None:
    case = MASKED[name]
    for seed in range(3):
        given = draw(case, seed)
        mask = given["mask"]

        def filled(value: float, mask: Tensor = mask, given: dict[str, Tensor] = given) -> dict[str, Tensor]:
            shown = {1: mask.any(1), 2: mask}
            return {
                n: x if x is mask or n in ("groups", "segments") else x.where(shown[x.dim()], value)
                for n, x in given.items()
            }

        for found, expected in zip(call(case, filled(fill)), call(case, filled(0.0)), strict=True):
            assert torch.equal(found, expected), seed


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_and_integers_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    case = EVERY[name]
    given = draw(case, 0, whole=dtype == torch.int64)
    low = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    high = {n: x.to(dtype).float() if x.is_floating_point() else x for n, x in given.items()}
    found, expected = call(case, low, gradients=False), call(case, high, gradients=False)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert all(x.dtype not in (torch.float16, torch.bfloat16) for x in expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


EMPTY = [(0, 5), (4, 0), (0, 0)]


@pytest.mark.parametrize(
    ("name", "rows", "width"), [(n, *shape) for n in EVERY for shape in (EMPTY if n in MASKED else EMPTY[:1])]
)
def test_empty_tensors_give_empty_results_or_zeros(name: str, rows: int, width: int) -> None:
    case = EVERY[name]
    given = draw(case, 0, rows, width)
    shape = (rows, width) if {"mask", "ref_logprobs"} & set(given) else (rows,)
    for x in parts(case.function(**given, **case.settings)):
        if isinstance(x, Tensor):
            assert x.shape in (shape, ()) and not x.isnan().any()
            assert x.dim() or x.item() == 0
    assert not any(x.isnan().any() for x in call(case, given))  # the gradients are as empty


@pytest.mark.parametrize(("rows", "width"), EMPTY)
def test_empty_logits_and_masks(rows: int, width: int) -> None:
    logits, tokens = torch.zeros(rows, width, 7), torch.zeros(rows, width, dtype=torch.long)
    assert tensors.shift_right(logits).shape == (rows, width, 7)
    assert tensors.token_logprobs(logits, tokens).shape == (rows, width)
    assert tensors.logprobs_at(logits, tokens).shape == (rows, width)
    flat = tensors.logprobs_and_entropy(logits.flatten(0, 1).requires_grad_(), tokens.flatten())
    assert [x.shape for x in flat] == [(0,), (0,)]
    assert torch.autograd.grad(flat[0].sum() + flat[1].sum(), flat[0], allow_unused=True)[0].shape == (0,)
    for temperature, top_k, top_p in ((0.0, None, None), (0.5, 2, 0.5), (1.0, None, 0.5)):
        assert tensors.warp(logits, temperature, top_k, top_p).shape == logits.shape
    assert segments.sequence_count(tokens.bool(), tokens).item() == 0


def test_nothing_seen_leaves_no_moments_and_no_intervals() -> None:
    none = torch.zeros(0)
    assert Moments().update(none) == Moments()
    assert Moments().normalize(none).shape == (0,)
    assert statistics.wilson(0.0, 0) == pytest.approx((0, 1))
    assert all(map(math.isnan, statistics.bootstrap(torch.zeros(0, 1), lambda means: means)[0]))
