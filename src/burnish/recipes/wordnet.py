"""Definitions of English nouns from WordNet (Miller 1995), as questions to be answered.

WordNet's files come with the Debian package wordnet-base; ``make wordnet`` puts them into data/wordnet.
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

    No noun is in two files, but that the held-out ones are asked for in every evaluation.

    Args:
        folder: where to write.
        seed: of the choice of nouns.
        dictionary: folder with ``index.noun`` and ``data.noun``; else the places where they usually are.
        rows: nouns with their definition, to fine-tune on.
        pairs: nouns with their definition and that of another noun.
        prompts: nouns to be defined in PPO.
        held_out: nouns that no training file has.
        longest: characters of a definition at most.

    Raises:
        UserError: the dictionary is not there, or has too few nouns.
    """
    rng = random.Random(seed)
    found = [noun for noun in nouns(_dictionary(dictionary)) if len(noun.definition) <= longest]
    needed = held_out + rows + pairs + prompts
    if len(found) <= needed:
        have = f"the dictionary has {len(found)} with so short a definition"
        raise UserError(f"{needed} nouns are asked for, and others to compare them with: {have}")
    rng.shuffle(found)
    unseen, taught, compared, asked = (
        found[start : start + n]
        for start, n in (
            (0, held_out),
            (held_out, rows),
            (held_out + rows, pairs),
            (held_out + rows + pairs, prompts),
        )
    )
    for name, chosen in (("sft", taught), ("sft-eval", unseen)):
        write_rows(folder / "data" / f"{name}.jsonl", ({"prompt": ask(n), "completion": n.definition} for n in chosen))
    for name, chosen in (("pairs", compared), ("pairs-eval", unseen)):
        write_rows(folder / "data" / f"{name}.jsonl", (pair(noun, rng.choice(found[needed:])) for noun in chosen))
    for name, chosen in (("prompts", asked), ("prompts-eval", unseen)):
        write_rows(folder / "data" / f"{name}.jsonl", ({"prompt": ask(n), "answer": n.definition} for n in chosen))


def ask(noun: Noun) -> str:
    """What is asked of a noun: ``Define "gadget".``."""
    return f'Define "{noun.word}".'


def pair(noun: Noun, other: Noun) -> dict[str, str]:
    """A preference for the noun's own definition over that of another one."""
    return {"prompt": ask(noun), "chosen": noun.definition, "rejected": other.definition}


def overlap(trajectories: list[Trajectory]) -> list[float]:
    """F1 of the words of an answer and of the definition, in [0, 1]: a judge that no training sees."""
    return [_f1(_words(t.text), _words(t.columns["answer"])) for t in trajectories]


def _words(text: str) -> set[str]:
    return set(WORD.findall(text.lower()))


def _f1(found: set[str], expected: set[str]) -> float:
    return 2 * len(found & expected) / max(1, len(found) + len(expected))


def _dictionary(folder: str | None) -> Path:
    places = [Path(folder)] if folder else [Path(place) for place in PLACES]
    for place in places:
        if (place / "index.noun").is_file() and (place / "data.noun").is_file():
            return place
    looked = " or ".join(map(str, places))
    raise UserError(f"no WordNet in {looked}: `make wordnet` fetches it (or install the Debian package wordnet-base)")


def nouns(dictionary: Path) -> list[Noun]:
    """Nouns of one word that occur in WordNet's tagged texts, in the dictionary's order, each in its first sense."""
    definitions = {}
    for line in _lines(dictionary / "data.noun"):
        fields, _, gloss = line.partition(" | ")
        definitions[fields.partition(" ")[0]] = gloss.partition('; "')[0].strip()
    found = []
    for line in _lines(dictionary / "index.noun"):
        word, *rest = line.split()
        pointers = int(rest[2])
        tagged, first_sense = int(rest[4 + pointers]), rest[5 + pointers]
        if WORD.fullmatch(word) and tagged > 0:
            found.append(Noun(word, definitions[first_sense]))
    return found


def _lines(path: Path) -> list[str]:
    """Lines after the licence, whose own begin with a space."""
    return [line for line in path.read_text("utf-8").splitlines() if not line.startswith(" ")]
