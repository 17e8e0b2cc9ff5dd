"""The tools of a row: JSON schemas, or Python functions that have one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.data.formats import At, list_at, shown
from burnish.errors import UserError, did_you_mean
from burnish.types import Tools


def read_tools(value: Any, at: At) -> Tools:
    """The schemas of a row's tools.

    Each tool is a JSON schema, with or without ``{"type": "function", "function": ...}`` around it, or a function named
    ``file.py:name``. The file is looked for in the folder of the data file. The schema of a function comes from its
    type hints and docstring (``transformers.utils.get_json_schema``).

    Raises:
        BadRow: a tool is not one of these, its schema is malformed, or two tools have the same name.
    """
    tools = tuple(_schema(tool, at.inside(i)) for i, tool in enumerate(list_at(value, at)))
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise at.inside(i).bad("two tools have this name", repr(name))
    return tools


def _schema(tool: Any, at: At) -> dict[str, Any]:
    if isinstance(tool, str):
        return _schema_of_function(tool, at)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
        raise at.bad(
            "not a tool", f"expected a JSON schema with a name or a function 'file.py:name', got {shown(tool)}"
        )
    inside = at.inside("function") if "function" in tool else at
    if "function" in tool and tool.get("type", "function") != "function":
        raise at.inside("type").bad("not a function", f"expected 'function', got {shown(tool['type'])}")
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise inside.inside("description").bad("not text", f"expected a string, got {shown(description)}")
    if parameters is not None:
        _check_schema(parameters, inside.inside("parameters"))
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _check_schema(schema: Any, at: At) -> None:
    """Raise a BadRow if the structure of a JSON schema is malformed. The names of types may be any."""
    if not isinstance(schema, Mapping):
        raise at.bad("not a JSON schema", f"expected an object such as {{type: string}}, got {shown(schema)}")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping):
        raise at.inside("properties").bad("not an object", f"expected a schema for each name, got {shown(properties)}")
    for name, inner in properties.items():
        _check_schema(inner, at.inside("properties").inside(name))
    if not isinstance(required, list | tuple):
        raise at.inside("required").bad("not a list", f"expected a list of names, got {shown(required)}")
    for i, name in enumerate(required):
        if name not in properties:
            hint = did_you_mean(str(name), map(str, properties))
            raise at.inside("required").inside(i).bad("unknown name", f"got {shown(name)}{hint}")
    if (items := schema.get("items")) is not None:
        _check_schema(items, at.inside("items"))


def _schema_of_function(reference: str, at: At) -> dict[str, Any]:
    # Both import torch, which checking a recipe does not need.
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    from burnish import user_functions

    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        raise at.bad("not a tool", f"expected a JSON schema or a function 'file.py:name', got {shown(reference)}")
    path = Path(at.source.rpartition(":")[0]).parent / place
    try:
        return get_json_schema(user_functions.load(f"{path}:{name}"))
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise at.bad("a function without a schema", f"{reference}: {error}") from error
    except UserError as error:
        raise at.bad("not a function", str(error)) from error
