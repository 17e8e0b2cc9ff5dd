"""Examples to micro-batches: which examples go together under a token budget, and their tensors.

How a step is cut into micro-batches changes memory and speed, but never the result.
"""

from __future__ import annotations

from itertools import accumulate, count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.types import Example, MicroBatch, Segments, Sequence, total_counts

# --- shared prompts -----------------------------------------------------------------------------------------------


def shared_length(example: Example) -> int:
    """The number of tokens at the start of an example's sequences that can be computed once for all of them.

    These tokens are the same in all sequences, and come before the first token that is learned or has a nonzero array
    entry. The last token of the common prompt is not shared: each sequence keeps it, to predict its own next token.
    """
    if len(example.sequences) < 2:
        return 0
    limit = min(_prompt_length(sequence) for sequence in example.sequences)
    first, *others = (sequence.tokens[:limit] for sequence in example.sequences)
    differs = np.zeros(limit, np.bool_)
    for tokens in others:
        differs |= tokens != first
    return max(0, _first_nonzero(differs) - 1)


def prompt_key(example: Example) -> bytes:
    """The prompt of an example with a single sequence, as a key: examples with equal keys can share their prompt.

    Empty if there is nothing to share, or if the example has several sequences.
    """
    sequence, *others = example.sequences
    length = 0 if others else _prompt_length(sequence)
    return sequence.tokens[:length].tobytes() if length > 1 else b""  # the last token is not shared


def prompt_groups(examples: list[Example], budget: int | None) -> list[list[int]]:
    """Indices of ``examples``, grouped by equal prompts. A group fits the budget if its prompt is computed once."""
    groups: list[list[int]] = []
    latest: dict[bytes, tuple[list[int], int]] = {}  # the last group of each prompt, and its width
    for i, example in enumerate(examples):
        key = prompt_key(example)
        length = sum(len(sequence) for sequence in example.sequences)
        group, width = latest.get(key, ([], 0))
        added = length - len(key) // example.sequences[0].tokens.itemsize + 1 if group else length
        if not key or not group or (budget is not None and width + added > budget):
            group, width, added = [], 0, length
            groups.append(group)
        group.append(i)
        if key:
            latest[key] = group, width + added
    return groups


def _prompt_length(sequence: Sequence) -> int:
    """The number of tokens before the first one that is learned or has a nonzero array entry."""
    return min(_first_nonzero(values) for values in (sequence.loss_mask, *sequence.arrays.values()))


def _first_nonzero(values: np.ndarray) -> int:
    """The index of the first nonzero entry, or the length if there is none."""
    nonzero = values != 0
    index = int(nonzero.argmax()) if nonzero.size else 0
    return index if index or (nonzero.size and nonzero[0]) else len(values)


# --- which examples go together -----------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Sequences that stand side by side in one row, after the first ``shared`` tokens, which they have in common."""

    shared: int
    sequences: tuple[Sequence, ...]

    @property
    def width(self) -> int:
        """The number of tokens in the row."""
        return self.shared + sum(len(sequence) - self.shared for sequence in self.sequences)


def _blocks(example: Example, shared: bool) -> list[_Block]:
    """One block of all sequences if they share a prompt, else one block for each."""
    length = shared_length(example) if shared else 0
    return [_Block(length, example.sequences)] if length else [_Block(0, (sequence,)) for sequence in example.sequences]


def micro_batches(
    examples: list[Example], budget: int | None, *, packed: bool = False, shared: bool = False
) -> list[list[int]]:
    """Group examples of similar length, with at most ``budget`` tokens per group, including padding.

    Padded rows are sorted by length and groups are filled from the longest: rows x longest row <= budget. Packed rows
    are grouped by first-fit decreasing on the sums of lengths. An example longer than the budget gets its own group.

    Args:
        examples: the examples of a step.
        budget: maximum number of tokens in a group; None puts all examples into one group.
        packed: as in ``collate``.
        shared: as in ``collate``.

    Returns:
        The indices of the examples of each group.
    """
    if budget is None:
        return [list(range(len(examples)))] if examples else []
    widths = [[block.width for block in _blocks(example, shared)] for example in examples]
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


def tokens_in(examples: list[Example], *, packed: bool = False, shared: bool = False) -> int:
    """The number of tokens of a micro-batch, including padding. The arguments are those of ``micro_batches``."""
    widths = [block.width for example in examples for block in _blocks(example, shared)]
    return sum(widths) if packed else len(widths) * max(widths)


