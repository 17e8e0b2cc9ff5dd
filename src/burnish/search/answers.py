"""Finds the answer in the text of a solution, and compares it with the known one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish import user_functions
from burnish.errors import UserError
from burnish.search.expressions import math_answer, math_equal
from burnish.search.settings import AnswerSettings
from burnish.user_code import user_code


class Answers:
    """Finds answers and checks them: ``Answers(AnswerSettings()).find("so 3 + 4 = 7")`` returns ``"7"``.

    Args:
        settings: how to find and check answers. A function is ``file.py:name`` or ``package.module:name``.
    """

    def __init__(self, settings: AnswerSettings) -> None:
        self.settings = settings
        self._own = {
            reference: user_functions.load(reference)
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
