"""Verdicts on disk, by content: the same question is never asked twice, not even by a run that was killed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from burnish.errors import UserError
from burnish.judges.protocol import Judge, NoVerdictError, Question, Verdict

FILE = "verdicts.sqlite"
"""The store of a run, in its folder."""
VERSION = 1
"""The version of the tables."""
WAIT = 60.0
"""Seconds to wait for another process that writes."""
AT_ONCE = 500
"""Keys in one query."""

_TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, identity TEXT NOT NULL, asked_by TEXT NOT NULL, question TEXT NOT NULL,
    verdict TEXT NOT NULL, calls INTEGER NOT NULL, cost REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS failures (identity TEXT NOT NULL, calls INTEGER NOT NULL, cost REAL NOT NULL);
"""


class Stored(NamedTuple):
    """A verdict and who asked for it first: ``Stored(Verdict((0.9, 0.1), 1.0), "judge/64")``."""

    verdict: Verdict
    asked_by: str


class VerdictStore:
    """The verdicts of a run in an SQLite file, which several threads and processes may share.

    Verdicts that belong together are written in one transaction before they are used.

    Raises:
        UserError: the file is damaged, or was written by another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=WAIT, check_same_thread=False, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise UserError(f"{self.path}: written by another version of Burnish: remove it to ask the judge again")
        self._log_ahead()
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if not version:
            self._connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")

    def _log_ahead(self) -> None:
        """Write to a log first: a transaction then takes 0.2 ms instead of 20, and what a killed process wrote stays.

        SQLite does not wait for another process that does the same at this moment.
        """
        end = time.monotonic() + WAIT
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def get(self, keys: Sequence[str]) -> dict[str, Stored]:
        """The verdicts that are stored, by key."""
        found = {}
        with self._lock, self._explained():
            for start in range(0, len(keys), AT_ONCE):
                some = keys[start : start + AT_ONCE]
                marks = ", ".join("?" * len(some))
                query = f"SELECT key, verdict, asked_by FROM verdicts WHERE key IN ({marks})"
                for key, text, asked_by in self._connection.execute(query, some):
                    found[key] = Stored(self._read(text), asked_by)
        return found

    def put(self, verdicts: Mapping[str, tuple[Question, Verdict]], identity: str, asked_by: str) -> dict[str, Stored]:
        """Store verdicts by key in one transaction, and return what is stored: of two writers, the first one wins."""
        rows = [
            (key, identity, asked_by, _question(question), json.dumps(asdict(verdict)), verdict.calls, verdict.cost)
            for key, (question, verdict) in verdicts.items()
        ]
        with self._lock, self._explained():
            with self._transaction():
                self._connection.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            return self.get(list(verdicts))

    def put_failure(self, identity: str, calls: int, cost: float) -> None:
        """Store what a question without a verdict has used."""
        with self._lock, self._explained(), self._transaction():
            self._connection.execute("INSERT INTO failures VALUES (?, ?, ?)", (identity, calls, cost))

    def spent(self, identity: str) -> tuple[int, float]:
        """The calls and the cost of a judge so far."""
        query = (
            "SELECT total(calls), total(cost) FROM (SELECT calls, cost FROM verdicts WHERE identity = ?1 "
            "UNION ALL SELECT calls, cost FROM failures WHERE identity = ?1)"
        )
        with self._lock, self._explained():
            calls, cost = self._connection.execute(query, (identity,)).fetchone()
        return int(calls), float(cost)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _read(self, text: str) -> Verdict:
        try:
            plain = json.loads(text)
            return Verdict(**{**plain, "probabilities": tuple(plain["probabilities"])})
        except (ValueError, KeyError, TypeError) as error:
            raise sqlite3.DatabaseError(f"a verdict cannot be read: {error}") from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain errors of SQLite and of the file system."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(f"{self.path}: cannot be read or written: {error}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.path}: damaged: {error}: restore it, or remove it to ask the judge all questions again"
            ) from error
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from error


class Answer(NamedTuple):
    """The verdict on a question, or why there is none: ``Answer(Verdict((0.9, 0.1), 1.0), cached=False)``.

    ``cached`` says whether it was known because someone else had asked the question, or because it is an earlier
    question of the same batch. A run that was killed and resumed gets the same value.
    """

    verdict: Verdict | NoVerdictError
    cached: bool


class StoredJudge(Judge):
    """A judge whose verdicts are stored and never asked for again: ``StoredJudge(judge, VerdictStore(path))``.

    Several threads may ask at the same time. A question that is in flight is not asked again but waited for.
    """

    def __init__(self, judge: Judge, store: VerdictStore, asked_by: str = "") -> None:
        self.judge, self.store, self.asked_by = judge, store, asked_by
        self.identity = judge.identity
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Stored | NoVerdictError]] = {}

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """The verdicts on questions, in their order. Errors are as in ``Judge.ask``."""
        return [verdict for verdict, _ in self.answers(questions) if isinstance(verdict, Verdict)]

    def answers(self, questions: Sequence[Question], asked_by: str = "", *, skip: bool = False) -> list[Answer]:
        """The verdicts on questions, in their order, and which were cached.

        Args:
            questions: the questions. Equal ones are asked once.
            asked_by: what asks, within that of the judge: the same after a run is resumed.
            skip: return the reason of a question without a verdict, instead of raising it.

        Raises:
            NoVerdictError: without ``skip``, a question has no verdict. ``index`` is that of the first such question.
            UserError: as in ``Judge.ask``, or the store is damaged.
        """
        asker = f"{self.asked_by}/{asked_by}"
        by_key = {self._key(question): question for question in questions}
        found: dict[str, Stored | NoVerdictError] = {}
        with self._lock:
            found |= self.store.get(list(by_key))
            awaited = {key: self._in_flight[key] for key in by_key if key not in found and key in self._in_flight}
            mine = [key for key in by_key if key not in found and key not in awaited]
            self._in_flight |= {key: Future() for key in mine}
        keys, answers, seen = list(map(self._key, questions)), [], set()
        try:
            with closing(self._asked(mine, by_key, asker)) as arriving:  # an error cancels what is in flight
                for some in arriving:
                    found |= some
                    if not skip:
                        _raise_first(keys, found)
        finally:
            self._give_up(mine)
            self._note_lost()
        found |= {key: future.result() for key, future in awaited.items()}
        if not skip:
            _raise_first(keys, found)
        for key in keys:
            one = found[key]
            if isinstance(one, NoVerdictError):
                answers.append(Answer(one, cached=False))
            else:
                answers.append(Answer(one.verdict, key in seen or one.asked_by != asker))
            seen.add(key)
        return answers

    def _asked(
        self, keys: list[str], questions: Mapping[str, Question], asker: str
    ) -> Generator[dict[str, Stored | NoVerdictError], None, None]:
        """Ask questions by key. Verdicts are stored before they are yielded."""
        if not keys:
            return
        for group in self.judge.each([questions[key] for key in keys]):
            given = {keys[i]: (questions[keys[i]], one) for i, one in group if isinstance(one, Verdict)}
            failed = {keys[i]: one for i, one in group if isinstance(one, NoVerdictError)}
            known: dict[str, Stored | NoVerdictError] = {**self.store.put(given, self.identity, asker), **failed}
            for error in failed.values():
                self.store.put_failure(self.identity, error.calls, error.cost)
            with self._lock:
                for key, one in known.items():
                    self._in_flight.pop(key).set_result(one)
            yield known

    def _give_up(self, keys: list[str]) -> None:
        """Tell those who wait for questions that were not answered."""
        with self._lock:
            for future in (self._in_flight.pop(key) for key in keys if key in self._in_flight):
                future.set_result(NoVerdictError("the judge was interrupted"))

    def close(self) -> None:
        """Close the judge and the store."""
        self.judge.close()
        self._note_lost()
        self.store.close()

    def _note_lost(self) -> None:
        """Store what interrupted questions have used."""
        calls, cost = self.judge.lost()
        if calls:
            self.store.put_failure(self.identity, calls, cost)

    def _key(self, question: Question) -> str:
        """A digest of the judge and the question."""
        return hashlib.sha256(json.dumps([self.identity, _question(question)]).encode()).hexdigest()


def _question(question: Question) -> str:
    return json.dumps({"messages": question.messages, "choices": question.choices}, sort_keys=True)


def _raise_first(keys: list[str], found: Mapping[str, Stored | NoVerdictError]) -> None:
    """Raise the error of the first question that has one."""
    for index, key in enumerate(keys):
        if isinstance(error := found.get(key), NoVerdictError):
            raise NoVerdictError(str(error), index, error.calls, error.cost) from error
