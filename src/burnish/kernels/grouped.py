"""Attention over packed rows on a CPU, by a few large matrix products.

Sequences of similar lengths are padded to the same length and computed together with oneDNN's batched products.
PyTorch's own kernel needs a call for each sequence and a copy of the keys for each query head that shares them, and its
products call MKL. The scores are computed again in the backward pass, a block of queries at a time, so that memory
grows linearly with the length of a sequence.

Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import accumulate
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.kernels import linear
from burnish.types import Segments

STEP = 16
"""Sequences are padded to a multiple of this, and those with the same multiple are computed together.

The multiple depends on no other sequence, so that results do not depend on what else is in the row.
"""

BLOCK = 128
"""The largest number of queries of a block. Keys after the last query of a block are left out."""

BYTES = 2**21
"""Scores that are held at a time. Larger tensors leave the caches, and the system returns their memory page by page."""

HIDDEN = -1e30
"""Added to the scores of columns that a query does not see. It is finite, so that a row of padding is not NaN."""


_ONE_THREAD = RLock()


@contextmanager
def onednn() -> Iterator[None]:
    """Within the context, batched products of float32 tensors are oneDNN's. They may round their inputs to bfloat16.

    The setting is that of the whole process, so only one thread at a time is in the context.
    """
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _ONE_THREAD:
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before


@cache
def is_exact() -> bool:
    """Whether products within ``onednn`` are in float32 on this machine. With AMX, they are not."""
    x = torch.full((1, 128, 128), 1 + 2**-12)  # 1 in bfloat16
    with onednn():
        return bool(torch.bmm(x, x)[0, 0, 0] > 128 * (1 + 2**-12))


def fits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``attend`` computes this dtype fast and exactly on this device."""
    if device.type != "cpu" or not linear.has_onednn():
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float32 and is_exact())


def is_faster(heads: int, key_heads: int) -> bool:
    """Whether ``attend`` is faster than PyTorch's kernel: if several query heads share a key.

    Otherwise, PyTorch's kernel copies no keys, and takes half the time for rows of 30 tokens.
    """
    return heads > key_heads


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, segments: Segments) -> Tensor:
    """Causal attention within each segment, and from a segment to all of its parent.

    It is computed in float32; only the result is rounded to the dtype of the inputs.

    Args:
        query: (1, heads, T, size) in float32 or bfloat16.
        key: (1, key heads, T, size).
        value: (1, key heads, T, size of values).
        scaling: scale of the dot products; None means 1 / sqrt(size).
        segments: the sequences in the row of T tokens.

    Returns:
        The states (1, T, heads, size of values).
    """
    with torch.autocast("cpu", enabled=False):
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return _Attention.apply(query, key, value, scale, segments)  # type: ignore[return-value]


