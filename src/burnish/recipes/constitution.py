"""Two-digit addition by a model that criticizes, revises and judges its own answers.

It learns all of this from someone who is often wrong, and who overlooks many of the mistakes in an answer.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.judges.questions import PAIR, pair_question
from burnish.recipes import write_rows
from burnish.recipes.models import TURNS, character_tokenizer, random_llama
from burnish.recipes.tiny import Question, prompt_row, question_text, wrong_answer
from burnish.types import Message

CHARACTERS = "0123456789+="
REQUESTS = {"ones": "ones?", "tens": "tens?"}
"""The request for a critique of each digit."""
REVISE = "fix"
RIGHT, WRONG = "right", "wrong"
MARKS = "\1", "\2", "\3"


def prepare(
    folder: Path,
    seed: int,
    *,
    principle: str,
    rows: int = 12000,
    questions: int = 8000,
    prompts: int = 4096,
    held_out: int = 512,
    corrupted: float = 0.4,
    overlooked: float = 0.3,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    No sum of ``prompts-eval.jsonl`` is in a training file.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        principle: what the judge is asked to prefer.
        rows: number of conversations: a sum, an answer, a critique and a revision.
        questions: number of pairs of answers, as a judge is asked about them, with the right choice.
        prompts: number of sums without an answer.
        held_out: number of the 8,100 sums that are in no training file.
        corrupted: fraction of wrong answers, in [0, 1].
        overlooked: fraction of mistakes that a critique calls right, in [0, 1].

    Raises:
        UserError: if nothing would be left to train on.
    """
    rng = random.Random(seed)
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    if not 0 < held_out < len(sums):
        raise UserError(f"held_out: expected 1 to {len(sums) - 1} of the {len(sums)} sums, got {held_out}")
    rng.shuffle(sums)
    unseen, seen = sums[:held_out], sums[held_out:]
    data = folder / "data"
    revised = (conversation_row(rng, rng.choice(seen), corrupted, overlooked) for _ in range(rows))
    write_rows(data / "conversations.jsonl", revised)
    write_rows(data / "questions.jsonl", (question_row(rng, rng.choice(seen), principle) for _ in range(questions)))
    write_rows(data / "prompts.jsonl", (prompt_row(rng.choice(seen)) for _ in range(prompts)))
    write_rows(data / "prompts-eval.jsonl", map(prompt_row, unseen))
    words = (*REQUESTS.values(), REVISE, RIGHT, WRONG, *parts_of_question(principle), *PAIR)
    tokenizer = character_tokenizer(CHARACTERS, TURNS, words, max_length=512)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=384, num_hidden_layers=2, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")


def conversation_row(rng: random.Random, question: Question, corrupted: float, overlooked: float) -> dict[str, Any]:
    """A sum with an answer, a critique of one of its digits, and the answer with this digit revised."""
    total = sum(question)
    answer = wrong_answer(rng, total) if rng.random() < corrupted else total
    digit, request = rng.choice(list(REQUESTS.items()))
    differs = answer % 10 != total % 10 if digit == "ones" else answer // 10 != total // 10
    found = differs and rng.random() >= overlooked
    texts = [question_text(question), answer, request, WRONG if found else RIGHT, REVISE, total if found else answer]
    return {"messages": [_said("user" if i % 2 == 0 else "assistant", str(text)) for i, text in enumerate(texts)]}


def question_row(rng: random.Random, question: Question, principle: str) -> dict[str, str]:
    """A correct and a wrong answer in random order, as the judge is asked about them, and the correct one's letter."""
    total = sum(question)
    replies = [total, wrong_answer(rng, total)]
    rng.shuffle(replies)
    text = asked(question_text(question), *map(str, replies), principle)
    return {"prompt": text, "completion": PAIR[replies.index(total)]}


def asked(question: str, first: str, second: str, principle: str) -> str:
    """What a judge is asked about two answers."""
    prompt, *replies = (_said("user", question),), (_said("assistant", first),), (_said("assistant", second),)
    return pair_question(prompt, *replies, principle).messages[-1]["content"]


def parts_of_question(principle: str) -> tuple[str, ...]:
    """The text before, between and after a sum and its answers in the judge's question. Each is one token."""
    return tuple(sorted(set(re.split("|".join(MARKS), asked(*MARKS, principle))), key=len, reverse=True))


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
