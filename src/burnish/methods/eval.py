"""Measures a model on rows: perplexity, pair accuracy, rewards, pass@k, best of k, KL, and the win rate of two models.

Every measure is a weighted mean over rows, and its 95 % interval comes from bootstrapping rows. Two models are measured
on the same rows with the same seeds, and use the same bootstrap samples, so that their difference is paired. The
command ``burnish eval`` measures with the same functions.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.errors import UserError
from burnish.generate.protocol import Generator
from burnish.generate.sampling import Sampling
from burnish.math.statistics import FEWEST_ROWS, best_of_k, bootstrap, pass_at_k
from burnish.methods import ROW_METHODS
from burnish.methods.pretrain import Pretrain
from burnish.methods.reward import RewardModel
from burnish.methods.settings import EvalConfig
from burnish.methods.sft import SFT
from burnish.models.forward import SamplingTransform, evaluating, scores, unwrap
from burnish.models.layout import Layout
from burnish.models.loaded import Loaded
from burnish.models.logprobs import TOKEN_BUDGET, logprobs
from burnish.protocols import Made, RowMethod, RowRun
from burnish.render.encode import AllSkippedError, encode, outcome
from burnish.render.renderer import Renderer
from burnish.render.truncate import ModelTruncation, Truncation
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import longest
from burnish.rl.collect import sample_prompts
from burnish.rl.environment import Environments
from burnish.rl.metrics import of_episodes, sample_rows
from burnish.types import (
    Changed,
    Encoded,
    Example,
    Pair,
    Preference,
    Prompt,
    Ranking,
    Row,
    Text,
    Trajectory,
)

SHOWN = 4
"""Number of prompts of a chunk whose first completion a person can read in the report."""
LARGEST_NLL = 700.0
"""Of a perplexity, so that its exponential is finite."""


@dataclass(frozen=True)
class Measured:
    """A row's value of each measure, and its weight in the mean if that is not 1.

    ``Measured({"nll": 1.43}, {"nll": 17.0})``. A row that was skipped or dropped has no values.
    """

    values: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The row's completions or pairs, for error analysis."""
    changed: str = ""
    """Why the row was skipped, dropped, shortened, or measured turn by turn."""


class Setup(NamedTuple):
    """What a measurement needs besides rows and a model."""

    rewards: list[NamedReward]
    sampling: Sampling
    truncation: Truncation
    seed: int
    generator_of: Callable[[Loaded], Generator]
    reference: Loaded | None
    environments: Environments | None = None


