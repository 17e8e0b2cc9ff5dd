import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.math import tensors


def numpy_log_softmax(z):
    z = np.asarray(z, dtype=np.float64)
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


def test_previous_holds_the_entry_before():
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert tensors.shift_right(x).tolist() == [[1, 1, 2], [4, 4, 5]]
    assert tensors.shift_right(torch.zeros(2, 3, 5)).shape == (2, 3, 5)


def test_token_logprobs_by_hand():
    # The output at 0 gives probabilities 1/4, 3/4 and predicts token 1; the output at 2 predicts nothing.
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(9.0), 0.0], [50.0, -50.0]]])
    logprobs = tensors.token_logprobs(logits, torch.tensor([[0, 1, 1]]))
    assert logprobs.tolist() == [pytest.approx([0.0, math.log(0.75), math.log(0.1)], abs=1e-6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_logprobs_against_numpy(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 11, generator=generator, dtype=dtype) * 5
    tokens = torch.randint(11, (3, 6), generator=generator)
    expected = np.zeros((3, 6))
    for b in range(3):
        for t in range(1, 6):
            expected[b, t] = numpy_log_softmax(logits[b, t - 1])[tokens[b, t]]
    result = tensors.token_logprobs(logits, tokens)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_uniform_logits_give_minus_ln_v():
    logprobs = tensors.token_logprobs(torch.full((2, 4, 7), 3.0), torch.randint(7, (2, 4)))
    torch.testing.assert_close(logprobs[:, 1:], torch.full((2, 3), -math.log(7)))


def test_half_precision_logits_give_float32():
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([[1, 2, 3]])
    result = tensors.token_logprobs(logits, tokens)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result[0, 2], numpy_log_softmax(logits[0, 1].float())[3], rtol=1e-5)


def test_token_logprobs_gradient():
    logits = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(5, (2, 4))
    assert torch.autograd.gradcheck(lambda z: tensors.token_logprobs(z, tokens), logits)
    (gradient,) = torch.autograd.grad(tensors.token_logprobs(logits, tokens).sum(), logits)
    assert gradient[:, -1].abs().max() == 0  # the last output predicts no token of the row


def test_misaligned_shapes_are_named():
    with pytest.raises(ValueError, match=r"tokens must align with logits: got shape \(2, 3\), expected \(2, 4\)"):
        tensors.token_logprobs(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"rewards must align with mask: got shape \(3,\), expected \(3, 3\)"):
        tensors.learned(torch.ones(3, 3, dtype=torch.bool), rewards=torch.zeros(3))


def test_learned_keeps_infinities_out_of_the_gradient():
    x = torch.tensor([[1.0, math.nan, 4.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    (kept,) = tensors.learned(mask, x=x)
    (gradient,) = torch.autograd.grad(torch.where(mask, kept.sqrt(), 0).sum(), x)
    assert kept.tolist() == [[1.0, 0.0, 4.0]]
    assert gradient.tolist() == [[0.5, 0.0, 0.25]]


def entropy(logits):
    """Of each distribution, by the library."""
    rows = logits.reshape(-1, logits.shape[-1])
    return tensors.logprobs_and_entropy(rows, torch.zeros(len(rows), dtype=torch.long))[1].view(logits.shape[:-1])


def test_entropy_by_hand():
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf], [0.0, -math.inf, -math.inf, 0.0]]
    )
    expected = [math.log(4), 0.25 * math.log(4) + 0.75 * math.log(4 / 3), math.log(2)]
    assert entropy(logits).tolist() == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(-60, 60), min_size=1, max_size=12))
def test_entropy_lies_between_0_and_ln_v(logits):
    found = entropy(torch.tensor(logits, dtype=torch.float64)).item()
    p = np.exp(numpy_log_softmax(logits))
    assert 0 <= found <= math.log(len(logits)) + 1e-12
    assert found == pytest.approx(-sum(x * math.log(x) for x in p if x > 0), abs=1e-9)


