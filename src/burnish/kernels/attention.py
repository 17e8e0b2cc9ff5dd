"""Attention over packed rows without a mask over all pairs of tokens: a sequence meets itself and the prompt it shares.

``varlen`` is registered with transformers as an attention implementation. Where a forward pass is told the ``runs`` of
its row it computes these alone; without them it is transformers' own ``sdpa``, so that a model which uses it can do all
that it could before.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from burnish.types import Segments

NAME = "burnish"
"""Of the implementation, in ``config._attn_implementation``; it is not saved with a model."""

UNKNOWN = frozenset({"softcap", "s_aux", "position_bias", "sliding_window"})
"""What some models ask of attention that is not computed here."""


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    runs: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each run, and from a run to the whole of its parent.

    Args:
        module: transformers' attention layer.
        query: (1, heads, T, size).
        key: (1, key heads, T, size).
        value: as ``key``.
        attention_mask: read where there are no runs.
        dropout: probability that a weight is left out.
        scaling: of the products; 1 / sqrt(size) where None.
        runs: of the T tokens.
        kwargs: what transformers' ``sdpa`` takes besides.

    Returns:
        (1, T, heads, size), and None in the place of the weights.

    Raises:
        ValueError: the layer asks for a soft cap, a window, a bias or a sink.
    """
    if runs is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if unknown := {name for name in UNKNOWN if kwargs.get(name) is not None}:
        raise ValueError(f"packed attention has no {', '.join(sorted(unknown))}")
    dtype = computed_in(query.dtype, query.device)
    if has_kernel(dtype, query.device) and not dropout:
        return on_gpu(query.to(dtype), key.to(dtype), value.to(dtype), scaling, runs), None
    groups = query.shape[1] // key.shape[1]
    parts = [x.split(runs.lengths, 2) for x in (query, repeat_kv(key, groups), repeat_kv(value, groups))]
    attended = []
    for parent, q, k, v in zip(runs.parents, *parts, strict=True):
        mask = None
        if parent is not None:
            k, v = (torch.cat([part[parent], own], 2) for part, own in zip(parts[1:], (k, v), strict=True))
            mask = _after(k.shape[2] - q.shape[2], q.shape[2], q.dtype, q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling)
        attended.append(out.transpose(1, 2))
    return torch.cat(attended, 1), None


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What products of numbers are computed in: autocast's dtype where that is on, else their own."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else dtype


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one call computes all runs: the flash kernel of a GPU, which knows half precision alone."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=64)
def _after(prefix: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask (length, prefix + length) of tokens that see a prefix, and each other causally."""
    hidden = torch.ones(length, prefix + length, dtype=torch.bool, device=device).triu(prefix + 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def on_gpu(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, runs: Segments) -> Tensor:
    """One call of the flash kernel; the keys of a parent are read in front of those of each of its children."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    index, of_queries, of_keys, longest = _plan(runs, q.device)
    if index is not None:
        k, v = k[index], v[index]
    # aligned at the last column, as it must be where there are more keys than queries
    out = varlen_attn(
        q,
        k,
        v,
        of_queries,
        of_keys,
        max(runs.lengths),
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return cast(Tensor, out)[None]


@lru_cache(maxsize=8)
def _plan(runs: Segments, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, int]:
    """Columns that are read as keys, None for all in order; where queries and keys of each run begin; most keys.

    The same for every layer of a pass, so that a device gets it once.
    """
    starts, seen, sources = [], [], []
    column = 0
    for length, parent in zip(runs.lengths, runs.parents, strict=True):
        starts.append(column)
        before = range(0) if parent is None else range(starts[parent], starts[parent] + runs.lengths[parent])
        sources += [*before, *range(column, column + length)]
        seen.append(len(before) + length)
        column += length
    of_queries, of_keys = (
        torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device) for sizes in (runs.lengths, seen)
    )
    index = torch.tensor(sources, device=device) if len(sources) > column else None
    return index, of_queries, of_keys, max(seen)
