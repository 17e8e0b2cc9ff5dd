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
RankedBy = Sequence[tuple[Answer, tuple[int, ...]]]
"""The answers that rank a task, with their ranks."""


def rows(kind: Kind, tasks: Iterable[Task], answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """The rows of a kind, in the order of the tasks. Tasks that nobody has ranked give none.

    ``meta`` has the other columns of the task's row, and the number of raters who ranked it. ``verdicts`` has what each
    of them said.

    - ``ranking``: ``scores`` are the shares of the other completions that a completion beats, averaged over raters.
    - ``preference``: a row for each pair of completions. ``p_chosen`` is the share of raters who prefer ``chosen``,
      with ties counted as half.
    - ``scored``: a row for each completion. ``reward`` is its score in the ranking, rescaled to [-1, 1].
    """
    given = ranked_by(answers)
    return [row for task in tasks if task.id in given for row in MAKERS[kind](task, given[task.id])]


def ranked_by(answers: Iterable[Answer]) -> dict[str, RankedBy]:
    """The answers to each task that rank its completions, by the task's id."""
    given: defaultdict[str, list[tuple[Answer, tuple[int, ...]]]] = defaultdict(list)
    for answer in answers:
        if answer.ranks is not None:
            given[answer.task].append((answer, answer.ranks))
    return dict(given)


def rank_groups(answers: Iterable[Answer]) -> list[list[list[float]]]:
    """The midranks of each completion by all of its raters, grouped by task, for ``krippendorff_alpha``."""
    groups = ranked_by(answers).values()
    return [[list(item) for item in zip(*(midranks(ranks) for _, ranks in group), strict=True)] for group in groups]


def _scores(group: RankedBy) -> list[float]:
    return [fmean(shares) for shares in zip(*(share_beaten(ranks) for _, ranks in group), strict=True)]


def _ranking(task: Task, group: RankedBy) -> list[dict[str, Any]]:
    whole = range(len(task.completions))
    row = {
        **_asked(task),
        "completions": [as_text(completion, "assistant") for completion in task.completions],
        "scores": _scores(group),
        "meta": _meta(task, group, {"completions": list(task.details)} if task.details else {}),
        "verdicts": [_verdict(answer, ranks, whole) for answer, ranks in group],
    }
    return [row]


def _preferences(task: Task, group: RankedBy) -> list[dict[str, Any]]:
    made = []
    for i, j in itertools.combinations(range(len(task.completions)), 2):
        share = share_preferred([ranks[i] for _, ranks in group], [ranks[j] for _, ranks in group])
        better, worse = (i, j) if share >= 0.5 else (j, i)
        details = {"chosen": task.details[better], "rejected": task.details[worse]} if task.details else {}
        row = {
            **_asked(task),
            "chosen": as_text(task.completions[better], "assistant"),
            "rejected": as_text(task.completions[worse], "assistant"),
            "p_chosen": max(share, 1 - share),
            "meta": _meta(task, group, details),
            "verdicts": [_verdict(answer, ranks, (better, worse)) for answer, ranks in group],
        }
        made.append(row)
    return made


def _scored(task: Task, group: RankedBy) -> list[dict[str, Any]]:
    return [
        {
            "messages": [*task.prompt, *completion],
            **({"tools": list(task.tools)} if task.tools else {}),
            "reward": 2 * score - 1,
            "meta": _meta(task, group, task.details[i] if task.details else {}),
            "verdicts": [_verdict(answer, ranks, (i,)) for answer, ranks in group],
        }
        for i, (completion, score) in enumerate(zip(task.completions, _scores(group), strict=True))
    ]


MAKERS: Mapping[Kind, Callable[[Task, RankedBy], list[dict[str, Any]]]] = {
    "ranking": _ranking,
    "preference": _preferences,
    "scored": _scored,
}


def _asked(task: Task) -> dict[str, Any]:
    return {"prompt": as_text(task.prompt, "user"), **({"tools": list(task.tools)} if task.tools else {})}


def _meta(task: Task, group: RankedBy, details: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the task's row, what it says of the completions, and the number of raters."""
    own = {**details, "raters": len(group)}
    return {f"{name}_original" if name in own else name: value for name, value in task.meta.items()} | own


def _verdict(answer: Answer, ranks: tuple[int, ...], shown: Sequence[int]) -> dict[str, Any]:
    """What a rater said of some of the completions of a task. The rank of one is its rank among all of them."""
    said: dict[str, Any] = {"rater": answer.rater}
    said["ranks"] = list(dense(ranks[i] for i in shown)) if len(shown) > 1 else [ranks[i] for i in shown]
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
