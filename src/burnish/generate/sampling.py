"""How completions are drawn. This module does not import torch, so that a recipe is checked quickly."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from burnish.types import Config


class Sampling(Config, use_attribute_docstrings=True):
    """How completions are drawn: ``Sampling(max_new_tokens=64, temperature=0.7, top_p=0.95, stop=["User:"])``."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """A completion that has not stopped by then ends with finish ``length``."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """No end-of-sequence token is sampled and no stop string is looked for before so many tokens."""
    length_range: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """[low, high): each request draws its own ``max_new_tokens`` uniformly from it."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Logits are divided by it; 0 always takes the likeliest token, whose log-probability is then 0."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample among the k likeliest tokens only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample among the likeliest tokens that together have this probability."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Completions a prompt."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """A completion ends with the token that completes one of these strings."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        shortest = self.max_new_tokens
        if self.length_range is not None:
            low, high = self.length_range
            if not 1 <= low < high:
                raise ValueError(f"length_range [{low}, {high}) is empty: expected 1 <= low < high")
            if "max_new_tokens" in self.model_fields_set:
                raise ValueError("length_range draws the longest length of each request: leave max_new_tokens out")
            shortest = low
        if self.min_new_tokens > shortest:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than the shortest limit, {shortest}")
        return self

    @property
    def longest(self) -> int:
        """The most tokens that any request may get."""
        return self.length_range[1] - 1 if self.length_range else self.max_new_tokens
