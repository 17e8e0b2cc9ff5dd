"""What is wrong with settings, in the words of recipes instead of those of pydantic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, get_args

import pydantic

from burnish.errors import UserError, did_you_mean

Keys = tuple[str | int, ...]
"""The path to a value: ``("stages", 0, "method")``."""


class Problem(NamedTuple):
    """One mistake: ``Problem(("stages", 0, "sed"), "unknown key")``."""

    path: Keys
    text: str


def dotted(path: Keys, root: Any = None) -> str:
    """A path as in an override: ``stages.ppo.method.kl_coef``. List elements that have a name appear by name."""
    parts = []
    for depth, key in enumerate(path):
        element = find(root, path[: depth + 1]) if isinstance(key, int) else None
        parts.append(str(element["name"] if isinstance(element, dict) and "name" in element else key))
    return ".".join(parts)


def find(root: Any, path: Keys) -> Any:
    """The value at a path, or None."""
    for key in path:
        if isinstance(root, dict) and isinstance(key, str):
            root = root.get(key)
        elif isinstance(root, list) and isinstance(key, int):
            root = root[key]
        else:
            return None
    return root


def shown(value: Any) -> str:
    """A value as shown in messages: ``3``, ``true``, ``the text 'abc'``, ``a list``."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    return "a list" if isinstance(value, list) else "a block of keys" if isinstance(value, dict) else str(value)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "finite_number": "a finite number",
    "expected": "{0}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} or fewer",
    "string_pattern_mismatch": "a name of at most 100 letters, digits, '_', '-' and '.', first a letter or digit",
}


def mistakes(error: pydantic.ValidationError, model: type[pydantic.BaseModel], value: Any) -> list[Problem]:
    """Convert the errors of pydantic to our messages. A key that allows several types gets one message."""
    expected: dict[Keys, list[str]] = {}
    problems = []
    for detail in error.errors():
        path = _real(detail["loc"], value)
        kind, context = detail["type"], detail.get("ctx", {})
        if kind == "extra_forbidden":
            known = sorted(_keys(model, tuple(detail["loc"][:-1])) or _keys(model, path[:-1]))
            text = f"unknown key{did_you_mean(str(path[-1]), known)}; keys here are {', '.join(known)}"
            problems.append(Problem(path, text))
        elif kind == "missing":
            problems.append(Problem(path, "this key is missing"))
        elif kind in _EXPECTED:
            expected.setdefault(path, []).append(_EXPECTED[kind].format(detail["msg"], **context))
        else:
            problems.append(Problem(path, str(context.get("error", detail["msg"]))))
    paths = [*expected, *(problem.path for problem in problems)]
    for path, options in expected.items():
        if any(len(other) > len(path) and other[: len(path)] == path for other in paths):
            continue  # the value has one of the types that the key allows, with a mistake inside
        got = find(value, path)
        choices = re.findall(r"'([^']+)'", options[0])
        near = did_you_mean(got, choices) if isinstance(got, str) else ""
        problems.append(Problem(path, f"expected {' or '.join(dict.fromkeys(options))}, got {shown(got)}{near}"))
    return problems


def _real(location: Keys, value: Any) -> Keys:
    """The location of an error, without pydantic's names for the branches of unions."""
    path: Keys = ()
    for depth, key in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(value, dict) and isinstance(key, str) and (key in value or (last and not key.startswith("<"))):
            path, value = (*path, key), value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            path, value = (*path, key), value[key]
    return path


def _keys(annotation: Any, path: Keys) -> set[str]:
    """The keys allowed in the block at a path, which leads through the fields of models and the tags of unions."""
    if path and isinstance(path[0], int):
        return _keys(annotation, path[1:])
    if path and (tag := str(path[0])).startswith("<"):
        branches = [get_args(branch) for branch in get_args(annotation)]
        chosen = [branch[0] for branch in branches if pydantic.Tag(tag) in branch[1:]]
        if not chosen:  # the union is inside of a list
            return set().union(*(_keys(branch, path) for branch in get_args(annotation)))
        return set().union(*(_keys(branch, path[1:]) for branch in chosen))
    if not (isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)):
        return set().union(*(_keys(branch, path) for branch in get_args(annotation)))
    fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
    if not path:
        return set(fields)
    return _keys(fields[str(path[0])].annotation, path[1:]) if path[0] in fields else set()


def refuse(error: pydantic.ValidationError, model: type[Any], values: Mapping[str, Any]) -> NoReturn:
    """Raise a UserError that lists the mistakes of settings written in Python: ``SFT: lern: unknown key; ...``."""
    name = model.__name__.removesuffix("Config")
    lines = [f"{dotted(path, values)}: {text}" if path else text for path, text in mistakes(error, model, dict(values))]
    what = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes", *lines])
    raise UserError(f"{name}: {what}") from None