def deal(tokens: list[int], ranks: int) -> list[list[int]]:
    """Deal micro-batches to ranks so that the numbers of tokens are about equal: the largest ones first, each to the
    rank with the fewest tokens so far.

    Args:
        tokens: the number of tokens of each micro-batch.
        ranks: number of ranks.

    Returns:
        The indices of the micro-batches of each rank, the largest first: at most ``ceil(len(tokens) / ranks)``.
    """
    most = -(-len(tokens) // ranks)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < most), key=lambda r: (loads[r], r))
        dealt[rank].append(i)
        loads[rank] += tokens[i]
    return dealt


# --- tensors ------------------------------------------------------------------------------------------------------


def collate(
    examples: list[Example],
    pad_id: int,
    *,
    side: str = "right",
    packed: bool = False,
    shared: bool = False,
    pad_to: int = 0,
) -> MicroBatch:
    """Make the tensors of a micro-batch. The examples are not changed.

    Padding has the token ``pad_id``, segment 0 and position 0. Code recognizes it by its segment, never by its id.

    Args:
        examples: the examples of the micro-batch.
        pad_id: the token id of padding.
        side: where padding goes: ``right`` or ``left``.
        packed: put all sequences into one row, instead of one row for each.
        shared: put the sequences of an example into one row after their common prompt (``shared_length``), which is
            then computed once.
        pad_to: minimum width.
    """
    blocks = [block for example in examples for block in _blocks(example, shared)]
    places, rows, width = _places([block.width for block in blocks], side, packed, pad_to)
    tokens = np.full((rows, width), pad_id, np.int64)
    segments, positions, parents = (np.zeros((rows, width), np.int64) for _ in range(3))
    loss_mask = np.zeros((rows, width), np.bool_)
    names = sorted({name for example in examples for sequence in example.sequences for name in sequence.arrays})
    arrays = {name: np.zeros((rows, width), np.float32) for name in names}
    counted = np.arange(width)
    starts, sizes, numbers = [], [], [count(1) for _ in range(rows)]
    for (common, sequences), (row, column) in zip(blocks, places, strict=True):
        parent = 0
        if common:
            here = slice(column, column + common)
            parent = next(numbers[row])
            tokens[row, here] = sequences[0].tokens[:common]
            segments[row, here], positions[row, here] = parent, counted[:common]
            column += common
        for sequence in sequences:
            length = len(sequence)
            here = slice(column, column + length - common)
            tokens[row, here] = sequence.tokens[common:]
            segments[row, here], positions[row, here] = next(numbers[row]), counted[common:length]
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
        learned=torch.from_numpy(np.flatnonzero(loss_mask)),
        starts=torch.tensor(starts),
        ends=torch.tensor(starts) + torch.tensor(sizes) - 1,
        arrays={name: torch.from_numpy(values) for name, values in arrays.items()},
        **_pairs(examples),
        packed=packed or any(len(block.sequences) > 1 for block in blocks),
        row_segments=_row_segments(blocks, places[0][1], width) if packed else None,
        sources=tuple(sequence.source for example in examples for sequence in example.sequences),
        counts=total_counts(examples),
    )


def _places(widths: list[int], side: str, packed: bool, pad_to: int) -> tuple[list[tuple[int, int]], int, int]:
    """Row and first column of each block, and the number of rows and columns of the micro-batch."""
    if packed:
        width = max(sum(widths), pad_to)
        offset = width - sum(widths) if side == "left" else 0
        return [(0, offset + before) for before in accumulate(widths[:-1], initial=0)], 1, width
    width = max([*widths, pad_to])
    return [(row, width - n if side == "left" else 0) for row, n in enumerate(widths)], len(widths), width


def _row_segments(blocks: list[_Block], before: int, width: int) -> Segments:
    """The segments of a packed row that begins with ``before`` columns of padding."""
    lengths, parents = ([before], [None]) if before else ([], [])
    for common, sequences in blocks:
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
    """The pairs of all examples, as indices of sequences in the micro-batch."""
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
    """The attention mask for a transformers model.

    Padded rows have a mask (B, T) of 0 and 1. Packed rows have an additive mask (B, 1, T, T): a token attends to its
    own segment and to the shared prompt before it, and, if ``causal``, to no later token.
    """
    if not batch.packed:
        return (batch.segments > 0).long()
    keys = batch.segments[:, None, :]
    same = (batch.segments[:, :, None] == keys) | ((batch.parents[:, :, None] == keys) & (keys > 0))
    allowed = same & torch.ones_like(same).tril() if causal else same
    # padding attends to itself, since softmax over no keys is NaN
    allowed = allowed | torch.eye(same.shape[-1], dtype=torch.bool, device=same.device)
    return torch.zeros(allowed.shape, dtype=dtype, device=same.device).masked_fill(~allowed, torch.finfo(dtype).min)[
        :, None
    ]
