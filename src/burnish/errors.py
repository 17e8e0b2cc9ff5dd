"""The two errors that are not faults of Burnish, and suggestions for words that are misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The user's input is wrong: a recipe, a data file, a model.

    The command line prints the message without a traceback and exits with code 2. The message says what is wrong,
    where, what was expected, and the nearest thing that would work.
    """


class UserCodeError(RuntimeError):
    """Code of the user raised an exception: a reward, a stage's function, or a file that was imported.

    ``UserCodeError("reward brevity (mine.py:brevity) raised ValueError on prompts.jsonl:3: no", "Traceback ...")``. The
    command line prints ``traceback``, which has the user's own frames only, and the message, and exits with code 1.
    """

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'learning_rate'?`` where a known word is close to the given one, else nothing."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