class Eval(RowMethod):
    """Writes ``measures.jsonl``, a row for each input row, and ``samples.jsonl``, the completions or pairs.

    A row of measures has its source and its values, and those of the model in ``against``. A row of samples says which
    model it is from: ``model`` or ``against``, as in the recipe.
    """

    spec = ROW_METHODS["eval"]

    def __init__(self, **settings: Any) -> None:
        self.settings = EvalConfig(**settings)

    def check(self, rows: list[Row], keys: Collection[str], reward_model: bool | None) -> None:
        """Check that the rows are of one kind that the settings fit."""
        check_rows(rows, keys, self.settings.reference is not None, reward_model)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Measure a chunk."""
        against, reference = self.settings.against, self.settings.reference
        models = {"model": run.load()} | ({"against": run.load(against)} if against is not None else {})
        check_models([m.reference for m in models.values()], [m.is_reward_model for m in models.values()])
        setup = Setup(
            run.rewards,
            run.sampling,
            run.truncation,
            run.seed,
            run.generator_of,
            run.load(reference) if reference is not None else None,
            run.environments,
        )
        sides = {name: measure(rows, first, loaded, setup) for name, loaded in models.items()}
        if against is not None:
            sides["model"] = with_wins(sides["model"], sides["against"])
        lines = [_line(row, {name: side[i] for name, side in sides.items()}) for i, row in enumerate(rows)]
        samples = [{"model": name} | s for name, side in sides.items() for one in side for s in one.samples]
        shown = [
            {"step": int(name == "model")} | sample
            for name, side in sides.items()
            for one in side[:SHOWN]
            for sample in one.samples[:1]
            if "completion" in sample
        ]
        counts = Counter(_outcome(one) for one in sides["model"])
        return Made({"measures.jsonl": lines, "samples.jsonl": samples}, counts, {}, shown)

    def results(self, folder: Path, seed: int) -> dict[str, dict[str, float]]:
        """Each measure with its interval; with ``against``, those of the other model before, and paired changes."""
        own: list[Measured] = []
        other: list[Measured] = []
        with (folder / "measures.jsonl").open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                own.append(_read(row))
                if "against" in row:
                    other.append(_read(row["against"]))
        if not own:
            return {}
        results: dict[str, dict[str, float]] = {"before": {}, "after": {}} if other else {"after": {}}
        for name, interval in compare([own, other] if other else [own], self.settings.resamples, seed).items():
            results["after"] |= _ends(name, interval)
            if "against" in interval:
                results["before"] |= _ends(name, interval["against"])
            if "difference" in interval and interval["difference"]["rows"] >= FEWEST_ROWS:
                change = interval["difference"]
                results["after"] |= {f"{name}_change_low": change["low"], f"{name}_change_high": change["high"]}
        return results


def _line(row: Row, sides: Mapping[str, Measured]) -> dict[str, Any]:
    plain = {name: _plain(side) for name, side in sides.items()}
    return {"source": row.source} | plain["model"] | {name: side for name, side in plain.items() if name != "model"}


def _plain(measured: Measured) -> dict[str, Any]:
    weights = {"weights": dict(measured.weights)} if measured.weights else {}
    changed = {"changed": measured.changed} if measured.changed else {}
    return {"values": dict(measured.values)} | weights | changed


def _read(row: Mapping[str, Any]) -> Measured:
    return Measured(row["values"], row.get("weights", {}), changed=row.get("changed", ""))


def _outcome(measured: Measured) -> str:
    """What became of a row, for counts: measured, shortened, dropped or skipped."""
    what = outcome(measured.changed) if measured.changed else ""
    return {"": "measured", "shortened": "measured, shortened", "by_turn": "measured, turn by turn"}.get(what, what)


def _ends(name: str, interval: Mapping[str, float]) -> dict[str, float]:
    """A value with its interval, which needs more than one row."""
    ends = {f"{name}_low": interval["low"], f"{name}_high": interval["high"]} if interval["rows"] > 1 else {}
    return {name: interval["value"]} | ends


# --- checks -------------------------------------------------------------------------------------------------------


def check_rows(rows: list[Row], keys: Collection[str], reference: bool, reward_model: bool | None) -> None:
    """Check that rows are of one kind that can be measured.

    Args:
        rows: all rows.
        keys: the keys that are set, such as ``reward`` and ``generation``.
        reference: whether there is a reference model.
        reward_model: whether the model is a reward model; None if this is not known yet.

    Raises:
        UserError: there are rows of another kind, or a setting is missing or has no effect.
    """
    if not rows:
        return
    kind = type(rows[0])
    pairs = kind in (Preference, Ranking)
    for row in rows:
        if type(row) is not kind and not (
            pairs and isinstance(row, Preference | Ranking) and reward_model is not False
        ):
            raise UserError(
                f"{row.source}: a {type(row).__name__} among rows of type {kind.__name__}: evaluate each type "
                "separately"
            )
    if kind is Prompt:
        if not {"reward", "environment"} & set(keys) and not reference:
            raise UserError("the rows are prompts: set reward: to score answers, or reference: for the KL")
        if reward_model:
            raise UserError("the model is a reward model, which cannot complete prompts: expected a language model")
    elif unused := sorted({"generation", "generator", "tools", "environment"} & set(keys)):
        raise UserError(f"{', '.join(unused)}: applies only to prompts; nothing is sampled from these rows")
    if reference and (reward_model or kind not in (Prompt, Preference)):
        raise UserError("reference: applies only to a policy evaluated on prompts or pairs: remove this key")
    if reward_model and not pairs:
        raise UserError(f"the model is a reward model, but {rows[0].source} is a {kind.__name__}: expected pairs")
    if reward_model is False and kind is Ranking:
        raise UserError("the rows are rankings, which are only for reward models: expected pairs")
    if reward_model is False and kind is Preference and not reference:
        raise UserError("the rows are pairs: the implicit rewards of a policy need a reference: set reference:")


def check_models(references: list[str], reward_models: list[bool]) -> None:
    """Check that a model and the one in ``against``, if there is one, have measures in common.

    Raises:
        UserError: one of them is a reward model, and the other is not.
    """
    own, *other = ("a reward model" if scores else "a policy" for scores in reward_models)
    if other and other[0] != own:
        raise UserError(
            f"against: {references[1]} is {other[0]}, but {references[0]} is {own}: they have no measure in common"
        )


# --- one model ----------------------------------------------------------------------------------------------------


def measure(rows: list[Row], first: int, loaded: Loaded, setup: Setup) -> list[Measured]:
    """Measure a model on rows of one kind. ``first`` is the index of the first row, from which come the seeds."""
    if isinstance(rows[0], Prompt):
        return _completions([row for row in rows if isinstance(row, Prompt)], first, loaded, setup)
    measured: list[Measured] = [Measured({})] * len(rows)
    for indices in _by_source(rows):
        group = [rows[i] for i in indices]
        if loaded.is_reward_model:
            values = _reward_pairs(group, loaded, setup)
        elif setup.reference is not None:
            values = _policy_pairs(group, loaded, setup.reference, setup)
        else:
            values = _likelihoods(group, loaded, setup)
        for i, one in zip(indices, values, strict=True):
            measured[i] = one
    return measured


def _by_source(rows: list[Row]) -> list[list[int]]:
    """The indices of rows, in groups in which each source has one row.

    There are several groups only if a file is read more than once, with other ``keys``. Equal rows share a group.
    """
    groups: list[tuple[dict[str, Row], list[int]]] = []
    for i, row in enumerate(rows):
        for known, indices in groups:
            if known.setdefault(row.source, row) == row:
                indices.append(i)
                break
        else:
            groups.append(({row.source: row}, [i]))
    return [indices for _, indices in groups]


def _likelihoods(rows: list[Row], loaded: Loaded, setup: Setup) -> list[Measured]:
    method = Pretrain() if isinstance(rows[0], Text) else SFT()
    examples, changed = _encoded(rows, loaded, setup, partial(method.examples, tokenizer=loaded.tokenizer))
    losses: dict[str, float] = {}
    counts: dict[str, float] = {}
    sequences = [sequence for example in examples for sequence in example.sequences]
    for sequence, values in zip(sequences, logprobs(loaded.model, sequences), strict=True):
        losses[sequence.source] = losses.get(sequence.source, 0.0) - math.fsum(values)
        counts[sequence.source] = counts.get(sequence.source, 0.0) + len(values)
    measured = {s: Measured({"nll": losses[s] / counts[s]}, {"nll": counts[s]}) for s in losses}
    return _in_order(rows, measured, changed)


def _policy_pairs(rows: list[Row], loaded: Loaded, reference: Loaded, setup: Setup) -> list[Measured]:
    """Implicit rewards log p(answer) - log p_reference(answer) of both answers (Rafailov et al. 2023)."""
    sums: list[dict[str, list[float]]] = []
    examples: list[Example] = []
    changed: list[Changed] = []
    for one in (reference, loaded):
        to_examples = partial(Renderer(one.tokenizer).comparisons, learned=True)
        examples, its_changes = _encoded(rows, one, setup, partial(encode, function=to_examples))
        changed += its_changes
        values = iter(logprobs(one.model, [sequence for example in examples for sequence in example.sequences]))
        sums.append({example.source: [math.fsum(next(values)) for _ in example.sequences] for example in examples})
    before, after = sums
    answer_rewards = {
        source: [value - start for value, start in zip(values, before[source], strict=True)]
        for source, values in after.items()
        if source in before
    }
    measured = {
        example.source: _of_pairs([_pair_sample(example, row, Pair(0, 1), answer_rewards[example.source])])
        for example, row in _with_rows(examples, rows)
        if example.source in answer_rewards
    }
    return _in_order(rows, measured, changed)


def _reward_pairs(rows: list[Row], loaded: Loaded, setup: Setup) -> list[Measured]:
    """Accuracy and margin of a reward model. The pairs of a ranking count as one row."""
    model, tokenizer = loaded.model, loaded.tokenizer
    examples, changed = _encoded(rows, loaded, setup, partial(RewardModel().examples, tokenizer=tokenizer))
    pad_id: Any = tokenizer.pad_token_id
    layout = Layout([model], pad_id=pad_id or 0)
    row_scores: list[list[float]] = [[] for _ in examples]
    with evaluating(model):
        for group, _, values in layout.passes(lambda batch: scores(model, batch).tolist(), examples, TOKEN_BUDGET):
            in_order = iter(values)
            for i in group:
                row_scores[i] = [next(in_order) for _ in examples[i].sequences]
    measured = {
        example.source: _of_pairs([_pair_sample(example, row, pair, mine) for pair in example.pairs])
        for (example, row), mine in zip(_with_rows(examples, rows), row_scores, strict=True)
    }
    return _in_order(rows, measured, changed)


def _of_pairs(pairs: list[dict[str, Any]]) -> Measured:
    """The measures of a row from its pairs."""
    margins = [pair["margin"] for pair in pairs]
    return Measured({"accuracy": fmean(map(_share, margins)), "margin": fmean(margins)}, samples=pairs)


def _completions(prompts: list[Prompt], first: int, loaded: Loaded, setup: Setup) -> list[Measured]:
    sampling, rewards = setup.sampling, setup.rewards
    done, changed = sample_prompts(
        prompts,
        first,
        loaded,
        setup.generator_of(loaded),
        sampling,
        setup.truncation,
        rewards,
        setup.seed,
        setup.environments,
    )
    everyone = [t for one in done for t in one.trajectories]
    ratios = iter(log_ratios(loaded, setup.reference, everyone, sampling) if setup.reference is not None else ())
    measured: list[Measured] = [Measured({})] * len(prompts)
    for index, _, mine in done:
        values = _of_completions(mine, rewards)
        if setup.reference is not None:
            # with top-k or top-p, or greedily, completions are not samples from p, and the mean is no KL
            whole = sampling.temperature > 0 and sampling.top_k is None and sampling.top_p is None
            values["kl" if whole else "log_ratio"] = fmean(next(ratios) for _ in mine)
        values["length"] = fmean(len(t.tokens) for t in mine)
        values["stopped"] = fmean(float(t.stopped) for t in mine)
        values |= {name: fmean(numbers) for name, numbers in of_episodes(mine).items()}
        measured[index - first] = Measured(values, samples=sample_rows(mine, "eval", loaded.tokenizer))
    reasons = dict(changed)
    return [replace(one, changed=reasons.get(row.source, "")) for row, one in zip(prompts, measured, strict=True)]


def _of_completions(mine: list[Trajectory], rewards: list[NamedReward]) -> dict[str, float]:
    """The score of a prompt's completions and each reward: its mean, pass@k if it is 0 or 1, and best of k by score."""
    chosen = any(reward.weight for reward in rewards)
    totals = [t.score for t in mine]
    values = {"score": fmean(totals)} if chosen else {}
    ks = [2**power for power in range(len(mine).bit_length())]
    for reward in rewards:
        name, given = f"reward_{reward.name}", [t.rewards[reward.name] for t in mine]
        values[name] = fmean(given)
        if {0.0, 1.0}.issuperset(given):
            values |= {f"{name}_pass@{k}": pass_at_k(len(mine), round(sum(given)), k) for k in ks}
        if chosen:
            values |= {f"{name}_best_of_{k}": best_of_k(totals, given, k) for k in ks[1:]}
    return values


