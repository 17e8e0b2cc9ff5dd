"""Generates puzzles such as ``527 684 587=624``: put + or - before each number so that the result is 624, modulo 1000.

A solution subtracts the numbers from the target, one in each step, in code whose output shows what is left:
``<code>r=624-527;print(r%1000)</code><output>97</output>``, ``<code>r-=684;print(r%1000)</code><output>413</output>``,
``<code>r+=587;print(r%1000)</code><output>0</output>``. The code calculates what a small model cannot, and search finds
the signs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.alphamath import Puzzle, question_row, same_numbers, total
from burnish.recipes.models import LINES, character_tokenizer, random_llama
from burnish.types import Trajectory

CHARACTERS = "0123456789+-= r\n"
WORDS = ("<code>", "</code>", "<output>", "</output>", ";print(r%1000)")
MODULUS = 1000
NUMBERS = range(100, MODULUS)
FIRST = re.compile(r"<code>r=(\d+)-(\d+);print\(r%1000\)</code>")
NEXT = re.compile(r"<code>r([+-])=(\d+);print\(r%1000\)</code>")
OPPOSITE = {"+": "-", "-": "+"}


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 8000,
    questions: int = 1000,
    development: int = 1000,
    held_out: int = 2000,
    numbers: int = 4,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    Every puzzle can be solved, and none is in two of the files.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of puzzles with a solution.
        questions: number of puzzles to search.
        development: number of puzzles to choose settings on.
        held_out: number of puzzles for the final comparison.
        numbers: numbers in each puzzle.

    Raises:
        UserError: ``numbers`` is out of range.
    """
    if not 2 <= numbers <= 6:
        raise UserError(f"numbers: expected 2 to 6, got {numbers}")
    rng = random.Random(seed)
    fresh, data = solutions(rng, numbers), folder / "data"
    for name, count in (("held-out", held_out), ("development", development), ("questions", questions)):
        write_rows(data / f"{name}.jsonl", (question_row(next(fresh)[0]) for _ in range(count)))
    write_rows(data / "solutions.jsonl", (solution_row(*next(fresh)) for _ in range(rows)))
    write_model(folder / "model", seed)


def find(text: str) -> str | None:
    """The expression that the code of a solution calculates, such as ``527+684-587``; None if it has another form."""
    first, *rest = text.strip().split("\n")
    start, others = FIRST.match(first), [NEXT.match(line) for line in rest]
    if start is None:
        return None
    signs = [(OPPOSITE[match[1]], match[2]) for match in others if match is not None]
    return start[2] + "".join(map("".join, signs)) if len(signs) == len(others) else None


def check(answer: str, columns: dict[str, Any]) -> bool:
    """Whether an expression uses all numbers in their order and has the target as its value, modulo 1000."""
    return same_numbers(answer, columns) and total(answer) % MODULUS == int(columns["target"])


def solutions(rng: random.Random, numbers: int) -> Iterator[tuple[Puzzle, list[int]]]:
    """Random puzzles, each once, with the signs, 1 or -1, of a solution."""
    seen: set[Puzzle] = set()
    while True:
        drawn, signs = tuple(rng.choices(NUMBERS, k=numbers)), [1, *rng.choices((1, -1), k=numbers - 1)]
        puzzle = Puzzle(drawn, sum(sign * number for sign, number in zip(signs, drawn, strict=True)) % MODULUS)
        if puzzle not in seen:
            seen.add(puzzle)
            yield puzzle, signs


def solution_row(puzzle: Puzzle, signs: list[int]) -> dict[str, Any]:
    """A puzzle with its solution in steps, whose values are all 1."""
    first, *rest = puzzle.numbers
    left = puzzle.target - first
    codes, outputs = [f"r={puzzle.target}-{first}"], [left]
    for sign, number in zip(signs[1:], rest, strict=True):
        left -= sign * number
        codes.append(f"r{'-' if sign > 0 else '+'}={number}")
        outputs.append(left)
    steps = [
        {"step": f"<code>{code};print(r%1000)</code>", "output": f"<output>{output % MODULUS}</output>", "Q": 1}
        for code, output in zip(codes, outputs, strict=True)
    ]
    return {"instruction": puzzle.text, "output": steps}


def solved(trajectories: list[Trajectory]) -> list[float]:
    """1 for a solution that reaches the target, else 0."""
    answers = [(find(t.text), dict(t.columns)) for t in trajectories]
    return [float(answer is not None and check(answer, columns)) for answer, columns in answers]


def write_model(folder: Path, seed: int) -> None:
    """Write a tokenizer of characters and tags, and a Llama of three layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, LINES, WORDS, max_length=112)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=192, num_hidden_layers=3, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
