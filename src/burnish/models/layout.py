"""How examples become micro-batches: settings that change memory and speed, never a result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from burnish.data.batching import collate, micro_batches, prompt, prompt_groups
from burnish.errors import UserError
from burnish.models.forward import can_pack, can_share, prefers_packed, unwrap
from burnish.types import Example, MicroBatch, Sequence, total_counts

BUDGET_ON_CPU = 512
"""Tokens of a micro-batch where nothing else is said: more is not faster there, and takes more memory."""


BUDGET_OF_PASS = 4096
"""Tokens of a micro-batch in a pass without gradient, on any device, where nothing else is said."""

T = TypeVar("T")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def default_budget(device: torch.device) -> int | None:
    """Tokens of a micro-batch where the user names no number; None is the whole step."""
    return BUDGET_ON_CPU if device.type == "cpu" else None


@dataclass
class Layout:
    """Lays examples out for models that all read them; the settings are those of ``burnish.Trainer``.

    Batches lie on ``device``, or where it is None on that of the first model.
    """

    models: list[nn.Module]
    device: torch.device | None = None
    pad_id: int = 0
    side: str = "right"
    pad_to: int = 0
    packed: bool | None = None
    shared_prompts: bool = True

    def __post_init__(self) -> None:
        if self.packed is None:
            self.packed = all(prefers_packed(model) for model in self.models)
        elif self.packed and (unfit := [model for model in self.models if not can_pack(model)]):
            model = type(unwrap(unfit[0])).__name__
            raise UserError(f"packed: {model} does not keep the sequences of a row apart: take this setting away")

    def groups(self, examples: list[Example], budget: int | None) -> list[list[int]]:
        """Indices of examples, a list for each micro-batch; those behind the same prompt stand side by side."""
        together = prompt_groups(examples, budget)
        if len(together) == len(examples) or not self.can_share():
            return micro_batches(examples, budget, packed=bool(self.packed), shared=self._shared(examples))
        joined = [_join([examples[i] for i in bundle]) for bundle in together]
        groups = micro_batches(joined, budget, packed=bool(self.packed), shared=True)
        return [[i for bundle in group for i in together[bundle]] for group in groups]

    def passes(
        self,
        function: Callable[[MicroBatch], T],
        examples: list[Example],
        budget: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        halve: bool = True,
    ) -> Iterator[tuple[list[int], MicroBatch, T]]:
        """Every micro-batch of one process, with the indices of its examples and what a function gives for it.

        For passes without gradient. Every process calls the function equally often, with a silent example where its
        micro-batches run out, since wrappers may wait for each other in a forward pass. On out-of-memory a micro-batch
        is cut in half, and so are those behind it; a single example that does not fit is an error. Where processes do
        wait for each other, ``halve`` is False, and the first out-of-memory is an error.

        Raises:
            UserError: out of memory, and not ``halve``.
        """
        budget = budget or BUDGET_OF_PASS
        groups = self.groups(examples, budget)
        waiting = groups[rank::world_size]
        if len(waiting) < -(-len(groups) // world_size):
            function(self.collate([_silent(examples[groups[-1][0]])]))
        while waiting:
            group = waiting.pop(0)
            batch = self.collate([examples[i] for i in group])
            try:
                found = function(batch)
            except RuntimeError as error:
                if not is_out_of_memory(error) or len(group) == 1:
                    raise
                if not halve:
                    raise UserError(
                        f"out of memory with token_budget={budget} in a pass without gradient: set a smaller "
                        "token_budget. With sharded weights it cannot be halved while other processes wait"
                    ) from error
            else:
                yield group, batch, found
                continue
            # outside the except block, where the traceback no longer holds the tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            # padding to a fixed width is in the batch and not in the budget, so that half a batch may be above it
            budget = min(budget, batch.tokens.numel()) // 2
            warnings.warn(f"out of memory: continuing with token_budget={budget}", stacklevel=2)
            rest = [i for one in (group, *waiting) for i in one]
            waiting = [[rest[k] for k in one] for one in self.groups([examples[i] for i in rest], budget)]

    def cut(self, examples: list[Example], budget: int | None, rank: int, world_size: int) -> list[MicroBatch]:
        """Micro-batches of one process; every process gets equally many, an empty one where they run out."""
        groups = self.groups(examples, budget)
        if world_size > 1 and budget is None:
            groups = [list(range(i, len(examples), world_size)) for i in range(min(world_size, len(examples)))]
        mine = [[examples[i] for i in group] for group in groups[rank::world_size]]
        while len(mine) < -(-len(groups) // world_size):
            mine.append([_silent(examples[groups[-1][0]])])
        return [self.collate(batch) for batch in mine]

    def collate(self, examples: list[Example]) -> MicroBatch:
        """One micro-batch of examples, on the device; neighbours behind the same prompt run it once."""
        counts = total_counts(examples)
        neighbours = [
            list(group) for start, same in groupby(examples, prompt) for group in ([same] if start else zip(same))
        ]
        if len(neighbours) < len(examples) and self.can_share():
            examples = [_join(group) for group in neighbours]
        packed, shared = bool(self.packed), self._shared(examples)
        batch = collate(examples, self.pad_id, side=self.side, packed=packed, shared=shared, pad_to=self.pad_to)
        batch = replace(batch, counts=counts)
        return batch.to(self.device or unwrap(self.models[0]).device)

    def _shared(self, examples: list[Example]) -> bool:
        return any(len(example.sequences) > 1 for example in examples) and self.can_share()

    def can_share(self) -> bool:
        """Whether sequences with the same prompt share it; found out by a trial of each model, once."""
        return self.shared_prompts and all(can_share(model) for model in self.models)


def _join(examples: list[Example]) -> Example:
    """One example of the sequences of those that have one each."""
    return examples[0] if len(examples) == 1 else Example(tuple(e.sequences[0] for e in examples))


def _silent(example: Example) -> Example:
    """An example of the same kind that adds nothing to any term."""
    first = example.sequences[0]
    zeros = {name: np.zeros(len(first)) for name in first.arrays}
    return Example((Sequence(first.tokens, np.zeros(len(first), np.bool_), first.source, zeros),))