class Group(NamedTuple):
    """B sequences that are padded on the left to L queries and N keys. A row is a token's vector of one head.

    Attributes:
        queries: (B * heads * L,), the row of each query among the T * heads rows, in the order batch, head, position.
        keys: (B * key heads * N,), the row of each key among the T * key heads rows.
        seen: (S * key heads,), the places in ``keys`` of the S keys that are not padding.
        sources: (S,), their tokens. Those of a prompt occur once for each of its answers.
        batch: B.
        length: L.
        columns: N.
        mask: (B, 1, 1, N), ``HIDDEN`` for keys that are padding and 0 for others; None if none is.
        padding: (B, 1, L, 1), which queries are padding; None if none is.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    sources: Tensor
    batch: int
    length: int
    columns: int
    mask: Tensor | None
    padding: Tensor | None

    def blocks(self, heads: int, key_heads: int) -> Iterator[tuple[slice, slice, slice]]:
        """Slices of (B * key heads), of L and of N. The scores of a block need about ``BYTES``."""
        length, columns = self.length, self.columns
        size = -(-length // -(-length // BLOCK))
        at_once = self.batch * key_heads
        if self.batch == 1:  # several sequences need less anyway
            most = BYTES // (4 * (heads // key_heads) * size * columns)
            at_once = max(n for n in range(1, key_heads + 1) if n <= max(1, most) and key_heads % n == 0)
        for row in range(0, self.batch * key_heads, at_once):
            for start in range(0, length, size):
                end = min(length, start + size)
                yield slice(row, row + at_once), slice(start, end), slice(0, columns - length + end)

    def weights(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Attention weights (R, groups * l, n).

        Args:
            query: (R, groups, l, size), of l queries one after another.
            key: (R, n, size), the keys up to that of the last query.
            scale: scale of the dot products.
        """
        scores = torch.bmm(query.flatten(1, 2), key.transpose(1, 2)).mul_(scale)
        length, columns = query.shape[2], key.shape[1]
        later = _later(-(-length // BLOCK) * BLOCK)[:length, :length]
        scores.view(-1, length, columns)[..., -length:].add_(later)
        if self.mask is not None:
            scores.view(self.batch, -1, length, columns).add_(self.mask[..., :columns])
        return scores.softmax(-1)


@lru_cache(maxsize=8)
def _later(length: int) -> Tensor:
    """(length, length), ``HIDDEN`` above the diagonal and 0 elsewhere."""
    return torch.full((length, length), HIDDEN).triu(1)


class Plan(NamedTuple):
    """The groups of a packed row.

    Attributes:
        groups: of sequences of similar lengths.
        sizes: the length of each group's ``queries``.
        order: (T * heads,), the places of the row's queries in those of all groups, one after another.
    """

    groups: tuple[Group, ...]
    sizes: list[int]
    order: Tensor


@lru_cache(maxsize=8)
def plan_of(segments: Segments, heads: int, key_heads: int) -> Plan:
    """Put sequences of similar lengths together, as many as their scores allow. All layers of a pass share one plan."""
    ends = list(accumulate(segments.lengths))
    members: dict[tuple[int, int], list[tuple[range, range]]] = {}
    for end, length, parent in zip(ends, segments.lengths, segments.parents, strict=True):
        prompt = range(0) if parent is None else range(ends[parent] - segments.lengths[parent], ends[parent])
        sizes = -(-length // STEP), -(-(len(prompt) + length) // STEP)
        members.setdefault(sizes, []).append((prompt, range(end - length, end)))
    groups, order, before = [], torch.empty(sum(segments.lengths), heads, dtype=torch.long), 0
    for (length, columns), sequences in members.items():
        most = max(1, BYTES // (4 * heads * length * columns * STEP**2))
        for first in range(0, len(sequences), most):
            part = sequences[first : first + most]
            queries = _padded([[*own] for _, own in part], length * STEP)
            groups.append(_group(part, columns * STEP, queries, heads, key_heads))
            order[queries[queries >= 0]] = before + _places(queries >= 0, heads).view(-1, heads)
            before += queries.numel() * heads
    return Plan(tuple(groups), [len(group.queries) for group in groups], order.flatten())


def _group(sequences: list[tuple[range, range]], columns: int, queries: Tensor, heads: int, key_heads: int) -> Group:
    """The group of sequences, each given by the tokens of its prompt elsewhere and its own, which are ``queries``."""
    keys = _padded([[*prompt, *own] for prompt, own in sequences], columns)
    mask = torch.zeros(keys.shape).masked_fill_(keys < 0, HIDDEN)[:, None, None]
    return Group(
        queries=_rows(queries.clamp(min=0), heads),
        keys=_rows(keys.clamp(min=0), key_heads),
        seen=_places(keys >= 0, key_heads),
        sources=keys[keys >= 0],
        batch=len(queries),
        length=queries.shape[1],
        columns=columns,
        mask=mask if bool((keys < 0).any()) else None,
        padding=(queries < 0)[:, None, :, None] if bool((queries < 0).any()) else None,
    )


def _padded(tokens: list[list[int]], length: int) -> Tensor:
    """(B, length), with -1 on the left."""
    return torch.tensor([[-1] * (length - len(row)) + row for row in tokens])


def _rows(tokens: Tensor, heads: int) -> Tensor:
    """The rows of tokens (B, L) among T * heads, in the order batch, head, position."""
    return (tokens[:, None] * heads + torch.arange(heads)[:, None]).flatten()


def _places(real: Tensor, heads: int) -> Tensor:
    """The places of real tokens of (B, L) in (B, heads, L), in the order batch, position, head."""
    batch, length = real.shape
    places = torch.arange(batch * heads * length).view(batch, heads, length)
    return places.transpose(1, 2)[real].flatten()


class _Attention(torch.autograd.Function):
    """softmax(q k^T scale + mask) v with gradients."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Segments) -> Tensor:  # type: ignore[override]
        """As ``attend``."""
        (_, heads, tokens, size), key_heads, width = query.shape, key.shape[1], value.shape[3]
        q, k, v = (x[0].transpose(0, 1).reshape(-1, x.shape[3]).float() for x in (query, key, value))
        plan = plan_of(segments, heads, key_heads)
        all_states = q.new_empty(sum(plan.sizes), width)
        with onednn():
            for group, part in zip(plan.groups, all_states.split(plan.sizes), strict=True):
                length, columns = group.length, group.columns
                asked = q.index_select(0, group.queries).view(-1, heads // key_heads, length, size)
                keys, values = (x.index_select(0, group.keys).view(-1, columns, x.shape[1]) for x in (k, v))
                states = part.view(*asked.shape[:3], width)
                for rows, at, to in group.blocks(heads, key_heads):
                    weights = group.weights(asked[rows, :, at], keys[rows, to], scale)
                    product = torch.bmm(weights, values[rows, to])
                    states[rows, :, at] = product.view_as(states[rows, :, at])
        out = all_states.index_select(0, plan.order).view(1, tokens, heads, width).to(query.dtype)
        ctx.save_for_backward(query, key, value, out)
        ctx.scale, ctx.segments = scale, segments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """For a gradient g of the states o, p the weights and s = p (g v^T - g o^T) scale: s k, s^T q, p^T g."""
        query, key, value, out = ctx.saved_tensors
        (_, heads, tokens, size), key_heads, width = query.shape, key.shape[1], value.shape[3]
        q, k, v = (x[0].transpose(0, 1).reshape(-1, x.shape[3]).float() for x in (query, key, value))
        g = gradient.reshape(-1, width).float()
        inner = (g * out.view(-1, width)).sum(-1)
        plan = plan_of(ctx.segments, heads, key_heads)
        to_queries = q.new_empty(sum(plan.sizes), size)
        of_key, of_value = torch.zeros(tokens, key_heads, size), torch.zeros(tokens, key_heads, width)
        with torch.autocast("cpu", enabled=False), onednn():
            for group, part in zip(plan.groups, to_queries.split(plan.sizes), strict=True):
                length, columns = group.length, group.columns
                asked, upper = (
                    x.index_select(0, group.queries).view(-1, heads // key_heads, length, x.shape[1]) for x in (q, g)
                )
                inners = inner.index_select(0, group.queries).view(asked.shape[:3])
                if group.padding is not None:
                    upper.view(group.batch, heads, length, width).masked_fill_(group.padding, 0.0)
                    inners.view(group.batch, heads, length).masked_fill_(group.padding[..., 0], 0.0)
                keys, values = (x.index_select(0, group.keys).view(-1, columns, x.shape[1]) for x in (k, v))
                to_query = part.view_as(asked)
                to_key, to_value = torch.zeros_like(keys), torch.zeros_like(values)
                for rows, at, to in group.blocks(heads, key_heads):
                    weights = group.weights(asked[rows, :, at], keys[rows, to], ctx.scale)
                    here, above = (x[rows, :, at].flatten(1, 2) for x in (asked, upper))
                    scores = torch.bmm(above, values[rows, to].transpose(1, 2))
                    scores.sub_(inners[rows, :, at].flatten(1)[:, :, None]).mul_(weights).mul_(ctx.scale)
                    to_query[rows, :, at] = torch.bmm(scores, keys[rows, to]).view_as(to_query[rows, :, at])
                    to_key[rows, to] += torch.bmm(scores.transpose(1, 2), here)
                    to_value[rows, to] += torch.bmm(weights.transpose(1, 2), above)
                for total, padded in ((of_key, to_key), (of_value, to_value)):
                    found = padded.flatten(0, 1).index_select(0, group.seen).view(-1, *total.shape[1:])
                    total.index_add_(0, group.sources, found)
        of_query = to_queries.index_select(0, plan.order).view(tokens, heads, size)
        gradients = [x.transpose(0, 1)[None].to(query.dtype) for x in (of_query, of_key, of_value)]
        return *gradients, None, None