def test_entropy_gradient_passes_infinite_logits():
    logits = torch.tensor([0.3, -math.inf, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy(logits), logits)
    finite = logits.detach()[[0, 2, 3]].requires_grad_()
    assert torch.autograd.gradcheck(entropy, finite)
    torch.testing.assert_close(gradient[[0, 2, 3]], torch.autograd.grad(entropy(finite), finite)[0])
    assert gradient[1] == 0


@pytest.mark.parametrize("block", [1, 20, 2**18])
def test_logprobs_and_entropy_are_those_of_plain_formulas(block, monkeypatch):
    monkeypatch.setitem(tensors.BLOCKS, "cpu", block)
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 9, dtype=torch.float64, generator=generator)
    tokens = torch.randint(9, (6,), generator=generator)
    logits[2, [i for i in range(9) if i != tokens[2]][:7]] = -torch.inf
    logits.requires_grad_()
    both = tensors.logprobs_and_entropy(logits, tokens)
    plain = logits.log_softmax(-1)
    terms = plain.exp() * plain.where(plain.isfinite(), 0.0)
    alone = tensors.logprobs_at(logits, tokens), -terms.sum(-1)
    weights = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, -2e3)):
        found, expected = (a * (weights[0] * x).sum() + b * (weights[1] * y).sum() for x, y in (both, alone))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        gradients = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, expected))
        torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)
    assert not tensors.logprobs_and_entropy(logits, tokens, entropies=False)[1].any()


@pytest.mark.parametrize("entropies", [False, True])
def test_the_gradient_may_overwrite_the_logits(entropies):
    states = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 6, 3, 3])

    def gradient(overwrite: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits = states * 2
        pair = tensors.logprobs_and_entropy(logits, tokens, entropies, overwrite)
        loss = (torch.stack(pair) * torch.arange(1, 5)).sum()
        (found,) = torch.autograd.grad(loss, states, retain_graph=True)
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, states)
        return found, logits

    (plain, kept), (found, written) = gradient(False), gradient(True)
    assert torch.equal(found, plain)
    assert torch.equal(kept, 2 * states) and torch.equal(2 * written, plain)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("rows", [0, 5, 300])
def test_half_precision_is_computed_in_float32_and_rounded_once(rows, overwrite):
    draw = torch.Generator().manual_seed(0)
    rounded = (8 * torch.randn(rows, 1000, generator=draw)).bfloat16()
    tokens = rounded.argmax(-1)
    weights = torch.randn(2, rows, generator=draw)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = rounded.clone().to(dtype).requires_grad_()
        pair = tensors.logprobs_and_entropy(leaf * 1, tokens, overwrite=overwrite)
        (torch.stack(pair) * weights).sum().backward()
        found.append((*pair, leaf.grad))
    (*half, gradient), (*whole, expected) = found
    assert {x.dtype for x in half} == {torch.float32} and gradient.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(half, whole, strict=True))
    assert torch.equal(gradient, expected.bfloat16())


def test_logprobs_and_entropy_gradient():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    tokens = torch.tensor([0, 4, 1])
    assert torch.autograd.gradcheck(lambda z: tensors.logprobs_and_entropy(z, tokens), logits)
    assert torch.autograd.gradcheck(lambda z: tensors.logprobs_and_entropy(z, tokens)[1], logits)
    with pytest.raises(ValueError, match="tokens must align with logits"):
        tensors.logprobs_and_entropy(logits, tokens[:2])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_warp_at_a_temperature_is_log_softmax_of_the_quotient(temperature):
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = tensors.warp(logits, temperature).log_softmax(-1)
    np.testing.assert_allclose(result, numpy_log_softmax(logits.numpy() / temperature), atol=1e-12)


