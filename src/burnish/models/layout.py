"""How examples lie in micro-batches: settings that change memory and speed, but never a result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from burnish.errors import UserError, is_out_of_memory, out_of_memory
from burnish.models import collectives
from burnish.models.batching import collate, deal, micro_batches, prompt_groups, prompt_key, tokens_in
from burnish.models.forward import can_pack, can_share, prefers_packed, unwrap
from burnish.models.limits import check_ids
from burnish.types import Example, MicroBatch, Sequence, total_counts

BUDGET_ON_CPU = 512
"""Default tokens of a training micro-batch on a CPU, where more are no faster and take more memory."""

BUDGET_OF_PASS = 4096
"""Default tokens of a micro-batch in a pass without gradient on a CPU."""

SMALLEST_PASS, LARGEST_PASS = 1024, 16384
"""The least and the most that the default is on a GPU. More tokens in a pass would only need more memory."""

T = TypeVar("T")


def does_not_fit(error: BaseException, examples: list[Example]) -> UserError:
    """The error to raise if memory runs out and the token budget cannot be halved."""
    longest = max((s for example in examples for s in example.sequences), key=len)
    one = f" with a micro-batch of one example (the longest has {len(longest):,} tokens, {longest.source})"
    return UserError(out_of_memory(error, one))


def default_budget(device: torch.device) -> int | None:
    """The default tokens of a training micro-batch; None is the whole step."""
    return BUDGET_ON_CPU if device.type == "cpu" else None


def budget_of_pass(models: list[nn.Module], device: torch.device) -> int:
    """The default tokens of a micro-batch in a pass without gradient.

    On a GPU, it is a power of two, so that the layers' activations take up to half of the memory that is free. A layer
    keeps about 8 vectors of hidden states and 3 of its MLP for each token, in float32.
    """
    if device.type != "cuda":
        return BUDGET_OF_PASS
    free, _ = torch.cuda.mem_get_info(device)
    configs = [unwrap(model).config.get_text_config(decoder=True) for model in models]
    each = max(
        4 * (8 * c.hidden_size + 3 * (getattr(c, "intermediate_size", None) or 4 * c.hidden_size)) for c in configs
    )
    fits = max(free // 2 // each, 1)
    return min(max(2 ** (fits.bit_length() - 1), SMALLEST_PASS), LARGEST_PASS)


@dataclass
class Layout:
    """Makes micro-batches that all of ``models`` can read.

    ``Layout([model], packed=False, pad_to=64).collate(examples)``
    """

    models: list[nn.Module]
    device: torch.device | None = None
    """The device of the micro-batches; None is that of the first model."""
    pad_id: int = 0
    """The token id of padding. It is 0 instead if the models have no embedding for it: padding is never read."""
    side: str = "right"
    """Where padding goes: right or left."""
    pad_to: int = 0
    """Minimum width of a micro-batch."""
    packed: bool | None = None
    """Put all sequences of a micro-batch into one row; None packs if that is fastest for these models."""
    shared_prompts: bool = True
    """Compute a prompt once for all its answers, if the models support it."""
    pass_budget: int | None = None
    """Maximum number of tokens of a micro-batch in a pass without gradient; None if neither the default was needed nor
    memory ran out. It is halved if memory runs out."""

    def __post_init__(self) -> None:
        configs = [unwrap(model).config.get_text_config(decoder=True) for model in self.models]
        self.vocabulary: int = min(config.vocab_size for config in configs)
        if self.pad_id >= self.vocabulary:
            self.pad_id = 0
        if self.packed is None:
            self.packed = all(prefers_packed(model) for model in self.models)
        elif self.packed and (unfit := [model for model in self.models if not can_pack(model)]):
            model = type(unwrap(unfit[0])).__name__
            raise UserError(f"packed: {model} does not keep the sequences of a row apart: remove this setting")

    def groups(self, examples: list[Example], budget: int | None) -> list[list[int]]:
        """The indices of the examples in each micro-batch. Examples with the same prompt are next to each other."""
        by_prompt = prompt_groups(examples, budget)
        if len(by_prompt) == len(examples) or not self.can_share():
            return micro_batches(examples, budget, packed=bool(self.packed), shared=self._shared(examples))
        joined = [_join([examples[i] for i in group]) for group in by_prompt]
        batches = micro_batches(joined, budget, packed=bool(self.packed), shared=True)
        return [[i for group in batch for i in by_prompt[group]] for batch in batches]

    def passes(
        self,
        function: Callable[[MicroBatch], T],
        examples: list[Example],
        budget: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> Iterator[tuple[list[int], MicroBatch, T]]:
        """Apply a function to the micro-batches of one process, in passes without gradient.

        If the device runs out of memory, the rest is cut into micro-batches of half the size, and so are later passes.
        A single example that does not fit is an error.

        Returns:
            The indices of the examples, the micro-batch and the function's result, for each micro-batch.

        Raises:
            UserError: a token id has no embedding; or out of memory with a single example.
        """
        self._check_ids(examples)
        budget = self.limit(budget)
        groups = self.groups(examples, budget)
        waiting = self._dealt(examples, groups, world_size)[rank]
        while waiting:
            group = waiting.pop(0)
            batch = self.collate([examples[i] for i in group])
            try:
                result = function(batch)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(group) == 1:
                    raise does_not_fit(error, [examples[group[0]]]) from error
            else:
                yield group, batch, result
                continue
            # not in the except block, where the traceback still refers to the tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            # pad_to widens the micro-batch but does not count in the budget
            budget = self.pass_budget = min(budget, batch.tokens.numel()) // 2
            warnings.warn(f"out of memory: continuing with token_budget={budget}", stacklevel=2)
            rest = [i for indices in (group, *waiting) for i in indices]
            waiting = [[rest[k] for k in indices] for indices in self.groups([examples[i] for i in rest], budget)]

    def passes_together(
        self,
        function: Callable[[MicroBatch], T],
        examples: list[Example],
        budget: int | None,
        *,
        rank: int,
        world_size: int,
        gather: Callable[[int], list[int]],
    ) -> Iterator[tuple[list[int], MicroBatch, T]]:
        """As ``passes``, for sharded models: every process calls the function equally often, because it waits for the
        others in each pass.

        A process without a micro-batch uses a short example. If the device of a process runs out of memory, that
        process cuts its rest into micro-batches of half the size, and all process it after the current ones.

        Args:
            function: see ``passes``.
            examples: see ``passes``.
            budget: see ``passes``.
            rank: see ``passes``.
            world_size: see ``passes``.
            gather: gives the numbers of all processes.
        """
        self._check_ids(examples)
        budget = self.limit(budget)
        waiting = self._dealt(examples, self.groups(examples, budget), world_size)[rank]
        while calls := max(gather(len(waiting))):
            rest: list[int] = []
            for k in range(calls):
                group = waiting[k] if k < len(waiting) and not rest else []
                batch = self.collate([examples[i] for i in group] or [silent(examples)])
                results: list[T] = []
                problem = collectives.attempt(
                    lambda batch, into=results: into.append(function(batch)),
                    batch,
                    lambda: self.collate([silent(examples)]),
                )
                if problem is None and group:
                    yield group, batch, results[0]
                elif problem is not None:
                    if len(group) < 2:
                        raise does_not_fit(RuntimeError(problem), [examples[i] for i in group] or examples)
                    rest = [i for indices in waiting[k:] for i in indices]
                    budget = self.pass_budget = min(budget, batch.tokens.numel()) // 2
                    warnings.warn(f"out of memory: continuing with token_budget={budget}", stacklevel=2)
            groups = self.groups([examples[i] for i in rest], budget) if rest else []
            waiting = [[rest[k] for k in indices] for indices in groups]

    def limit(self, budget: int | None) -> int:
        """The budget of a pass without gradient: ``budget`` or the default, or less if memory ran out before."""
        if budget is None and self.pass_budget is None:
            self.pass_budget = budget_of_pass(self.models, self.device or unwrap(self.models[0]).device)
        return min(limit for limit in (budget, self.pass_budget) if limit is not None)

    def _check_ids(self, examples: list[Example]) -> None:
        for sequence in (s for example in examples for s in example.sequences):
            check_ids(sequence.tokens, self.vocabulary, sequence.source)

    def cut(self, examples: list[Example], budget: int | None, rank: int, world_size: int) -> list[MicroBatch]:
        """The micro-batches of one process. Every process gets equally many; a surplus one adds nothing to the loss."""
        groups = self.groups(examples, budget) if world_size == 1 else self._even(examples, budget, world_size)
        dealt = self._dealt(examples, groups, world_size)
        batches = [[examples[i] for i in group] for group in dealt[rank]]
        while len(batches) < max(map(len, dealt)):
            batches.append([silent(examples)])
        return [self.collate(batch) for batch in batches]

    def _even(self, examples: list[Example], budget: int | None, ranks: int) -> list[list[int]]:
        """Groups that are as small as possible, but no more than ``ranks`` times those that a rank needs anyway.

        With groups of the full budget, 9 of them on 8 ranks would take as long as 16.
        """
        groups = self.groups(examples, budget)
        most = -(-len(groups) // ranks) * ranks
        low, high = 0, max(self._tokens(examples, group) for group in groups)
        while high - low > 1 + high // 100:
            middle = (low + high) // 2
            smaller = self.groups(examples, middle)
            if len(smaller) <= most:
                groups, high = smaller, middle
            else:
                low = middle
        return groups

    def _dealt(self, examples: list[Example], groups: list[list[int]], ranks: int) -> list[list[list[int]]]:
        """The groups of each rank, with about equal numbers of tokens."""
        if ranks == 1:
            return [groups]
        dealt = deal([self._tokens(examples, group) for group in groups], ranks)
        return [[groups[i] for i in of_rank] for of_rank in dealt]

    def _tokens(self, examples: list[Example], group: list[int]) -> int:
        """The number of tokens of a micro-batch without ``pad_to``."""
        joined = self._joined([examples[i] for i in group])
        return tokens_in(joined, packed=bool(self.packed), shared=self._shared(joined))

    def collate(self, examples: list[Example]) -> MicroBatch:
        """One micro-batch, on the device. Adjacent examples with the same prompt share it."""
        counts = total_counts(examples)
        examples = self._joined(examples)
        packed, shared = bool(self.packed), self._shared(examples)
        batch = collate(examples, self.pad_id, side=self.side, packed=packed, shared=shared, pad_to=self.pad_to)
        batch = replace(batch, counts=counts)
        return batch.to(self.device or unwrap(self.models[0]).device)

    def _joined(self, examples: list[Example]) -> list[Example]:
        """The examples, but adjacent ones with the same prompt as one if they can share it."""
        by_prompt = [
            list(group) for key, same in groupby(examples, prompt_key) for group in ([same] if key else zip(same))
        ]
        if len(by_prompt) == len(examples) or not self.can_share():
            return examples
        return [_join(group) for group in by_prompt]

    def _shared(self, examples: list[Example]) -> bool:
        return any(len(example.sequences) > 1 for example in examples) and self.can_share()

    def can_share(self) -> bool:
        """Whether sequences with the same prompt share it. The first call tries it with each model."""
        return self.shared_prompts and all(can_share(model) for model in self.models)


def _join(examples: list[Example]) -> Example:
    """One example with the sequences of several examples that have one each."""
    return examples[0] if len(examples) == 1 else Example(tuple(e.sequences[0] for e in examples))


def silent(examples: list[Example]) -> Example:
    """A short example of the same kind as ``examples`` that adds nothing to any term of the loss."""
    shortest = min((example.sequences[0] for example in examples), key=len)
    zeros = {name: np.zeros(len(shortest)) for name in shortest.arrays}
    return Example((Sequence(shortest.tokens, np.zeros(len(shortest), np.bool_), shortest.source, zeros),))
