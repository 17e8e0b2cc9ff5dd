"""Rows that are read during training, for data that does not fit in memory."""

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
from burnish.render.encode import account, without_cache
from burnish.types import Encoded, Example, Row

logger = logging.getLogger(__name__)
UNUSED = ("skipped", "dropped", "shortened")  # rows that are not used, or in part
MAX_NAMED = 1000  # these rows are all counted, but only so many are listed by name


class Source(NamedTuple):
    """A source of rows: ``Source("big.jsonl", lambda: readers.read("big.jsonl", (Text,)), weight=2.0)``."""

    name: str
    read: Callable[[], Iterator[Row | Skipped]]
    """Starts to read from the first row."""
    weight: float | None = None
    """The relative share of this source."""
    files: Unchanged | None = None
    """Checks that the files do not change during the run; None checks nothing."""


class RowStream:
    """An endless stream of rows. Each source is read in order, and read again from its start when it runs out.

    Without weights, the sources follow one another. With weights, rows are drawn in these proportions
    (``mixing.next_source``). The state of a stream is a few numbers; to resume, the sources are read again up to it.

    Args:
        sources: the sources; either all of them have a weight, or none.
        shuffle_buffer: how many rows are read, encoded and shuffled together.
    """

    def __init__(self, sources: list[Source], shuffle_buffer: int = 2048) -> None:
        self.sources = sources
        self.shuffle_buffer = shuffle_buffer
        self.weights = [source.weight for source in sources if source.weight is not None]
        assert len(self.weights) in (0, len(sources))
        self.load_state_dict({"read": [0] * len(sources), "drawn": [0] * len(sources), "current": 0})

    def state_dict(self) -> dict[str, Any]:
        """For each source the records read since its start and the rows drawn in total, and the current source."""
        return {"read": list(self.read), "drawn": list(self.drawn), "current": self.current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.read, self.drawn, self.current = list(state["read"]), list(state["drawn"]), state["current"]
        self._open: list[Iterator[Row | Skipped] | None] = [None] * len(self.sources)

    def take(self, count: int) -> tuple[list[Row], list[Skipped]]:
        """The next ``count`` rows, and the rows skipped on the way.

        Raises:
            UserError: a source has no good row, a file has changed, or a row is bad and bad rows are not skipped.
        """
        rows: list[Row] = []
        skipped: list[Skipped] = []
        exhausted = 0  # sources that have ended since the last row
        while len(rows) < count:
            if self.weights:
                self.current = next_source(self.weights, self.drawn)
            record = next(self._records(self.current), None)
            if record is None:
                exhausted += 1
                self._restart(exhausted, skipped)
                continue
            self.read[self.current] += 1
            if isinstance(record, Skipped):
                skipped.append(record)
            else:
                rows.append(record)
                self.drawn[self.current] += 1
                exhausted = 0
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
            records = self._open[index] = itertools.islice(self.sources[index].read(), self.read[index], None)
        return records

    def _restart(self, exhausted: int, skipped: list[Skipped]) -> None:
        """Read the current source from its start next time, and move on to the next one if there are no weights."""
        if not self.drawn[self.current] or exhausted > len(self.sources):
            reason = f": every row was skipped, the first one because of {skipped[0].message}" if skipped else ""
            raise UserError(f"{self.sources[self.current].name}: no rows{reason}")
        self.read[self.current], self._open[self.current] = 0, None
        if not self.weights:
            self.current = (self.current + 1) % len(self.sources)


class StreamLoader(StepLoader):
    """Yields steps of ``rows_per_step`` examples from a stream. All steps of the run are one epoch.

    The loader reads, encodes and shuffles ``stream.shuffle_buffer`` rows at a time. Examples that do not fill a step
    wait for the next rows. The state is the stream's position before the current rows, the examples that waited then,
    and the number of steps since; to resume, the current rows are read and encoded again.

    Args:
        stream: the rows.
        encode: turns rows into examples.
        rows_per_step: examples of a step, over all processes.
        seed: the seed of the order.
        steps: steps of the run.
    """

    def __init__(
        self, stream: RowStream, encode: Callable[[list[Row]], Encoded], rows_per_step: int, seed: int, steps: int
    ) -> None:
        self.stream, self.encode = stream, encode
        self.rows_per_step, self.seed, self.steps = rows_per_step, seed, steps
        self.done = self.chunk = self.step = 0
        self.waiting: list[Example] = []
        self.position = stream.state_dict()
        self.report: dict[str, Any] = {"rows": 0, **dict.fromkeys(UNUSED, 0), "names": {kind: [] for kind in UNUSED}}
        self.report_before = self.report  # before the current rows

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
            self.position, self.chunk, self.step = self.stream.state_dict(), self.chunk + 1, 0
            self.report_before = self.report

    def _read(self) -> list[Example]:
        """The shuffled examples of the rows after ``position``."""
        if self.stream.state_dict() != self.position:
            self.stream.load_state_dict(self.position)
        rows, skipped = self.stream.take(self.stream.shuffle_buffer)
        with without_cache():
            encoded = self.encode(rows)
        if not encoded.examples:
            first = encoded.changed[0]
            reason = f"{first.source}: {first.reason}"
            raise UserError(f"all {len(rows)} rows were dropped, the first one because of {reason}")
        if skipped:
            logger.warning("%d rows were skipped, the first: %s", len(skipped), skipped[0].message)
        used = account(rows, encoded.changed)
        names = {kind: getattr(used, kind) for kind in UNUSED}
        names["skipped"] = [f"{s.source}: {s.reason}" for s in skipped] + used.skipped
        before = self.report_before
        self.report = {"rows": before["rows"] + used.rows} | {
            kind: before[kind] + len(new) for kind, new in names.items()
        }
        if by_turn := before.get("by_turn", 0) + len(used.by_turn):
            self.report["by_turn"] = by_turn
        self.report["names"] = {kind: (before["names"][kind] + new)[:MAX_NAMED] for kind, new in names.items()}
        return [encoded.examples[i] for i in permutation(len(encoded.examples), self.seed, self.chunk)]

    def counts(self) -> dict[str, Any]:
        """The number of rows used, skipped, dropped and shortened, and the names of the first of each.

        ``by_turn`` is the number of rows that have a sequence for each learned turn.
        """
        named = {kind: many for kind, many in self.report.items() if kind in ("rows", "by_turn")}
        return named | self.report["names"] | {f"{kind} in all": self.report[kind] for kind in UNUSED}

    def state_dict(self) -> dict[str, Any]:
        """The position before the current rows, the examples that waited then, the steps since, and the counts."""
        return {
            "position": self.position,
            "waiting": [example.to_plain() for example in self.waiting],
            "report": self.report,
            "report_before": self.report_before,
            "done": self.done,
            "chunk": self.chunk,
            "step": self.step,
            "rows_per_step": self.rows_per_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.position = state["position"]
        self.waiting = [Example.from_plain(plain) for plain in state["waiting"]]
        self.report, self.report_before = state["report"], state["report_before"]
        self.done, self.chunk, self.step = state["done"], state["chunk"], state["step"]
        self.rows_per_step = state["rows_per_step"]


def check(method: Method, steps: int) -> None:
    """Check that a method can train on a stream for this number of steps.

    Raises:
        UserError: the method needs all rows at once, or the number of steps is not set.
    """
    if not method.spec.streams:
        raise UserError(f"method {method.spec.name!r} needs all of its rows at once: remove data.stream")
    if steps <= 0:
        raise UserError("a stream has no end: set trainer.max_steps to the number of steps of the run")
