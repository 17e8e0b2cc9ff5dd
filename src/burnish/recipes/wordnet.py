"""Definitions of English nouns from WordNet (Miller 1995), as questions and answers.

WordNet's files come with the Debian package wordnet-base. ``make wordnet`` puts them into data/wordnet.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.types import Trajectory

PLACES = ("data/wordnet", "/usr/share/wordnet")
WORD = re.compile(r"[a-z]{3,}")


class Noun(NamedTuple):
    """A noun with the definition of its first sense: ``Noun("gadget", "a device that is useful for a job")``."""

    word: str
    definition: str


def prepare(
    folder: Path,
    seed: int,
    *,
    dictionary: str | None = None,
    rows: int = 1200,
    pairs: int = 800,
    prompts: int = 256,
    held_out: int = 128,
    longest: int = 90,
) -> None:
    """Write ``data/*.jsonl`` into a folder; the same seed writes the same bytes.

    Every noun is in one training file at most. The held-out nouns are in all evaluation files and in no training file.

    Args:
        folder: where to write.
        seed: seed of the choice of nouns.
        dictionary: folder with ``index.noun`` and ``data.noun``; None looks in the usual places.
        rows: number of nouns with their definition for fine-tuning.
        pairs: number of nouns with their definition and that of another noun.
        prompts: number of nouns to define in PPO.
        held_out: number of nouns that are in no training file.
        longest: maximum length of a definition in characters.

    Raises:
        UserError: if the dictionary is missing or has too few nouns.
    """
    rng = random.Random(seed)
    candidates = [noun for noun in nouns(_dictionary(dictionary)) if len(noun.definition) <= longest]
    needed = held_out + rows + pairs + prompts
    if len(candidates) <= needed:
        raise UserError(
            f"held_out, rows, pairs and prompts add up to {needed} nouns, but the dictionary has only "
            f"{len(candidates)} with a definition of at most {longest} characters: expected more than {needed}"
        )
    rng.shuffle(candidates)
    unseen, taught, compared, asked = (
        candidates[start : start + n]
        for start, n in (
            (0, held_out),
            (held_out, rows),
            (held_out + rows, pairs),
            (held_out + rows + pairs, prompts),
        )
    )
    for name, chosen in (("sft", taught), ("sft-eval", unseen)):
        write_rows(
            folder / "data" / f"{name}.jsonl", ({"prompt": question(n), "completion": n.definition} for n in chosen)
        )
    for name, chosen in (("pairs", compared), ("pairs-eval", unseen)):
        write_rows(
            folder / "data" / f"{name}.jsonl",
            (preference_row(noun, rng.choice(candidates[needed:])) for noun in chosen),
        )
    for name, chosen in (("prompts", asked), ("prompts-eval", unseen)):
        write_rows(folder / "data" / f"{name}.jsonl", ({"prompt": question(n), "answer": n.definition} for n in chosen))


def question(noun: Noun) -> str:
    """The question for a noun: ``Define "gadget".``."""
    return f'Define "{noun.word}".'


def preference_row(noun: Noun, other: Noun) -> dict[str, str]:
    """A preference for the noun's own definition over another noun's."""
    return {"prompt": question(noun), "chosen": noun.definition, "rejected": other.definition}


def overlap(trajectories: list[Trajectory]) -> list[float]:
    """F1 score, in [0, 1], between the words of an answer and those of the definition."""
    return [_f1(_words(t.text), _words(t.columns["answer"])) for t in trajectories]


def _words(text: str) -> set[str]:
    return set(WORD.findall(text.lower()))


def _f1(words: set[str], expected: set[str]) -> float:
    return 2 * len(words & expected) / max(1, len(words) + len(expected))


def _dictionary(folder: str | None) -> Path:
    places = [Path(folder)] if folder else [Path(place) for place in PLACES]
    for place in places:
        if (place / "index.noun").is_file() and (place / "data.noun").is_file():
            return place
    searched = " or ".join(map(str, places))
    raise UserError(
        f"no WordNet in {searched}: run `make wordnet` to fetch it, or install the Debian package wordnet-base"
    )


def nouns(dictionary: Path) -> list[Noun]:
    """One-word nouns that occur in WordNet's tagged texts, in alphabetical order, with their first sense."""
    definitions = {}
    for line in _lines(dictionary / "data.noun"):
        fields, _, gloss = line.partition(" | ")
        definitions[fields.partition(" ")[0]] = gloss.partition('; "')[0].strip()
    tagged_nouns = []
    for line in _lines(dictionary / "index.noun"):
        word, *rest = line.split()
        pointers = int(rest[2])
        tagged, first_sense = int(rest[4 + pointers]), rest[5 + pointers]
        if WORD.fullmatch(word) and tagged > 0:
            tagged_nouns.append(Noun(word, definitions[first_sense]))
    return tagged_nouns


def _lines(path: Path) -> list[str]:
    """The lines after the license, whose own lines begin with a space."""
    return [line for line in path.read_text("utf-8").splitlines() if not line.startswith(" ")]
