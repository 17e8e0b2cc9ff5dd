"""Generates questions such as ``What kind of thing is a robin?``, with step-by-step solutions by a solver that errs.

The solver names the next wider kind in each step (``A robin is a bird.``, ``A bird is an animal.``) and names a wrong
one with a fixed probability. It then continues from the wrong kind. Values are those of
:mod:`burnish.recipes.chains`: the mean outcome of several attempts to continue from a step, and -1 after a mistake.
A pretrained model knows most of these kinds, so few rows are enough to learn the values.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.recipes import write_rows
from burnish.recipes.chains import estimated_value

THINGS = {
    "bird": "sparrow eagle owl robin duck goose crow parrot penguin pigeon swan hawk gull stork raven finch",
    "fish": "salmon trout shark tuna cod carp herring sardine eel pike perch",
    "mammal": "dog cat horse cow lion tiger whale mouse bear wolf fox rabbit sheep goat camel squirrel",
    "insect": "bee ant moth beetle wasp mosquito butterfly cricket fly dragonfly",
    "tree": "oak pine maple birch willow elm cedar poplar spruce beech",
    "flower": "rose tulip daisy lily orchid violet sunflower daffodil poppy",
    "worker": "doctor teacher nurse farmer baker pilot judge lawyer carpenter waiter plumber tailor butcher",
    "fruit": "apple pear banana cherry mango plum grape lemon peach melon orange apricot",
    "vegetable": "carrot onion potato cabbage leek turnip radish cucumber pumpkin",
    "tool": "hammer saw drill wrench chisel shovel rake axe screwdriver",
    "vehicle": "car truck bus bicycle tractor van train tram motorcycle",
    "instrument": "violin piano flute trumpet drum guitar cello harp clarinet",
    "garment": "coat shirt hat sock glove scarf jacket skirt sweater",
    "container": "bottle box bucket jar barrel basket cup bag",
    "building": "church school castle barn hospital library hotel tower",
    "gem": "diamond ruby emerald sapphire opal topaz pearl",
}
"""The narrowest kinds, with things of each, separated by spaces."""

WIDER = {
    **dict.fromkeys(("bird", "fish", "mammal", "insect"), "animal"),
    **dict.fromkeys(("tree", "flower"), "plant"),
    **dict.fromkeys(("fruit", "vegetable"), "food"),
    **dict.fromkeys(("tool", "instrument"), "device"),
    **dict.fromkeys(("garment", "container"), "product"),
    "worker": "person",
    "vehicle": "machine",
    "building": "structure",
    "gem": "mineral",
    **dict.fromkeys(("animal", "plant", "person"), "living thing"),
    **dict.fromkeys(("device", "machine", "product", "structure"), "object"),
}
"""The next wider kind of a kind. The widest have none."""

# The kinds that a solver may name in its first, second and third step.
LEVELS = [sorted(THINGS), sorted({WIDER[kind] for kind in THINGS}), ["living thing", "object"]]


def prepare(
    folder: Path, seed: int, *, rows: int = 200, held_out: int = 64, mistakes: float = 0.2, attempts: int = 8
) -> None:
    """Write ``data/steps.jsonl`` and ``data/steps-eval.jsonl`` into a folder; the same seed writes the same bytes.

    Args:
        folder: where to write.
        seed: seed of the data.
        rows: number of training solutions. Each is about a random thing that is not held out.
        held_out: number of things that are in no training row, with one solution each.
        mistakes: probability that a step is wrong, in [0, 1).
        attempts: number of attempts to continue from each step. Their mean outcome is the value of the step.

    Raises:
        UserError: if a number is out of range.
    """
    things = [(thing, kind) for kind, names in THINGS.items() for thing in names.split()]
    if not 0 <= mistakes < 1:
        raise UserError(f"mistakes: expected a probability in [0, 1), got {mistakes}")
    if attempts < 1:
        raise UserError(f"attempts: expected at least 1, got {attempts}")
    if not 0 < held_out < len(things):
        raise UserError(f"held_out: expected 1 to {len(things) - 1} of the {len(things)} things, got {held_out}")
    rng = random.Random(seed)
    rng.shuffle(things)
    chosen = {"steps": rng.choices(things[held_out:], k=rows), "steps-eval": things[:held_out]}
    for name, drawn in chosen.items():
        solutions = (solution_row(rng, thing, kind, mistakes, attempts) for thing, kind in drawn)
        write_rows(folder / "data" / f"{name}.jsonl", solutions)


def solution_row(rng: random.Random, thing: str, kind: str, mistakes: float, attempts: int) -> dict[str, Any]:
    """A row of steps with their values, by a solver that gets each step wrong with probability ``mistakes``.

    Args:
        rng: the source of mistakes.
        thing: what the question asks about, such as ``robin``.
        kind: its narrowest kind, such as ``bird``.
        mistakes: probability that a step is wrong.
        attempts: number of attempts to continue from each step.
    """
    steps, right, at = [], True, thing
    true: str | None = kind
    for level in LEVELS:
        if true is None:
            break
        stated = rng.choice([other for other in level if other != true]) if rng.random() < mistakes else true
        right = right and stated == true
        value = estimated_value(rng, right, len(wider_kinds(stated)), mistakes, attempts)
        sentence = f"{with_article(at)} is {with_article(stated)}."
        steps.append({"step": sentence[0].upper() + sentence[1:], "Q": value})
        at, true = stated, WIDER.get(stated)
    return {"instruction": f"What kind of thing is {with_article(thing)}?", "output": steps}


def wider_kinds(kind: str) -> list[str]:
    """The kinds that contain a kind, from the next wider one to the widest: ``bird`` gives animal and living thing."""
    return [] if kind not in WIDER else [WIDER[kind], *wider_kinds(WIDER[kind])]


def with_article(noun: str) -> str:
    """The noun with its article: ``a robin``, ``an animal``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
