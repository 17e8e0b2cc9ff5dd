"""Counts what a pass asks of a device: operations, and those that make the program wait for it.

On a CPU nothing waits, but the same operations are called: ``with Counter() as counter: ...; counter.syncs``.
"""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward", "equal", "_unique2"}
"""Operations whose result the program needs before it can continue: a number, or the size of a tensor."""

COPIES = {"tolist", "cpu", "numpy", "new_tensor"}
"""Methods that copy from or to memory of the CPU that is not pinned. On a CPU they call no operation."""


class _Copies(TorchFunctionMode):
    """Counts copies."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if self.counter.on and name in COPIES:
            self.counter.syncs[name] += 1
        return function(*args, **(kwargs or {}))


class Counter(TorchDispatchMode):
    """Counts operations while ``on``: ``operations`` without views, which start no kernel, and ``syncs``, by name."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.on = on
        self.operations: Tally[str] = Tally()
        self.syncs: Tally[str] = Tally()
        self._copies = _Copies(self)

    def __enter__(self) -> Counter:
        self._copies.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on:
            name = function._schema.name.removeprefix("aten::")
            if not function.is_view and name not in ("detach", "lift_fresh", "_unsafe_view"):
                self.operations[name] += 1
            if name in WAITS or (name in ("index", "index_put", "index_put_") and _has_mask(args[1])):
                self.syncs[name] += 1
        return function(*args, **(kwargs or {}))


def _has_mask(indices: list[torch.Tensor | None]) -> bool:
    """Whether a tensor is indexed by a mask: the result has as many entries as the mask has true ones."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
