"""Answers to rows by hand; every row is read back by Burnish's readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from burnish.data import readers
from burnish.label.export import Kind, as_text, rank_groups, rows
from burnish.label.reading import read
from burnish.label.tasks import Answer, Highlight, Task
from burnish.types import Messages, Preference, Ranking, Scored

KINDS: tuple[Kind, ...] = get_args(Kind)
TEXTS = ("a", "b", "c")
TASK = Task(
    ({"role": "user", "content": "p"},),
    tuple(({"role": "assistant", "content": text},) for text in TEXTS),
    "rows.jsonl:1",
    meta={"topic": "x", "raters": "many"},
    details=({"id": 0}, {"id": 1}, {"id": 2}),
)
UNRANKED = Task(({"role": "user", "content": "q"},), TASK.completions, "rows.jsonl:2")
ANSWERS = [
    Answer(TASK.id, "Ann", (1, 2, 3), "clear", (Highlight(2, 0, 0, 1, "c"),), 4.26),
    Answer(TASK.id, "Ben", (1, 1, 2)),
    Answer(TASK.id, "Cem", None, "no idea"),
    Answer(UNRANKED.id, "Ann", None),
]


def test_a_ranking_by_hand() -> None:
    (row,) = rows("ranking", [TASK, UNRANKED], ANSWERS)
    assert (row["prompt"], row["completions"]) == ("p", ["a", "b", "c"])
    # Ann: 1, 1/2, 0. Ben: a beats c and half of b, (1 + 1/2) / 2 = 3/4, as b does; c 0
    assert row["scores"] == [(1 + 0.75) / 2, (0.5 + 0.75) / 2, 0]
    assert row["meta"] == {
        "topic": "x",
        "raters_original": "many",
        "raters": 2,
        "completions": [{"id": 0}, {"id": 1}, {"id": 2}],
    }
    mark = {"completion": 2, "part": 0, "start": 0, "end": 1, "text": "c"}
    assert row["verdicts"] == [
        {"rater": "Ann", "ranks": [1, 2, 3], "comment": "clear", "highlights": [mark], "seconds": 4.3},
        {"rater": "Ben", "ranks": [1, 1, 2]},
        {"rater": "Cem", "ranks": None, "comment": "no idea"},
    ]


def test_preferences_by_hand() -> None:
    made = rows("preference", [TASK, UNRANKED], ANSWERS)
    # a against b: Ann prefers a, Ben ties: (1 + 1/2) / 2
    assert [(row["chosen"], row["rejected"], row["p_chosen"]) for row in made] == [
        ("a", "b", 0.75),
        ("a", "c", 1.0),
        ("b", "c", 1.0),
    ]
    assert made[0]["meta"]["raters"] == 2 and made[0]["meta"]["chosen"] == {"id": 0}
    assert made[0]["verdicts"][0] == {"rater": "Ann", "ranks": [1, 2], "comment": "clear", "seconds": 4.3}
    assert made[2]["verdicts"][0]["ranks"] == [1, 2]  # of b and c alone
    assert made[2]["verdicts"][0]["highlights"][0]["completion"] == 1  # c is the rejected one
    (backwards,) = rows("preference", [TASK], [Answer(TASK.id, "Ann", (2, 1, 2))])[:1]
    assert (backwards["chosen"], backwards["rejected"], backwards["meta"]["chosen"]) == ("b", "a", {"id": 1})


def test_scores_by_hand() -> None:
    made = rows("scored", [TASK, UNRANKED], ANSWERS)
    assert [row["reward"] for row in made] == [0.75, 0.25, -1.0]  # the scores above, times 2, minus 1
    assert made[2]["messages"] == [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]
    assert made[2]["meta"] == {"topic": "x", "raters_original": "many", "id": 2, "raters": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_back(kind: Kind, tmp_path: Path) -> None:
    episode: Messages = (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "4", "name": "f"},
        {"role": "assistant", "content": "4"},
    )
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    like_json: Messages = ({"role": "assistant", "content": '{"role": "user"}'},)
    other = Task(({"role": "system", "content": "s"}, *UNRANKED.prompt), (episode, like_json), "rows.jsonl:3", (tool,))
    answers = [*ANSWERS, Answer(other.id, "Ann", (2, 1))]
    path = tmp_path / "out.jsonl"
    made = rows(kind, [TASK, UNRANKED, other], answers)
    path.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    row_class = {"ranking": Ranking, "preference": Preference, "scored": Scored}[kind]
    back = readers.load(path, (row_class,)).rows
    assert len(back) == len(made) == {"ranking": 2, "preference": 4, "scored": 5}[kind]
    assert isinstance(back[-1], Ranking | Preference | Scored) and back[-1].tools == (tool,)
    if kind == "ranking":
        assert isinstance(back[1], Ranking)
        assert (back[1].prompt, back[1].completions, back[1].scores) == (other.prompt, other.completions, (0.0, 1.0))
        # and its tasks are the same ones
        assert [task.id for task in read(path).tasks] == [TASK.id, other.id]


def test_text_that_looks_like_messages_stays_a_message() -> None:
    assert as_text(({"role": "user", "content": "hi"},), "user") == "hi"
    assert as_text(({"role": "user", "content": '[{"role": 1}]'},), "user") == [
        {"role": "user", "content": '[{"role": 1}]'}
    ]
    assert as_text(({"role": "system", "content": "hi"},), "user") == [{"role": "system", "content": "hi"}]


def test_midranks_of_each_completion_by_task() -> None:
    assert rank_groups(ANSWERS) == [[[1, 1.5], [2, 1.5], [3, 3]]]
