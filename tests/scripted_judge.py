"""Judges that answer what a test tells them to: ``from scripted_judge import ScriptedJudge, always_first``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from burnish.judges.protocol import Judge, Question, Verdict

Script = Callable[[Question], Sequence[float]]
"""The probabilities of a question's choices."""


class ScriptedJudge(Judge):
    """Answers with the probabilities that a function of the question gives, and keeps what it was asked."""

    def __init__(self, script: Script, identity: str = "scripted") -> None:
        self.script, self.identity = script, identity
        self.asked: list[Question] = []

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """The verdicts on questions, each with all of the mass."""
        self.asked += questions
        return [Verdict(tuple(self.script(question)), mass=1.0, tokens=10) for question in questions]


def always_first(question: Question) -> list[float]:
    """All probability on the first choice, whatever the question."""
    return [1.0] + [0.0] * (len(question.choices) - 1)


def uniform(question: Question) -> list[float]:
    """The same probability for every choice."""
    return [1 / len(question.choices)] * len(question.choices)
