"""Sampling settings. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from burnish.types import Config

COLDEST = 1e-3
"""Minimum temperature above 0. Logits divided by less could be infinite."""


def check_temperature(temperature: float) -> None:
    """Raise a ValueError if logits cannot be divided by a temperature."""
    if 0 < temperature < COLDEST:
        raise ValueError(
            f"temperature {temperature:g} is too small to divide logits by: expected 0, which always takes the "
            f"likeliest token, or at least {COLDEST:g}"
        )


class Sampling(Config, use_attribute_docstrings=True):
    """Sampling settings: ``Sampling(max_new_tokens=64, temperature=0.7, top_p=0.95, stop=["User:"])``."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Maximum number of tokens. A completion that reaches it ends with finish reason ``length``."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Minimum number of tokens before an end-of-sequence token or a stop string can end a completion."""
    length_range: Annotated[list[Annotated[int, Field(lt=2**63)]], Field(min_length=2, max_length=2)] | None = None
    """[low, high): the range from which each request draws its own ``max_new_tokens`` uniformly."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Divisor of the logits. 0 always takes the likeliest token, whose log-probability is then 0."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample only from the k likeliest tokens."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample only from the smallest set of likeliest tokens whose total probability reaches top_p."""
    samples: Annotated[int, Field(ge=1, le=65536)] = 1
    """Number of completions per prompt."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Stop strings. A completion ends with the token that completes one of them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_temperature(self.temperature)
        shortest = self.max_new_tokens
        if self.length_range is not None:
            low, high = self.length_range
            if not 1 <= low < high:
                raise ValueError(f"length_range [{low}, {high}) is empty: expected 1 <= low < high")
            if "max_new_tokens" in self.model_fields_set:
                raise ValueError("length_range sets the limit of each request: leave max_new_tokens out")
            shortest = low
        if self.min_new_tokens > shortest:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than the shortest limit, {shortest}")
        return self

    @property
    def longest(self) -> int:
        """The maximum number of tokens of any request."""
        return self.length_range[1] - 1 if self.length_range else self.max_new_tokens