def test_warp_by_hand():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)

    def probabilities(**settings):
        return tensors.warp(p.log(), **settings).softmax(-1).tolist()

    assert probabilities(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(top_k=9) == pytest.approx(p.tolist())
    assert probabilities(top_p=0.39) == pytest.approx([0, 1, 0, 0])
    assert probabilities(top_p=0.5) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(top_p=0.95) == pytest.approx(p.tolist())
    assert probabilities(top_p=1.0) == pytest.approx(p.tolist())
    # After top-k the probabilities are 4/9, 2/9, 3/9: the first two hold 7/9.
    assert probabilities(top_k=3, top_p=0.75) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30])
    assert probabilities(temperature=0) == pytest.approx([0, 1, 0, 0])


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.01, 1.0))
def test_nucleus_is_the_smallest_set_that_reaches_top_p(seed, v, top_p):
    p = np.random.default_rng(seed).dirichlet(np.ones(v))
    kept = tensors.warp(torch.tensor(p).log(), top_p=top_p).isfinite().numpy()
    assert p[kept].sum() >= top_p - 1e-9
    assert p[kept].sum() - p[kept].min() < top_p + 1e-9
    assert p[kept].min() >= p[~kept].max(initial=0)


def test_warp_keeps_ties_and_rows_apart():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0]])
    assert tensors.warp(logits, top_k=2).isfinite().tolist() == [[True, True, True, False], [False, True, True, False]]
    assert tensors.warp(logits[:1], temperature=0).isfinite().tolist() == [[True, False, False, False]]


def test_warp_gradient():
    logits = torch.tensor([[0.1, 2.0, 1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    settings = {"temperature": 0.7, "top_k": 3, "top_p": 0.9}
    assert torch.autograd.gradcheck(
        lambda z: tensors.logprobs_at(tensors.warp(z, **settings), torch.tensor([1])), logits
    )
    logprobs = tensors.logprobs_at(tensors.warp(logits, **settings), torch.tensor([2]))
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, 3] == 0


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_wide_nucleus_is_found_as_a_narrow_one(top_p):
    v = 3 * tensors.NUCLEUS
    spread = torch.tensor([0.0, 0.1, 1.0, 3.0, 20.0], dtype=torch.float64)
    logits = spread[:, None] * torch.randn(5, v, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = tensors.warp(logits[None], top_p=top_p)[0].isfinite()
    for row, found in zip(logits, kept, strict=True):
        p = row.softmax(-1)
        ordered = p.sort(descending=True).values
        count = next(n for n in range(1, v + 1) if math.fsum(ordered[:n].tolist()) >= top_p - 1e-12)
        assert torch.equal(found, p >= ordered[count - 1])
        assert torch.equal(tensors.warp(row, top_p=top_p).isfinite(), found)
    assert kept.sum(-1).max() > tensors.NUCLEUS > kept.sum(-1).min()


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_warp_refuses_settings_out_of_range(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be"):
        tensors.warp(torch.zeros(3), **settings)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 64, 1000])
def test_sums_by_doubling_are_cumulative_sums(width):
    x = torch.rand(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(tensors._sums_by_doubling(x), x.cumsum(-1), atol=1e-12, rtol=1e-12)
    assert torch.equal(tensors._sums_by_doubling(torch.tensor([1, 2, 3, 4, 5])), torch.tensor([1, 3, 6, 10, 15]))
    assert torch.equal(tensors.cumulative_sum(x), x.cumsum(-1))


def test_cumulative_sums_on_a_gpu_avoid_a_kernel_that_is_not_deterministic(monkeypatch):
    """``cumsum`` has none for floating-point numbers there. A stand-in for a tensor on a GPU fails in it."""

    class OnGpu(torch.Tensor):
        device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]

        def cumsum(self, *args, **kwargs):
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    x = torch.tensor([0.5, 0.25, 0.125]).as_subclass(OnGpu)
    with pytest.raises(RuntimeError, match="deterministic"):
        tensors.cumulative_sum(x)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert tensors.cumulative_sum(x).tolist() == [0.5, 0.75, 0.875]
