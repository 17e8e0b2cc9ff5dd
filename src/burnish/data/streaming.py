"""Rows that are read while a run goes on, for data that does not fit in memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from burnish.data.loader import permutation
from burnish.data.mixing import next_source
from burnish.data.readers import Skipped, Unchanged
from burnish.errors import UserError
from burnish.protocols import Method, StepLoader
from burnish.render.encode import sort_changes, without_cache
from burnish.types import Encoded, Example, Row

logger = logging.getLogger(__name__)
NAMED = 1000  # rows that are left out or cut and kept by name; all are counted


class Source(NamedTuple):
    """Something that rows come from: ``Source("big.jsonl", lambda: rows.read("big.jsonl", (Text,)), weight=2.0)``."""

    name: str
    read: Callable[[], Iterator[Row | Skipped]]
    weight: float | None = None
    files: Unchanged | None = None
    """What is read, as it was when the run began; None is not checked."""


class RowStream:
    """Rows without end: each source is read in its order, and one that runs out begins again.

    Sources without weights come one after another; with weights, rows are drawn in those proportions
    (``mixing.next_source``). Where it stands is a few numbers; to go on from there, sources are read up to it again.

    Args:
        sources: where rows come from; all have a weight, or none.
        shuffle_buffer: rows that are read, encoded and shuffled together.
    """

    def __init__(self, sources: list[Source], shuffle_buffer: int = 2048) -> None:
        self.sources = sources
        self.shuffle_buffer = shuffle_buffer
        self.weights = [source.weight for source in sources if source.weight is not None]
        assert len(self.weights) in (0, len(sources))
        self.load_state_dict({"at": [0] * len(sources), "drawn": [0] * len(sources), "current": 0})

    def state_dict(self) -> dict[str, Any]:
        """Records read of each source since it began, rows drawn of each, and which comes next."""
        return {"at": list(self.at), "drawn": list(self.drawn), "current": self.current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.at, self.drawn, self.current = list(state["at"]), list(state["drawn"]), state["current"]
        self._open: list[Iterator[Row | Skipped] | None] = [None] * len(self.sources)

    def take(self, count: int) -> tuple[list[Row], list[Skipped]]:
        """The next rows, and those left out on the way.

        Raises:
            UserError: a source has no good row or has changed, or a row is bad and is not to be skipped.
        """
        rows: list[Row] = []
        skipped: list[Skipped] = []
        fruitless = 0  # sources that ended one after another with no row between
        while len(rows) < count:
            if self.weights:
                self.current = next_source(self.weights, self.drawn)
            record = next(self._records(self.current), None)
            if record is None:
                fruitless += 1
                self._begin_again(fruitless, skipped)
                continue
            self.at[self.current] += 1
            if isinstance(record, Skipped):
                skipped.append(record)
            else:
                rows.append(record)
                self.drawn[self.current] += 1
                fruitless = 0
        self._check_files()
        return rows, skipped

    def _check_files(self) -> None:
        for source in self.sources:
            if source.files is not None:
                source.files.check()

    def _records(self, index: int) -> Iterator[Row | Skipped]:
        records = self._open[index]
        if records is None:
            self._check_files()
            records = self._open[index] = itertools.islice(self.sources[index].read(), self.at[index], None)
        return records

    def _begin_again(self, fruitless: int, skipped: list[Skipped]) -> None:
        if not self.drawn[self.current] or fruitless > len(self.sources):
            found = f": every row was skipped, the first as {skipped[0].message}" if skipped else ""
            raise UserError(f"{self.sources[self.current].name}: no rows{found}")
        self.at[self.current], self._open[self.current] = 0, None
        if not self.weights:
            self.current = (self.current + 1) % len(self.sources)


class StreamLoader(StepLoader):
    """Steps of ``rows_per_step`` examples from a stream, as many as the run has; together they are its one epoch.

    ``shuffle_buffer`` rows are read, encoded and put in a seeded order, then the next ones; examples that are too few
    for a step wait for them. The state is where the stream stood before these rows, what waited then, and the steps
    since: to go on, the rows are read and encoded again.

    ``told`` counts rows that were read, skipped and cut, and names the first 1,000 of them.
    """

    def __init__(
        self, stream: RowStream, encode: Callable[[list[Row]], Encoded], rows_per_step: int, seed: int, steps: int
    ) -> None:
        self.stream, self.encode = stream, encode
        self.rows_per_step, self.seed, self.steps = rows_per_step, seed, steps
        self.done = self.chunk = self.step = 0
        self.waiting: list[Example] = []
        self.place = stream.state_dict()
        self.told: dict[str, Any] = {"rows": 0, "skipped": 0, "cut": 0, "names": {"skipped": [], "cut": []}}
        self.told_before = self.told

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[Example]]:
        while self.done < self.steps:
            examples = self.waiting + self._read()
            whole = len(examples) // self.rows_per_step
            for step in range(self.step, whole):
                self.step, self.done = step + 1, self.done + 1
                yield examples[step * self.rows_per_step : (step + 1) * self.rows_per_step]
                if self.done == self.steps:
                    return
            self.waiting = examples[whole * self.rows_per_step :]
            self.place, self.chunk, self.step = self.stream.state_dict(), self.chunk + 1, 0
            self.told_before = self.told

    def _read(self) -> list[Example]:
        """Examples of the rows from ``place`` on, in their order."""
        if self.stream.state_dict() != self.place:
            self.stream.load_state_dict(self.place)
        rows, skipped = self.stream.take(self.stream.shuffle_buffer)
        with without_cache():
            encoded = self.encode(rows)
        if not encoded.examples:
            first = encoded.changed[0]
            raise UserError(f"nothing is left of {len(rows)} rows, the first as {first.source}: {first.reason}")
        if skipped:
            logger.warning("%d rows were skipped, the first: %s", len(skipped), skipped[0].message)
        left_out, cut = sort_changes(encoded.changed)
        names = {"skipped": [f"{s.source}: {s.reason}" for s in skipped] + left_out, "cut": cut}
        before = self.told_before
        self.told = {"rows": before["rows"] + len(rows)} | {
            kind: before[kind] + len(found) for kind, found in names.items()
        }
        self.told["names"] = {kind: (before["names"][kind] + found)[:NAMED] for kind, found in names.items()}
        return [encoded.examples[i] for i in permutation(len(encoded.examples), self.seed, self.chunk)]

    def counts(self) -> dict[str, Any]:
        """Rows that were read, and those skipped and cut: the first of them by name, and how many in all."""
        return {"rows": self.told["rows"], **self.told["names"]} | {
            f"{kind} in all": self.told[kind] for kind in ("skipped", "cut")
        }

    def state_dict(self) -> dict[str, Any]:
        """The place of the rows in hand, what waited before them, the steps since, and what was told."""
        return {
            "place": self.place,
            "waiting": [example.to_plain() for example in self.waiting],
            "told": self.told,
            "told_before": self.told_before,
            **{name: getattr(self, name) for name in COUNTS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.place, self.told, self.told_before = state["place"], state["told"], state["told_before"]
        self.waiting = [Example.from_plain(plain) for plain in state["waiting"]]
        for name in COUNTS:
            setattr(self, name, state[name])


COUNTS = ("done", "chunk", "step", "rows_per_step")


def check(method: Method, steps: int) -> None:
    """Whether a method can learn from a stream in a run of so many steps.

    Raises:
        UserError: it makes its own steps from all rows, or the run has no end.
    """
    if not method.spec.streams:
        raise UserError(f"method {method.spec.name!r} needs all of its rows at once: take data.stream away")
    if steps <= 0:
        raise UserError("a stream has no end: set trainer.max_steps to the steps of the run")
