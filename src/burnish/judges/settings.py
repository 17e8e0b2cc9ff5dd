"""The settings of judges. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from burnish.addresses import plain_address
from burnish.judges.constitution import load_constitution
from burnish.models.settings import ModelSource
from burnish.types import Config

ENDPOINT_ONLY = (
    *("name", "key", "votes", "top_logprobs", "concurrency", "connect_timeout", "timeout", "retries", "backoff"),
    *("max_calls", "max_cost", "input_price", "output_price"),
)
"""Settings of an endpoint, which a local model would ignore."""
MAY_CHANGE = (
    *("key", "concurrency", "connect_timeout", "timeout", "retries", "backoff"),
    *("max_calls", "max_cost", "input_price", "output_price"),
)
"""Settings on which no verdict depends. They may change before a run is resumed."""


Text = Annotated[str, Field(min_length=1)]
Principles = str | Annotated[list[Text], Field(min_length=1)] | None
"""What to judge by: a YAML file of principles with ``compare:``, or a list of texts; None is the default."""


def principle_texts(principles: Principles) -> tuple[str, ...]:
    """The texts of principles, each for a question of its own; () for the default.

    Raises:
        UserError: the file cannot be read, or a principle has no ``compare``.
    """
    if isinstance(principles, str):
        return tuple(one.compare for one in load_constitution(principles, ("compare",)) if one.compare is not None)
    return tuple(principles or ())


class JudgeSettings(Config):
    """A judge: ``{model: {stage: sft}}``, or ``{url: "http://127.0.0.1:8000/v1", name: my-model, key: MY_KEY}``.

    Exactly one of ``model`` and ``url`` is set.
    """

    model: ModelSource | None = Field(None, description="a language model that judges in this process")
    template: str | None = Field(None, description="name of a plain template, for a model without a chat template")
    url: str | None = Field(None, description="address of an OpenAI-compatible API, up to and including /v1")
    name: str | None = Field(None, description="url: the name of the model at the endpoint")
    key: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="url: NAME of the environment variable that holds the key; the key itself is never written down",
    )
    votes: int = Field(
        0,
        ge=0,
        le=1024,
        description="url: number of sampled answers whose shares are the probabilities, for an endpoint that gives no "
        "log-probabilities; 0 reads the log-probabilities",
    )
    top_logprobs: int = Field(20, ge=1, le=1000, description="url: log-probabilities to request for each token")
    concurrency: int = Field(8, ge=1, le=1024, description="url: maximum number of calls in flight")
    connect_timeout: float = Field(10.0, gt=0, le=86400, description="url: seconds to wait for a connection")
    timeout: float = Field(120.0, gt=0, le=86400, description="url: seconds to wait for an answer")
    retries: int = Field(5, ge=0, le=100, description="url: how often a failed call is repeated")
    backoff: float = Field(
        1.0, ge=0, le=3600, description="url: seconds before the first repetition; doubles each time, up to 60"
    )
    max_calls: int | None = Field(
        None, ge=1, description="url: maximum number of calls of this judge in the run, failed ones included"
    )
    max_cost: float | None = Field(
        None, gt=0, description="url: maximum cost of this judge in the run; needs the prices"
    )
    input_price: float | None = Field(None, ge=0, description="url: price of a million tokens that the judge reads")
    output_price: float | None = Field(None, ge=0, description="url: price of a million tokens that the judge writes")
    reasoning: bool = Field(False, description="let the judge explain its reasoning before it chooses")
    max_reasoning_tokens: int = Field(256, ge=1, description="reasoning: maximum number of tokens of the explanation")

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str | None) -> str | None:
        return None if url is None else plain_address(url, "http://127.0.0.1:8000/v1")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.model is None) == (self.url is None):
            raise ValueError("a judge needs either model: or url:, and not both")
        if self.url is not None and self.name is None:
            raise ValueError("url: needs name:, the name of the model at the endpoint")
        if self.url is not None and self.template is not None:
            raise ValueError("template: only for a judge with model:, but this one has url:")
        if self.model is not None and (given := [key for key in ENDPOINT_ONLY if key in self.model_fields_set]):
            raise ValueError(f"{', '.join(given)}: only for a judge with url:, but this one has model:")
        if self.votes and "top_logprobs" in self.model_fields_set:
            raise ValueError("votes are counted instead of reading log-probabilities: remove top_logprobs or votes")
        if "max_reasoning_tokens" in self.model_fields_set and not self.reasoning:
            raise ValueError("max_reasoning_tokens needs reasoning: true")
        if self.max_cost is not None and (self.input_price is None or self.output_price is None):
            raise ValueError("max_cost needs input_price and output_price, the prices of a million tokens")
        return self
