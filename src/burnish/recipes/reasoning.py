"""Questions of reasoning-gym, which generates more than a hundred kinds, with its own check of answers.

```yaml
- name: prepare
  run: burnish.recipes.reasoning:prepare
  with: {task: chain_sum, size: 1000, held_out: 200, options: {min_terms: 3}}
- name: search
  method: {name: search, answer: {find: last_line, check: "burnish.recipes.reasoning:check"}}
  data: {rows: {stage: prepare, file: questions.jsonl}}
```
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from burnish.errors import UserError, did_you_mean
from burnish.recipes import write_rows

DRAWS = 20
"""Maximum number of questions that are generated for each one that is wanted, because some kinds have few."""


def prepare(
    folder: Path,
    seed: int,
    *,
    task: str,
    size: int = 1000,
    held_out: int = 200,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write ``data/questions.jsonl`` and ``data/held-out.jsonl``, which have no question in common.

    A row is ``{"prompt": "... 4 - 1 - 7 =", "answer": "-4", "entry": {"task": "chain_sum", "index": 1, ...}}``.
    The same seed writes the same bytes.

    Args:
        folder: where to write.
        seed: seed of the questions.
        task: a kind of questions, such as ``chain_sum``.
        size: number of questions.
        held_out: number of held-out questions.
        options: settings of the task, such as ``{"min_terms": 3}``.

    Raises:
        UserError: reasoning-gym is not installed, has no such task or option, or has too few different questions.
    """
    if size < 1 or held_out < 0:
        raise UserError(f"expected size of at least 1 and held_out of at least 0, got {size} and {held_out}")
    entry = {"task": task, "options": dict(options or {}), "size": DRAWS * (size + held_out)}
    rows = _rows(entry | {"seed": random.Random(seed).getrandbits(32)})
    drawn = [row for _, row in zip(range(size + held_out), rows, strict=False)]
    if len(drawn) < size + held_out:
        raise UserError(f"{task}: only {len(drawn):,} different questions, expected {size + held_out:,}: ask for fewer")
    write_rows(folder / "data" / "questions.jsonl", drawn[:size])
    write_rows(folder / "data" / "held-out.jsonl", drawn[size:])


def check(answer: str, columns: Mapping[str, Any]) -> bool:
    """Whether reasoning-gym gives an answer its highest score.

    Args:
        answer: the answer of a solution.
        columns: the columns of a row that ``prepare`` wrote.

    Raises:
        UserError: the row is from elsewhere, or from a version of reasoning-gym that generates other questions.
    """
    if "entry" not in columns:
        raise UserError("no column entry: burnish.recipes.reasoning:check needs rows of burnish.recipes.reasoning")
    entry = dict(columns["entry"])
    index = entry.pop("index")
    dataset = _dataset(json.dumps(entry))
    item = dataset[index]
    if item["answer"] != columns.get("answer"):
        raise UserError("this version of reasoning-gym generates other questions than the one that wrote the rows")
    return dataset.score_answer(answer=answer, entry=item) >= 1.0


def _rows(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The different questions of a task, as rows."""
    dataset, seen = _dataset(json.dumps(entry)), set()
    for index in range(entry["size"]):
        item = dataset[index]
        if item["question"] not in seen:
            seen.add(item["question"])
            yield {"prompt": item["question"], "answer": item["answer"], "entry": entry | {"index": index}}


@functools.lru_cache(maxsize=16)
def _dataset(entry: str) -> Any:
    """The dataset of reasoning-gym with a task, options, a seed and a size, given as JSON."""
    settings = json.loads(entry)
    try:
        gym = import_module("reasoning_gym")
        tasks = import_module("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install reasoning-gym") from error
    task = settings["task"]
    if task not in tasks:
        raise UserError(f"task: reasoning-gym has no task {task!r}{did_you_mean(task, tasks)}")
    try:
        return gym.create_dataset(task, seed=settings["seed"], size=settings["size"], **settings["options"])
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"options of {task}: {error}") from error
