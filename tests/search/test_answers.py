"""Finding answers and checking them, with unknown results and time limits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from burnish.errors import UserCodeError, UserError
from burnish.search import expressions
from burnish.search.answers import Answers
from burnish.search.expressions import math_answer, math_equal
from burnish.search.settings import AnswerSettings


def answers(**settings: str) -> Answers:
    return Answers(AnswerSettings(**settings))


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(
        "def first(text):\n    return text.split()[0] if text else None\n"
        "def length(text):\n    return len(text)\n"
        "def larger(answer, columns):\n"
        "    return None if answer == '?' else int(answer) > columns['least']\n"
        "def yes(answer, columns):\n    return 'yes'\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        ("math", "so 3 + 4 = 7", "7"),
        ("math", r"it is \boxed{\frac{1}{2}}, not 3", r"\frac{1}{2}"),
        ("math", "I do not know", None),
        ("math", "", None),
        ("last_line", "3+4=7\n7-2=5\n", "5"),
        ("last_line", "3+4=7\nso red", "so red"),
        ("last_line", "3+4=7\n7-2=", None),
        ("last_line", " \n", None),
    ],
)
def test_find(find, text, found):
    assert answers(find=find).find(text) == found


@pytest.mark.parametrize(
    ("check", "answer", "known", "same"),
    [
        ("math", "0.5", "1/2", True),
        ("math", r"\frac{2}{4}", "$\\frac{1}{2}$", True),
        ("math", "7", "8", False),
        ("math", "Paris", "Paris", True),  # equal as text
        ("math", "7", "Paris", None),  # math-verify cannot read the known answer
        ("exact", " 7 ", "7", True),
        ("exact", "7.0", "7", False),
    ],
)
def test_check(check, answer, known, same):
    assert answers(check=check).check(answer, {"answer": known}) is same
    assert answers(check=check).same(answer, known) is same


def test_the_known_answer_may_be_a_number_or_in_another_column():
    assert answers().check("7", {"answer": 7}) is True
    assert answers(check="exact", column="target").check("0", {"target": 0}) is True


def test_functions_of_the_user(mine):
    own = answers(find=f"{mine}:first", check=f"{mine}:larger")
    assert own.find("7 apples") == "7"
    assert own.find("") is None
    columns = {"least": 5}
    assert [own.check(answer, columns) for answer in ("7", "3", "?")] == [True, False, None]
    assert own.same("7", "7.0") is False  # answers of several solutions are compared as text


def test_mistakes_of_functions_are_named(mine):
    with pytest.raises(UserError, match=r"answer.find .*mine.py:length returned int: expected a string or None"):
        answers(find=f"{mine}:length").find("abc")
    with pytest.raises(UserError, match=r"answer.check .*mine.py:yes returned str: expected True, False or None"):
        answers(check=f"{mine}:yes").check("7", {})
    with pytest.raises(UserCodeError, match=r"answer.check .*mine.py:larger raised ValueError on 'seven'"):
        answers(check=f"{mine}:larger").check("seven", {"least": 1})
    with pytest.raises(UserError, match="has no frist"):
        answers(find=f"{mine}:frist")


@pytest.mark.parametrize("key", ["find", "check"])
def test_an_unknown_name_is_refused(key):
    with pytest.raises(UserError, match=rf"{key}: expected math, .* or file.py:name, got 'maths'"):
        AnswerSettings(**{key: "maths"})


FOREVER = "$9^{9^{9^{9}}}$"


def test_an_expression_that_takes_forever_is_unknown(monkeypatch):
    monkeypatch.setattr(expressions, "SECONDS", 0.5)
    math_equal.cache_clear()
    start = time.process_time(), time.monotonic()
    assert math_equal("1", FOREVER) is None
    assert time.process_time() - start[0] < 0.5  # another process computed it
    assert time.monotonic() - start[1] < 60  # the limit is on CPU time, so a busy machine changes no result
    assert answers().check("0.5", {"answer": "1/2"}) is True  # a new process
    assert math_answer("so 3 + 4 = 7") == "7"


def test_the_process_ends_after_an_interruption(monkeypatch):
    assert math_answer("x = 3") == "3"
    process = expressions._process
    child = process.child
    assert child is not None and child.stdout is not None

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(child.stdout, "readline", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        math_answer("x = 4")
    assert process.child is None and child.poll() is not None
    assert math_answer("x = 5") == "5"  # not the answer to the question before


def test_without_math_verify_there_is_an_error(monkeypatch):
    process = expressions._Process()
    monkeypatch.setattr(expressions.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="pip install math-verify"):
        process.ask({"text": "1"})
