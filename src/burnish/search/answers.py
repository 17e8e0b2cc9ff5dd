"""Finds the answer in the text of a solution, and compares it with the known one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from burnish import user_functions
from burnish.errors import UserError
from burnish.search.settings import AnswerSettings
from burnish.time_limit import TimeLimitExceeded, time_limit
from burnish.user_code import user_code

MATH_SECONDS = 5.0
"""Time limit of reading or comparing mathematical expressions."""


class Answers:
    """Finds answers and checks them: ``Answers(AnswerSettings()).find("so 3 + 4 = 7")`` returns ``"7"``.

    Args:
        settings: how to find and check answers.
        locate: makes a reference to a user's function absolute.
    """

    def __init__(self, settings: AnswerSettings, locate: Callable[[str], str] = str) -> None:
        self.settings = settings
        self._own = {
            reference: user_functions.load(locate(reference))
            for reference in (settings.find, settings.check)
            if ":" in reference
        }

    def find(self, text: str) -> str | None:
        """The answer in the text of a solution; None if there is none."""
        reference = self.settings.find
        if reference == "math":
            return math_answer(text)
        if reference == "last_line":
            lines = text.strip().splitlines()
            return lines[-1].rpartition("=")[2].strip() or None if lines else None
        with user_code(f"answer.find {reference}", f"on {text[-80:]!r}", seed=0):
            found = self._own[reference](text)
        if found is not None and not isinstance(found, str):
            raise UserError(f"answer.find {reference} returned {type(found).__name__}: expected a string or None")
        return found

    def check(self, answer: str, columns: Mapping[str, Any]) -> bool | None:
        """Whether an answer is correct, given the columns of the question's row; None if this cannot be told."""
        reference = self.settings.check
        if ":" not in reference:
            return self.same(answer, str(columns[self.settings.column]))
        with user_code(f"answer.check {reference}", f"on {answer[:80]!r}", seed=0):
            verdict = self._own[reference](answer, dict(columns))
        if verdict is not None and not isinstance(verdict, bool):
            raise UserError(f"answer.check {reference} returned {type(verdict).__name__}: expected True, False or None")
        return verdict

    def same(self, one: str, other: str) -> bool | None:
        """Whether two answers are the same; None if this cannot be told."""
        if one.strip() == other.strip():
            return True
        return math_equal(other, one) if self.settings.check == "math" else False


@functools.lru_cache(maxsize=2**16)
def math_answer(text: str) -> str | None:
    """The last mathematical expression in a text, as math-verify finds it: what is boxed, else the last number."""
    from math_verify import parse

    try:
        with _quiet(), time_limit(MATH_SECONDS):
            found = parse(text, parsing_timeout=0)
    except TimeLimitExceeded:
        return None
    return str(found[-1]) if found else None


@functools.lru_cache(maxsize=2**16)
def math_equal(expected: str, answer: str) -> bool | None:
    """Whether an answer equals the expected one, by math-verify; None if it cannot tell, or not in time."""
    from math_verify import parse, verify

    try:
        with _quiet(), time_limit(MATH_SECONDS):
            gold = parse(expected, parsing_timeout=0)
            return verify(gold, parse(answer, parsing_timeout=0), timeout_seconds=0) if gold else None
    except TimeLimitExceeded:
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """math-verify logs a warning if it gets no time limit of its own, which only works in the main thread."""
    logger = logging.getLogger("math_verify")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
