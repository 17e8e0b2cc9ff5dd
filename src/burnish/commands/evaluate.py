"""Evaluation of models from the command line, and the table of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from burnish import progress
from burnish.config import row_stage
from burnish.config.evaluation import Evaluation
from burnish.config.resolve import environments_of, model_reference, named_reward
from burnish.config.sources import data_reference
from burnish.data import readers as rows
from burnish.generate.local import LocalGenerator
from burnish.methods import ROW_METHODS
from burnish.methods.eval import Measured, Setup, check_models, check_rows, compare, measure, with_wins
from burnish.models.loaded import Loaded, is_reward_model, load
from burnish.render.encode import account
from burnish.report.metrics import OF_EPISODES, describe
from burnish.report.page import table_of
from burnish.rewards.functions import close
from burnish.types import Changed, Row


def evaluate(model: str, evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate a model, and with ``against`` a second one on the same rows and seeds.

    Returns the value and interval of each measure, and the samples, as plain values for JSON.

    Raises:
        UserError: if the rows do not suit the model or the evaluation.
    """
    references = [model] + ([model_reference(evaluation.against, Path())] if evaluation.against else [])
    reward_models = [is_reward_model(reference) for reference in references]
    check_models(references, reward_models)
    eval_rows = _rows(evaluation, reward_models[0])
    setup = _setup(evaluation)
    with ExitStack() as stack:
        stack.callback(close, setup.rewards)
        sides = [
            _measured(load(reference, evaluation.template, reward_model=reward_models[0]), eval_rows.rows, setup)
            for reference in references
        ]
    if len(sides) == 2:
        sides[0] = with_wins(*sides)
    measures = compare(sides, evaluation.resamples, evaluation.seed)
    changed = [
        Changed(row.source, one.changed)
        for side in sides
        for row, one in zip(eval_rows.rows, side, strict=True)
        if one.changed
    ]
    used = account(eval_rows.rows, dict.fromkeys(changed))
    return {
        "name": evaluation.name,
        "models": references,
        "evaluation": evaluation.model_dump(mode="json"),
        "rows": used.rows,
        "skipped": [f"{row.source}: {row.reason}" for row in eval_rows.skipped] + used.skipped,
        "dropped": used.dropped,
        "shortened": used.shortened,
        "by_turn": len(used.by_turn),
        "measures": measures,
        "samples": [
            {"model": name} | sample
            for name, side in zip(references, sides, strict=True)
            for one in side
            for sample in one.samples
        ],
    }


def _rows(evaluation: Evaluation, reward_model: bool) -> rows.Rows:
    """Read the rows, and check that they are all of one kind which the evaluation can measure."""
    data, spec = evaluation.data, ROW_METHODS["eval"]
    scored = evaluation.reward or evaluation.environment.classes
    kinds = spec.kinds_with_rewards if scored else spec.kinds
    names = ("format", "keys", "keep", "on_bad_row", "limit")
    settings: dict[str, Any] = {name: getattr(data, name) for name in names}
    loaded = rows.load(data_reference(data.eval, Path()), kinds, **settings)
    check_rows(loaded.rows, evaluation.model_fields_set, evaluation.reference is not None, reward_model)
    return loaded


def _setup(evaluation: Evaluation) -> Setup:
    """The rewards, the reference and the settings of an evaluation."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = evaluation.reference
    rewards = [named_reward(source, evaluation, Path(), device) for source in evaluation.reward]
    environments = environments_of(evaluation, evaluation.locate)
    return Setup(
        rewards if environments is None else environments.rewards(rewards),
        evaluation.generation,
        evaluation.data,
        evaluation.seed,
        lambda loaded: LocalGenerator(loaded.model, loaded.tokenizer, frozen=True),
        load(model_reference(reference, Path()), evaluation.template) if reference is not None else None,
        environments,
    )


def _measured(loaded: Loaded, eval_rows: list[Row], setup: Setup) -> list[Measured]:
    """Measure a model in the same chunks as a stage, so that the results are the same."""
    measured = []
    size = row_stage.CHUNK
    for first in range(0, len(eval_rows), size):
        progress.report("evaluating rows", first, len(eval_rows))
        measured += measure(eval_rows[first : first + size], first, loaded, setup)
    return measured


# --- display ------------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> Table:
    """A table of measures with their 95 % intervals. Finish reasons and tool errors that never occur are left out."""
    names = result["models"]
    rows = [["measure", *_ends(names), *(["difference"] if len(names) == 2 else [])]]
    for name, interval in result["measures"].items():
        if name.startswith(OF_EPISODES) and not interval["value"] and not interval.get("against", interval)["value"]:
            continue
        both = [interval[key] for key in ("against", "difference") if key in interval]
        cells = [_cell(one) for one in [interval, *both]]
        rows.append([describe(name).label, *cells, *[""] * (len(names) * 2 - 1 - len(cells))])
    return table_of(rows, box=None, pad_edge=False)


def _ends(names: Sequence[str]) -> list[str]:
    """The last 32 characters of models' names, without the folders in which both lie."""
    parts = [Path(name).parts for name in names]
    folders = zip(*(part[:-1] for part in parts), strict=False)
    shared = len(list(takewhile(lambda both: both[0] == both[1], folders))) if len(names) == 2 else 0
    shown = [str(Path(*part[shared:])) for part in parts]
    return [name if len(name) <= 32 else f"...{name[-29:]}" for name in shown]


def _cell(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:.4g} [{interval['low']:.4g}, {interval['high']:.4g}]"
