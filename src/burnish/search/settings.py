"""Settings of reasoning steps and of the search over them. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from burnish.types import Config


class CodeSettings(Config, use_attribute_docstrings=True):
    """How a step contains code, and how its output is appended: ``{start: "<code>", end: "</code>"}``."""

    start: Annotated[str, Field(min_length=1)] = "<code>"
    """The text before code."""
    end: Annotated[str, Field(min_length=1)] = "</code>"
    """The text after code. It ends the step."""
    output: str = "<output>{}</output>"
    """What is appended to the step, with the output in place of {}. The delimiter follows."""
    characters: Annotated[int, Field(ge=1)] = 1000
    """Maximum number of characters of the output."""
    errors: Annotated[int, Field(ge=1)] = 3
    """A solution fails after this many steps with failed code in a row."""
    preload: list[str] | None = None
    """Modules to import in advance. Default: math, statistics, fractions, and sympy if it is installed."""
    seconds: Annotated[int, Field(ge=1)] = 5
    """Maximum CPU time of the code of a step."""
    sandbox: Literal["landlock", "none"] = "landlock"
    """none runs the model's code without protection. Then it can read and start whatever your user can."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.output.count("{}") != 1:
            raise ValueError(f"output: expected {{}} once, where the output goes, got {self.output!r}")
        if self.end != self.end.rstrip():
            raise ValueError(f"end: expected no white space at its end, because steps are stripped, got {self.end!r}")
        return self


class StepSettings(Config, use_attribute_docstrings=True):
    r"""What a reasoning step is: ``{delimiter: "\n", depth: 8}``."""

    delimiter: Annotated[str, Field(min_length=1)] = "\n"
    """The text that ends a step, as in training. Code of several lines needs another one than a line break."""
    final: Annotated[str, Field(min_length=1)] | None = None
    """A step that contains this text is the last one of a solution. By default, a solution ends with the model's turn,
    which a model that was not trained to end its turns never does."""
    depth: Annotated[int, Field(ge=1)] = 8
    """Maximum number of steps. A solution that has more has failed."""
    code: CodeSettings | None = None
    """Steps may contain code, which runs in the sandbox."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.code is not None:
            for key in ("start", "end"):
                if self.delimiter in getattr(self.code, key):
                    raise ValueError(f"code.{key}: it contains the delimiter {self.delimiter!r}, which ends the step")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings of a step."""
        return [self.delimiter] if self.code is None else [self.delimiter, self.code.end]


class AnswerSettings(Config, use_attribute_docstrings=True):
    """How to find the answer in a solution, and how to check it: ``{find: last_line, check: exact}``."""

    find: str = "math"
    """math: the last mathematical expression, or the boxed one, by math-verify; last_line: the last line, or what
    follows its last =; file.py:name: a function that gets the text and returns the answer, or None."""
    check: str = "math"
    """math: equal by math-verify; exact: equal as text; file.py:name: a function that gets the answer and the row's
    columns as a dict, and returns True, False, or None if it cannot tell."""
    column: str = "answer"
    """The column of a row with the known answer."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for key, names in (("find", ("math", "last_line")), ("check", ("math", "exact"))):
            value = getattr(self, key)
            if value not in names and ":" not in value:
                raise ValueError(f"{key}: expected {', '.join(names)} or file.py:name, got {value!r}")
        return self
