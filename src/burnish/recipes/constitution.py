"""Two-digit addition by a model that criticizes, revises and judges its own manners.

It learns all of this from someone who often shouts and insults, and who overlooks some of it in an answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.judges.questions import PAIR, pair_question
from burnish.recipes import write_rows
from burnish.recipes.models import TURNS, character_tokenizer, random_llama
from burnish.recipes.tiny import Question, prompt_row, question_text
from burnish.types import Message, Trajectory

CHARACTERS = "0123456789+=!"
INSULT, SHOUT = "silly", "!"
FAULTS = {"insults?": INSULT, "shouts?": SHOUT}
"""What an answer may have besides a number, by the request for its critique."""
REVISE = "fix"
YES, NO = "yes", "no"
MARKS = "\1", "\2", "\3"


def prepare(
    folder: Path,
    seed: int,
    *,
    principle: str,
    rows: int = 8000,
    questions: int = 4000,
    prompts: int = 2048,
    held_out: int = 512,
    rude: float = 0.4,
    overlooked: float = 0.3,
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    No sum of ``prompts-eval.jsonl`` is in a training file.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        principle: what the judge is asked to prefer.
        rows: number of conversations: a sum, an answer, a critique and a revision.
        questions: number of pairs of answers, as a judge is asked about them, with the letter of the more polite one.
        prompts: number of sums without an answer.
        held_out: number of the 8,100 sums that are in no training file.
        rude: fraction of answers that insult, and of those that shout, in [0, 1].
        overlooked: fraction of insults and shouts that a critique does not find, in [0, 1].

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
    revised = (conversation_row(rng, rng.choice(seen), rude, overlooked) for _ in range(rows))
    write_rows(data / "conversations.jsonl", revised)
    write_rows(data / "questions.jsonl", (question_row(rng, rng.choice(seen), principle) for _ in range(questions)))
    write_rows(data / "prompts.jsonl", (prompt_row(rng.choice(seen)) for _ in range(prompts)))
    write_rows(data / "prompts-eval.jsonl", map(prompt_row, unseen))
    words = (*FAULTS, INSULT, REVISE, YES, NO, *parts_of_question(principle), *PAIR)
    tokenizer = character_tokenizer(CHARACTERS, TURNS, words, max_length=512)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=384, num_hidden_layers=2, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")


def polite(trajectories: list[Trajectory]) -> list[float]:
    """1 if an answer neither insults nor shouts, else 0."""
    return [float(not any(fault in t.text for fault in FAULTS.values())) for t in trajectories]


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 if the number in an answer is the sum, else 0."""
    return [float(without(t.text, FAULTS.values()) == t.columns["answer"]) for t in trajectories]


def without(answer: str, faults: Iterable[str]) -> str:
    """An answer without faults."""
    for fault in faults:
        answer = answer.replace(fault, "")
    return answer


def answer_to(question: Question, *, insults: bool, shouts: bool) -> str:
    """The sum, with these faults: ``silly42!``."""
    return f"{INSULT * insults}{sum(question)}{SHOUT * shouts}"


def conversation_row(rng: random.Random, question: Question, rude: float, overlooked: float) -> dict[str, Any]:
    """A sum with an answer, a critique that looks for one fault, and the answer without it if it was found."""
    answer = answer_to(question, insults=rng.random() < rude, shouts=rng.random() < rude)
    request, fault = rng.choice(list(FAULTS.items()))
    found = fault in answer and rng.random() >= overlooked
    revision = without(answer, [fault]) if found else answer
    texts = [question_text(question), answer, request, YES if found else NO, REVISE, revision]
    return {"messages": [_said("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]}


def question_row(rng: random.Random, question: Question, principle: str) -> dict[str, str]:
    """Two answers with different numbers of faults, as the judge is asked about them, and the better one's letter."""
    manners = [(insults, shouts) for insults in (False, True) for shouts in (False, True)]
    pairs = [(one, two) for one in manners for two in manners if sum(one) != sum(two)]
    both = rng.choice(pairs)
    first, second = (answer_to(question, insults=insults, shouts=shouts) for insults, shouts in both)
    text = asked(question_text(question), first, second, principle)
    return {"prompt": text, "completion": PAIR[sum(both[0]) > sum(both[1])]}


def asked(question: str, first: str, second: str, principle: str) -> str:
    """What a judge is asked about two answers."""
    one, other = (_said("assistant", first),), (_said("assistant", second),)
    return pair_question((_said("user", question),), one, other, principle).messages[-1]["content"]


def parts_of_question(principle: str) -> tuple[str, ...]:
    """The text before, between and after a sum and its answers in the judge's question. Each is one token."""
    return tuple(sorted(set(re.split("|".join(MARKS), asked(*MARKS, principle))), key=len, reverse=True))


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
