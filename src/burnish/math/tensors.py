"""Log-probabilities of tokens, the shift by one, and the sampling distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS = {"cpu": 2**18, "cuda": 2**24}
"""Number of logits processed at once: 1 MiB in float32, which fits in a processor's cache, or 64 MiB."""
NOTHING = -1e4  # a log-probability whose exp is 0 in every precision, so that p log p is 0 instead of NaN for p = 0

NUCLEUS = 512
"""Number of largest logits in which to look for the nucleus before sorting a whole row."""


def same_shape(**tensors: Tensor) -> None:
    """Check that all tensors have the shape of the first one. A (B,) tensor would broadcast silently with a (B, B) one.

    Raises:
        ValueError: if a shape differs; the message gives both names and shapes.
    """
    (reference, first), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.shape != first.shape:
            got, expected = tuple(tensor.shape), tuple(first.shape)
            raise ValueError(f"{name} must align with {reference}: got shape {got}, expected {expected}")


def learned(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32 or float64 (``upcast``), with 0 and no gradient where the mask is False.

    Apply this to the inputs of a computation, not to its result: ``where`` on a NaN result still has a NaN gradient.

    Raises:
        ValueError: if a tensor has another shape than the mask.
    """
    same_shape(mask=mask, **tensors)
    return tuple(torch.where(mask, upcast(tensor), 0) for tensor in tensors.values())


def upcast(x: Tensor) -> Tensor:
    """Convert to float32, but keep float64. Half precision would round sums, and integers would truncate quotients."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def shift_right(x: Tensor) -> Tensor:
    """Shift by one: entry t of the result is x[:, t - 1]. Entry 0 repeats x[:, 0] and is never used.

    A causal model's output at t - 1 predicts token t. This is the only place where that shift happens.

    Args:
        x: (B, T, ...).

    Returns:
        (B, T, ...).
    """
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)


def logprobs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of tokens, log softmax(logits)[token], without a shift: logits[i] predicts token i.

    Args:
        logits: (..., V); half precision is computed in float32.
        tokens: (...), token ids.

    Returns:
        (...), at most 0; -inf for a token whose logit is -inf.

    Raises:
        ValueError: if the shapes do not match.
    """
    same_shape(logits=logits[..., 0], tokens=tokens)
    return upcast(logits).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token given the previous tokens: log softmax(logits[:, t - 1])[tokens[:, t]].

    Args:
        logits: (B, T, V), a causal model's output on the tokens.
        tokens: (B, T), token ids.

    Returns:
        (B, T) in nats; entry 0 is 0, because the first token has no prediction.

    Raises:
        ValueError: if the shapes do not match.
    """
    logprobs = logprobs_at(shift_right(logits), tokens)
    return torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs[:, 1:]], dim=1)


def logprobs_and_entropy(
    logits: Tensor, tokens: Tensor, entropies: bool = True, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """``logprobs_at`` and the entropy H = -sum_v p_v log p_v, in [0, ln V], from one softmax.

    Of all (N, V) tensors, only the logits are kept for the backward pass, in their own dtype.

    Args:
        logits: (N, V); half precision is computed in float32. -inf marks tokens that cannot be sampled.
        tokens: (N,), token ids.
        entropies: if False, the entropies are not computed and are 0 without a gradient.
        overwrite: the backward pass writes the gradient over the logits, which nothing else may use then. This saves a
            tensor of their size, and the time to get its memory from the system.

    Returns:
        Log-probabilities (N,) and entropies (N,), in nats.

    Raises:
        ValueError: if the shapes do not match.
    """
    same_shape(logits=logits[..., 0], tokens=tokens)
    return _LogprobsAndEntropy.apply(logits, tokens, entropies, overwrite)  # type: ignore[return-value]


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, entropies: bool, overwrite: bool) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        lse, entropy = logits.new_empty(len(logits), dtype=dtype), logits.new_zeros(len(logits), dtype=dtype)
        for rows, at in blocks(logits):
            rows = upcast(rows)
            lse[at] = rows.logsumexp(-1)
            if entropies:
                logprobs = rows - lse[at, None]
                entropy[at] = -torch.linalg.vecdot(logprobs.exp(), logprobs.clamp_(min=NOTHING))
        ctx.save_for_backward(logits, tokens, lse, entropy)
        ctx.overwrite = overwrite
        ctx.set_materialize_grads(False)
        if not entropies:
            ctx.mark_non_differentiable(entropy)
        return logits.gather(-1, tokens[:, None])[:, 0] - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        """With q the token: dl/dz_v = [v = q] - p_v, and dH/dz_v = -p_v (log p_v + H)."""
        logits, tokens, lse, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropies = gradients
        result = logits if ctx.overwrite else torch.empty_like(logits)
        rounded = result.dtype != lse.dtype  # once, at the end of a block
        block = lse.new_empty(next(blocks(logits))[0].shape) if rounded and len(logits) else result
        for rows, at in blocks(logits):
            out = (block[: len(rows)] if rounded else result[at]).copy_(rows).sub_(lse[at, None])
            weights = 0.0 if grad_logprobs is None else -grad_logprobs[at, None]
            if grad_entropies is not None:
                moved = out.clamp(min=NOTHING) + entropy[at, None]
                weights = weights - grad_entropies[at, None] * moved
            out.exp_().mul_(weights)
            if grad_logprobs is not None:
                out.scatter_add_(-1, tokens[at, None], grad_logprobs[at, None])
            if rounded:
                result[at] = out
        return result, None, None, None


