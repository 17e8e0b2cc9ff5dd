import pytest
import torch

from burnish.errors import UserError
from burnish.math.choices import Reduction
from burnish.math.reductions import reduce, reduction_weights

F64 = torch.float64
MASK = torch.tensor([[False, True, True, True], [True, False, False, False], [False] * 4])


@pytest.mark.parametrize(
    ("kind", "length", "expected"),
    [
        ("token_mean", None, (1 + 2 + 3 + 4) / 4),
        ("sequence_mean", None, ((1 + 2 + 3) / 3 + 4) / 2),
        ("sequence_sum", None, ((1 + 2 + 3) + 4) / 2),
        ("fixed_length", 10, ((1 + 2 + 3) / 10 + 4 / 10) / 2),
    ],
)
def test_reductions_by_hand(kind, length, expected):
    values = torch.tensor([[9.0, 1.0, 2.0, 3.0], [4.0, 9.0, 9.0, 9.0], [9.0] * 4], dtype=F64)
    weights = reduction_weights(MASK, kind, length, dtype=F64)
    assert reduce(values, MASK, weights).mean.item() == pytest.approx(expected, abs=1e-12)
    packed = torch.cat([values[0], values[1], values[2]]).unsqueeze(0)
    mask = torch.cat([MASK[0], MASK[1], MASK[2]]).unsqueeze(0)
    segments = torch.tensor([[1] * 4 + [2] * 4 + [0] * 4])
    weights = reduction_weights(mask, kind, length, segments, dtype=F64)
    assert reduce(packed, mask, weights).mean.item() == pytest.approx(expected, abs=1e-12)


def test_reduce_without_weights_is_the_mean_over_tokens():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 7, dtype=F64, generator=generator)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    term = reduce(values, mask)
    assert term.count.item() == mask.sum().item()
    assert term.mean.item() == pytest.approx(values[mask].numpy().mean(), abs=1e-12)
    torch.testing.assert_close(term, reduce(values, mask, reduction_weights(mask, dtype=F64)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_are_exact_in_every_precision(dtype):
    mask = torch.zeros(300, 701, dtype=torch.bool)
    mask[:, 1:700] = True
    tokens = reduction_weights(mask, "token_mean", dtype=dtype)
    assert tokens.count.item() == 300 * 699
    for kind in ("sequence_mean", "sequence_sum"):
        assert reduction_weights(mask, kind, dtype=dtype).count.item() == 300
    weights = reduction_weights(mask, "sequence_mean", dtype=dtype)
    assert weights.tokens[0, 1].item() == pytest.approx(1 / 699, rel=1e-6)
    assert reduce(torch.ones(300, 701, dtype=dtype), mask, weights).mean.item() == pytest.approx(1, rel=1e-5)


def test_reduction_refuses_bad_arguments():
    with pytest.raises(UserError, match="unknown reduction 'mean': expected token_mean"):
        reduction_weights(MASK, "mean")  # pyright: ignore[reportArgumentType]
    cases: list[tuple[Reduction, int | None]] = [("fixed_length", None), ("fixed_length", 0), ("token_mean", 5)]
    for kind, length in cases:
        with pytest.raises(UserError, match=f"fixed_length needs a length of at least 1, .*: got {length} for {kind}"):
            reduction_weights(MASK, kind, length)
