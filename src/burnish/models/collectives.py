"""The collectives of sharded modules, so that a process that fails in a pass does not leave the others waiting.

FSDP2 gathers weights and scatters gradients at fixed points of a pass. If memory runs out in one process, the others
wait for it at the next point. That process then repeats the pass with a short example, which fits, but leaves out the
collectives that it had already made: so all processes end the pass, with useless results, and can agree to repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from burnish.errors import is_out_of_memory

T = TypeVar("T")

# torch before 2.13 has only the old names, which 2.13 deprecates
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Pass:
    """The collectives that this process has made in the current pass, and those that it still has to leave out."""

    made = left_out = 0

    def joins(self) -> bool:
        """Count a collective. Whether this process takes part in it."""
        if self.left_out:
            self.left_out -= 1
            return False
        self.made += 1
        return True


_pass = _Pass()
_roots: WeakSet[FSDPModule] = WeakSet()


class _Collective:
    """The buffers of FSDP2's collectives, an interface that ``torch.distributed.fsdp`` does not export."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if _pass.joins():
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        output_tensor.zero_()
        return None


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp, async_op=False
    ) -> dist.Work | None:
        if _pass.joins():
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)  # type: ignore[arg-type]
        output_tensor.zero_()
        return None


def watch(root: torch.nn.Module) -> None:
    """Count the collectives of a sharded root and of the sharded modules inside it."""
    assert isinstance(root, FSDPModule)
    _roots.add(root)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


def attempt(function: Callable[[T], object], value: T, short: Callable[[], T]) -> str | None:
    """Call a function that makes one pass.

    If memory runs out, it is called with ``short()`` instead, so that this process makes as many collectives as the
    others.

    Returns:
        What went wrong, or None if nothing did.
    """
    _pass.made = _pass.left_out = 0
    try:
        function(value)
    except RuntimeError as error:
        # FSDP2 could not repeat an interrupted pass before torch 2.13
        if not is_out_of_memory(error) or not all(hasattr(root, "reset_iter_state") for root in _roots):
            raise
        problem = str(error)
    else:
        return None
    # not in the except block, where the traceback still refers to the tensors
    for root in _roots:
        root.reset_iter_state()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _pass.left_out, _pass.made = _pass.made, 0
    function(short())
    return problem
