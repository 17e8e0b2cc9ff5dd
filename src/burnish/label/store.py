"""Tasks and answers in a SQLite file: every answer is on disk before the next task is shown."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from burnish.errors import UserError
from burnish.files import storing
from burnish.label.tasks import Answer, Highlight, Task, dense

FORMAT = 1
RESERVED = 900.0
"""Seconds for which a task that was shown to a rater is not given to another one, if it needs only one more answer."""
_TABLES = """
CREATE TABLE IF NOT EXISTS tasks (id TEXT PRIMARY KEY, position INTEGER, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS raters (name TEXT PRIMARY KEY, joined REAL NOT NULL);
CREATE TABLE IF NOT EXISTS views (
  task TEXT NOT NULL REFERENCES tasks, rater TEXT NOT NULL, shown_order TEXT NOT NULL, at REAL NOT NULL,
  PRIMARY KEY (task, rater)
);
CREATE TABLE IF NOT EXISTS answers (
  number INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL REFERENCES tasks, rater TEXT NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('ranked', 'skipped', 'undone')), ranks TEXT, comment TEXT NOT NULL,
  highlights TEXT NOT NULL, seconds REAL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS answers_of ON answers (task, rater, number);
CREATE VIEW IF NOT EXISTS latest AS SELECT * FROM answers a WHERE NOT EXISTS
  (SELECT 1 FROM answers later WHERE later.task = a.task AND later.rater = a.rater AND later.number > a.number);
"""


@dataclass(frozen=True)
class Shown:
    """A task as one rater sees it.

    ``Shown(task, order=(2, 0, 1), earlier=None)`` shows the task's third completion first. ``earlier`` is the answer
    that the rater has undone, if there is one.
    """

    task: Task
    order: tuple[int, ...]
    earlier: Answer | None


@dataclass(frozen=True)
class Progress:
    """How far one rater is: ``Progress("Ann", ranked=12, skipped=1, undone=2, median_seconds=8.5)``."""

    rater: str
    ranked: int
    skipped: int
    undone: int
    """How many answers the rater has taken back."""
    median_seconds: float | None


class Store:
    """The database of a labeling project. It may be used from several threads and processes at once.

    Answers are never changed or deleted: a revision or an undo is one more row.

    Args:
        path: the SQLite file. It is created if it does not exist.
        seed: determines the order in which each rater sees the completions of each task.

    Raises:
        UserError: the file is no such database, or it cannot be written.
    """

    def __init__(self, path: str | Path, seed: int = 0) -> None:
        self.path, self.seed = Path(path), seed
        self._lock = threading.RLock()
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT) or (found == 0 and self._db.execute("SELECT 1 FROM sqlite_master").fetchone()):
                self._db.close()
                raise UserError(f"{path}: a database of another program: name another file with --database")
            with self._writing():
                for statement in filter(str.strip, _TABLES.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: cannot be used as the database of answers: {error}") from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction, which is on disk when the context ends."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    # --- tasks --------------------------------------------------------------------------------------------------------

    def show_only(self, tasks: Sequence[Task]) -> None:
        """Show these tasks, in this order, and no others. Answers to other tasks are kept."""
        with self._writing():
            self._db.execute("UPDATE tasks SET position = NULL")
            self._add(tasks)

    def add(self, tasks: Sequence[Task], setting: tuple[str, str] | None = None) -> None:
        """Show these tasks after all others, and store a setting in the same transaction."""
        with self._writing():
            self._add(tasks)
            if setting is not None:
                self._db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", setting)

    def _add(self, tasks: Sequence[Task]) -> None:
        (last,) = self._db.execute("SELECT COALESCE(MAX(position), -1) FROM tasks").fetchone()
        for position, task in enumerate(tasks, start=last + 1):
            self._db.execute(
                "INSERT INTO tasks VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "position = COALESCE(position, excluded.position), content = excluded.content",
                (task.id, position, task.to_json()),
            )

    def setting(self, key: str) -> str | None:
        """A setting that was stored with ``add``."""
        rows = self._rows("SELECT value FROM settings WHERE key = ?", key)
        return rows[0]["value"] if rows else None

    def tasks(self, shown_only: bool = False) -> list[Task]:
        """All tasks: those that are shown, in their order, and then those that are not shown any more."""
        condition = "WHERE position IS NOT NULL" if shown_only else ""
        rows = self._rows(f"SELECT content FROM tasks {condition} ORDER BY position IS NULL, position, rowid")
        return [Task.from_json(row["content"]) for row in rows]

    def task(self, id: str) -> Task | None:
        """A task by its id."""
        rows = self._rows("SELECT content FROM tasks WHERE id = ?", id)
        return Task.from_json(rows[0]["content"]) if rows else None

    def next(self, rater: str, raters: int | None = None) -> Shown | None:
        """The next task for a rater, or None if there is nothing left to do. It is noted as shown.

        A task whose answer the rater has undone comes first.

        Args:
            rater: the rater's name.
            raters: how many raters rank or skip a task; None lets every rater answer every task.
        """
        now = time.time()
        with self._writing():
            row = self._db.execute(
                "SELECT t.id, t.content FROM tasks t "
                "LEFT JOIN latest a ON a.task = t.id AND a.rater = :rater "
                "WHERE t.position IS NOT NULL AND (a.kind IS NULL OR a.kind = 'undone') AND (:raters IS NULL OR "
                "(SELECT COUNT(*) FROM latest l WHERE l.task = t.id AND l.kind != 'undone') "
                "+ (SELECT COUNT(*) FROM views v WHERE v.task = t.id AND v.rater != :rater AND v.at > :since AND NOT "
                "EXISTS (SELECT 1 FROM latest m WHERE m.task = t.id AND m.rater = v.rater AND m.kind != 'undone')) "
                "< :raters) ORDER BY a.kind IS NULL, a.number DESC, t.position LIMIT 1",
                {"rater": rater, "raters": raters, "since": now - RESERVED},
            ).fetchone()
            if row is None:
                return None
            task = Task.from_json(row["content"])
            order = self._order(task, rater)
            self._db.execute(
                "INSERT INTO views VALUES (?, ?, ?, ?) ON CONFLICT (task, rater) DO UPDATE SET at = excluded.at",
                (task.id, rater, json.dumps(order), now),
            )
        return Shown(task, order, self._undone(task.id, rater))

    def _order(self, task: Task, rater: str) -> tuple[int, ...]:
        """The order in which the rater sees the completions: the stored one, or a random one."""
        rows = self._rows("SELECT shown_order FROM views WHERE task = ? AND rater = ?", task.id, rater)
        if rows:
            return tuple(json.loads(rows[0]["shown_order"]))
        order = list(range(len(task.completions)))
        random.Random(f"{self.seed} {task.id} {rater}").shuffle(order)
        return tuple(order)

    def shown_order(self, task: str, rater: str) -> tuple[int, ...] | None:
        """The order in which a rater saw the completions of a task; None if the rater has not seen it."""
        rows = self._rows("SELECT shown_order FROM views WHERE task = ? AND rater = ?", task, rater)
        return tuple(json.loads(rows[0]["shown_order"])) if rows else None

    # --- answers ------------------------------------------------------------------------------------------------------

    def join(self, rater: str) -> None:
        """Note a rater's name. One who comes back continues."""
        with self._writing():
            self._db.execute("INSERT OR IGNORE INTO raters VALUES (?, ?)", (rater, time.time()))

    def record(self, answer: Answer) -> Answer:
        """Store an answer, and return it with its time and, if it was shown on the page, how long it took.

        Raises:
            ValueError: there is no such task, or the answer has not one rank for each of its completions.
        """
        task = self.task(answer.task)
        if task is None:
            raise ValueError(f"no task {answer.task!r}")
        if answer.ranks is not None and len(answer.ranks) != len(task.completions):
            raise ValueError(f"task {answer.task}: {len(answer.ranks)} ranks, {len(task.completions)} completions")
        with self._writing():
            return self._record(answer)

    def _record(self, answer: Answer) -> Answer:
        at, seconds = answer.at or time.time(), answer.seconds
        view = self._rows("SELECT at FROM views WHERE task = ? AND rater = ?", answer.task, answer.rater)
        if seconds is None and view:
            seconds = max(0.0, at - view[0]["at"])
        ranks = None if answer.ranks is None else json.dumps(dense(answer.ranks))
        kind = "skipped" if answer.ranks is None else "ranked"
        self._db.execute("INSERT OR IGNORE INTO raters VALUES (?, ?)", (answer.rater, at))
        cursor = self._db.execute(
            "INSERT INTO answers (task, rater, kind, ranks, comment, highlights, seconds, at) VALUES (?,?,?,?,?,?,?,?)",
            (answer.task, answer.rater, kind, ranks, answer.comment, answer.highlights_json(), seconds, at),
        )
        return _answer(self._rows("SELECT * FROM answers WHERE number = ?", cursor.lastrowid)[0])

    def bring(self, answers: Sequence[Answer]) -> int:
        """Store answers of another tool, and return how many are new.

        A rater's answer to a task is left out if the rater has answered it before.
        """
        with self._writing():
            known = {(row["task"], row["rater"]) for row in self._rows("SELECT DISTINCT task, rater FROM answers")}
            new = [answer for answer in answers if (answer.task, answer.rater) not in known]
            for answer in new:
                self._record(answer)
        return len(new)

    def undo(self, rater: str) -> Answer | None:
        """Take back the rater's last answer to a task that is shown. Its task is the next one; None if there is none.

        Undoing again takes back the answer before.
        """
        with self._writing():
            rows = self._rows(
                "SELECT * FROM latest WHERE rater = ? AND kind != 'undone' AND task IN "
                "(SELECT id FROM tasks WHERE position IS NOT NULL) ORDER BY number DESC LIMIT 1",
                rater,
            )
            if not rows:
                return None
            self._db.execute(
                "INSERT INTO answers (task, rater, kind, ranks, comment, highlights, seconds, at) "
                "VALUES (?, ?, 'undone', NULL, '', '[]', NULL, ?)",
                (rows[0]["task"], rater, time.time()),
            )
        return _answer(rows[0])

    def _undone(self, task: str, rater: str) -> Answer | None:
        rows = self._rows(
            "SELECT * FROM answers WHERE task = ? AND rater = ? AND kind != 'undone' ORDER BY number DESC LIMIT 1",
            task,
            rater,
        )
        return _answer(rows[0]) if rows else None

    def answers(self) -> list[Answer]:
        """The answers that hold now, one for each task and rater, in the order in which they were given."""
        return [_answer(row) for row in self._rows("SELECT * FROM latest WHERE kind != 'undone' ORDER BY number")]

    def revisions(self) -> list[Answer | None]:
        """Every answer that was ever given, in order. None stands for an undo."""
        rows = self._rows("SELECT * FROM answers ORDER BY number")
        return [None if row["kind"] == "undone" else _answer(row) for row in rows]

    # --- progress -----------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """A number that grows with every answer and every undo."""
        return self._rows("SELECT COALESCE(MAX(number), 0) AS number FROM answers")[0]["number"]

    def counts(self, raters: int = 1) -> tuple[int, int]:
        """The number of tasks that are shown, and of those that at least so many raters have ranked or skipped."""
        (row,) = self._rows(
            "SELECT COUNT(*) AS tasks, COALESCE(SUM((SELECT COUNT(*) FROM latest l WHERE l.task = t.id "
            "AND l.kind != 'undone') >= ?), 0) AS done FROM tasks t WHERE t.position IS NOT NULL",
            raters,
        )
        return row["tasks"], row["done"]

    def answered(self, rater: str) -> int:
        """How many of the tasks that are shown a rater has ranked or skipped."""
        (row,) = self._rows(
            "SELECT COUNT(*) AS n FROM latest l JOIN tasks t ON t.id = l.task "
            "WHERE t.position IS NOT NULL AND l.kind != 'undone' AND l.rater = ?",
            rater,
        )
        return row["n"]

    def progress(self) -> list[Progress]:
        """How far each rater is, in the order in which they joined."""
        current: dict[str, list[Answer]] = {
            row["name"]: [] for row in self._rows("SELECT * FROM raters ORDER BY joined")
        }
        for answer in self.answers():
            current[answer.rater].append(answer)
        undone = {
            row["rater"]: row["n"]
            for row in self._rows("SELECT rater, COUNT(*) AS n FROM answers WHERE kind = 'undone' GROUP BY rater")
        }
        return [
            Progress(
                name,
                sum(answer.ranks is not None for answer in answers),
                sum(answer.ranks is None for answer in answers),
                undone.get(name, 0),
                median(times) if (times := [a.seconds for a in answers if a.seconds is not None]) else None,
            )
            for name, answers in current.items()
        ]


def _answer(row: sqlite3.Row) -> Answer:
    ranks = None if row["ranks"] is None else tuple(json.loads(row["ranks"]))
    highlights = tuple(Highlight(**highlight) for highlight in json.loads(row["highlights"]))
    return Answer(row["task"], row["rater"], ranks, row["comment"], highlights, row["seconds"], row["at"])
