"""The interface of judges: questions in, probabilities of their choices out. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from burnish.errors import UserError
from burnish.types import Messages


@dataclass(frozen=True)
class Question:
    """What a judge reads, and the words among which it chooses.

    ``Question(({"role": "user", "content": "Which is larger, A: 2 or B: 3? Answer with A or B."},), ("A", "B"))``

    Raises:
        ValueError: fewer than two choices, equal ones, or one that is empty or has white space around it.
    """

    messages: Messages
    """A conversation that ends with a message of the user."""
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices):
            raise ValueError(f"choices {self.choices}: expected at least two different ones")
        if any(choice != choice.strip() or not choice for choice in self.choices):
            raise ValueError(f"choices {self.choices}: expected words without white space around them")


@dataclass(frozen=True)
class Verdict:
    """How likely a judge chooses each of the words: ``Verdict((0.9, 0.1), mass=0.98)``.

    Raises:
        ValueError: a probability is not in [0, 1], or they do not sum to 1.
    """

    probabilities: tuple[float, ...]
    """Of the choices, in their order; their sum is 1."""
    mass: float
    """The probability that the judge answers with any of the choices, before normalization. For a judge that votes, the
    share of its votes that name a choice."""
    reasoning: str = ""
    """What the judge wrote before it chose."""
    calls: int = 1
    """Forward passes over the question, or requests to an endpoint, failed ones included."""
    tokens: int = 0
    """Tokens read and written."""
    seconds: float = 0.0
    cost: float = 0.0
    """In the currency of the prices in the judge's settings."""

    def __post_init__(self) -> None:
        valid = all(0 <= p <= 1 for p in self.probabilities)  # NaN is not
        if not valid or abs(math.fsum(self.probabilities) - 1) > 1e-6:
            raise ValueError(f"probabilities {self.probabilities}: expected numbers in [0, 1] whose sum is 1")
        if not 0 <= self.mass <= 1:
            raise ValueError(f"mass {self.mass}: expected a probability")


class NoVerdictError(UserError):
    """A judge gave no verdict on one question, also after retries.

    ``index`` is that of the question. ``calls`` and ``cost`` are what the question has used.
    """

    def __init__(self, message: str, index: int = 0, calls: int = 0, cost: float = 0.0) -> None:
        super().__init__(message)
        self.index, self.calls, self.cost = index, calls, cost


class Judge(Protocol):
    """Chooses between words. Judges subclass this protocol.

    ``identity`` names everything that verdicts depend on besides the question: the model and the settings. Verdicts are
    stored by it, so it must not change when a folder moves, and it contains no secrets.
    """

    identity: str

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """The verdicts on questions, in their order.

        Raises:
            NoVerdictError: the judge gave no verdict on a question.
            UserError: the judge cannot work, or a limit on calls or cost is reached.
        """
        ...

    def each(self, questions: Sequence[Question]) -> Iterator[list[tuple[int, Verdict | NoVerdictError]]]:
        """The verdicts on questions as soon as they are known, each with the index of its question.

        Verdicts that are yielded together were computed together. A question without a verdict has the reason instead.
        By default, all questions are asked together, and the first one without a verdict is an error.
        """
        yield list(enumerate(self.ask(questions)))

    def lost(self) -> tuple[int, float]:
        """The calls and the cost of questions that were interrupted, since this was last asked. By default, none."""
        return 0, 0.0

    def close(self) -> None:
        """Release connections."""
