"""Settings of environments. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from burnish.types import Config

Reference = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[dict[str, str], Tag("<several>")],
    Discriminator(
        lambda value: (
            "<path>" if isinstance(value, str) else "<several>" if value and isinstance(value, dict) else None
        ),
        custom_error_type="expected",
        custom_error_message="file.py:Class or {NAME: file.py:Class, ...}",
    ),
]


class Limits(Config):
    """Limits of episodes: ``Limits(max_turns=4, max_tool_tokens=64)``."""

    max_turns: Annotated[int, Field(ge=1)] = 8
    """Maximum number of messages of the model in an episode."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of an episode after its prompt. Default: what fits into the context window."""
    max_tool_tokens: Annotated[int, Field(ge=1)] = 512
    """Maximum number of tokens of a message of the environment. The rest is cut off."""
    timeout: Annotated[float, Field(gt=0, le=threading.TIMEOUT_MAX)] = 60.0
    """Time limit in seconds for the environment's answer to a turn."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Number of threads for methods that are not async. Default: none, they run one after another. With threads, an
    episode's random numbers should come from its ``seed``."""
    reward_at: Literal["end", "turns"] = "end"
    """Where rewards of turns count: their sum at the end of the episode, or each at the end of its turn."""


class EnvironmentSettings(Limits):
    """An environment and its limits: ``{class: my_env.py:Guess, max_turns: 8, max_tool_tokens: 512}``."""

    class_: Reference | None = Field(None, alias="class")
    """file.py:Class whose methods are tools, or {NAME: file.py:Class, ...} for rows with a column ``environment``."""
    turns: Reference | None = None
    """file.py:Class with a method ``respond``, which answers whole messages; or several by name, as in ``class``."""
    arguments: dict[str, Any] = Field({})
    """Keyword arguments of the constructor."""

    @model_validator(mode="before")
    @classmethod
    def _a_block(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(f"expected a block of keys, got the text {given[:60]!r}: write {{class: {given[:60]}}}")
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.class_ is not None and self.turns is not None:
            raise ValueError("has both class: and turns:; methods of a class are tools, and turns: answers whole turns")
        if self.arguments and not self.classes:
            raise ValueError("arguments: needs class: or turns:")
        if self.reward_at == "turns" and self.turns is None:
            raise ValueError("reward_at: turns needs turns:, because other environments have one reward an episode")
        return self

    @property
    def classes(self) -> dict[str, str]:
        """The environments by the name that a row's column ``environment`` gives; a single one has the name ``""``."""
        given = self.class_ if self.class_ is not None else self.turns
        if given is None:
            return {}
        return given if isinstance(given, dict) else {"": given}
