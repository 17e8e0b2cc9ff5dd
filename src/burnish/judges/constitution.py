"""Principles by which models critique, revise and judge answers (Bai et al., "Constitutional AI", 2022)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import SequenceNode

from burnish.errors import UserError
from burnish.files import expanded
from burnish.mistakes import dotted, mistakes, shown
from burnish.types import Config

SHIPPED = Path(__file__).with_name("constitution.yaml")
"""The constitution that is used unless a recipe names another one."""
LONGEST = 300_000
"""Maximum number of characters of a constitution."""

Use = Literal["critique", "revise", "compare"]


class Principle(Config):
    """One principle of a constitution: ``Principle(name="clear", critique="Find ...", revise="Rewrite ...")``."""

    name: str = Field(min_length=1, description="a short name, by which rows and reports refer to the principle")
    critique: str | None = Field(None, min_length=1, description="what to look for in an answer")
    revise: str | None = Field(None, min_length=1, description="how to change the answer")
    compare: str | None = Field(None, min_length=1, description="what a judge prefers of two replies")


def load_constitution(path: str | Path | None = None, uses: Collection[Use] = ()) -> tuple[Principle, ...]:
    """Read the principles of a YAML file: a list of blocks with ``name`` and the texts of ``Principle``.

    Args:
        path: the file; None reads the constitution that comes with Burnish.
        uses: the texts that every principle must have, such as ``("critique", "revise")``.

    Raises:
        UserError: the file cannot be read, is not such a list, or a principle is wrong. The message names the line.
    """
    file = SHIPPED if path is None else expanded(str(path))
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{file}: {reason}: expected a YAML list of principles") from error
    values, lines = _parse(text, str(file))
    principles = []
    for value, line in zip(values, lines, strict=True):
        at = f"{file}:{line}"
        if not isinstance(value, dict):
            raise UserError(f"{at}: expected a block with name: and one of {', '.join(_TEXTS)}, got {shown(value)}")
        try:
            principles.append(Principle.model_validate(value))
        except pydantic.ValidationError as error:
            keys, problem = mistakes(error, Principle, value)[0]
            raise UserError(f"{at}: {dotted(keys)}: {problem}") from None
    check_principles(principles, uses, [f"{file}:{line}" for line in lines])
    return tuple(principles)


_TEXTS = tuple(name for name in Principle.model_fields if name != "name")


def check_principles(principles: Sequence[Principle], uses: Collection[Use], places: Sequence[str]) -> None:
    """Check that principles have different names and the texts that they are used for.

    Args:
        principles: the principles.
        uses: the texts that every principle must have.
        places: where each principle is written, for messages.

    Raises:
        UserError: two have one name, or a text is missing.
    """
    first: dict[str, str] = {}
    for principle, place in zip(principles, places, strict=True):
        if principle.name in first:
            raise UserError(
                f"{place}: name: {principle.name!r} is the name of two principles, first {first[principle.name]}"
            )
        first[principle.name] = place
        if lacking := [use for use in uses if getattr(principle, use) is None]:
            raise UserError(f"{place}: the principle {principle.name!r} has no {lacking[0]}:, which is needed here")


def _parse(text: str, label: str) -> tuple[list[Any], list[int]]:
    """The elements of a YAML list, and the line of each.

    Raises:
        UserError: the text is not YAML, or no list with elements.
    """
    if len(text) > LONGEST:
        raise UserError(f"{label}: {len(text):,} characters: a constitution has at most {LONGEST:,}")
    try:
        root = YAML(typ="safe", pure=True).compose(text)
        values = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{label}{line}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError) as error:
        raise UserError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(root, SequenceNode) or not values:
        found = "an empty list" if values == [] else shown(values)
        raise UserError(f"{label}: expected a list of principles, each with name: and its texts, got {found}")
    return values, [node.start_mark.line + 1 for node in root.value]
