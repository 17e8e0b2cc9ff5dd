"""A key/value cache in which every row has its own length, so that rows can be added and removed without padding."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from burnish.errors import UserError
from burnish.kernels import attention
from burnish.models.forward import backbone, unwrap

BLOCK = 64
"""The number of columns is a multiple of this."""


@dataclass
class Cursor:
    """Where a forward pass over B slots writes its keys and values.

    Those of slot ``rows[i]`` (B, 1), which is ``start + i``, go to the columns ``positions[i]`` (B, T). ``length``
    columns are in use.
    """

    slots: int
    capacity: int
    rows: Tensor
    positions: Tensor
    start: int = 0
    length: int = 0


class SlotLayer(CacheLayerMixin):
    """The keys and values (slots, heads, capacity, size) of one layer. Each row has its own length."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory for all slots."""
        # Zeros, because masked values are still multiplied by 0, and an uninitialized NaN would stay NaN.
        self.keys, self.values = (
            new.new_zeros(self.cursor.slots, new.shape[1], self.cursor.capacity, new.shape[3])
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, heads, T, size) at the cursor, and return all keys and values of its rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.cursor
        self.keys[at.rows, :, at.positions] = key_states.transpose(1, 2)
        self.values[at.rows, :, at.positions] = value_states.transpose(1, 2)
        here = slice(at.start, at.start + len(at.rows))
        return self.keys[here, :, : at.length], self.values[here, :, : at.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of columns, and the index of the first one."""
        return self.cursor.length, 0

    def get_seq_length(self) -> int:
        """The number of columns before those of this step, in the longest row."""
        return max(self.cursor.length - 1, 0)

    def get_max_length(self) -> int:
        """-1: the cache grows without limit."""
        return -1


class SlotCache(Cache):
    """The cache of all layers, which a forward pass reads and extends."""

    def __init__(self, layers: int, device: torch.device) -> None:
        nowhere = torch.zeros(0, dtype=torch.long, device=device)
        self.cursor = Cursor(0, BLOCK, nowhere, nowhere)
        self.stores = [SlotLayer(self.cursor) for _ in range(layers)]
        super().__init__(layers=list(self.stores))

    @property
    def token_bytes(self) -> int:
        """The memory in bytes of one token's keys and values in all layers."""
        return sum(
            states.element_size() * states.shape[1] * states.shape[3]
            for store in self.stores
            for states in (store.keys, store.values)
        )

    def at(self, positions: Tensor, length: int, start: int = 0) -> None:
        """Set the cursor: the next keys of slot ``start + i`` go to the columns ``positions[i]`` (B, T).

        All positions are below ``length``.
        """
        self.reserve(length=length)
        if (start, len(positions)) != (self.cursor.start, len(self.cursor.rows)):
            self.cursor.rows = torch.arange(start, start + len(positions), device=positions.device)[:, None]
        self.cursor.positions, self.cursor.start, self.cursor.length = positions, start, length

    def reserve(self, slots: int = 0, length: int = 0) -> None:
        """Grow the cache to at least this many slots and columns. Its content is kept."""
        at = self.cursor
        if slots <= at.slots and length <= at.capacity:
            return
        at.slots = max(slots, at.slots)
        if length > at.capacity:
            at.capacity = BLOCK * -(-max(length, at.capacity * 5 // 4) // BLOCK)
        for store in self.stores:
            if store.is_initialized:
                keys, values = store.keys, store.values
                store.lazy_initialization(keys, values)
                store.keys[: len(keys), :, : keys.shape[2]] = keys
                store.values[: len(values), :, : values.shape[2]] = values

    def copy(self, prefix: DynamicCache, prompts: Tensor, start: int) -> None:
        """Copy the keys and values of row ``prompts[i]`` of ``prefix`` to the start of slot ``start + i``."""
        width = prefix.get_seq_length()
        self.reserve(length=width)
        here = slice(start, start + len(prompts))
        for store, source in zip(self.stores, prefix.layers, strict=True):
            assert isinstance(source, DynamicLayer) and source.keys is not None and source.values is not None
            keys, values = source.keys, source.values
            if not store.is_initialized:
                store.lazy_initialization(keys, values)
            store.keys[here, :, :width] = keys[prompts]
            store.values[here, :, :width] = values[prompts]

    def place(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` columns of slots ``source`` to slots ``target``. They may overlap."""
        for store in self.stores:
            if store.is_initialized:
                store.keys[target, :, :length] = store.keys[source, :, :length]
                store.values[target, :, :length] = store.values[source, :, :length]


def layer_windows(model: Any) -> tuple[int, dict[str, int | None]]:
    """The number of layers with a cache, and the attention window (None: all tokens) of each type of layer.

    Raises:
        UserError: if the model's attention does not support this cache.
    """
    config = unwrap(model).config.get_text_config(decoder=True)
    name = type(unwrap(model)).__name__
    taken = inspect.signature(backbone(model).forward).parameters
    if missing := [key for key in ("past_key_values", "position_ids") if key not in taken]:
        raise UserError(f"{name} takes no {', '.join(missing)}: the local generator needs them to decode row by row")
    layers = DynamicCache(config=config).layers
    unknown = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    types = getattr(config, "layer_types", None) or ["attention"] * len(layers)
    if unknown or "chunked_attention" in types:
        raise UserError(
            f"{name} keeps {', '.join(sorted(unknown)) or 'chunked attention'}, which the local generator cannot cache "
            "row by row: it takes models with full or sliding-window attention in every layer"
        )
    if config._attn_implementation not in ("sdpa", "eager", attention.NAME):
        raise UserError(
            f"{name} was loaded with attn_implementation={config._attn_implementation!r}, which takes no mask by row: "
            "load it with attn_implementation='sdpa'"
        )
    windows = {kind: getattr(layer, "sliding_window", None) for kind, layer in zip(types, layers, strict=True)}
    return len(layers), windows
