"""Attention with one query per row on a CPU, by matrix products that read only the cache columns in use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from burnish.kernels import attention

NAME = "burnish_decoding"
"""The name of the implementation in ``config._attn_implementation`` during a decoding step."""

UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Attention features of some models that are left to transformers."""

ROWS = 16
"""Number of rows computed together, up to the longest of them. Smaller groups need more calls."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    columns: list[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(q k scaling + mask) v, with the signature of transformers' attention functions.

    Args:
        module: the layer.
        query: (B, heads, 1, size).
        key: (B, key heads, L, size).
        value: (B, key heads, L, size).
        attention_mask: (B, 1, 1, L), additive, with the lowest number for hidden columns.
        scaling: scale of the dot products; None means 1 / sqrt(size).
        columns: the number of cache columns that each row uses; None means all columns.
        kwargs: other arguments of transformers' ``sdpa``.

    Returns:
        The states (B, 1, heads, size), and None in place of the attention weights.
    """
    if any(kwargs.get(name) is not None for name in UNKNOWN):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, _, size = query.shape
    # Heads that share a key become several queries of the same key.
    scaled = query * (size**-0.5 if scaling is None else scaling)
    scaled = scaled.reshape(rows, key.shape[1], heads // key.shape[1], size)
    states = []
    for start in range(0, rows, ROWS):
        here = slice(start, start + ROWS)
        length = key.shape[2] if columns is None else max(columns[here])
        weights = scaled[here] @ key[here, :, :length].transpose(2, 3)
        weights += attention_mask[here, :, :, :length]
        states.append(weights.softmax(-1) @ value[here, :, :length])
    return torch.cat(states).view(rows, 1, heads, value.shape[-1]), None


def is_faster(model: Any) -> bool:
    """Whether a transformers model can use ``attend`` and is faster with it: on a CPU in float32 or wider.

    A GPU's fused kernels are faster.
    """
    wide = model.dtype in (torch.float32, torch.float64)
    current = model.config.get_text_config(decoder=True)._attn_implementation
    return model.device.type == "cpu" and wide and current in ("sdpa", attention.NAME) and model.is_backend_compatible()
