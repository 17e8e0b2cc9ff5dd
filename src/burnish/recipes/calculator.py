"""Sums and products of two-digit numbers, with a calculator that a model may call.

The model learns from someone who always knows the answer and sometimes calls the calculator all the same. A small model
can add in its head but not multiply, so it has to call the calculator more often than that.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import TURNS, character_tokenizer, random_llama
from burnish.types import Trajectory

CHARACTERS = "0123456789+*=>[]()"
WORDS = ("<tool>", "</tool>", "calculator")
NUMBERS = range(10, 100)


class Question(NamedTuple):
    """Two numbers to add or multiply: ``Question(34, "*", 58)``."""

    first: int
    operator: str
    second: int

    @property
    def text(self) -> str:
        """``34*58``."""
        return f"{self.first}{self.operator}{self.second}"

    @property
    def answer(self) -> str:
        """``1972``."""
        return str(self.first + self.second if self.operator == "+" else self.first * self.second)


def calculator(expression: str) -> str:
    """Add or multiply two numbers.

    Args:
        expression: such as 34+58 or 34*58.
    """
    match = re.fullmatch(r"(\d{1,9})([+*])(\d{1,9})", expression)
    if match is None:
        raise ValueError("expected a sum or a product")
    first, operator, second = match.groups()
    return Question(int(first), operator, int(second)).answer


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 16000,
    prompts: int = 1024,
    held_out: int = 512,
    calls: float = 0.2,
    without: float = 0.2,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    A question is as often a sum as a product. No question of an evaluation file is in a training file.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of conversations for fine-tuning.
        prompts: number of questions without an answer.
        held_out: number of the 16,200 questions that are in no training file.
        calls: fraction of the conversations in which the calculator is called, in [0, 1].
        without: fraction of the conversations in which there is no calculator, in [0, 1].

    Raises:
        UserError: if a number is out of range.
    """
    if calls < 0 or without < 0 or calls + without > 1:
        raise UserError(f"calls and without: expected fractions whose sum is at most 1, got {calls} and {without}")
    rng = random.Random(seed)
    questions = [Question(a, operator, b) for a in NUMBERS for operator in "+*" for b in NUMBERS]
    if not 0 < held_out < len(questions):
        raise UserError(
            f"held_out: expected 1 to {len(questions) - 1} of the {len(questions)} questions, got {held_out}"
        )
    rng.shuffle(questions)
    unseen, seen = questions[:held_out], questions[held_out:]
    data = folder / "data"
    write_rows(data / "sft.jsonl", (sft_row(rng, rng.choice(seen), calls, without) for _ in range(rows)))
    write_rows(data / "prompts.jsonl", (prompt_row(rng.choice(seen)) for _ in range(prompts)))
    write_rows(data / "prompts-eval.jsonl", map(prompt_row, unseen))
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 if the last turn is exactly the answer, else 0."""
    return [float(t.turns[-1].text == t.columns["answer"]) for t in trajectories]


def called(trajectories: list[Trajectory]) -> list[float]:
    """1 if a tool was called, else 0."""
    return [float(bool(t.tool_calls)) for t in trajectories]


def sft_row(rng: random.Random, question: Question, calls: float, without: float) -> dict[str, Any]:
    """A conversation that ends with the correct answer."""
    from transformers.utils.chat_template_utils import get_json_schema

    draw = rng.random()
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    if draw < calls:
        call = {"name": "calculator", "arguments": {"expression": question.text}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calculator", "content": question.answer})
    messages.append({"role": "assistant", "content": question.answer})
    tools = [] if draw > 1 - without else [get_json_schema(calculator)]
    return {"messages": messages, "tools": tools}


def prompt_row(question: Question) -> dict[str, str]:
    """A prompt with the correct answer in the column ``answer``."""
    return {"prompt": question.text, "answer": question.answer}


def write_model(folder: Path, seed: int) -> None:
    """Write a tokenizer of characters and three words, and a Llama of two layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, TURNS, WORDS)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=384, num_hidden_layers=2, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