def log_ratios(loaded: Loaded, reference: Loaded, trajectories: list[Trajectory], sampling: Sampling) -> list[float]:
    """Sum of log p - log p_reference over each completion. Without top-k and top-p, its mean estimates the KL."""
    if loaded.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise UserError(
            f"reference: {reference.reference} has another vocabulary than {loaded.reference}: cannot compute the KL"
        )
    transform = SamplingTransform(sampling.temperature or 1.0)
    ratios = [0.0] * len(trajectories)
    owners = [(i, sequence) for i, t in enumerate(trajectories) for sequence in t.sequences]
    sides = [logprobs(one.model, [sequence for _, sequence in owners], transform) for one in (loaded, reference)]
    for (i, _), a, b in zip(owners, *sides, strict=True):
        ratios[i] += math.fsum(a) - math.fsum(b)
    return ratios


Encoder = Callable[..., Encoded]
"""Encodes ``rows`` with a ``truncation``."""


def _encoded(rows: list[Row], loaded: Loaded, setup: Setup, encoder: Encoder) -> Encoded:
    """Encode each row once. The default max_length is the model's limit."""
    limit, given = longest(unwrap(loaded.model).config, loaded.tokenizer), setup.truncation
    truncation = ModelTruncation(
        max_length=given.max_length or limit,
        too_long=given.too_long,
        on_bad_row=given.on_bad_row,
        model_limit=limit,
    )
    try:
        return encoder(rows=list({row.source: row for row in rows}.values()), truncation=truncation)
    except AllSkippedError as error:  # other chunks may have rows that can be encoded
        return Encoded([], error.changed)


