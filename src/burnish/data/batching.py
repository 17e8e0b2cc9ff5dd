"""Examples to micro-batches, and rows to optimizer steps.

One item of a loader is one optimizer step: the examples of all processes. It is cut here into micro-batches of
similar length under a token budget; how it is cut changes memory and speed, never the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.errors import UserError
from burnish.types import Example, MicroBatch, Segments, Sequence, total_counts


def shared_length(example: Example) -> int:
    """How many tokens at the start of an example's sequences run once for all of them.

    They are the same in all sequences and stand before the first token that is learned or carries a number. The last
    token of a common prompt is not among them: each sequence keeps it, to predict its own next one.
    """
    if len(example.sequences) < 2:
        return 0
    limit = min(_first_used(sequence) for sequence in example.sequences)
    first, *others = (sequence.tokens[:limit] for sequence in example.sequences)
    differs = np.zeros(limit, np.bool_)
    for tokens in others:
        differs |= tokens != first
    return max(0, _first(differs) - 1)


def prompt(example: Example) -> bytes:
    """The tokens of a lone sequence that can run once for others that begin with them too; none of another example."""
    sequence, *others = example.sequences
    used = 0 if others else _first_used(sequence)
    return sequence.tokens[:used].tobytes() if used > 1 else b""  # its last token is not shared


def prompt_groups(examples: list[Example], budget: int | None) -> list[list[int]]:
    """Indices of ``examples``, those with the same prompt together as far as they fit the budget behind it."""
    groups: list[list[int]] = []
    begun: dict[bytes, tuple[list[int], int]] = {}
    for i, example in enumerate(examples):
        start = prompt(example)
        length = sum(len(sequence) for sequence in example.sequences)
        group, width = begun.get(start, ([], 0))
        more = length - len(start) // example.sequences[0].tokens.itemsize + 1 if group else length
        if not start or not group or (budget is not None and width + more > budget):
            group, width, more = [], 0, length
            groups.append(group)
        group.append(i)
        if start:
            begun[start] = group, width + more
    return groups


def _first_used(sequence: Sequence) -> int:
    """How many tokens stand before the first one that is learned or carries a number."""
    return min(_first(values) for values in (sequence.loss_mask, *sequence.arrays.values()))


def _first(values: np.ndarray) -> int:
    """The index of the first entry that is not 0, or the length if there is none."""
    nonzero = values != 0
    index = int(nonzero.argmax()) if nonzero.size else 0
    return index if index or (nonzero.size and nonzero[0]) else len(values)


def _units(example: Example, shared: bool) -> list[tuple[int, tuple[Sequence, ...]]]:
    """What lies in one row when padded: sequences, and how many tokens they share in front of them."""
    common = shared_length(example) if shared else 0
    return [(common, example.sequences)] if common else [(0, (sequence,)) for sequence in example.sequences]


def _width(unit: tuple[int, tuple[Sequence, ...]]) -> int:
    common, sequences = unit
    return common + sum(len(sequence) - common for sequence in sequences)


def micro_batches(
    examples: list[Example], budget: int | None, *, packed: bool = False, shared: bool = False
) -> list[list[int]]:
    """Indices of ``examples``, cut into groups of similar length that hold at most ``budget`` tokens with padding.

    Padded: sorted by length and filled from the longest, rows times longest row <= budget. Packed: first-fit
    decreasing on the sums of lengths. An example longer than the budget gets a group of its own. No budget: one group.
    ``shared`` as in ``collate``.
    """
    if budget is None:
        return [list(range(len(examples)))] if examples else []
    widths = [[_width(unit) for unit in _units(example, shared)] for example in examples]
    order = sorted(range(len(examples)), key=lambda i: (-max(widths[i]), i))
    groups: list[list[int]] = []
    used: list[int] = []
    for i in order:
        if packed:
            cost = alone = sum(widths[i])
            fits = (g for g in range(len(groups)) if used[g] + cost <= budget)
        else:
            alone = len(widths[i]) * max(widths[i])
            cost = len(widths[i]) * max(widths[groups[-1][0]]) if groups else alone
            fits = (g for g in range(len(groups) - 1, len(groups)) if g >= 0 and used[g] + cost <= budget)
        place = next(fits, None)
        if place is None:
            groups.append([i])
            used.append(alone)
        else:
            groups[place].append(i)
            used[place] += cost
    return groups


def _place(widths: list[int], side: str, packed: bool, pad_to: int) -> tuple[list[tuple[int, int]], int, int]:
    """Row and first column of every unit, and the shape of the batch."""
    if packed:
        width = max(sum(widths), pad_to)
        offset = width - sum(widths) if side == "left" else 0
        return [(0, offset + before) for before in accumulate(widths[:-1], initial=0)], 1, width
    width = max([*widths, pad_to])
    return [(row, width - n if side == "left" else 0) for row, n in enumerate(widths)], len(widths), width


def collate(
    examples: list[Example],
    pad_id: int,
    *,
    side: str = "right",
    packed: bool = False,
    shared: bool = False,
    pad_to: int = 0,
) -> MicroBatch:
    """Lay examples out as tensors: one sequence a row with padding on ``side``, or all of them in one packed row.

    ``shared``: the sequences of an example stand in one row behind the prompt that they share (``shared_length``),
    which then runs once. ``pad_to`` is the least width. Padding carries ``pad_id``, segment 0 and position 0, and is
    told from tokens by its segment alone, never by its id. The examples are not changed.
    """
    units = [unit for example in examples for unit in _units(example, shared)]
    places, rows, width = _place([_width(unit) for unit in units], side, packed, pad_to)
    tokens = np.full((rows, width), pad_id, np.int64)
    segments, positions, parents = (np.zeros((rows, width), np.int64) for _ in range(3))
    loss_mask = np.zeros((rows, width), np.bool_)
    names = sorted({name for example in examples for sequence in example.sequences for name in sequence.arrays})
    arrays = {name: np.zeros((rows, width), np.float32) for name in names}
    counted = np.arange(width)
    starts, sizes, number = [], [], [count(1) for _ in range(rows)]
    for (common, sequences), (row, column) in zip(units, places, strict=True):
        parent = 0
        if common:
            here = slice(column, column + common)
            parent = next(number[row])
            tokens[row, here] = sequences[0].tokens[:common]
            segments[row, here], positions[row, here] = parent, counted[:common]
            column += common
        for sequence in sequences:
            length = len(sequence)
            here = slice(column, column + length - common)
            tokens[row, here] = sequence.tokens[common:]
            segments[row, here], positions[row, here] = next(number[row]), counted[common:length]
            parents[row, here] = parent
            loss_mask[row, here] = sequence.loss_mask[common:]
            for name in names:
                arrays[name][row, here] = sequence.arrays[name][common:]
            starts.append(row * width + column)
            sizes.append(length - common)
            column += length - common
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        segments=torch.from_numpy(segments),
        parents=torch.from_numpy(parents),
        positions=torch.from_numpy(positions),
        loss_mask=torch.from_numpy(loss_mask),
        starts=torch.tensor(starts),
        ends=torch.tensor(starts) + torch.tensor(sizes) - 1,
        arrays={name: torch.from_numpy(values) for name, values in arrays.items()},
        **_pairs(examples),
        packed=packed or any(len(sequences) > 1 for _, sequences in units),
        runs=_runs(units, places[0][1], width) if packed else None,
        sources=tuple(sequence.source for example in examples for sequence in example.sequences),
        counts=total_counts(examples),
    )


def _runs(units: list[tuple[int, tuple[Sequence, ...]]], before: int, width: int) -> Segments:
    """The runs of a packed row that begins with ``before`` columns of padding."""
    lengths, parents = ([before], [None]) if before else ([], [])
    for common, sequences in units:
        parent = len(lengths) if common else None
        if common:
            lengths.append(common)
            parents.append(None)
        lengths += [len(sequence) - common for sequence in sequences]
        parents += [parent] * len(sequences)
    if after := width - sum(lengths):
        lengths.append(after)
        parents.append(None)
    return Segments(tuple(lengths), tuple(parents))


def _pairs(examples: list[Example]) -> dict[str, Tensor]:
    """The pairs of all examples, as indices of their sequences in the batch."""
    pairs, offset = [], 0
    for example in examples:
        pairs += [pair._replace(better=pair.better + offset, worse=pair.worse + offset) for pair in example.pairs]
        offset += len(example.sequences)
    return {
        "pairs": torch.tensor([[p.better, p.worse] for p in pairs], dtype=torch.long).reshape(-1, 2),
        "pair_weights": torch.tensor([p.weight for p in pairs], dtype=torch.float32),
        "margins": torch.tensor([p.margin for p in pairs], dtype=torch.float32),
        "p_better": torch.tensor([p.p_better for p in pairs], dtype=torch.float32),
    }


def attention_mask(batch: MicroBatch, dtype: torch.dtype, *, causal: bool = True) -> Tensor:
    """The mask a transformers model takes: (B, T) of 0 and 1 when rows are padded, (B, 1, T, T) additive when packed.

    Packed, a token attends to the tokens of its own segment and of the shared prompt before it, up to itself where
    ``causal``.
    """
    if not batch.packed:
        return (batch.segments > 0).long()
    keys = batch.segments[:, None, :]
    same = (batch.segments[:, :, None] == keys) | ((batch.parents[:, :, None] == keys) & (keys > 0))
    allowed = same & torch.ones_like(same).tril() if causal else same
    # a query with no key gives NaN in softmax: padding attends to itself
    allowed = allowed | torch.eye(same.shape[-1], dtype=torch.bool, device=same.device)
    return torch.zeros(allowed.shape, dtype=dtype, device=same.device).masked_fill(~allowed, torch.finfo(dtype).min)[
        :, None
    ]


def permutation(n: int, *seeds: int) -> list[int]:
    """A permutation of ``range(n)`` that depends on its seeds alone."""
    digest = hashlib.blake2b(",".join(map(str, seeds)).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(n, generator=generator).tolist()


class RowLoader:
    """Steps of ``rows_per_step`` examples in a fresh seeded order every epoch; the last one may be smaller.

    The order depends on the seed and the epoch only, not on the number of processes.
    ``finish`` turns the examples of a step into what is trained on, for numbers that depend on all of them; ``kept``
    are numbers of a method that go with the state.
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
            # the state after the last step of an epoch is the start of the next, for a checkpoint taken there
            self.epoch, self.step = (self.epoch + 1, 0) if step + 1 == len(self) else (self.epoch, step + 1)
            chosen = [self.examples[i] for i in order[start : start + self.rows_per_step]]
            yield self.finish(chosen) if self.finish else chosen

    def state_dict(self) -> dict[str, Any]:
        """Epoch, step, the rows of a step, which a run keeps when its number of processes changes, and what is kept."""
        place = {"epoch": self.epoch, "step": self.step, "rows_per_step": self.rows_per_step}
        return place | {"kept": dict(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.epoch, self.step, self.rows_per_step = state["epoch"], state["step"], state["rows_per_step"]
        self.kept.clear()
        self.kept.update(state["kept"])
