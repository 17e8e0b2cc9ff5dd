"""Examples to micro-batches, and rows to optimizer steps.

One item of a loader is one optimizer step: the examples of all processes. It is cut here into micro-batches of
similar length under a token budget; how it is cut changes memory and speed, never the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from burnish.types import Example, MicroBatch, Sequence, UserError


def size(example: Example, padded_to: int = 0) -> int:
    """Tokens that an example takes in a padded micro-batch whose rows are ``padded_to`` long, or its own longest."""
    longest = max(len(sequence.tokens) for sequence in example.sequences)
    return len(example.sequences) * max(longest, padded_to)


def micro_batches(examples: list[Example], budget: int | None, *, packed: bool = False) -> list[list[int]]:
    """Indices of ``examples``, cut into groups of similar length that hold at most ``budget`` tokens with padding.

    Padded: sorted by length and filled from the longest, rows times longest row <= budget. Packed: first-fit
    decreasing on the sums of lengths. An example longer than the budget gets a group of its own. No budget: one group.
    """
    if budget is None:
        return [list(range(len(examples)))] if examples else []
    longest = [max(len(s.tokens) for s in example.sequences) for example in examples]
    order = sorted(range(len(examples)), key=lambda i: (-longest[i], i))
    groups: list[list[int]] = []
    used: list[int] = []
    for i in order:
        if packed:
            cost = sum(len(s.tokens) for s in examples[i].sequences)
            fits = (g for g in range(len(groups)) if used[g] + cost <= budget)
        else:
            width = longest[groups[-1][0]] if groups else 0
            cost = size(examples[i], width)
            fits = (g for g in range(len(groups) - 1, len(groups)) if g >= 0 and used[g] + cost <= budget)
        place = next(fits, None)
        if place is None:
            groups.append([i])
            used.append(sum(len(s.tokens) for s in examples[i].sequences) if packed else size(examples[i]))
        else:
            groups[place].append(i)
            used[place] += cost
    return groups


def _place(sequences: list[Sequence], side: str, packed: bool, pad_to: int) -> tuple[list[tuple[int, int]], int, int]:
    """Row and first column of every sequence, and the shape of the batch."""
    lengths = [len(s.tokens) for s in sequences]
    if packed:
        width = max(sum(lengths), pad_to)
        offset = width - sum(lengths) if side == "left" else 0
        places = []
        for length in lengths:
            places.append((0, offset))
            offset += length
        return places, 1, width
    width = max([*lengths, pad_to])
    return [(row, width - n if side == "left" else 0) for row, n in enumerate(lengths)], len(lengths), width


def collate(
    examples: list[Example], pad_id: int, *, side: str = "right", packed: bool = False, pad_to: int = 0
) -> MicroBatch:
    """Lay examples out as tensors: one sequence a row with padding on ``side``, or all of them in one packed row.

    ``pad_to`` is the least width. Padding carries ``pad_id``, segment 0 and position 0, and is told from tokens by its
    segment alone, never by its id. The examples are not changed.
    """
    sequences = [sequence for example in examples for sequence in example.sequences]
    places, rows, width = _place(sequences, side, packed, pad_to)
    tokens = torch.full((rows, width), pad_id, dtype=torch.long)
    segments = torch.zeros((rows, width), dtype=torch.long)
    positions = torch.zeros((rows, width), dtype=torch.long)
    trained = torch.zeros((rows, width), dtype=torch.bool)
    names = sorted({name for sequence in sequences for name in sequence.arrays})
    arrays = {name: torch.zeros((rows, width), dtype=torch.float32) for name in names}
    for index, (sequence, (row, start)) in enumerate(zip(sequences, places, strict=True)):
        here = slice(start, start + len(sequence.tokens))
        tokens[row, here] = torch.tensor(sequence.tokens)
        segments[row, here] = index + 1 if packed else 1
        positions[row, here] = torch.arange(len(sequence.tokens))
        trained[row, here] = torch.tensor(sequence.trained)
        for name in names:
            arrays[name][row, here] = torch.tensor(sequence.arrays[name], dtype=torch.float32)
    pairs, offset = [], 0
    for example in examples:
        pairs += [pair._replace(better=pair.better + offset, worse=pair.worse + offset) for pair in example.pairs]
        offset += len(example.sequences)
    starts = torch.tensor([row * width + start for row, start in places])
    return MicroBatch(
        tokens=tokens,
        segments=segments,
        positions=positions,
        trained=trained,
        starts=starts,
        ends=starts + torch.tensor([len(s.tokens) - 1 for s in sequences]),
        arrays=arrays,
        pairs=torch.tensor([[p.better, p.worse] for p in pairs], dtype=torch.long).reshape(-1, 2),
        pair_weights=torch.tensor([p.weight for p in pairs], dtype=torch.float32),
        margins=torch.tensor([p.margin for p in pairs], dtype=torch.float32),
        p_better=torch.tensor([p.p_better for p in pairs], dtype=torch.float32),
        packed=packed,
        sources=tuple(s.source for s in sequences),
    )


def attention_mask(batch: MicroBatch, dtype: torch.dtype, *, causal: bool = True) -> Tensor:
    """The mask a transformers model takes: (B, T) of 0 and 1 when rows are padded, (B, 1, T, T) additive when packed.

    Packed, a token attends to the tokens of its own segment, up to itself where ``causal``.
    """
    if not batch.packed:
        return (batch.segments > 0).long()
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
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

    The order depends on the seed and the epoch only, not on the number of processes, and its state is three numbers.
    """

    def __init__(self, examples: list[Example], rows_per_step: int, seed: int) -> None:
        if not examples:
            raise UserError("there is nothing to train on: the training data has no rows")
        self.examples = examples
        self.rows_per_step = rows_per_step
        self.seed = seed
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
            yield [self.examples[i] for i in order[start : start + self.rows_per_step]]

    def state_dict(self) -> dict[str, Any]:
        """Epoch, step and the rows of a step, which a run keeps when its number of processes changes."""
        return {"epoch": self.epoch, "step": self.step, "rows_per_step": self.rows_per_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.epoch, self.step, self.rows_per_step = state["epoch"], state["step"], state["rows_per_step"]
