"""Files to tasks: rankings, pairs, samples, and the exports of other labeling tools with their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from burnish.data.readers import raw_records
from burnish.data.recognition import parse
from burnish.errors import UserError
from burnish.label import other_tools
from burnish.label.tasks import Answer, Task
from burnish.types import Changed, Conversation, Preference, Ranking

ROWS = ("samples.jsonl", "ranked.jsonl")
"""The files of a stage that hold completions, the fullest first."""
OF_COMPLETIONS = frozenset({"completion", "chosen", "rejected", "completions", "scores", "ranks", "output", "response"})
OF_PROMPTS = {
    True: frozenset({"prompt", "system", "tools"}),
    False: frozenset({"messages", "conversations", "instruction", "input", "history", "question"})
    | {"system", "system_prompt", "tools"},
}
"""The columns of a prompt in rows with and without the column ``prompt``."""


@dataclass
class Input:
    """What was read: ``Input([Task(...)], [Answer(...)], [Changed("p.jsonl:3", "equal to p.jsonl:1")])``."""

    tasks: list[Task] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """Those of another tool."""
    left_out: list[Changed] = field(default_factory=list)
    """Rows that give no task of their own, and why."""


def read(source: str | Path) -> Input:
    """Read tasks from a file, or from the folder of a stage.

    Rows have ``prompt`` and ``completions`` (with ``scores`` or ``ranks``, or without), or two answers (``chosen`` and
    ``rejected``), or one completion each, as in ``samples.jsonl``; then the completions of a prompt are one task. The
    JSON exports of Label Studio's pairwise template and of Argilla's ranking question are read with their answers.
    Equal rows are one task, and equal completions of a prompt are shown once.

    Raises:
        UserError: the file cannot be read, a row has none of these shapes, or nothing is left to rank.
    """
    path = rows_of(source)
    records = list(raw_records(path))
    if other_tools.is_label_studio(records):
        given = other_tools.label_studio(records)
    elif other_tools.is_argilla(records):
        given = other_tools.argilla(records)
    else:
        given = [(_task(place, record), []) for place, record in records]
    made = Input()
    made.tasks = distinct(joined(task for task, _ in given), made.left_out)
    if not made.tasks:
        reason = made.left_out[0].reason if made.left_out else "it has no rows"
        raise UserError(f"{path}: nothing to rank: {reason}")
    kept = {task.id for task in made.tasks}
    for task, answers in given:
        made.answers += [answer for answer in answers if answer.task in kept]
        if answers and task.id not in kept:
            reason = f"{len(answers)} answers to completions of which some are equal or empty"
            made.left_out.append(Changed(task.source, reason))
    return made


def rows_of(source: str | Path) -> Path:
    """The file of completions: the given one, or that of a stage's folder.

    Raises:
        UserError: the folder has no such file.
    """
    path = Path(source)
    if not path.is_dir():
        return path
    for folder in (path / "data", path):
        for name in ROWS:
            if (folder / name).is_file():
                return folder / name
    found = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.jsonl"))
    hint = f"; name one of its files: {', '.join(found[:5])}" if found else ""
    raise UserError(f"{path}: a folder without data/samples.jsonl and data/ranked.jsonl{hint}")


def _task(place: str, record: Mapping[str, Any]) -> Task:
    completions = record.get("completions")
    if isinstance(completions, list) and "prompt" in record and not {"scores", "ranks"} & record.keys():
        return _unscored(place, record, completions)
    kind = Preference if "chosen" in record else Ranking if "completions" in record else Conversation
    if kind is Conversation and record.keys().isdisjoint(("completion", "output", "response")):
        raise UserError(
            f"{place}: no completions to rank: expected a prompt with completions, with chosen and rejected, or with "
            f"completion, got {', '.join(map(str, record))}; to sample completions of prompts, add --model"
        )
    return task_of(_parsed(record, kind, place), record)


def _unscored(place: str, record: Mapping[str, Any], completions: list[Any]) -> Task:
    """The task of a prompt with completions that have no scores. Equal ones are left out."""
    different = [completion for i, completion in enumerate(completions) if completion not in completions[:i]]
    rest = {name: value for name, value in record.items() if name != "completions"}
    if len(different) == 1:
        return task_of(_parsed({**rest, "completion": different[0]}, Conversation, place), rest)
    scored = {**rest, "completions": different, "scores": [0.0] * len(different)}
    return replace(task_of(_parsed(scored, Ranking, place), rest), details=())


def _parsed(record: Mapping[str, Any], kind: type[Any], place: str) -> Any:
    return parse(record, (kind,), place, any_column=True)


def task_of(row: Ranking | Preference | Conversation, record: Mapping[str, Any]) -> Task:
    """The task of a row. A prompt with its completion gives one with a single completion, for ``joined``.

    Args:
        row: the row.
        record: all of its columns.

    Raises:
        UserError: the row is a conversation without a prompt of its own.
    """
    columns = _columns(record)
    if isinstance(row, Preference):
        return Task(row.prompt, (row.chosen, row.rejected), row.source, row.tools, columns)
    if isinstance(row, Ranking):
        details = tuple({"score": score} for score in row.scores)
        return Task(row.prompt, row.completions, row.source, row.tools, columns, details)
    start = row.completion_start
    if start is None:
        raise UserError(f"{row.source}: a conversation without a prompt: expected prompt and completion")
    return Task(row.messages[:start], (row.messages[start:],), row.source, row.tools, columns)


def _columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are neither the prompt nor a completion. Those in ``meta`` are taken out of it."""
    read = OF_COMPLETIONS | OF_PROMPTS["prompt" in record]
    columns = {str(name): value for name, value in record.items() if name not in read and value is not None}
    meta = columns.pop("meta", {})
    return {**meta, **columns} if isinstance(meta, Mapping) else {"meta": meta, **columns}


