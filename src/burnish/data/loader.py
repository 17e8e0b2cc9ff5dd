"""Rows to optimizer steps: one item of a loader is one step, the examples of all processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from burnish.errors import UserError
from burnish.protocols import StepLoader
from burnish.types import Example


def permutation(n: int, *seeds: int) -> list[int]:
    """A permutation of ``range(n)`` that depends only on its seeds."""
    digest = hashlib.blake2b(",".join(map(str, seeds)).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(n, generator=generator).tolist()


class RowLoader(StepLoader):
    """Yields steps of ``rows_per_step`` examples, in a new seeded order every epoch.

    The order depends only on the seed and the epoch, not on the number of processes. The last step of an epoch may be
    smaller.

    Args:
        examples: the examples of an epoch, at least one.
        rows_per_step: examples of a step, over all processes.
        seed: the seed of the order.
        finish: called with the examples of a step before it is yielded; returns the examples to train on. A method uses
            it for numbers that depend on the whole step.
        kept: numbers of the method that are saved and restored with the loader's state.
    """

    def __init__(
        self,
        examples: list[Example],
        rows_per_step: int,
        seed: int,
        finish: Callable[[list[Example]], list[Example]] | None = None,
        kept: dict[str, float] | None = None,
    ) -> None:
        if not examples:
            raise UserError(
                "there is nothing to train on: the training data has no rows, or none that fits data.max_length"
            )
        self.examples = examples
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.finish = finish
        self.kept = {} if kept is None else kept
        self.epoch = 0
        self.step = 0

    def __len__(self) -> int:
        return -(-len(self.examples) // self.rows_per_step)

    def __iter__(self) -> Iterator[list[Example]]:
        order = permutation(len(self.examples), self.seed, self.epoch)
        for step in range(self.step, len(self)):
            start = step * self.rows_per_step
            # set before the yield, since a checkpoint may be saved there
            self.epoch, self.step = (self.epoch + 1, 0) if step + 1 == len(self) else (self.epoch, step + 1)
            examples = [self.examples[i] for i in order[start : start + self.rows_per_step]]
            yield self.finish(examples) if self.finish else examples

    def state_dict(self) -> dict[str, Any]:
        """Epoch, step, rows per step, and the method's numbers. A run keeps its rows per step on more processes."""
        state = {"epoch": self.epoch, "step": self.step, "rows_per_step": self.rows_per_step}
        return state | {"kept": dict(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.epoch, self.step, self.rows_per_step = state["epoch"], state["step"], state["rows_per_step"]
        self.kept.clear()
        self.kept.update(state["kept"])
