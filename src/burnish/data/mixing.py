"""Mixes the rows of several sources."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from burnish.data.loader import permutation
from burnish.data.readers import Mixed, Rows
from burnish.errors import UserError

LONGEST_EPOCH = 100  # draws per row; a mixture that needs more has a mistake in its weights


def next_source(weights: Sequence[float], drawn: Sequence[int]) -> int:
    """The source to draw from next: the one furthest behind its share, or the first of several.

    ``next_source([2, 1], [1, 1])`` is 0, because two of three rows should come from the first source. In this way every
    source has about its share at any time; with two sources, the difference is less than a row.

    Args:
        weights: relative share of each source.
        drawn: rows drawn from each source so far.
    """
    total, done = sum(weights), sum(drawn) + 1
    behind = [done * weight - total * count for weight, count in zip(weights, drawn, strict=True)]
    return behind.index(max(behind))


def epoch(sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> list[tuple[int, int]]:
    """The draws of one epoch, as (source, row).

    Without weights, every row is drawn once, source after source. With weights, rows are drawn in these proportions
    until every row of every source has been drawn. The source with the most rows for its weight is drawn once; the
    others are shuffled and drawn again each time they run out.

    Args:
        sizes: number of rows of each source, at least 1.
        weights: relative share of each source, above 0.
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


def mix(sources: Sequence[Rows], names: Sequence[str], weights: Sequence[float] | None, seed: int) -> Rows:
    """The rows of one epoch over several sources. A row that is drawn twice is there twice.

    A mixture is drawn once, before training. The loader decides the order of its rows in each epoch.

    Raises:
        UserError: the weights are so uneven that an epoch would take more than ``LONGEST_EPOCH`` draws per row.
    """
    sizes = [len(rows.rows) for rows in sources]
    _check_length(sizes, names, weights)
    draws = epoch(sizes, weights, seed)
    drawn = Counter(source for source, _ in draws)
    mixed = [Mixed(name, len(rows.rows), drawn[i]) for i, (name, rows) in enumerate(zip(names, sources, strict=True))]
    skipped = [one for rows in sources for one in rows.skipped]
    records = tuple(sources[source].records[row] for source, row in draws) if sources[0].records else ()
    return Rows([sources[source].rows[row] for source, row in draws], skipped, tuple(mixed), records)


def _check_length(sizes: Sequence[int], names: Sequence[str], weights: Sequence[float] | None) -> None:
    if weights is None:
        return
    needed = [size * sum(weights) / weight for size, weight in zip(sizes, weights, strict=True)]
    slowest = needed.index(max(needed))
    if needed[slowest] > LONGEST_EPOCH * sum(sizes):
        raise UserError(
            f"{names[slowest]}: with these weights it takes {needed[slowest]:,.0f} draws until all of its "
            f"{sizes[slowest]:,} rows have been drawn, and there are {sum(sizes):,} rows in all: give it a limit or a "
            "larger weight"
        )


def _passes(size: int, seed: int, source: int) -> Iterator[int]:
    """The rows of a source again and again, in another order each time."""
    for repetition in itertools.count():
        yield from permutation(size, seed, source, repetition)
