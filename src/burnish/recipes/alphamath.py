"""Generates sums on a clock with ten hours, such as ``7+4+5+3=?``, with solutions by a student with wrong habits.

The student adds one number at a time (``7+8=5``, ``5+5=0``, ``0+9=9``). Some of the fifty facts that this needs are
hard: the student has got into the habit of a wrong result, always the same one, and gives the correct one only
sometimes. Other facts are wrong now and then. A model that imitates the student makes the same mistakes. A majority of
its solutions makes them too, while the outcomes of questions with known answers show which steps are wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import character_tokenizer, random_llama
from burnish.types import Trajectory

CHARACTERS = "0123456789+=?\n"
HOURS = 10
NUMBERS = range(1, 6)

# A question and its solution read "<bos>7+8+5=?\n7+8=5\n5+5=0\n<eos>".
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '\\n' -}}
{%- endif -%}
{%- endfor -%}"""

Question = tuple[int, ...]
Fact = tuple[int, int]


class Student:
    """Adds on the clock, with wrong habits.

    Args:
        rng: the source of the habits and of the mistakes.
        hard: share of the facts for which the student has a wrong habit.
        habit: probability that the student follows the habit.
        slip: probability of a mistake, which is a random result, where there is no habit.
    """

    def __init__(self, rng: random.Random, hard: float, habit: float, slip: float) -> None:
        facts = [(first, second) for first in range(HOURS) for second in NUMBERS]
        self.rng, self.habit, self.slip = rng, habit, slip
        self.habits: dict[Fact, int] = {fact: self._wrong(fact) for fact in rng.sample(facts, round(hard * len(facts)))}

    def add(self, first: int, second: int) -> int:
        """What the student thinks the sum is."""
        fact = first, second
        if fact in self.habits:
            return self.habits[fact] if self.rng.random() < self.habit else sum(fact) % HOURS
        return self._wrong(fact) if self.rng.random() < self.slip else sum(fact) % HOURS

    def steps(self, question: Question) -> list[str]:
        """A solution: ``["7+8=5", "5+5=0"]``. After a mistake, the student continues with its result."""
        lines, total = [], question[0]
        for number in question[1:]:
            result = self.add(total, number)
            lines.append(f"{total}+{number}={result}")
            total = result
        return lines

    def _wrong(self, fact: Fact) -> int:
        return (sum(fact) + self.rng.randrange(1, HOURS)) % HOURS


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 3000,
    questions: int = 600,
    development: int = 1000,
    held_out: int = 2000,
    terms: int = 6,
    hard: float = 0.3,
    habit: float = 0.7,
    slip: float = 0.1,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    No question is in two of the files.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of the student's solutions.
        questions: number of questions with known answers to search.
        development: number of questions to choose settings on.
        held_out: number of questions for the final comparison.
        terms: numbers in each sum.
        hard: share of the facts for which the student has a wrong habit.
        habit: probability that the student follows a habit.
        slip: probability that the student gets another fact wrong.

    Raises:
        UserError: if a number is out of range.
    """
    for name, share in {"hard": hard, "habit": habit, "slip": slip}.items():
        if not 0 <= share <= 1:
            raise UserError(f"{name}: expected a number in [0, 1], got {share}")
    if terms < 2 or rows + questions + development + held_out > len(NUMBERS) ** terms // 2:
        raise UserError(f"terms: sums of {terms} numbers do not give so many different questions")
    rng = random.Random(seed)
    student, fresh = Student(rng, hard, habit, slip), unique_questions(rng, terms)
    data = folder / "data"
    write_rows(data / "sft.jsonl", (solution_row(student, next(fresh)) for _ in range(rows)))
    for name, count in (("questions", questions), ("development", development), ("held-out", held_out)):
        write_rows(data / f"{name}.jsonl", (question_row(next(fresh)) for _ in range(count)))
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 if the last line of a solution ends in the correct sum, else 0."""
    return [float(t.text.strip().rpartition("=")[2] == t.columns["answer"]) for t in trajectories]


def unique_questions(rng: random.Random, terms: int) -> Iterator[Question]:
    """Random questions, each once."""
    seen: set[Question] = set()
    while True:
        question = tuple(rng.choice(NUMBERS) for _ in range(terms))
        if question not in seen:
            seen.add(question)
            yield question


def question_text(question: Question) -> str:
    """The text of a question: ``7+8+5=?``."""
    return "+".join(map(str, question)) + "=?"


def solution_row(student: Student, question: Question) -> dict[str, Any]:
    """A question with the student's solution, which is often wrong."""
    return {"prompt": question_text(question), "completion": "".join(f"{s}\n" for s in student.steps(question))}


def question_row(question: Question) -> dict[str, str]:
    """A question with the correct sum in the column ``answer``."""
    return {"prompt": question_text(question), "answer": str(sum(question) % HOURS)}


def write_model(folder: Path, seed: int) -> None:
    """Write a character-level tokenizer and a Llama of three layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=192, num_hidden_layers=3, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