def joined(tasks: Iterable[Task]) -> list[Task]:
    """The tasks, with one task for all those of a prompt that have a single completion, in place of the first one.

    Columns that differ between these become details of the completions.
    """
    groups: dict[str | int, list[Task]] = {}
    for i, task in enumerate(tasks):
        single = len(task.completions) == 1
        groups.setdefault(json.dumps([task.prompt, task.tools]) if single else i, []).append(task)
    return [_one(group) if len(group) > 1 else group[0] for group in groups.values()]


def _one(samples: list[Task]) -> Task:
    first = samples[0]
    names = dict.fromkeys(name for sample in samples for name in sample.meta)
    shared = {name for name in names if all(sample.meta.get(name) == first.meta.get(name) for sample in samples)}
    completions = tuple(sample.completions[0] for sample in samples)
    details = tuple({name: value for name, value in sample.meta.items() if name not in shared} for sample in samples)
    meta = {name: first.meta[name] for name in names if name in shared}
    return Task(first.prompt, completions, first.source, first.tools, meta, details if any(details) else ())


def distinct(tasks: Iterable[Task], left_out: list[Changed]) -> list[Task]:
    """The tasks with distinct completions, each once. What is left out is added to ``left_out``."""
    kept: dict[str, Task] = {}
    for task in tasks:
        first = [i for i, completion in enumerate(task.completions) if completion not in task.completions[:i]]
        if len(first) < len(task.completions):
            details = tuple(task.details[i] for i in first) if task.details else ()
            completions = tuple(task.completions[i] for i in first)
            task = Task(task.prompt, completions, task.source, task.tools, task.meta, details)
        if len(task.completions) < 2:
            left_out.append(Changed(task.source, f"{len(task.completions)} distinct completion of the prompt"))
        elif task.id in kept:
            left_out.append(Changed(task.source, f"equal to {kept[task.id].source}"))
        else:
            kept[task.id] = task
    return list(kept.values())
