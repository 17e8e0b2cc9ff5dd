"""Generates chain sums such as ``3+4-2+4=?``, with step-by-step solutions by a solver that makes mistakes.

The solver takes one step at a time (``3+4=7``, ``7-2=5``, ``5+4=9``) and gets each step wrong with a fixed probability.
A solution with a mistake counts as wrong, whatever follows. The value of a step is what a tree search would estimate:
the mean outcome, 1 or -1, of several attempts to continue from it. After a mistake, the value is -1. Before one, it is
an estimate with less variance the closer the step is to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import LINES, character_tokenizer, random_llama
from burnish.types import Trajectory

CHARACTERS = "0123456789+-=?\n"
LARGEST = 9
TERMS = (4, 5)
NUMBERS = range(1, 7)

Question = tuple[int, ...]


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 12000,
    prompts: int = 1024,
    held_out: int = 512,
    mistakes: float = 0.2,
    attempts: int = 8,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    No question of an evaluation file is in a training file.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of training solutions, each of a new random question.
        prompts: number of questions without a solution.
        held_out: number of questions that are in no training file, with one solution each.
        mistakes: probability that a step is wrong, in [0, 1).
        attempts: number of attempts to continue from each step. Their mean outcome is the value of the step.

    Raises:
        UserError: if a number is out of range.
    """
    if not 0 <= mistakes < 1:
        raise UserError(f"mistakes: expected a probability in [0, 1), got {mistakes}")
    if attempts < 1 or held_out < 1:
        raise UserError(f"attempts and held_out: expected at least 1, got {attempts} and {held_out}")
    rng = random.Random(seed)
    unseen: dict[Question, None] = {}
    while len(unseen) < held_out:
        unseen[random_question(rng)] = None

    def seen() -> Iterator[Question]:
        while True:
            question = random_question(rng)
            if question not in unseen:
                yield question

    data, questions = folder / "data", seen()
    write_rows(data / "steps.jsonl", (solution_row(rng, next(questions), mistakes, attempts) for _ in range(rows)))
    write_rows(data / "steps-eval.jsonl", (solution_row(rng, question, mistakes, attempts) for question in unseen))
    write_rows(data / "prompts.jsonl", (prompt_row(next(questions)) for _ in range(prompts)))
    write_rows(data / "prompts-eval.jsonl", map(prompt_row, unseen))
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 if the last line of an answer ends in the correct total, else 0."""
    return [float(t.text.strip().rpartition("=")[2] == t.columns["answer"]) for t in trajectories]


def random_question(rng: random.Random) -> Question:
    """A first number and the numbers added to it, such as ``(3, 4, -2, 4)``. All running totals are in [0, 9]."""
    while True:
        added = (rng.choice((-1, 1)) * rng.choice(NUMBERS) for _ in range(rng.choice(TERMS) - 1))
        question = (rng.choice(NUMBERS), *added)
        if all(0 <= total <= LARGEST for total in running_totals(question)):
            return question


def running_totals(question: Question) -> list[int]:
    """The correct totals: ``running_totals((3, 4, -2, 4))`` is ``[7, 5, 9]``."""
    return [sum(question[: k + 1]) for k in range(1, len(question))]


def question_text(question: Question) -> str:
    """The text of a question: ``3+4-2+4=?``."""
    return f"{question[0]}{''.join(f'{n:+d}' for n in question[1:])}=?"


def solution_row(rng: random.Random, question: Question, mistakes: float, attempts: int) -> dict[str, Any]:
    """A row of steps with their values, by a solver that gets each step wrong with probability ``mistakes``.

    After a wrong step, the solver continues from the wrong total.
    """
    steps, right, total = [], True, question[0]
    left = len(question) - 1
    for k, number in enumerate(question[1:], start=2):
        true = total + number
        stated = wrong_total(rng, true, question[k:]) if rng.random() < mistakes else true
        steps.append({"step": f"{total}{number:+d}={stated}"})
        # A second mistake may lead back to the correct total, but a solution with a wrong step never counts as right.
        right, total, left = right and stated == true, stated, left - 1
        steps[-1]["Q"] = estimated_value(rng, right, left, mistakes, attempts)
    return {"instruction": question_text(question), "output": steps}


def estimated_value(rng: random.Random, right: bool, left: int, mistakes: float, attempts: int) -> float:
    """The mean outcome, 1 or -1, of several attempts to take the steps that are left; -1 after a mistake.

    Args:
        rng: the source of mistakes.
        right: whether all steps so far are right.
        left: number of steps that are left.
        mistakes: probability that a step is wrong.
        attempts: number of attempts.
    """
    won = sum(right and all(rng.random() >= mistakes for _ in range(left)) for _ in range(attempts))
    return 2 * won / attempts - 1


def wrong_total(rng: random.Random, true: int, rest: tuple[int, ...]) -> int:
    """A wrong total that keeps the later totals in [0, 9]; the correct total if there is none."""
    after = [true + sum(rest[:k]) for k in range(len(rest) + 1)]
    others = [by for by in range(-min(after), LARGEST - max(after) + 1) if by]
    return true + rng.choice(others) if others else true


def prompt_row(question: Question) -> dict[str, str]:
    """A prompt with the correct total in the column ``answer``."""
    return {"prompt": question_text(question), "answer": str(running_totals(question)[-1])}


def write_model(folder: Path, seed: int) -> None:
    """Write a character-level tokenizer and a Llama of three layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, LINES)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=192, num_hidden_layers=3, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
