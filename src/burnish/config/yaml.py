"""YAML with the file and line of every key, overrides, and messages that name them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from burnish.errors import UserError, did_you_mean
from burnish.mistakes import Keys, Problem, dotted, find, shown

OVERRIDE = "command line"
DEEPEST = 32
"""Maximum number of blocks inside each other."""
LONGEST = 300_000
"""Maximum number of characters of a recipe, which take a few seconds to parse."""
MOST = 20_000
"""Maximum number of values of a recipe."""
SHOWN = 20
"""Maximum number of mistakes that a message lists."""
STANDARD = "tag:yaml.org,2002:"
MERGE = f"{STANDARD}merge"
_TOO_DEEP = f"more than {DEEPEST} blocks inside each other"


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


def read(text: str, label: str, *, lines: bool = True) -> Document:
    """Parse YAML 1.2. ``label`` names the file in messages, with line numbers unless ``lines`` is false.

    The size of a recipe is limited, because few lines of aliases can stand for billions of values.

    Raises:
        UserError: if there is a syntax error, a duplicate key, a value that is not plain YAML, or too much of anything.
    """
    if len(text) > LONGEST:
        raise UserError(f"{label}: {len(text):,} characters: a recipe has at most {LONGEST:,}")
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = DEEPEST + 1
    reader = _Reader(label, lines)
    try:
        root = yaml.compose(text)
    except MaxDepthExceededError as error:
        raise UserError(f"{reader.at(error.problem_mark)}: {_TOO_DEEP}") from error
    except MarkedYAMLError as error:
        at = reader.at(error.problem_mark)
        raise UserError(f"{at}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError) as error:
        raise UserError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error
    return Document(None if root is None else reader.value(root, ()), reader.places)


class _Reader:
    """Converts the nodes of a file to plain values, and keeps the place of each in ``places``."""

    def __init__(self, label: str, lines: bool) -> None:
        self.label, self.lines, self.count = label, lines, 0
        self.places: dict[Keys, str] = {(): label}

    def at(self, mark: StreamMark | None) -> str:
        """A place in the file: ``r.yaml:3``."""
        return f"{self.label}:{mark.line + 1}" if self.lines and mark is not None else self.label

    def value(self, node: Node, path: Keys, depth: int = 0) -> Any:
        """The value of a node. An alias is the value that it repeats.

        ``depth`` is larger than the length of the path inside of merged blocks, which may merge themselves.
        """
        self.count += 1
        if self.count > MOST:
            raise UserError(f"{self.at(node.start_mark)}: more than {MOST:,} values, counting those of aliases")
        if depth > DEEPEST:
            raise UserError(f"{self.at(node.start_mark)}: {_TOO_DEEP}")
        tag = str(node.tag).removeprefix(STANDARD)
        if isinstance(node, MappingNode) and tag == "map":
            return self._keys(node, path, depth + 1)
        if isinstance(node, SequenceNode) and tag == "seq":
            for index, item in enumerate(node.value):
                self.places[(*path, index)] = self.at(item.start_mark)
            return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        try:
            if not isinstance(node, ScalarNode):
                raise KeyError
            return _SCALARS[tag](node.value)
        except KeyError:
            kinds = "text, a number, true, false, null, a list or keys"
            name = f"!!{tag}" if str(node.tag).startswith(STANDARD) else tag
            raise UserError(f"{self.at(node.start_mark)}: expected {kinds}, got a value with the tag {name}") from None
        except ValueError as error:
            raise UserError(f"{self.at(node.start_mark)}: {error}") from error

    def _keys(self, node: MappingNode, path: Keys, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, source in node.value:
            if str(key.tag) == MERGE:
                sources = source.value if isinstance(source, SequenceNode) else [source]
                kept, self.places = self.places, {}  # merged keys have the place of the block that they are merged into
                for one in reversed(sources):  # the first one wins
                    if not isinstance(values := self.value(one, path, depth), dict):
                        raise UserError(f"{self.at(key.start_mark)}: << takes a block of keys, got {shown(values)}")
                    merged |= values
                self.places = kept
        for key, item in node.value:
            if str(key.tag) == MERGE:
                continue
            at = self.at(key.start_mark)
            name = self.value(key, path, depth)
            if not isinstance(name, str):
                raise UserError(f"{at}: a key must be text, got {shown(name)}: put it in quotes")
            if name in own:
                raise UserError(f"{at}: {name}: this key is written twice, first in line {first[name]}")
            first[name] = key.start_mark.line + 1
            self.places[(*path, name)] = at
            own[name] = self.value(item, (*path, name), depth)
        return merged | own


def _text(written: str) -> str:
    if wrong := re.search("[\0\ud800-\udfff]", written):
        raise ValueError(f"text with the character {wrong[0]!r}, which files and models cannot hold: remove it")
    return written


def _boolean(written: str) -> bool:
    if written.lower() not in ("true", "false"):
        raise ValueError(f"expected true or false, got {written[:60]!r}")
    return written.lower() == "true"


def _integer(written: str) -> int:
    digits = written.replace("_", "")
    try:
        number = int(digits, 0 if re.match("[+-]?0[box]", digits) else 10)
    except ValueError:  # not a number, or one of thousands of digits
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(f"expected a whole number of at most 64 bits, got {_short(written)}")
    return number


def _float(written: str) -> float:
    try:
        return float(re.sub(r"\.(?=inf|nan)", "", written.replace("_", "").lower()))
    except ValueError:
        raise ValueError(f"expected a number, got {_short(written)}") from None


def _short(written: str) -> str:
    return repr(written if len(written) <= 60 else f"{written[:57]}...")


_SCALARS: dict[str, Callable[[str], Any]] = {
    "bool": _boolean,
    "float": _float,
    "int": _integer,
    "null": lambda written: None,
    **dict.fromkeys(("merge", "str", "timestamp", "value"), _text),
}
"""How the text of each kind of scalar is read. Dates stay text."""


def override(document: Document, text: str) -> Document:
    """Apply one ``dotted.path=value``. Elements of a list are addressed by index or by their ``name``."""
    keys, equals, written = text.partition("=")
    if not equals or not all(keys.split(".")):
        raise UserError(f"{OVERRIDE}: {text!r} is not key=value, for instance trainer.learning_rate=1e-5")
    if keys.count(".") >= DEEPEST:
        raise UserError(f"{OVERRIDE}: {keys[:60]}...: {_TOO_DEEP}")
    value = read(written, f"{OVERRIDE}: {keys}", lines=False).value
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
        if re.fullmatch("[0-9]{1,9}", key) and int(key) < len(block):
            return int(key)
        known = [str(name) for name in names if name]
        loop, slash, _ = key.partition("/")
        if slash and loop in known:
            every = text.replace(key, f"{loop}.stages.{key.rpartition('/')[2]}", 1)
            hint = f"this sets all rounds: {every}; by_round: sets a value for each of them"
            raise UserError(f"{OVERRIDE}: {text}: {hint}")
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
    title = f"{document.places[()]}: {len(lines)} mistakes"
    more = [f"and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    raise UserError("\n  ".join([title, *lines[:SHOWN], *more]) if len(lines) > 1 else lines[0])


def _line(place: str) -> float:
    number = place.rpartition(":")[2]
    return int(number) if number.isdigit() else float("inf")
