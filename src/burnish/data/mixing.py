"""Mixtures: which rows of several sources come in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from burnish.data.batching import permutation
from burnish.data.readers import Mixed, Rows
from burnish.errors import UserError

LONGEST_EPOCH = 100  # draws for each row there is: beyond it a weight is a mistake


def next_source(weights: Sequence[float], drawn: Sequence[int]) -> int:
    """The source that is most behind its share after ``drawn`` rows of each; the first of equals.

    ``next_source([2, 1], [1, 1])`` is 0: of three rows two are to be the first source's. Drawn one after another, each
    source has its share of any beginning of the draws, to within a row for two sources.
    """
    total, done = sum(weights), sum(drawn) + 1
    behind = [done * weight - total * count for weight, count in zip(weights, drawn, strict=True)]
    return behind.index(max(behind))


def epoch(sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> list[tuple[int, int]]:
    """The draws of one epoch, as (source, row).

    Without weights: every row once, source after source. With weights, rows are drawn in those proportions until every
    row of every source has been drawn: the source with the most rows for its weight is drawn once over, the others
    begin again in a fresh order each time they run out. So no row is left out; ``limit`` bounds a source that is too
    large for its weight.

    Args:
        sizes: rows of each source, at least 1.
        weights: relative shares of the rows that are drawn, above 0.
        seed: of the order in each source.
    """
    if weights is None:
        return [(source, row) for source, size in enumerate(sizes) for row in range(size)]
    drawn = [0] * len(sizes)
    rows = [_passes(size, seed, source) for source, size in enumerate(sizes)]
    draws = []
    while any(count < size for count, size in zip(drawn, sizes, strict=True)):
        source = next_source(weights, drawn)
        drawn[source] += 1
        draws.append((source, next(rows[source])))
    return draws


def mix(found: Sequence[Rows], names: Sequence[str], weights: Sequence[float] | None, seed: int) -> Rows:
    """The rows of an epoch over several sources, and how many each gave; a row that is drawn twice stands there twice.

    A mixture is drawn once, before training; the order of its rows in each epoch is the loader's.

    Raises:
        UserError: the weights would repeat the other sources beyond reason until the slowest one has been read.
    """
    sizes = [len(rows.rows) for rows in found]
    _check_length(sizes, names, weights)
    draws = epoch(sizes, weights, seed)
    drawn = Counter(source for source, _ in draws)
    mixed = [Mixed(name, len(rows.rows), drawn[i]) for i, (name, rows) in enumerate(zip(names, found, strict=True))]
    skipped = [one for rows in found for one in rows.skipped]
    return Rows([found[source].rows[row] for source, row in draws], skipped, tuple(mixed))


def _check_length(sizes: Sequence[int], names: Sequence[str], weights: Sequence[float] | None) -> None:
    if weights is None:
        return
    needed = [size * sum(weights) / weight for size, weight in zip(sizes, weights, strict=True)]
    slowest = needed.index(max(needed))
    if needed[slowest] > LONGEST_EPOCH * sum(sizes):
        raise UserError(
            f"{names[slowest]}: with these weights all of its {sizes[slowest]:,} rows have been drawn after "
            f"{needed[slowest]:,.0f} draws, of {sum(sizes):,} rows in all: give it a limit or a larger weight"
        )


def _passes(size: int, seed: int, source: int) -> Iterator[int]:
    """All rows of a source, over and over, each time in another order."""
    turn = 0
    while True:
        yield from permutation(size, seed, source, turn)
        turn += 1