def _in_order(rows: list[Row], measured: Mapping[str, Measured], changed: list[Changed]) -> list[Measured]:
    """What was measured by source in the order of the rows, each with its change."""
    reasons = dict(changed)
    return [replace(measured.get(row.source, Measured({})), changed=reasons.get(row.source, "")) for row in rows]


def _with_rows(examples: list[Example], rows: list[Row]) -> list[tuple[Example, Preference | Ranking]]:
    """Each example with the row that it was made of."""
    by_source = {row.source: row for row in rows if isinstance(row, Preference | Ranking)}
    return [(example, by_source[example.source]) for example in examples]


def _pair_sample(example: Example, row: Preference | Ranking, pair: Pair, answer_scores: list[float]) -> dict[str, Any]:
    """A pair for error analysis: its texts, and the score and the length in tokens of both answers."""
    answers = (row.chosen, row.rejected) if isinstance(row, Preference) else row.completions
    sample: dict[str, Any] = {"source": row.source, "prompt": list(row.prompt)}
    for name, index in (("chosen", pair.better), ("rejected", pair.worse)):
        sample[name] = list(answers[index])
        sample |= {f"{name}_score": answer_scores[index], f"{name}_tokens": len(example.sequences[index])}
    return sample | {"margin": answer_scores[pair.better] - answer_scores[pair.worse]}


