"""Loads the user's functions, which recipes refer to as ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from burnish.errors import UserError, did_you_mean
from burnish.user_code import user_code


def load(reference: str) -> Callable[..., Any]:
    """Load a function, given ``file.py:name`` or ``package.module:name``.

    A file is imported once for each version of its contents, always with the same random seed.

    Raises:
        UserError: if there is no such file, module or function, or the file is not valid Python.
        UserCodeError: if the file or module raises an exception while it is imported.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"{reference}: not a function: expected file.py:name or package.module:name")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise UserError(f"{reference}: {name} is a {type(function).__name__}, not a function")
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise UserError(f"{reference}: {place} has no {name}{_nearest(name, functions)}")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = [str(other) for other in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file{did_you_mean(str(path), beside)}")
    source = path.read_bytes()
    # The name has a hash, so that a file called, say, random.py does not replace Python's module.
    name = f"_{path.stem}_{hashlib.sha256(str(path.resolve()).encode() + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _importing(str(path)):
            try:
                spec.loader.exec_module(module)
            except SyntaxError as error:
                raise UserError(f"{error.filename}:{error.lineno}: not Python: {error.msg}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> ModuleType:
    with _importing(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # If the module exists but one of its own imports is missing, show the traceback.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            hint = f"; a file is named with its .py: {name}.py:NAME" if Path(f"{name}.py").is_file() else ""
            raise UserError(f"{name}: no module {error.name} is installed{hint}") from error


def _importing(place: str) -> contextlib.AbstractContextManager[None]:
    return user_code(place, "when it was imported", seed=0, keep_environment=True)


def _nearest(name: str, functions: list[str]) -> str:
    return did_you_mean(name, functions) or (f"; it has {', '.join(functions)}" if functions else "")
