"""Generates puzzles such as ``3 6 5 6 2=4``: put + or - before each number so that the result is 4, modulo 10.

A solution takes one number at a time: ``3-6=7``, ``7+5=2``, ``2-6=6``, ``6-2=4``. The student whose solutions a model
first imitates calculates without mistakes, but guesses every sign, so that few of the solutions reach the target. Which
sign is right shows only at the end. This is what search is for.
"""

from __future__ import annotations

import random
import re
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import LINES, character_tokenizer, random_llama
from burnish.types import Trajectory

CHARACTERS = "0123456789+-= \n"
MODULUS = 10
LARGEST = 6
STEP = re.compile(r"(\d)([+-])(\d)=(\d)")


class Puzzle(NamedTuple):
    """Numbers and a target: ``Puzzle((3, 8, 5), 6)``, which ``3+8-5`` solves."""

    numbers: tuple[int, ...]
    target: int

    @property
    def text(self) -> str:
        """``3 8 5=6``."""
        return f"{' '.join(map(str, self.numbers))}={self.target}"


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 8000,
    questions: int = 2000,
    development: int = 1000,
    held_out: int = 2000,
    numbers: int = 5,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    Every puzzle can be solved, and none is in two of the files.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of the student's solutions.
        questions: number of puzzles to search.
        development: number of puzzles to choose settings on.
        held_out: number of puzzles for the final comparison.
        numbers: numbers in each puzzle.

    Raises:
        UserError: a number is out of range, or there are fewer puzzles.
    """
    if not 2 <= numbers <= 6:
        raise UserError(f"numbers: expected 2 to 6, got {numbers}")
    found = puzzles(numbers)
    if (wanted := rows + questions + development + held_out) > len(found):
        raise UserError(
            f"rows + questions + development + held_out: expected at most {len(found):,}, the number of puzzles with "
            f"{numbers} numbers, got {wanted:,}"
        )
    rng = random.Random(seed)
    drawn, data = iter(rng.sample(found, wanted)), folder / "data"
    for name, count in (("held-out", held_out), ("development", development), ("questions", questions)):
        write_rows(data / f"{name}.jsonl", map(question_row, islice(drawn, count)))
    write_rows(data / "sft.jsonl", (solution_row(rng, puzzle) for puzzle in drawn))
    write_model(folder / "model", seed)


def find(text: str) -> str | None:
    """The expression that a solution calculates, such as ``3+8-5``; None if its lines do not continue each other."""
    lines = [STEP.fullmatch(line) for line in text.strip().split("\n")]
    steps = [match.groups() for match in lines if match is not None]
    if len(steps) != len(lines) or any(one[3] != other[0] for one, other in pairwise(steps)):
        return None
    return steps[0][0] + "".join(sign + number for _, sign, number, _ in steps)


def check(answer: str, columns: dict[str, Any]) -> bool:
    """Whether an expression uses all numbers in their order and has the target as its value, modulo 10."""
    return same_numbers(answer, columns) and total(answer) % MODULUS == int(columns["target"])


def same_numbers(answer: str, columns: dict[str, Any]) -> bool:
    """Whether an expression uses all numbers of a puzzle in their order."""
    return re.sub(r"[+-]", " ", answer) == columns["numbers"]


def total(answer: str) -> int:
    """The value of an expression such as ``3-6+5``."""
    return sum(map(int, re.findall(r"[+-]?\d+", answer)))


def solved(trajectories: list[Trajectory]) -> list[float]:
    """1 for a solution that reaches the target, else 0."""
    answers = [(find(t.text), dict(t.columns)) for t in trajectories]
    return [float(answer is not None and check(answer, columns)) for answer, columns in answers]


def puzzles(numbers: int) -> list[Puzzle]:
    """All puzzles with so many numbers that can be solved."""
    found = []
    for drawn in product(range(1, LARGEST + 1), repeat=numbers):
        totals = {drawn[0]}
        for number in drawn[1:]:
            totals = {(total + sign * number) % MODULUS for total in totals for sign in (-1, 1)}
        found += [Puzzle(drawn, total) for total in sorted(totals)]
    return found


def solution_row(rng: random.Random, puzzle: Puzzle) -> dict[str, str]:
    """A puzzle with the student's solution, whose signs are guessed."""
    lines, total = [], puzzle.numbers[0]
    for number in puzzle.numbers[1:]:
        sign = rng.choice("+-")
        result = (total + number if sign == "+" else total - number) % MODULUS
        lines.append(f"{total}{sign}{number}={result}\n")
        total = result
    return {"prompt": puzzle.text, "completion": "".join(lines)}


def question_row(puzzle: Puzzle) -> dict[str, str]:
    """A puzzle with what ``check`` reads in the columns ``numbers`` and ``target``."""
    return {"prompt": puzzle.text, "numbers": " ".join(map(str, puzzle.numbers)), "target": str(puzzle.target)}


def write_model(folder: Path, seed: int) -> None:
    """Write a character-level tokenizer and a Llama of three layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, LINES)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=192, num_hidden_layers=3, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
