"""Errors that are not bugs in Burnish, and suggestions for misspelled words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters other than tab and line break, and halves of surrogate pairs."""


class UserError(ValueError):
    """The user's input is wrong, such as a recipe, a data file or a model.

    The command line prints the message without a traceback and exits with code 2. The message says what is wrong,
    where, what was expected, and the nearest thing that would work. Text from files is part of many messages, so
    characters that would act on the terminal, or that it cannot show, are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(UNSAFE.sub(lambda match: ascii(match[0])[1:-1], message))


class WaitingForPeople(Exception):
    """A stage waits for people, and there is no terminal in which to wait.

    The command line prints the message, which says what people have to do, and exits with code 3.
    """


class LostProcessError(Exception):
    """A process of the run was killed, hangs or cannot be reached, so the others cannot continue.

    The command line prints the message without a traceback and exits with code 1.
    """


class Terminated(KeyboardInterrupt):
    """The run was ended by SIGTERM: ``Terminated(12)`` after it saved a checkpoint of step 12.

    The command line says so and exits with code 143. It is a KeyboardInterrupt, because asyncio and whatever calls the
    user's code let only those through.
    """

    def __init__(self, step: int | None = None) -> None:
        saved = f" after saving a checkpoint of step {step:,}" if step is not None else ""
        super().__init__(f"ended by SIGTERM{saved}; run the same command again to resume")


class UserCodeError(Exception):
    """The user's code raised an exception: a reward, a stage's function, or a file that was imported.

    ``UserCodeError("reward brevity (mine.py:brevity) raised ValueError on prompts.jsonl:3: no", "Traceback ...")``. The
    command line prints ``traceback``, which has only the user's own frames, and the message, and exits with code 1.

    It is not a RuntimeError, because contextlib takes a RuntimeError that was raised from a StopIteration for that
    StopIteration.
    """

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine has run out of memory. This does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # of torch
        return True
    return "can't allocate memory" in str(error)


def out_of_memory(error: BaseException, where: str = "") -> str:
    """A message that says what to change if even the smallest batch does not fit into memory."""
    reason = (str(error).strip() or "no more memory").splitlines()[0]
    return (
        f"out of memory{where}: {reason}: close other programs, or use a smaller model, an adapter:, "
        "trainer.activation_checkpointing: true, a smaller data.max_length, or fewer generator.slots"
    )


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to the given one, or None if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'learning_rate'?)`` if a known word is similar to the given one, else an empty string."""
    near = closest(word, known)
    return f" (did you mean {near!r}?)" if near is not None else ""
