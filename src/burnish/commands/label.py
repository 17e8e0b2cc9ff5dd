"""The page where people rank completions, and the export of their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.files import storing, write_text
from burnish.label.export import Kind, by_task, ranks_of, rows
from burnish.label.reading import distinct, read
from burnish.label.store import Store
from burnish.label.tasks import Task, pairwise
from burnish.types import Changed, Messages, Prompt

Say = Callable[[str], None]
SAMPLED = "sampled"
SHOWN = 5
"""Number of rows that are left out whose reason is printed."""


def default_database(source: Path) -> Path:
    """The SQLite file beside a file or a folder: ``colors.labels.sqlite`` for ``colors.jsonl``."""
    path = source.resolve() if source.is_dir() else source
    return path.with_name(f"{path.name if path.is_dir() else path.stem}.labels.sqlite")


def check_stored(database: Path, given: Mapping[str, object]) -> None:
    """Check that a database exists whose tasks are shown again, and that no option would be ignored.

    Raises:
        UserError: there is no such file, or an option is set.
    """
    if not database.is_file():
        raise UserError(f"{database}: no such file: expected the database of a stage that waits for people")
    if ignored := [option for option, value in given.items() if value]:
        raise UserError(f"{', '.join(ignored)} would have no effect: {database} has its own tasks")


def fill(source: Path, database: Path, pairs: bool, say: Say) -> None:
    """Read tasks, and answers of other tools, into the database."""
    given = read(source)
    if pairs and given.answers:
        raise UserError(f"{source}: --pairwise would ignore its {len(given.answers)} answers of another tool")
    tasks = pairwise(given.tasks) if pairs else given.tasks
    with Store(database) as store:
        before = {task.id for task in store.tasks()}
        store.show_only(tasks)
        new = store.bring(given.answers)
    say(f"{len(tasks):,} {'pairs' if pairs else 'tasks'} from {source}")
    if new:
        say(f"{new:,} answers of another tool")
    if gone := len(before - {task.id for task in tasks}):
        say(f"{gone:,} other tasks of {database} are not shown; their answers are kept")
    left_out(given.left_out, say)


def left_out(changed: list[Changed], say: Say) -> None:
    """Print which rows gave no task, and why."""
    for source, reason in changed[:SHOWN]:
        say(f"left out: {source}: {reason}")
    if len(changed) > SHOWN:
        say(f"left out: {len(changed) - SHOWN:,} more rows")


def sample(source: Path, database: Path, pairs: bool, model: str, options: dict[str, Any], say: Say) -> None:
    """Complete prompts, and store the completions as tasks. A stopped call resumes after the last stored prompt.

    Args:
        source: the file of prompts.
        database: the SQLite file.
        pairs: show two completions at a time.
        model: as in ``burnish generate``.
        options: template, precision, seed, and the sampling settings.
        say: prints a line.

    Raises:
        UserError: the database has tasks of other prompts, models or settings.
    """
    from burnish.commands import generate as inference

    template, precision, seed = (options.pop(name) for name in ("template", "precision", "seed"))
    sampling = inference.sampling_settings(options)
    prompts = inference.prompts([], source)
    asked = [(row.messages, row.tools, dict(row.columns)) for row in prompts]
    known = [model, template, precision, seed, sampling.model_dump(), pairs, asked]
    key = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    with Store(database) as store:
        stored = json.loads(store.setting(SAMPLED) or "null")
        if (stored is None and store.tasks()) or (stored is not None and stored["key"] != key):
            raise UserError(
                f"{database}: has other completions, of another file or model, or with other settings: name another "
                "file with --database"
            )
        first = 0 if stored is None else stored["prompts"]
        if first < len(prompts):
            say(f"sampling {sampling.samples} completions of {len(prompts) - first:,} prompts")
            loaded = inference.load(model, template, precision)
            reasons: list[Changed] = []
            for count, lines in inference.completions(loaded, prompts, sampling, seed, start=first):
                done = [line["completion"] for line in lines]
                made = distinct(_tasks(prompts[first : first + count], done, sampling.samples), reasons)
                first += count
                store.add(pairwise(made) if pairs else made, (SAMPLED, json.dumps({"key": key, "prompts": first})))
            left_out(reasons, say)
        say(f"{store.counts()[0]:,} {'pairs' if pairs else 'tasks'} in {database}")


def _tasks(prompts: list[Prompt], completions: list[str], samples: int) -> Iterator[Task]:
    """The task of each prompt, with its completions that are not empty."""
    for i, row in enumerate(prompts):
        texts = filter(str.strip, completions[i * samples : (i + 1) * samples])
        made: tuple[Messages, ...] = tuple(({"role": "assistant", "content": text},) for text in texts)
        yield Task(row.messages, made, row.source, row.tools, row.columns)


def show(database: Path, raters: int | None, host: str, port: int, seed: int, say: Say) -> None:
    """Serve the page until every task has enough answers, or the user presses Ctrl+C."""
    from burnish.label.server import serve

    with serve(None, database, raters=raters, host=host, port=port, seed=seed) as page:
        say(f"answers are stored in {database}")
        say(f"rank at {page.address}")
        say("press Ctrl+C to stop; every answer is kept")
        try:
            while not page.wait(1.0):
                pass
            say("every task has enough answers")
        except KeyboardInterrupt:
            pass
        tasks, done = page.store.counts(raters or 1)
        say(f"{done:,} of {tasks:,} tasks answered")


def export(database: Path, kind: Kind, output: Path, say: Say) -> None:
    """Write the answers of a database as rows.

    Raises:
        UserError: nobody has ranked anything, or the file cannot be written.
    """
    with Store(database) as store:
        tasks, answers = store.tasks(), store.answers()
    made = rows(kind, tasks, answers)
    if not made:
        raise UserError(f"{database}: nothing to export: nobody has ranked a task")
    with storing(output):
        write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made))
    ranked = [task for task, given in by_task(answers).items() if ranks_of(given)]
    say(f"{len(made):,} rows in {output}, from {len(ranked):,} of {len(tasks):,} tasks")
    if only_skipped := len(by_task(answers)) - len(ranked):
        say(f"left out: {only_skipped:,} tasks that were only skipped")
