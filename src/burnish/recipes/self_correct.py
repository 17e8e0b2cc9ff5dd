"""Two-digit addition with a second attempt: an environment says whether the first answer is wrong.

The model learns from someone who is often wrong, and who repeats or changes a wrong answer without thinking again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from burnish import Observation
from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import TURNS, character_tokenizer, random_llama
from burnish.recipes.tiny import Question, prompt_row, question_text, wrong_answer
from burnish.types import Message, Trajectory

CHARACTERS = "0123456789+="
WRONG = "wrong"
REPEATED = 0.5


class Check:
    """Says whether an answer is wrong. It may then be corrected once. The reward is 1 for a correct answer."""

    def reset(self, answer: str, **columns: Any) -> None:
        """Begin an episode."""
        self.answer = answer
        self.attempts = 0

    def respond(self, message: Message) -> Observation:
        """Check an answer."""
        self.attempts += 1
        right = message["content"] == self.answer
        done = right or self.attempts == 2
        return Observation(() if done else WRONG, done, float(right))


def prepare(
    folder: Path,
    seed: int,
    *,
    rows: int = 12000,
    prompts: int = 2048,
    held_out: int = 512,
    corrupted: float = 0.5,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    No question of an evaluation file is in a training file.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of conversations for fine-tuning.
        prompts: number of questions without an answer.
        held_out: number of the 8,100 questions that are in no training file.
        corrupted: fraction of wrong first answers, and of wrong second ones, in [0, 1].

    Raises:
        UserError: if nothing would be left to train on.
    """
    rng = random.Random(seed)
    questions = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    if not 0 < held_out < len(questions):
        raise UserError(
            f"held_out: expected 1 to {len(questions) - 1} of the {len(questions)} questions, got {held_out}"
        )
    rng.shuffle(questions)
    unseen, seen = questions[:held_out], questions[held_out:]
    data = folder / "data"
    write_rows(data / "sft.jsonl", (sft_row(rng, rng.choice(seen), corrupted) for _ in range(rows)))
    write_rows(data / "prompts.jsonl", (prompt_row(rng.choice(seen)) for _ in range(prompts)))
    write_rows(data / "prompts-eval.jsonl", map(prompt_row, unseen))
    write_rows(data / "corrections-eval.jsonl", (correction_row(rng, question) for question in unseen))
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 if the last answer is exactly the sum, else 0."""
    return [float(t.turns[-1].text == t.columns["answer"]) for t in trajectories]


def sft_row(rng: random.Random, question: Question, corrupted: float) -> dict[str, Any]:
    """A conversation with one answer, or with two if the first is wrong. Half of the wrong second ones repeat it."""
    total = sum(question)
    if rng.random() >= corrupted:
        return {"messages": [*asked(question), answered(total)]}
    first = second = wrong_answer(rng, total)
    if rng.random() >= corrupted:
        second = total
    elif rng.random() >= REPEATED:
        second = wrong_answer(rng, total)
    return {"messages": [*asked(question), answered(first), {"role": "user", "content": WRONG}, answered(second)]}


def correction_row(rng: random.Random, question: Question) -> dict[str, Any]:
    """A prompt that asks to correct a wrong answer."""
    messages = [*asked(question), answered(wrong_answer(rng, sum(question))), {"role": "user", "content": WRONG}]
    return {"prompt": messages, "answer": str(sum(question))}


def asked(question: Question) -> list[Message]:
    """A question as a message."""
    return [{"role": "user", "content": question_text(question)}]


def answered(number: int) -> Message:
    """An answer as a message."""
    return {"role": "assistant", "content": str(number)}


def write_model(folder: Path, seed: int) -> None:
    """Write a tokenizer of characters and one word, and a Llama of two layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, TURNS, (WRONG,))
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=384, num_hidden_layers=2, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
