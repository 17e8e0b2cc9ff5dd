"""What ``burnish eval`` measures: a recipe without stages, in the same language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field

from burnish.config.checks import data_problem, function_problem, model_problem, renamed
from burnish.config.loading import document
from burnish.config.schema import NAME, ModelSource, RewardSource, StageModel, locate
from burnish.config.yaml import OVERRIDE, Document, Keys, Problem, complain, mistakes, override
from burnish.errors import UserError, did_you_mean
from burnish.generate.sampling import Sampling
from burnish.render.templates import PLAIN_TEMPLATES
from burnish.render.truncate import Truncation
from burnish.types import Config


class EvaluationData(Truncation, use_attribute_docstrings=True):
    """Rows to measure on: ``{eval: prompts.jsonl, limit: 200}``; what they are decides what is measured."""

    eval: str
    format: str | None = None
    """Name of the row shape, where the keys do not tell it."""
    keys: dict[str, str] | None = None
    """Names of the file's keys: {prompt: question}."""
    keep: list[str] = Field([])
    """Columns that are not read, besides id, source and the like. Any other column that is no part of a row is an
    error."""
    limit: int | None = Field(None, gt=0)
    """Read this many rows."""


class Evaluation(Config, use_attribute_docstrings=True):
    """What is measured, and on which rows."""

    name: str = Field("eval", pattern=NAME)
    seed: int = Field(0, ge=0)
    data: EvaluationData
    against: ModelSource | None = None
    """A second model, that answers the same prompts with the same seeds; differences are paired."""
    reference: ModelSource | None = None
    """A policy to which the KL is measured, and against which the implicit rewards of pairs are."""
    reward: list[RewardSource] = Field([])
    generation: Sampling = Field(default_factory=Sampling)
    template: str | None = None
    """Plain template, for models that have no chat template."""
    resamples: int = Field(2000, gt=0)
    """Bootstrap samples behind every 95 % interval."""
    _home: Path = pydantic.PrivateAttr(Path())

    def locate(self, reference: str) -> str:
        """``file.py:name`` with a path relative to the recipe's folder; ``package.module:name`` unchanged."""
        return locate(self._home, reference)


def load_evaluation(arguments: Sequence[str]) -> Evaluation:
    """The evaluation that a recipe file and ``key=value`` overrides describe; either may be left out.

    Raises UserError with one message that lists every mistake with its file, line and key. Nothing is loaded.
    """
    files = [text for text in arguments if "=" not in text]
    if len(files) > 1:
        raise UserError(f"expected one recipe, got {', '.join(files)}; a setting is written key=value")
    written, file = document(files[0]) if files else (Document({}, {(): OVERRIDE}), Path("eval"))
    for text in arguments:
        written = override(written, text) if "=" in text else written
    try:
        evaluation = Evaluation.model_validate(written.value)
    except pydantic.ValidationError as error:
        complain(written, list(renamed(mistakes(error, Evaluation, written.value))))
        raise
    evaluation._home = file.parent.resolve()
    complain(written, list(_problems(evaluation)))
    return evaluation


def _problems(evaluation: Evaluation) -> Iterator[Problem]:
    """Files, models, functions and templates that are not there."""
    models: list[tuple[Keys, Any]] = [(("against",), evaluation.against), (("reference",), evaluation.reference)]
    models += [(("reward", i, "model"), reward.model) for i, reward in enumerate(evaluation.reward)]
    for path, source in models:
        if isinstance(source, StageModel):
            yield Problem(path, f"an evaluation has no stages: name the folder, runs/NAME/{source.stage}")
        elif isinstance(source, str) and (text := model_problem(source)):
            yield Problem(path, text)
    if text := data_problem(evaluation.data.eval):
        yield Problem(("data", "eval"), text)
    for i, reward in enumerate(evaluation.reward):
        if reward.function and (text := function_problem(evaluation.locate(reward.function))):
            yield Problem(("reward", i, "function"), text)
    names: list[tuple[Keys, str | None]] = [(("template",), evaluation.template)]
    names += [(("reward", i, "template"), reward.template) for i, reward in enumerate(evaluation.reward)]
    for path, name in names:
        if name is not None and name not in PLAIN_TEMPLATES:
            text = f"unknown template {name!r}{did_you_mean(name, PLAIN_TEMPLATES)}"
            yield Problem(path, f"{text}; templates are {', '.join(PLAIN_TEMPLATES)}")
