"""A game over several turns: find a number from 1 to 15 in four guesses, told after each whether it is higher or lower.

The model learns from a careless player, who halves the remaining range in a quarter of the turns. Otherwise this player
heeds only the last reply. Half of the games are lost. Someone who always halves the range wins every game.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.models import TURNS, character_tokenizer, random_llama

NUMBERS = range(1, 16)
GUESSES = 4
WORDS = ("<tool>guess(", ")</tool>", "guess", "higher", "lower", "right", *map(str, reversed(NUMBERS)))


class Guess:
    """A game in TRL's contract: ``reset`` begins it, ``guess`` is a tool, and ``reward`` is 1 once the number is found.

    ``reset`` reads the number from a column of the row, so that a row is the same game for every model.
    """

    reward = 0.0
    done = False

    def reset(self, number: int, **columns: Any) -> None:
        """Begin a game."""
        self.number = number

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 1 to 15.
        """
        if number == self.number:
            self.reward, self.done = 1.0, True
            return "right"
        return "higher" if number < self.number else "lower"


def prepare(
    folder: Path, seed: int, *, rows: int = 6000, prompts: int = 4096, held_out: int = 512, halved: float = 0.25
) -> None:
    """Write ``data/*.jsonl`` and a random ``model`` into a folder; the same seed writes the same bytes.

    Args:
        folder: where to write.
        seed: seed of the data and the weights.
        rows: number of games to learn from.
        prompts: number of games to play.
        held_out: number of games to play in an evaluation.
        halved: fraction of the turns in which the player halves the remaining range, in [0, 1].

    Raises:
        UserError: if ``halved`` is out of range.
    """
    if not 0 <= halved <= 1:
        raise UserError(f"halved: expected a fraction in [0, 1], got {halved}")
    rng = random.Random(seed)
    data = folder / "data"
    write_rows(data / "sft.jsonl", (sft_row(rng, halved) for _ in range(rows)))
    for name, number in (("prompts", prompts), ("prompts-eval", held_out)):
        write_rows(data / f"{name}.jsonl", ({"prompt": "?", "number": rng.choice(NUMBERS)} for _ in range(number)))
    write_model(folder / "model", seed)


def sft_row(rng: random.Random, halved: float) -> dict[str, Any]:
    """A game of the careless player. It ends with the last guess."""
    from transformers.utils.chat_template_utils import get_json_schema

    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    for number, reply in game(rng, halved):
        call = {"name": "guess", "arguments": {"number": number}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "guess", "content": reply})
    return {"messages": messages[:-1], "tools": [get_json_schema(Guess.guess)]}


def game(rng: random.Random, halved: float) -> Iterator[tuple[int, str]]:
    """The guesses and replies of a game of the careless player."""
    guess = Guess()
    guess.reset(rng.choice(NUMBERS))
    remaining = allowed = list(NUMBERS)
    for _ in range(GUESSES):
        number = remaining[len(remaining) // 2] if rng.random() < halved else rng.choice(allowed)
        reply = guess.guess(number)
        yield number, reply
        if guess.done:
            return
        allowed = [other for other in NUMBERS if (other > number if reply == "higher" else other < number)]
        remaining = [other for other in remaining if other in allowed]


def write_model(folder: Path, seed: int) -> None:
    """Write a tokenizer of words and a Llama of two layers with random weights."""
    tokenizer = character_tokenizer("?=>[]", TURNS, WORDS)
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=384, num_hidden_layers=2, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
