"""How large the micro-batches of a stage are: from its rows, or, if they do not exist yet, from its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.types import Example


@dataclass(frozen=True)
class Lengths:
    """The lengths of the sequences that a stage learns from: ``Lengths(widths=(96, 41), longest=96, learned=0.7)``."""

    widths: tuple[int, ...]
    """Tokens of each example, with all of its sequences and, of a prompt, the longest completion."""
    longest: int
    """Tokens of the longest sequence."""
    learned: float
    """Share of the tokens that are learned."""
    prompt: int = 0
    """Tokens of the longest prompt, if the rows are prompts."""
    known: bool = True
    """Whether the rows exist. Otherwise every row is assumed to be as long as possible."""


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a process: ``MicroBatch(tokens=512, learned=350, count=4)``."""

    tokens: int
    """Tokens, including padding."""
    learned: int
    """Learned tokens."""
    count: int
    """Number of micro-batches of an optimizer step in a process."""


def lengths_of(examples: Sequence[Example], sampled: int, packed: bool) -> Lengths:
    """The lengths of examples, each with up to ``sampled`` more tokens. Padded sequences are as long as the longest."""
    rows = [[len(s) + sampled for s in example.sequences] for example in examples]
    total = sum(sum(row) for row in rows)
    learned = sum(int(s.loss_mask.sum()) + sampled for example in examples for s in example.sequences)
    longest = max((max(row) for row in rows), default=1)
    return Lengths(
        widths=tuple(sum(row) if packed else len(row) * max(row) for row in rows),
        longest=longest,
        learned=learned / max(total, 1),
        prompt=longest - sampled if sampled else 0,
    )


def largest(lengths: Lengths, rows: int, budget: int | None, processes: int, samples: int = 1) -> MicroBatch:
    """The largest micro-batch of an optimizer step of the longest rows.

    A step of S tokens on n processes is cut into micro-batches of at most the budget; without one, each process gets
    S / n. No micro-batch is smaller than an example.

    Args:
        lengths: those of the rows.
        rows: number of rows of a step, or of completions.
        budget: maximum number of tokens of a micro-batch; None for no limit.
        processes: number of processes n.
        samples: number of completions of a prompt.
    """
    ordered = sorted(lengths.widths, reverse=True)[:rows]
    step = sum([width for width in ordered for _ in range(samples)][:rows])
    tokens = min(step, max(min(budget or step, -(-step // processes)), ordered[0]))
    return MicroBatch(tokens, round(tokens * lengths.learned), max(1, -(-step // (tokens * processes))))
