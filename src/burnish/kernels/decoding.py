"""Attention of one query a row on a CPU, which reads no more of the cache than a row needs, by matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from burnish.kernels import attention

NAME = "burnish_decoding"
"""What transformers calls it while a step is decoded."""

UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention that is left to transformers."""

ROWS = 16
"""Rows that are read up to the longest of them; fewer cost more calls."""


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
    """softmax(q k scaling + mask) v, row by row, where transformers' models ask for attention.

    Args:
        module: the layer.
        query: (B, heads, 1, size).
        key: (B, key heads, L, size), of which there may be fewer heads.
        value: (B, key heads, L, size).
        attention_mask: (B, 1, 1, L), additive, the lowest number for what is not seen.
        scaling: 1 / sqrt(size) where it is None.
        columns: of the first L columns, how many each row has (B); None where the model does not pass it on.
        kwargs: what transformers' ``sdpa`` takes besides.

    Returns:
        (B, 1, heads, size), and None in the place of the weights.
    """
    if any(kwargs.get(name) is not None for name in UNKNOWN):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, _, size = query.shape
    # Heads that share a key are several queries of it.
    scaled = query * (size**-0.5 if scaling is None else scaling)
    scaled = scaled.reshape(rows, key.shape[1], heads // key.shape[1], size)
    found = []
    for start in range(0, rows, ROWS):
        here = slice(start, start + ROWS)
        length = key.shape[2] if columns is None else max(columns[here])
        weights = scaled[here] @ key[here, :, :length].transpose(2, 3)
        weights += attention_mask[here, :, :, :length]
        found.append(weights.softmax(-1) @ value[here, :, :length])
    return torch.cat(found).view(rows, 1, heads, value.shape[-1]), None


def is_faster(model: Any) -> bool:
    """Whether a transformers model can use ``attend`` and gains by it: on a CPU in float32 or wider.

    A GPU's fused kernels are faster.
    """
    wide = model.dtype in (torch.float32, torch.float64)
    current = model.config.get_text_config(decoder=True)._attn_implementation
    return model.device.type == "cpu" and wide and current in ("sdpa", attention.NAME) and model.is_backend_compatible()
