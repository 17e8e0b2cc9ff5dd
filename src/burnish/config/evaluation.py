"""The recipe of ``burnish eval``, which is like a training recipe without stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field

from burnish.config.checks import (
    data_problem,
    environment_functions,
    function_problem,
    model_problem,
    principle_problems,
    renamed,
    reward_functions,
    reward_models,
    reward_templates,
)
from burnish.config.loading import document
from burnish.config.schema import NAME, RewardSource, locate
from burnish.config.yaml import OVERRIDE, Document, complain, override
from burnish.errors import UserError, did_you_mean
from burnish.files import expanded
from burnish.generate.sampling import Sampling
from burnish.mistakes import Keys, Problem, mistakes
from burnish.models.settings import ModelSource, StageModel
from burnish.render.templates import PLAIN_TEMPLATES
from burnish.render.truncate import Truncation
from burnish.rl.settings import EnvironmentSettings
from burnish.types import Config


class EvaluationData(Truncation, use_attribute_docstrings=True):
    """Rows to evaluate on: ``{eval: prompts.jsonl, limit: 200}``. Their type decides which measures are computed."""

    eval: str
    format: str | None = None
    """Name of the row format, if it cannot be inferred from the keys."""
    keys: dict[str, str] | None = None
    """Names of the file's keys: {prompt: question}."""
    keep: list[str] = Field([])
    """Extra columns that the rows may have besides id, source and the like. Any other unknown column is an error."""
    limit: int | None = Field(None, gt=0)
    """Maximum number of rows to read."""


class Evaluation(Config, use_attribute_docstrings=True):
    """Settings of an evaluation: its rows, models and rewards."""

    name: str = Field("eval", pattern=f"^{NAME}$")
    seed: int = Field(0, ge=0, lt=2**32)
    data: EvaluationData
    against: ModelSource | None = None
    """A second model, evaluated on the same rows with the same seeds. Differences are paired."""
    reference: ModelSource | None = None
    """The reference policy of the KL and of the implicit rewards of pairs."""
    reward: list[RewardSource] = Field([])
    generation: Sampling = Field(default_factory=Sampling)
    tools: list[str] = Field([])
    """Functions that the model may call: [my_tools.py:calculator]."""
    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    """What answers the model, and its limits: {class: my_env.py:Guess, max_turns: 8}."""
    template: str | None = None
    """Name of a plain template, for models without a chat template."""
    resamples: int = Field(2000, gt=0, le=1_000_000)
    """Number of bootstrap samples for each 95 % interval."""
    _home: Path = pydantic.PrivateAttr(Path())

    def locate(self, reference: str) -> str:
        """``file.py:name`` with a path relative to the recipe's folder; ``package.module:name`` unchanged."""
        return locate(self._home, reference)

    def beside(self, file: str) -> Path:
        """The path of a file that is named relative to the recipe's folder."""
        return self._home / expanded(file)


def load_evaluation(arguments: Sequence[str]) -> Evaluation:
    """Load an evaluation from a recipe file, ``key=value`` overrides, or both. This loads no model and no rows.

    Raises:
        UserError: one message that lists every mistake with its file, line and key.
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
    """Files, models, functions and templates that do not exist."""
    models: list[tuple[Keys, Any]] = [(("against",), evaluation.against), (("reference",), evaluation.reference)]
    models += reward_models(evaluation.reward)
    for path, source in models:
        if isinstance(source, StageModel):
            yield Problem(path, f"an evaluation has no stages: give the folder instead, runs/NAME/{source.stage}")
        elif isinstance(source, str) and (text := model_problem(source)):
            yield Problem(path, text)
    if text := data_problem(evaluation.data.eval):
        yield Problem(("data", "eval"), text)
    for path, function in [*reward_functions(evaluation.reward), *environment_functions(evaluation)]:
        if text := function_problem(function, evaluation.locate):
            yield Problem(path, text)
    yield from (Problem(path, text) for path, text in principle_problems(evaluation.reward, evaluation.beside))
    names: list[tuple[Keys, str | None]] = [(("template",), evaluation.template)]
    names += reward_templates(evaluation.reward)
    for path, name in names:
        if name is not None and name not in PLAIN_TEMPLATES:
            text = f"unknown template {name!r}{did_you_mean(name, PLAIN_TEMPLATES)}"
            yield Problem(path, f"{text}; templates are {', '.join(PLAIN_TEMPLATES)}")
