"""Answers to rows: rankings, preferences and scores, each a pure function of tasks and answers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Literal

from burnish.data.formats import MESSAGE_TEXT
from burnish.label.tasks import Answer, Task, dense
from burnish.math.agreement import midranks, share_beaten, share_preferred
from burnish.types import Message, Messages

Kind = Literal["ranking", "preference", "scored"]


def rows(kind: Kind, tasks: Iterable[Task], answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """The rows of a kind, in the order of the tasks. Tasks that nobody has ranked give none.

    ``meta`` has the other columns of the task's row, and the number of raters who ranked it. ``verdicts`` has what each
    rater said, also those who skipped the task.

    - ``ranking``: ``scores`` are the shares of the other completions that a completion beats, averaged over raters.
    - ``preference``: a row for each pair of completions. ``p_chosen`` is the share of raters who prefer ``chosen``,
      with ties counted as half.
    - ``scored``: a row for each completion. ``reward`` is its score in the ranking, rescaled to [-1, 1].
    """
    given = by_task(answers)
    return [row for task in tasks if ranks_of(given[task.id]) for row in MAKERS[kind](task, given[task.id])]


def by_task(answers: Iterable[Answer]) -> defaultdict[str, list[Answer]]:
    """The answers to each task, by its id."""
    given: defaultdict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        given[answer.task].append(answer)
    return given


def ranks_of(answers: Iterable[Answer]) -> list[tuple[int, ...]]:
    """The ranks of the answers that are not skipped."""
    return [answer.ranks for answer in answers if answer.ranks is not None]


def rank_groups(answers: Iterable[Answer]) -> list[list[list[float]]]:
    """The midranks of each completion by all of its raters, grouped by task, for ``krippendorff_alpha``."""
    groups = filter(None, map(ranks_of, by_task(answers).values()))
    return [[list(item) for item in zip(*map(midranks, group), strict=True)] for group in groups]


def _scores(answers: Sequence[Answer]) -> list[float]:
    return [fmean(shares) for shares in zip(*map(share_beaten, ranks_of(answers)), strict=True)]


def _ranking(task: Task, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    row = {
        **_asked(task),
        "completions": [as_text(completion, "assistant") for completion in task.completions],
        "scores": _scores(answers),
        "meta": _meta(task, answers, {"completions": list(task.details)} if task.details else {}),
        "verdicts": [_verdict(answer, range(len(task.completions))) for answer in answers],
    }
    return [row]


def _preferences(task: Task, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    made, given = [], ranks_of(answers)
    for i, j in itertools.combinations(range(len(task.completions)), 2):
        share = share_preferred([ranks[i] for ranks in given], [ranks[j] for ranks in given])
        better, worse = (i, j) if share >= 0.5 else (j, i)
        details = {"chosen": task.details[better], "rejected": task.details[worse]} if task.details else {}
        row = {
            **_asked(task),
            "chosen": as_text(task.completions[better], "assistant"),
            "rejected": as_text(task.completions[worse], "assistant"),
            "p_chosen": max(share, 1 - share),
            "meta": _meta(task, answers, details),
            "verdicts": [_verdict(answer, (better, worse)) for answer in answers],
        }
        made.append(row)
    return made


def _scored(task: Task, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [
        {
            "messages": [*task.prompt, *completion],
            **({"tools": list(task.tools)} if task.tools else {}),
            "reward": 2 * score - 1,
            "meta": _meta(task, answers, task.details[i] if task.details else {}),
            "verdicts": [_verdict(answer, (i,)) for answer in answers],
        }
        for i, (completion, score) in enumerate(zip(task.completions, _scores(answers), strict=True))
    ]


MAKERS: Mapping[Kind, Callable[[Task, Sequence[Answer]], list[dict[str, Any]]]] = {
    "ranking": _ranking,
    "preference": _preferences,
    "scored": _scored,
}


def _asked(task: Task) -> dict[str, Any]:
    return {"prompt": as_text(task.prompt, "user"), **({"tools": list(task.tools)} if task.tools else {})}


def _meta(task: Task, answers: Sequence[Answer], details: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the task's row, what it says of the completions, and the number of raters."""
    own = {**details, "raters": len(ranks_of(answers))}
    return {f"{name}_original" if name in own else name: value for name, value in task.meta.items()} | own


def _verdict(answer: Answer, shown: Sequence[int]) -> dict[str, Any]:
    """What a rater said of some of the completions of a task. The rank of one is its rank among all of them."""
    said: dict[str, Any] = {"rater": answer.rater, "ranks": None}
    if answer.ranks is not None:
        ranks = [answer.ranks[i] for i in shown]
        said["ranks"] = list(dense(ranks)) if len(shown) > 1 else ranks
    if answer.comment:
        said["comment"] = answer.comment
    place = {completion: position for position, completion in enumerate(shown)}
    marked = [asdict(h) | {"completion": place[h.completion]} for h in answer.highlights if h.completion in place]
    if marked:
        said["highlights"] = marked
    if answer.seconds is not None:
        said["seconds"] = round(answer.seconds, 1)
    return said


def as_text(messages: Messages, role: str) -> str | list[Message]:
    """The text of a single plain message of this role, or else the messages, as readers accept them."""
    plain = len(messages) == 1 and messages[0]["role"] == role and set(messages[0]) == {"role", "content"}
    if plain and not MESSAGE_TEXT.match(messages[0]["content"]):
        return messages[0]["content"]
    return list(messages)
