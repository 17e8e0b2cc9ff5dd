"""The keys and values of texts that later requests begin with. Each token of a common beginning is stored once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from burnish.generate.kv_cache import SlotCache

ROOT = -1
"""The empty text, which all others begin with."""

SMALLEST = 1024
"""The first capacity in tokens."""


def default_bytes(device: torch.device) -> int:
    """A quarter of a GPU's memory, or 2 GiB. Free memory has no influence, so that equal plans store the same texts."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 2 * 2**30


class PrefixStore:
    """The keys and values of texts, as a trie of tokens.

    ``children[node, token]`` is the node of a text that ends with this token after the text of ``node``. The id of a
    node is its row in the keys and values (capacity, heads, size) of every layer. The capacity doubles as needed.

    If ``max_bytes`` of keys and values are in use, more tokens are not stored, and ``make_room`` drops those that the
    next plan does not need. So what is stored depends only on the plans.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.children: dict[tuple[int, int], int] = {}
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.full = False

    def __len__(self) -> int:
        """The number of tokens stored."""
        return len(self.children)

    def match(self, tokens: Iterable[int]) -> list[int]:
        """The nodes of the longest stored text that ``tokens`` begin with, one for each of its tokens."""
        nodes, node = list[int](), ROOT
        for token in tokens:
            found = self.children.get((node, token))
            if found is None:
                break
            nodes.append(found)
            node = found
        return nodes

    def store(self, texts: Sequence[Sequence[int]], slots: Sequence[int], cache: SlotCache) -> None:
        """Store those tokens of ``texts[i]`` that are new. Their keys and values are in slot ``slots[i]``."""
        limit, first = self.max_bytes // cache.token_bytes, len(self)
        rows, columns = list[int](), list[int]()
        for text, slot in zip(texts, slots, strict=True):
            node = ROOT
            for column, token in enumerate(text):
                child = self.children.get((node, token))
                if child is None:
                    if len(self) >= limit:
                        self.full = True
                        break
                    child = self.children[node, token] = len(self)
                    rows.append(slot)
                    columns.append(column)
                node = child
        if not rows:
            return
        self._grow(cache, limit)
        device = cache.stores[0].keys.device
        at_rows, at_columns = torch.tensor(rows, device=device), torch.tensor(columns, device=device)
        for (keys, values), source in zip(self.layers, cache.stores, strict=True):
            keys[first : len(self)] = source.keys[at_rows, :, at_columns]
            values[first : len(self)] = source.values[at_rows, :, at_columns]

    def load(self, prefixes: Sequence[Sequence[int]], cache: SlotCache, start: int) -> None:
        """Copy the keys and values of the nodes ``prefixes[i]`` to the beginning of slot ``start + i``."""
        width = max(map(len, prefixes))
        cache.reserve(length=width)
        # Padding repeats node 0. It lies after the prefix, where it is overwritten before any query sees it.
        padded = [[*prefix, *[0] * (width - len(prefix))] for prefix in prefixes]
        nodes = torch.tensor(padded, device=cache.stores[0].keys.device)
        here = slice(start, start + len(prefixes))
        for (keys, values), target in zip(self.layers, cache.stores, strict=True):
            target.keys[here, :, :width] = keys[nodes].transpose(1, 2)
            target.values[here, :, :width] = values[nodes].transpose(1, 2)

    def make_room(self, texts: Iterable[Iterable[int]]) -> None:
        """If the store is full, drop all tokens except those that these texts begin with."""
        if not self.full:
            return
        kept = sorted({node for text in texts for node in self.match(text)})
        moved = {node: place for place, node in enumerate(kept)} | {ROOT: ROOT}
        self.children = {
            (moved[parent], token): moved[node] for (parent, token), node in self.children.items() if node in moved
        }
        for keys, values in self.layers:
            nodes = torch.tensor(kept, dtype=torch.long, device=keys.device)
            keys[: len(kept)] = keys[nodes]
            values[: len(kept)] = values[nodes]
        self.full = False

    def _grow(self, cache: SlotCache, limit: int) -> None:
        """Make room for all nodes. Layers grow one after the other, so that only one of them is in memory twice."""
        if not self.layers:
            self.layers = [(_no_rows(layer.keys), _no_rows(layer.values)) for layer in cache.stores]
        capacity = len(self.layers[0][0])
        if len(self) <= capacity:
            return
        capacity = min(max(len(self), 2 * capacity, SMALLEST), limit)
        for index, (keys, values) in enumerate(self.layers):
            self.layers[index] = _enlarged(keys, capacity), _enlarged(values, capacity)


def _no_rows(states: Tensor) -> Tensor:
    """An empty tensor (0, heads, size) like keys or values (slots, heads, capacity, size)."""
    return states.new_empty(0, states.shape[1], states.shape[3])


def _enlarged(rows: Tensor, capacity: int) -> Tensor:
    """A tensor of ``capacity`` rows that begins with these rows."""
    larger = rows.new_empty(capacity, *rows.shape[1:])
    larger[: len(rows)] = rows
    return larger
