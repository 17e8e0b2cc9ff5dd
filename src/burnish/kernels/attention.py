"""Attention over packed rows: a sequence attends to itself and to the prompt it shares, without a (T, T) mask.

``varlen`` is an attention implementation for transformers. If a forward pass passes ``segments``, tokens attend only
within their segment and its parent. Otherwise it calls transformers' own ``sdpa``, so the model works as before.
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

from burnish.kernels import grouped
from burnish.math.tensors import upcast
from burnish.types import Segments, copied

NAME = "burnish"
"""The name of the implementation in ``config._attn_implementation``, which is not saved with a model."""

UNKNOWN = frozenset({"softcap", "s_aux", "position_bias", "sliding_window"})
"""Attention features of some models that ``varlen`` does not support."""


class Packed:
    """The segments of a packed row, in an object that torch.compile does not look into.

    It would compile the layers again for every number of segments.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment, and from a segment to all of its parent.

    Args:
        module: transformers' attention layer.
        query: (1, heads, T, size).
        key: (1, key heads, T, size).
        value: as ``key``.
        attention_mask: used only without ``segments``.
        dropout: probability of dropping an attention weight.
        scaling: scale of the dot products; None means 1 / sqrt(size).
        segments: the sequences in the row of T tokens.
        kwargs: other arguments of transformers' ``sdpa``.

    Returns:
        The states (1, T, heads, size), and None in place of the attention weights.

    Raises:
        ValueError: if the layer needs a soft cap, a sliding window, a bias or an attention sink.
    """
    if segments is None:
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if unknown := {name for name in UNKNOWN if kwargs.get(name) is not None}:
        raise ValueError(f"packed attention does not support {', '.join(sorted(unknown))}")
    dtype = computed_in(query.dtype, query.device)
    if has_kernel(dtype, query.device) and not dropout:
        return on_gpu(query.to(dtype), key.to(dtype), value.to(dtype), scaling, segments.segments), None
    in_groups = grouped.fits(dtype, query.device) and grouped.is_faster(query.shape[1], key.shape[1])
    if in_groups and not dropout:
        return grouped.attend(query.to(dtype), key.to(dtype), value.to(dtype), scaling, segments.segments), None
    if query.device.type == "cpu":
        # In half precision, the backward pass on a CPU takes three times as long as in float32, and is less accurate.
        with torch.autocast("cpu", enabled=False):
            states = by_sequence(upcast(query), upcast(key), upcast(value), dropout, scaling, segments.segments)
            return states.to(query.dtype), None
    return by_sequence(query, key, value, dropout, scaling, segments.segments), None


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The ``sdpa`` of transformers. In half precision on a CPU, it computes in float32, except for single queries.

    The backward pass of PyTorch's kernel takes three times as long in bfloat16, and is less accurate. Passes without
    gradient are computed in the same way, so that a policy and its reference have the same log-probabilities. Decoding
    has one query a row, and would convert all keys for it. Continuous batching, which passes its ``cache``, writes the
    keys and values into it in their own dtype.
    """
    half = computed_in(query.dtype, query.device) in (torch.bfloat16, torch.float16)
    if query.device.type != "cpu" or not half or query.shape[2] == 1 or kwargs.get("cache") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        states, _ = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, dropout, scaling, **kwargs
        )
    return states.to(query.dtype), None


def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, segments: Segments
) -> Tensor:
    """One call of PyTorch's attention per segment."""
    groups = query.shape[1] // key.shape[1]
    parts = [x.split(segments.lengths, 2) for x in (query, repeat_kv(key, groups), repeat_kv(value, groups))]
    attended = []
    for parent, q, k, v in zip(segments.parents, *parts, strict=True):
        mask = None
        if parent is not None:
            k, v = (torch.cat([part[parent], own], 2) for part, own in zip(parts[1:], (k, v), strict=True))
            mask = _after(k.shape[2] - q.shape[2], q.shape[2], q.dtype, q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling)
        attended.append(out.transpose(1, 2))
    return torch.cat(attended, 1)


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: autocast's if it is enabled, else that of the tensors."""
    enabled = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else dtype


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one call can compute all segments: on a GPU with the flash kernel, which needs half precision."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=64)
def _after(prefix: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask (length, prefix + length) of causal tokens that also attend to a whole prefix."""
    hidden = torch.ones(length, prefix + length, dtype=torch.bool, device=device).triu(prefix + 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def on_gpu(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, segments: Segments) -> Tensor:
    """One call of the flash kernel. The keys of a parent are copied in front of the keys of each child."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    index, of_queries, of_keys, longest = _plan(segments, q.device)
    if index is not None:
        k, v = k[index], v[index]
    # If there are more keys than queries, the kernel aligns the causal mask at the last column, as needed here.
    out = varlen_attn(
        q,
        k,
        v,
        of_queries,
        of_keys,
        max(segments.lengths),
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return cast(Tensor, out)[None]


@lru_cache(maxsize=8)
def _plan(segments: Segments, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, int]:
    """Key columns (None: all, in order), offsets of queries and keys, and the largest number of keys of a segment.

    The result is cached, so that all layers of a pass share one copy on the device.
    """
    starts, seen, sources = [], [], []
    column = 0
    for length, parent in zip(segments.lengths, segments.parents, strict=True):
        starts.append(column)
        prefix = range(0) if parent is None else range(starts[parent], starts[parent] + segments.lengths[parent])
        sources += [*prefix, *range(column, column + length)]
        seen.append(len(prefix) + length)
        column += length
    of_queries, of_keys = (
        copied(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device) for sizes in (segments.lengths, seen)
    )
    index = copied(torch.tensor(sources), device) if len(sources) > column else None
    return index, of_queries, of_keys, max(seen)