def _share(difference: float) -> float:
    return 0.5 if difference == 0 else float(difference > 0)


# --- all rows, and two models -------------------------------------------------------------------------------------


def with_wins(own: list[Measured], other: list[Measured]) -> list[Measured]:
    """What one model measured, with the win rate of its scores. A draw counts one half."""
    return [
        replace(one, values={**one.values, "win_rate": fmean(map(_share, _differences(one, two)))})
        if "score" in one.values and "score" in two.values
        else one
        for one, two in zip(own, other, strict=True)
    ]


def _differences(one: Measured, two: Measured) -> list[float]:
    return [a["score"] - b["score"] for a, b in zip(one.samples, two.samples, strict=True)]


def compare(sides: list[list[Measured]], resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Each measure of all rows with its interval. For two models, also that of the other and the paired difference.

    Two models are compared on the rows that both have measured. A measure that some of the rows lack is left out, such
    as pass@k if some rewards are neither 0 nor 1. The perplexity is the exponential of the mean negative log-likelihood
    per token.

    Args:
        sides: what one model measured on each row, and in the same order what another one did, if there is one.
        resamples: the number of bootstrap samples.
        seed: the random seed of the bootstrap.

    Returns:
        ``{"accuracy": {"value": 0.9, "low": 0.87, "high": 0.93, "rows": 400}}``. With two models, each measure that
        both have also has ``against`` and ``difference``.

    Raises:
        UserError: no row has been measured.
    """
    rows = [row for row in zip(*sides, strict=True) if all(one.values for one in row)]
    if not rows:
        first = next(one.changed for row in zip(*sides, strict=True) for one in row if not one.values)
        raise UserError(
            f"no rows left to evaluate: all of them were left out, the first because of {first}: raise data.max_length "
            "if rows are too long"
        )
    keys = [
        [key for key in side[0].values if all(key in one.values for one in side)] for side in zip(*rows, strict=True)
    ]
    places = {at: 2 * i for i, at in enumerate((side, key) for side, names in enumerate(keys) for key in names)}
    columns = array("d")
    for row in rows:
        for side, key in places:
            weight = row[side].weights.get(key, 1.0)
            columns.extend((weight * row[side].values[key], weight))
    table = torch.frombuffer(columns, dtype=torch.float64).view(len(rows), -1)
    wanted = [(name, part) for name in _shown(keys) for part in _parts(name, len(sides))]

    def statistics(means: Tensor) -> Tensor:
        def of(side: int, name: str) -> Tensor:
            place = places[side, "nll" if name == "perplexity" else name]
            ratio = means[:, place] / means[:, place + 1]
            return ratio.clamp(max=LARGEST_NLL).exp() if name == "perplexity" else ratio

        parts = {"": lambda name: of(0, name), "against": lambda name: of(1, name)}
        parts["difference"] = lambda name: of(0, name) - of(1, name)
        return torch.stack([parts[part](name) for name, part in wanted], dim=1)

    values = statistics(table.mean(0, keepdim=True))[0].tolist()
    results: dict[str, dict[str, Any]] = {}
    for (name, part), value, (low, high) in zip(
        wanted, values, bootstrap(table, statistics, resamples, seed), strict=True
    ):
        interval = {"value": value, "low": low, "high": high, "rows": len(rows)}
        results.setdefault(name, {}).update({part: interval} if part else interval)
    return results


def _shown(keys: list[list[str]]) -> list[str]:
    """The measures that all models have, with the perplexity, and the win rate, which only the first one has."""
    names = [key for key in keys[0] if key == "win_rate" or all(key in others for others in keys)]
    return [*(["perplexity"] if "nll" in names else []), *names]


def _parts(name: str, models: int) -> tuple[str, ...]:
    return ("",) if models == 1 or name == "win_rate" else ("", "against", "difference")
