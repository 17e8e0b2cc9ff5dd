"""Verdicts on disk: nothing is asked twice, by several threads, processes, or after a kill."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from burnish.errors import UserError
from burnish.judges.protocol import Judge, NoVerdictError, Question, Verdict
from burnish.judges.store import StoredJudge, VerdictStore
from burnish.types import Message
from scripted_judge import ScriptedJudge, always_first, uniform


def question(text: str) -> Question:
    return Question((Message(role="user", content=text),), ("A", "B"))


def length(asked: Question) -> list[float]:
    """A different verdict for each length of the question."""
    p = 1 / (2 + len(asked.messages[0]["content"]))
    return [p, 1 - p]


def judge(path: Path, asked_by: str = "") -> tuple[StoredJudge, ScriptedJudge]:
    own = ScriptedJudge(length)
    return StoredJudge(own, VerdictStore(path), asked_by), own


def test_a_question_is_asked_once_also_within_a_batch_and_by_another_stage(tmp_path: Path) -> None:
    first, own = judge(tmp_path / "v.sqlite", "one")
    questions = [question(text) for text in ("a", "bb", "a", "ccc", "bb")]
    answers = first.answers(questions, "0")
    assert [q.messages[0]["content"] for q in own.asked] == ["a", "bb", "ccc"]
    assert [answer.verdict for answer in answers] == ScriptedJudge(length).ask(questions)
    assert [answer.cached for answer in answers] == [False, False, True, False, True]
    first.close()
    second, other = judge(tmp_path / "v.sqlite", "two")
    again = second.answers([*questions, question("dddd")], "0")
    assert [q.messages[0]["content"] for q in other.asked] == ["dddd"]
    assert [answer.verdict for answer in again[:5]] == [answer.verdict for answer in answers]
    assert [answer.cached for answer in again] == [True] * 5 + [False]
    second.close()


def test_who_resumes_finds_the_same_verdicts_uncached(tmp_path: Path) -> None:
    questions = [question(text) for text in ("a", "bb", "a")]
    for _ in range(2):  # the second time, all verdicts are there
        stored, own = judge(tmp_path / "v.sqlite", "stage")
        assert [answer.cached for answer in stored.answers(questions, "64")] == [False, False, True]
        stored.close()
    assert own.asked == []


def test_another_judge_choice_or_message_is_another_question(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "v.sqlite")
    own = [ScriptedJudge(always_first, "one"), ScriptedJudge(uniform, "two")]
    one, two = (StoredJudge(judge, store) for judge in own)
    asked = question("a")
    assert one.ask([asked])[0].probabilities == (1, 0)
    assert two.ask([asked])[0].probabilities == (0.5, 0.5)
    one.ask([Question(asked.messages, ("A", "B", "C"))])
    one.ask([Question((Message(role="system", content="x"), *asked.messages), ("A", "B"))])
    assert [len(judge.asked) for judge in own] == [3, 1]
    store.close()


class Halting(Judge):
    """Answers one question at a time, and fails at the third one."""

    identity = "halting"

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.asked: list[Question] = []

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        raise NotImplementedError

    def each(self, questions: Sequence[Question]) -> Iterator[list[tuple[int, Verdict | NoVerdictError]]]:
        for i, asked in enumerate(questions):
            self.asked.append(asked)
            if asked.messages[0]["content"] == "q2":
                if not isinstance(self.error, NoVerdictError):
                    raise self.error
                yield [(i, self.error)]
            else:
                yield [(i, Verdict((0.5, 0.5), 1.0, calls=2, cost=0.25))]


QUESTIONS = [question(f"q{i}") for i in range(5)]


def test_what_was_judged_before_an_error_stays(tmp_path: Path) -> None:
    halting = Halting(KeyboardInterrupt())
    stored = StoredJudge(halting, VerdictStore(tmp_path / "v.sqlite"))
    with pytest.raises(KeyboardInterrupt):
        stored.ask(QUESTIONS)
    halting.error, halting.asked = NoVerdictError("no", 0, 3, 0.5), []
    answers = stored.answers(QUESTIONS, skip=True)
    assert [asked.messages[0]["content"] for asked in halting.asked] == ["q2", "q3", "q4"]
    assert [isinstance(answer.verdict, Verdict) for answer in answers] == [True, True, False, True, True]
    assert stored.store.spent("halting") == (4 * 2 + 3, 4 * 0.25 + 0.5)
    stored.close()


def test_the_first_question_without_a_verdict_ends_the_batch(tmp_path: Path) -> None:
    halting = Halting(NoVerdictError("because", 7))
    stored = StoredJudge(halting, VerdictStore(tmp_path / "v.sqlite"))
    with pytest.raises(NoVerdictError, match="because") as error:
        stored.ask([QUESTIONS[0], QUESTIONS[0], QUESTIONS[2], QUESTIONS[3]])
    assert error.value.index == 2  # of the questions that were asked, not of those that were new
    assert len(halting.asked) == 2
    stored.close()


def test_threads_wait_for_a_question_in_flight(tmp_path: Path) -> None:
    def slow(asked: Question) -> list[float]:
        time.sleep(0.1)
        return length(asked)

    own = ScriptedJudge(slow)
    stored = StoredJudge(own, VerdictStore(tmp_path / "v.sqlite"))
    found: list[list[Verdict]] = []
    threads = [
        threading.Thread(target=lambda: found.append(stored.ask([question("a"), question("bb")]))) for _ in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(own.asked) == 2
    assert len(found) == 3 and found[0] == found[1] == found[2]
    stored.close()


WRITER = """\
import sys
from pathlib import Path
from burnish.judges.protocol import Question
from burnish.judges.store import StoredJudge, VerdictStore
from scripted_judge import ScriptedJudge

def length(asked):
    p = 1 / (2 + len(asked.messages[0]["content"]))
    return [p, 1 - p]

stored = StoredJudge(ScriptedJudge(length), VerdictStore(Path(sys.argv[1])), "")
for i in range(int(sys.argv[2]), int(sys.argv[2]) + 20):
    stored.ask([Question(({"role": "user", "content": "x" * i},), ("A", "B"))])
stored.close()
"""


def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "v.sqlite"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, "-c", WRITER, str(path), str(start)] for start in (0, 10)]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0]
    stored, own = judge(path)
    verdicts = stored.ask([question("x" * i) for i in range(30)])
    assert own.asked == []
    assert verdicts == ScriptedJudge(length).ask([question("x" * i) for i in range(30)])
    stored.close()


def test_of_two_writers_the_first_one_wins(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "v.sqlite")
    for p in (0.25, 0.75):
        given = {"key": (question("a"), Verdict((p, 1 - p), 1.0))}
        assert store.put(given, "judge", "stage")["key"].verdict.probabilities == (0.25, 0.75)
    store.close()


@pytest.mark.parametrize("damage", ["text", "truncated", "verdict"])
def test_a_damaged_store_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "v.sqlite"
    stored, _ = judge(path)
    stored.ask([question("x" * i) for i in range(60)])
    stored.close()
    if damage == "text":
        path.write_text("not a database " * 100)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:6000])
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE verdicts SET verdict = '{}'")
        connection.close()
    with pytest.raises(UserError, match=r"v\.sqlite: damaged: .*remove it to ask the judge all questions again"):
        judge(path)[0].ask([question("x" * i) for i in range(60)])


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "v.sqlite")
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(UserError, match="another version"):
        VerdictStore(tmp_path / "v.sqlite")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        VerdictStore(tmp_path / "file" / "v.sqlite")
