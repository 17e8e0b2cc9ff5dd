"""Attention by products of whole groups of sequences, against attention with a mask in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from burnish.kernels import attention, grouped, linear
from burnish.types import Segments

SEGMENTS = [
    Segments((5,), (None,)),
    Segments((4, 3, 5, 6, 2), (None, 0, 0, None, 3)),
    Segments((33, 1, 40, 30, 70, 64), (None, 0, 0, None, None, 4)),
    Segments((31,) * 5 + (150,), (None,) * 6),
]


def inputs(segments: Segments, dtype: torch.dtype, heads: int = 6, key_heads: int = 2) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(heads, 8), (key_heads, 8), (key_heads, 4)]
    made = [torch.randn(1, sum(segments.lengths), *shape, generator=draw) for shape in shapes]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def with_mask(query, key, value, scaling, segments: Segments) -> torch.Tensor:
    """Attention over the whole row, where a mask hides other sequences."""
    of = [i for i, length in enumerate(segments.lengths) for _ in range(length)]
    seen = torch.tensor([[a == b or segments.parents[a] == b for b in of] for a in of]).tril()
    return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True).transpose(1, 2)


def computed(function, leaves: list[torch.Tensor], scaling: float | None, segments: Segments) -> list[torch.Tensor]:
    """The states, and the gradients of the sum of their squares."""
    states = function(*leaves, scaling, segments)
    states.double().square().sum().backward()
    return [states.detach(), *(x.grad for x in leaves if x.grad is not None)]


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """The largest differences, as shares of the largest entries."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in pairs]


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("size", [grouped.BYTES, 2**14, 2**10])
@pytest.mark.parametrize("segments", SEGMENTS, ids=lambda segments: str(len(segments.lengths)))
def test_states_and_gradients_are_those_of_attention_with_a_mask(segments, size, scaling, monkeypatch):
    monkeypatch.setattr(grouped, "BYTES", size)
    monkeypatch.setattr(grouped, "BLOCK", 16)
    grouped.plan_of.cache_clear()
    expected = computed(with_mask, [x.detach().double().requires_grad_() for x in inputs(segments, torch.float32)],
                        scaling, segments)  # fmt: skip
    found = computed(grouped.attend, inputs(segments, torch.float32), scaling, segments)
    grouped.plan_of.cache_clear()
    assert len(found) == 4
    assert max(errors(found, expected)) < (1e-5 if grouped.is_exact() else 2e-2)


@pytest.mark.parametrize("segments", SEGMENTS, ids=lambda segments: str(len(segments.lengths)))
def test_in_bfloat16_only_results_are_rounded(segments):
    exact = computed(with_mask, [x.detach().double().requires_grad_() for x in inputs(segments, torch.bfloat16)],
                     None, segments)  # fmt: skip
    found = computed(grouped.attend, inputs(segments, torch.bfloat16), None, segments)
    assert {x.dtype for x in found} == {torch.bfloat16}
    limit = 2**-7 if grouped.is_exact() else 2e-2
    assert max(errors(found, exact)) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_states_and_gradients_whatever_else_is_in_the_row(dtype):
    lengths = (21, 3, 30, 17, 1, 150, 64, 25)
    leaves = inputs(Segments(lengths, (None,) * len(lengths)), dtype, heads=9, key_heads=3)
    together = computed(grouped.attend, leaves, None, Segments(lengths, (None,) * len(lengths)))
    for part, at in enumerate(accumulate((0, *lengths[:-1]))):
        here = slice(at, at + lengths[part])
        alone = [x.detach()[:, :, here].requires_grad_() for x in leaves]
        states, *gradients = computed(grouped.attend, alone, None, Segments(lengths[part : part + 1], (None,)))
        expected = [together[0][:, here], *(x[:, :, here] for x in together[1:])]
        if grouped.fits(dtype, torch.device("cpu")):
            assert all(torch.equal(a, b) for a, b in zip([states, *gradients], expected, strict=True))
        else:  # products that are not oneDNN's may depend on their number
            assert max(errors([states, *gradients], expected)) < 2e-2


def test_large_scores_do_not_overflow_and_a_single_token_attends_to_itself():
    segments = Segments((1, 3), (None, None))
    query, key, value = inputs(segments, torch.float32)
    states = grouped.attend(1e4 * query, 1e4 * key, value, None, segments)
    assert states.isfinite().all()
    torch.testing.assert_close(states[0, 0], value[0, :, 0].repeat_interleave(3, 0))


def test_attention_takes_it_for_the_dtypes_that_it_computes_well(monkeypatch):
    monkeypatch.setattr(linear, "has_onednn", lambda: True)
    cpu = torch.device("cpu")
    for exact in (True, False):
        monkeypatch.setattr(grouped, "is_exact", lambda exact=exact: exact)
        assert grouped.fits(torch.float32, cpu) == exact
        assert grouped.fits(torch.bfloat16, cpu)
        assert not grouped.fits(torch.float64, cpu)
        assert not grouped.fits(torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(linear, "has_onednn", lambda: False)
    assert not grouped.fits(torch.bfloat16, cpu)


def test_models_whose_heads_share_no_keys_keep_the_kernel_of_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "by_sequence", lambda query, *_: calls.append(query) or query.transpose(1, 2))
    monkeypatch.setattr(grouped, "fits", lambda dtype, device: True)
    packed = attention.Packed(segments := Segments((5,), (None,)))
    for key_heads, times in ((6, 1), (2, 1)):
        query, key, value = inputs(segments, torch.float32, 6, key_heads)
        attention.varlen(torch.nn.Identity(), query, key, value, None, segments=packed)
        assert len(calls) == times


def test_autocast_does_not_round_float32_scores(monkeypatch):
    monkeypatch.setattr(grouped, "fits", lambda dtype, device: dtype == torch.bfloat16)
    segments = SEGMENTS[1]

    def under_autocast(query, key, value, scaling, segments: Segments) -> torch.Tensor:
        packed = attention.Packed(segments)
        return attention.varlen(torch.nn.Module(), query, key, value, None, scaling=scaling, segments=packed)[0]

    expected = computed(grouped.attend, inputs(segments, torch.bfloat16), None, segments)
    with torch.autocast("cpu", torch.bfloat16):
        found = computed(under_autocast, inputs(segments, torch.bfloat16), None, segments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_threads_do_not_leave_the_precision_of_other_products_changed():
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    first, second = Event(), Event()

    def other() -> None:
        first.wait(5)
        with grouped.onednn():
            second.set()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(other)
        with grouped.onednn():
            first.set()
            assert not second.wait(0.1)
        done.result(5)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]


def test_the_precision_of_other_products_is_restored():
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    with pytest.raises(RuntimeError), grouped.onednn():
        assert settings.fp32_precision == "bf16"
        raise RuntimeError
    assert settings.fp32_precision == before