def blocks(logits: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield blocks of rows, with their positions."""
    size = max(1, BLOCKS.get(logits.device.type, BLOCKS["cuda"]) // logits.shape[-1])
    for start in range(0, len(logits), size):
        yield logits[start : start + size], slice(start, start + size)


def cumulative_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sums x_0 + ... + x_t along the last dimension.

    On a GPU, torch's ``cumsum`` raises an error for floating-point numbers under deterministic algorithms.

    Args:
        x: (..., T).
        dtype: of the sums; None means that of x.

    Returns:
        (..., T).
    """
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return _sums_by_doubling(x.to(dtype or x.dtype))
    return x.cumsum(-1, dtype=dtype)


def _sums_by_doubling(x: Tensor) -> Tensor:
    """``cumulative_sum`` in log2(T) additions of shifted copies, whose order is fixed.

    Source: Hillis and Steele, "Data parallel algorithms", 1986.
    """
    step = 1
    while step < x.shape[-1]:
        x = x + F.pad(x[..., :-step], (step, 0))
        step *= 2
    return x


def warp(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits of the sampling distribution: divided by the temperature, then filtered by top-k and top-p.

    Sampler and trainer both call this function, so that their log-probabilities agree. Logits equal to the smallest
    kept one are kept too, so that the result does not depend on the order of a sort or on the batch.

    Args:
        logits: (..., V).
        temperature: at least 0; 0 is greedy and puts all probability on the first of the largest logits.
        top_k: keep the k largest logits; None or at least V keeps all.
        top_p: keep the smallest set of most probable tokens whose total probability reaches top_p, in (0, 1]; None
            keeps all.

    Returns:
        (..., V), -inf and without a gradient for removed tokens.

    Raises:
        ValueError: if an argument is out of range.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None to keep all tokens, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, or None to keep all tokens, got {top_p}")
    logits = upcast(logits)
    if temperature == 0:
        greedy = F.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
        return logits.masked_fill(~greedy, -torch.inf)
    if temperature != 1:
        logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.detach().topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None and top_p < 1:
        logits = logits.masked_fill(logits < _smallest_in_nucleus(logits.detach(), top_p), -torch.inf)
    return logits


def _smallest_in_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The smallest logit that top-p keeps, (..., 1)."""
    total = logits.logsumexp(-1, keepdim=True)
    few = min(NUCLEUS, logits.shape[-1])
    smallest, reached = _smallest(logits.topk(few).values, total, top_p)
    wide = ~reached
    if few < logits.shape[-1] and bool(wide.any()):  # sort these rows completely
        smallest[wide] = _smallest(logits[wide].sort(-1, descending=True).values, total[wide], top_p)[0]
    return smallest


def _smallest(ordered: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest logit of the nucleus among logits in descending order, and whether they reach top_p, (...)."""
    probabilities = (ordered - total).exp()
    before = cumulative_sum(probabilities) - probabilities
    smallest = torch.where(before < top_p, ordered, torch.inf).amin(-1, keepdim=True)
    return smallest, before[..., -1] >= top_p
