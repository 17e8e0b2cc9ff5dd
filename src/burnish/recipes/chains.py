r"""Chain sums such as ``3+4-2+4=?``, solved step by step by a solver that errs, with all of its data made on the spot.

A solver takes one step after the other (``3+4=7``, ``7-2=5``, ``5+4=9``) and gets each wrong with one probability;
nothing that follows a mistake mends it. The value of a step is what a tree search would give it: the mean outcome, 1
or -1, of a few attempts to go on from there. After a mistake that is -1; before one it is an estimate, and the nearer
the end, the less it varies.
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

CHARACTERS = "0123456789+-=?\n"
LARGEST = 9
TERMS = (4, 5)
NUMBERS = range(1, 7)

# A question and its solution read "<bos>3+4-2=?\n3+4=7\n7-2=5\n<eos>".
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '\\n' -}}
{%- endif -%}
{%- endfor -%}"""

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
        seed: of the data and of the weights.
        rows: solutions to learn from, each of a question drawn anew.
        prompts: questions without a solution.
        held_out: questions that no training file has, with one solution each.
        mistakes: probability that a step is wrong, in [0, 1).
        attempts: solutions that are tried from each step, whose mean outcome is its value.

    Raises:
        UserError: a number is out of its range.
    """
    if not 0 <= mistakes < 1:
        raise UserError(f"mistakes: expected a probability in [0, 1), got {mistakes}")
    if attempts < 1 or held_out < 1:
        raise UserError(f"attempts and held_out: expected at least 1, got {attempts} and {held_out}")
    rng = random.Random(seed)
    unseen: dict[Question, None] = {}
    while len(unseen) < held_out:
        unseen[ask(rng)] = None

    def seen() -> Iterator[Question]:
        while True:
            question = ask(rng)
            if question not in unseen:
                yield question

    data, questions = folder / "data", seen()
    write_rows(data / "steps.jsonl", (solved(rng, next(questions), mistakes, attempts) for _ in range(rows)))
    write_rows(data / "steps-eval.jsonl", (solved(rng, question, mistakes, attempts) for question in unseen))
    write_rows(data / "prompts.jsonl", (asked(next(questions)) for _ in range(prompts)))
    write_rows(data / "prompts-eval.jsonl", map(asked, unseen))
    write_model(folder / "model", seed)


def exact(trajectories: list[Trajectory]) -> list[float]:
    """1 where the last line of an answer ends in the right total, and 0 elsewhere."""
    return [float(t.text.strip().rpartition("=")[2] == t.columns["answer"]) for t in trajectories]


def ask(rng: random.Random) -> Question:
    """A first number and what is added to it in turn, whose totals all lie in [0, 9]: ``(3, 4, -2, 4)``."""
    while True:
        added = (rng.choice((-1, 1)) * rng.choice(NUMBERS) for _ in range(rng.choice(TERMS) - 1))
        question = (rng.choice(NUMBERS), *added)
        if all(0 <= total <= LARGEST for total in totals(question)):
            return question


def totals(question: Question) -> list[int]:
    """The right totals: ``totals((3, 4, -2, 4))`` is ``[7, 5, 9]``."""
    return [sum(question[: k + 1]) for k in range(1, len(question))]


def spell(question: Question) -> str:
    """``3+4-2+4=?``."""
    return f"{question[0]}{''.join(f'{n:+d}' for n in question[1:])}=?"


def solved(rng: random.Random, question: Question, mistakes: float, attempts: int) -> dict[str, Any]:
    """A row of steps with their values, by a solver that gets each step wrong with probability ``mistakes``.

    The steps after a wrong one go on from its total, rightly or not.
    """
    steps, right, total = [], True, question[0]
    left = len(question) - 1
    for k, number in enumerate(question[1:], start=2):
        true = total + number
        found = slip(rng, true, question[k:]) if rng.random() < mistakes else true
        steps.append({"step": f"{total}{number:+d}={found}"})
        # a second slip may lead back to the right total, but no solution with a wrong step counts as right
        right, total, left = right and found == true, found, left - 1
        won = sum(right and all(rng.random() >= mistakes for _ in range(left)) for _ in range(attempts))
        steps[-1]["Q"] = 2 * won / attempts - 1
    return {"instruction": spell(question), "output": steps}


def slip(rng: random.Random, true: int, rest: tuple[int, ...]) -> int:
    """A wrong total that keeps those after it in [0, 9], where there is one."""
    after = [true + sum(rest[:k]) for k in range(len(rest) + 1)]
    others = [by for by in range(-min(after), LARGEST - max(after) + 1) if by]
    return true + rng.choice(others) if others else true


def asked(question: Question) -> dict[str, str]:
    """A prompt with the right total in a column of its own."""
    return {"prompt": spell(question), "answer": str(totals(question)[-1])}


def write_model(folder: Path, seed: int) -> None:
    """A tokenizer of one token for each character, and a Llama of three layers with random weights."""
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=192, num_hidden_layers=3, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
