"""YAML with the file and line of every key, overrides, and messages that name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML, RoundTripConstructor
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from burnish.errors import UserError, did_you_mean
from burnish.mistakes import Keys, Problem, dotted, find, shown

OVERRIDE = "command line"
DEEPEST = 32


@dataclass(frozen=True)
class Document:
    """Plain values and where they were written: ``Document({"seed": 1}, {(): "r.yaml", ("seed",): "r.yaml:3"})``."""

    value: Any
    places: dict[Keys, str]
    hidden: Keys = ()
    """A prefix of all paths that the file omits. Messages omit it too."""

    def where(self, path: Keys) -> str:
        """The place of a key, or of the nearest enclosing block that was written."""
        return next(self.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.places)


# --- reading ------------------------------------------------------------------------------------------------------


class _DuplicateKey(YAMLError):
    """``_DuplicateKey(3, "seed: this key is written twice, first in line 2")``."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class _Constructor(RoundTripConstructor):
    """Keeps dates as text, and reports both lines of a duplicate key."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if key in mapping:
            first, second = mapping.lc.key(key)[0] + 1, key_node.start_mark.line + 1
            raise _DuplicateKey(second, f"{key}: this key is written twice, first in line {first}")
        return True


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)


def read(text: str, label: str) -> Document:
    """Parse YAML 1.2. ``label`` names the file in messages.

    Raises:
        UserError: if there is a syntax error, a duplicate key, or a value that is not plain YAML.
    """
    yaml = YAML()
    yaml.Constructor = _Constructor
    try:
        root = yaml.load(text)
    except _DuplicateKey as error:
        raise UserError(f"{label}:{error.line}: {error}") from error
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{label}{line}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error
    places: dict[Keys, str] = {(): label}
    return Document(_plain(root, (), places, label), places)


def _plain(value: Any, path: Keys, places: dict[Keys, str], label: str) -> Any:
    """Convert the values of ruamel.yaml to plain Python values, and collect their lines in ``places``."""
    at = next(places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in places)
    if len(path) > DEEPEST:
        raise UserError(f"{at}: more than {DEEPEST} blocks inside each other")
    if isinstance(value, CommentedMap):
        lines = {key: f"{label}:{place[0] + 1}" for key, place in (value.lc.data or {}).items()}
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{lines.get(key, at)}: a key must be text, got {shown(key)}: put it in quotes")
            if key in lines:  # a key from a merge (<<) has no line here
                places[(*path, key)] = lines[key]
        return {str(key): _plain(item, (*path, str(key)), places, label) for key, item in value.items()}
    if isinstance(value, CommentedSeq):
        for index in range(len(value)):
            places[(*path, index)] = f"{label}:{value.lc.item(index)[0] + 1}"
        return [_plain(item, (*path, index), places, label) for index, item in enumerate(value)]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is not None:
        raise UserError(f"{at}: expected text, a number, true, false, null, a list or keys, got {value}")
    return None


def override(document: Document, text: str) -> Document:
    """Apply one ``dotted.path=value``. Elements of a list are addressed by index or by their ``name``."""
    keys, equals, written = text.partition("=")
    if not equals or not all(keys.split(".")):
        raise UserError(f"{OVERRIDE}: {text!r} is not key=value, for instance trainer.learning_rate=1e-5")
    value = read(written, f"{OVERRIDE}: {keys}").value
    path: Keys = ()
    for key in keys.split("."):
        path = (*path, _step(document.value, path, key, text))
    replaced = _replace(document.value, path, value)
    kept = {place: at for place, at in document.places.items() if place[: len(path)] != path}
    return Document(replaced, {**kept, path: OVERRIDE})


def _at(value: Any, path: Keys) -> Any:
    for key in path:
        value = (value or {}).get(key) if isinstance(key, str) else value[key]
    return value


def _step(root: Any, path: Keys, key: str, text: str) -> str | int:
    """Resolve one part of an override's path to a key or an index."""
    block = _at(root, path)
    if isinstance(block, list):
        names = [item.get("name") if isinstance(item, dict) else None for item in block]
        if key in names:
            return names.index(key)
        if key.isdigit() and int(key) < len(block):
            return int(key)
        known = [str(name) for name in names if name]
        have = f"its entries are {', '.join(known)}" if known else f"it has {len(block)} entries, counted from 0"
        raise UserError(f"{OVERRIDE}: {text}: {dotted(path, root)} has no {key!r}{did_you_mean(key, known)}; {have}")
    if block is not None and not isinstance(block, dict):
        at = dotted(path, root)
        raise UserError(f"{OVERRIDE}: {text}: {at} is {shown(block)}, not a block; replace it: {at}={{{key}: ...}}")
    return key


def _replace(value: Any, path: Keys, new: Any) -> Any:
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        return [_replace(item, rest, new) if i == key else item for i, item in enumerate(value)]
    block = value or {}
    return {**block, key: _replace(block.get(key), rest, new)}


# --- messages -----------------------------------------------------------------------------------------------------


def complain(document: Document, problems: list[Problem]) -> None:
    """Raise one UserError that lists every problem with its place. Does nothing if there are no problems."""
    if not problems:
        return
    lines = []
    for path, text in sorted(dict.fromkeys(problems), key=lambda problem: _line(document.where(problem.path))):
        name = dotted(path, document.value)
        if document.hidden and path[: len(document.hidden)] == document.hidden:
            name = dotted(path[len(document.hidden) :], find(document.value, document.hidden))
        lines.append(f"{document.where(path)}: {name + ': ' if name else ''}{text}")
    title = f"{document.places[()]}: {len(lines)} mistakes\n  "
    raise UserError(title + "\n  ".join(lines) if len(lines) > 1 else lines[0])


def _line(place: str) -> float:
    number = place.rpartition(":")[2]
    return int(number) if number.isdigit() else float("inf")
