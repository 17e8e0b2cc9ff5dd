"""Answers survive a kill, revisions are kept, undo works, and raters do not disturb each other."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from burnish.errors import UserError
from burnish.label.store import Store
from burnish.label.tasks import Answer, Highlight, Task
from burnish.types import Messages


def said(role: str, text: str) -> Messages:
    return ({"role": role, "content": text},)


def task(number: int, completions: int = 3) -> Task:
    texts = [said("assistant", f"completion {i} of {number}") for i in range(completions)]
    return Task(said("user", f"prompt {number}"), tuple(texts), f"rows.jsonl:{number}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "answers.sqlite")
    store.show_only([task(number) for number in range(3)])
    return store


def rank_next(store: Store, rater: str, ranks: tuple[int, ...] = (1, 2, 3), raters: int | None = None) -> Task:
    shown = store.next(rater, raters)
    assert shown is not None
    store.record(Answer(shown.task.id, rater, ranks))
    return shown.task


def test_a_task_and_an_answer_are_read_back_as_they_were_stored(store: Store) -> None:
    stored = Task(
        said("user", "שלום 🙂"),
        (said("assistant", "a"), said("assistant", "b")),
        "x:1",
        ({"type": "function"},),
        {"topic": "colors"},
        ({"score": 1.5}, {"score": 2.5}),
    )
    store.add([stored])
    assert store.task(stored.id) == stored and store.tasks()[-1] == stored
    mark = Highlight(1, 0, 0, 1, "b")
    answer = store.record(Answer(stored.id, "Zoë", (7, 2), "because", (mark,), 2.5))
    assert store.answers() == [answer]
    assert (answer.ranks, answer.comment, answer.highlights, answer.seconds) == ((2, 1), "because", (mark,), 2.5)


def test_equal_rows_are_one_task_and_its_columns_do_not_matter() -> None:
    first = task(1)
    other_place = Task(first.prompt, first.completions, "other.jsonl:9", meta={"a": 1})
    assert other_place.id == first.id != task(2).id
    assert Task(first.prompt, first.completions[::-1], first.source).id != first.id


def test_tasks_come_in_order_and_end(store: Store) -> None:
    assert [rank_next(store, "Ann") for _ in range(3)] == [task(0), task(1), task(2)]
    assert store.next("Ann") is None
    assert store.answered("Ann") == 3 and store.counts() == (3, 3) and store.counts(2) == (3, 0)


def test_the_order_shown_differs_by_rater_and_stays(store: Store) -> None:
    store.show_only([task(number, completions=6) for number in range(8)])
    orders = {}
    for rater in ("Ann", "Ben"):
        for number in range(8):
            shown = store.next(rater)
            assert shown is not None and sorted(shown.order) == list(range(6))
            again = store.next(rater)
            assert again is not None and again.order == shown.order == store.shown_order(shown.task.id, rater)
            orders[rater, number] = shown.order
            store.record(Answer(shown.task.id, rater, None))
    # 16 random orders of 6 are equal by chance with a probability of 16^2 / 2 / 720 < 0.2; this seed has none
    assert len(set(orders.values())) == 16


def test_undo_takes_back_one_answer_after_the_other_and_keeps_all_revisions(store: Store) -> None:
    first, second = rank_next(store, "Ann"), rank_next(store, "Ann", (3, 2, 1))
    rank_next(store, "Ben")
    undone = store.undo("Ann")
    assert undone is not None and (undone.task, undone.ranks) == (second.id, (3, 2, 1))
    assert store.undo("Ann") is not None
    assert store.undo("Ann") is None  # Ben's answer is not hers
    assert [answer.rater for answer in store.answers()] == ["Ben"]
    # the task of the last undo comes first, with the earlier answer, then the other one
    shown = store.next("Ann")
    assert shown is not None and shown.task == first and shown.earlier is not None
    assert shown.earlier.ranks == (1, 2, 3)
    assert rank_next(store, "Ann", (2, 1, 3)) == first
    assert rank_next(store, "Ann") == second
    assert [revision and revision.ranks for revision in store.revisions()] == [
        (1, 2, 3),
        (3, 2, 1),
        (1, 2, 3),
        None,
        None,
        (2, 1, 3),
        (1, 2, 3),
    ]
    (ann, ben) = store.progress()
    assert (ann.rater, ann.ranked, ann.skipped, ann.undone) == ("Ann", 2, 0, 2)
    assert (ben.rater, ben.ranked) == ("Ben", 1)


def test_a_task_that_needs_one_rater_is_not_shown_to_two(store: Store) -> None:
    ann, ben = store.next("Ann", 1), store.next("Ben", 1)
    assert ann is not None and ben is not None and ann.task == task(0) and ben.task == task(1)
    again = store.next("Ann", 1)
    assert again is not None and again.task == task(0)  # reloading keeps the reservation
    assert rank_next(store, "Ann", raters=1) == task(0)
    assert rank_next(store, "Ann", raters=1) == task(2)
    assert store.next("Ann", 1) is None  # Ben has the last one
    store.record(Answer(task(1).id, "Ben", None))
    assert store.counts(1) == (3, 3)  # a skipped task has been looked at


def test_tasks_that_are_not_shown_any_more_keep_their_answers(store: Store) -> None:
    rank_next(store, "Ann")
    store.show_only([task(2)])
    assert store.counts() == (1, 0) and store.answered("Ann") == 0
    assert len(store.answers()) == 1 and len(store.tasks()) == 3
    assert store.undo("Ann") is None  # its task could not be shown again


def test_answers_of_another_tool_are_brought_once(store: Store) -> None:
    brought = [Answer(task(0).id, "Tool: 1", (1, 2, 3)), Answer(task(1).id, "Tool: 1", None)]
    assert store.bring(brought) == 2
    assert store.bring(brought) == 0
    assert len(store.revisions()) == 2


def test_wrong_answers_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="no task"):
        store.record(Answer("nothing", "Ann", None))
    with pytest.raises(ValueError, match="2 ranks, 3 completions"):
        store.record(Answer(task(0).id, "Ann", (1, 2)))
    assert store.revisions() == []


def test_threads_store_every_answer(store: Store) -> None:
    store.show_only([task(number) for number in range(10)])
    other = Store(store.path)  # as another process would

    def rate(where: Store, rater: str) -> None:
        for _ in range(10):
            rank_next(where, rater)

    threads = [
        threading.Thread(target=rate, args=(where, f"rater {i}")) for i, where in enumerate([store, store, other])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(answer.task, answer.rater) for answer in store.answers()}) == len(store.revisions()) == 30


WRITER = """
import sys
from burnish.label.store import Store
from burnish.label.tasks import Answer
store = Store(sys.argv[1])
while (shown := store.next("Ann")) is not None:
    store.record(Answer(shown.task.id, "Ann", (1, 2, 3)))
    print(shown.task.id, flush=True)
"""


def test_a_kill_loses_no_answer(store: Store) -> None:
    store.show_only([task(number) for number in range(2000)])
    command = [sys.executable, "-c", WRITER, str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(12)]
        writer.kill()
        acknowledged += writer.stdout.read().split()
    stored = [answer.task for answer in store.answers()]
    # one more may be on disk than was printed
    assert len(acknowledged) < 2000 and stored[: len(acknowledged)] == acknowledged
    assert len(stored) - len(acknowledged) in (0, 1)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("prompt,completion\n" * 100)
    with pytest.raises(UserError, match=r"text\.sqlite: cannot be used as the database of answers: file is not"):
        Store(tmp_path / "text.sqlite")
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE songs (title TEXT)")
    db.close()
    with pytest.raises(UserError, match=r"other\.sqlite: a database of another program"):
        Store(tmp_path / "other.sqlite")
