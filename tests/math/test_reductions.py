from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from burnish.math.reductions import fixed_length, reduce, sequence_mean, sequence_sum, token_mean
from burnish.types import Metric, Term

F64 = torch.float64
MASK = torch.tensor([[False, True, True, True], [True, False, False, False], [False] * 4])


def ones(mask: Tensor) -> Tensor:
    """One sequence in each row."""
    return torch.ones_like(mask, dtype=torch.long)


def mean(term: Term) -> float:
    assert term.count is not None
    return Metric(term.total, term.count).mean.item()


@pytest.mark.parametrize(
    ("reduction", "settings", "expected"),
    [
        (token_mean, {}, (1 + 2 + 3 + 4) / 4),
        (sequence_mean, {}, ((1 + 2 + 3) / 3 + 4) / 2),
        (sequence_sum, {}, ((1 + 2 + 3) + 4) / 2),
        (fixed_length, {"length": 10}, ((1 + 2 + 3) / 10 + 4 / 10) / 2),
    ],
)
def test_reductions_by_hand(reduction: Callable[..., Term], settings: dict[str, int], expected: float) -> None:
    values = torch.tensor([[9.0, 1.0, 2.0, 3.0], [4.0, 9.0, 9.0, 9.0], [9.0] * 4], dtype=F64)
    term = reduction(values, MASK, ones(MASK), **settings)
    assert term.unit == ("tokens" if reduction is token_mean else "sequences")
    assert mean(term) == pytest.approx(expected, abs=1e-12)
    packed = torch.cat([values[0], values[1], values[2]]).unsqueeze(0)
    mask = torch.cat([MASK[0], MASK[1], MASK[2]]).unsqueeze(0)
    segments = torch.tensor([[1] * 4 + [2] * 4 + [0] * 4])
    assert mean(reduction(packed, mask, segments, **settings)) == pytest.approx(expected, abs=1e-12)


def test_reduce_is_the_mean_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 7, dtype=F64, generator=generator)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    metric = reduce(values, mask)
    assert metric.count.item() == mask.sum().item()
    assert metric.mean.item() == pytest.approx(values[mask].numpy().mean(), abs=1e-12)
    term = metric.over("tokens")
    assert term[:3] == token_mean(values, mask, ones(mask))[:3]
    assert term.parts is not None and torch.equal(term.parts[0], values.where(mask, 0))
    assert torch.equal(term.parts[1], mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    mask = torch.zeros(300, 701, dtype=torch.bool)
    mask[:, 1:700] = True
    losses = torch.ones(300, 701, dtype=dtype)
    term = token_mean(losses, mask, ones(mask))
    assert term.count is not None and term.count.item() == 300 * 699
    for reduction in (sequence_mean, sequence_sum):
        term = reduction(losses, mask, ones(mask))
        assert term.count is not None and term.count.item() == 300
    one = torch.zeros_like(losses)
    one[0, 1] = 1
    assert sequence_mean(one, mask, ones(mask)).total.item() == pytest.approx(1 / 699, rel=1e-6)
    assert mean(sequence_mean(losses, mask, ones(mask))) == pytest.approx(1, rel=1e-5)


def test_reductions_check_shapes() -> None:
    for reduction in (token_mean, sequence_mean, sequence_sum):
        with pytest.raises(ValueError, match=r"must align with .*: got shape \(4,\), expected \(3, 4\)"):
            reduction(torch.ones(4), MASK, ones(MASK))
    with pytest.raises(ValueError, match=r"segments must align with .*: got shape \(3,\), expected \(3, 4\)"):
        sequence_mean(torch.ones(3, 4), MASK, torch.ones(3, dtype=torch.long))
