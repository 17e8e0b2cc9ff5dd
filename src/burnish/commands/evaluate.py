"""Evaluation of models: perplexity, pair accuracy, rewards, KL, pass@k, best of k, win rate, with 95 % intervals.

Every measure is a weighted mean over rows, and its confidence interval comes from bootstrapping rows. Two models use
the same bootstrap samples, so that their difference is paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from peft import TaskType
from rich.table import Table
from torch import Tensor

from burnish.commands.generate import TOKEN_BUDGET, Loaded, load, logprobs
from burnish.config.evaluation import Evaluation
from burnish.config.resolve import model_reference, named_reward
from burnish.config.sources import data_reference
from burnish.data import readers as rows
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, request_seed
from burnish.generate.stopping import eos_ids
from burnish.math.statistics import best_of_k, bootstrap, pass_at_k
from burnish.methods.pretrain import Pretrain
from burnish.methods.reward import RewardModel
from burnish.methods.sft import SFT
from burnish.models import loading
from burnish.models.forward import SamplingTransform, evaluating, scores, unwrap
from burnish.models.layout import Layout
from burnish.models.limits import check_room
from burnish.render.encode import account, encode
from burnish.render.renderer import Renderer
from burnish.render.templates import prepare_template, set_template
from burnish.render.truncate import ModelTruncation, Truncation
from burnish.report.page import table_of
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import longest
from burnish.rl.collect import sample_and_score
from burnish.rl.metrics import sample_rows
from burnish.types import Changed, Conversation, Example, Pair, Preference, Prompt, Ranking, Row, Text, Trajectory

PROMPTS = ("prompt", "query")
"""Formats of rows that the model completes."""


class Measure(NamedTuple):
    """Values and weights keyed by row: ``Measure({"pairs.jsonl:1": 1.0}, {"pairs.jsonl:1": 1.0})``.

    The measure is sum w x / sum w, or its exponential if ``exp`` is set.
    """

    values: Mapping[str, float]
    weights: Mapping[str, float] | None = None
    exp: bool = False

    def columns(self, sources: list[str]) -> Tensor:
        """The columns w x and w, for the rows in the given order. (N, 2)."""
        weights = [1.0 if self.weights is None else self.weights[source] for source in sources]
        pairs = [(w * self.values[source], w) for source, w in zip(sources, weights, strict=True)]
        return torch.tensor(pairs, dtype=torch.float64)

    def of(self, means: Tensor) -> Tensor:
        """The measure (R,), computed from means (R, 2) of its columns."""
        mean = means[:, 0] / means[:, 1]
        return mean.exp() if self.exp else mean


@dataclass
class Measured:
    """The results of one model: measures, its completions or pairs, and its skipped, dropped and shortened rows."""

    measures: dict[str, Measure]
    samples: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    changed: list[Changed] = field(default_factory=list)


def evaluate(model: str, evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate a model, and with ``against`` a second one on the same rows and seeds.

    Returns the value and interval of each measure, and the samples, as plain values for JSON.

    Raises:
        UserError: if the rows do not suit the model or the evaluation.
    """
    references = [model] + ([model_reference(evaluation.against, Path())] if evaluation.against else [])
    rewards_model = _is_reward_model(model)
    if evaluation.against and _is_reward_model(references[1]) != rewards_model:
        kinds = ("a policy", "a reward model") if rewards_model else ("a reward model", "a policy")
        raise UserError(
            f"against: {references[1]} is {kinds[0]}, but {model} is {kinds[1]}: they have no measure in common"
        )
    eval_rows = _rows(evaluation, rewards_model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scorers = [named_reward(source, evaluation, Path(), device) for source in evaluation.reward]
    reference = _policy(model_reference(evaluation.reference, Path()), evaluation) if evaluation.reference else None
    done = [
        _measure_rewards(name, eval_rows.rows, evaluation) if rewards_model
        else _measure_policy(_policy(name, evaluation), eval_rows.rows, evaluation, scorers, reference)
        for name in references
    ]  # fmt: skip
    measures = _compared(done, evaluation)
    used = account(eval_rows.rows, dict.fromkeys(change for one in done for change in one.changed))
    return {
        "name": evaluation.name,
        "models": references,
        "evaluation": evaluation.model_dump(mode="json"),
        "rows": used.rows,
        "skipped": [f"{row.source}: {row.reason}" for row in eval_rows.skipped] + used.skipped,
        "dropped": used.dropped,
        "shortened": used.shortened,
        "measures": measures,
        "samples": [
            {"model": name} | sample for name, one in zip(references, done, strict=True) for sample in one.samples
        ],
    }


def _is_reward_model(reference: str) -> bool:
    folder = loading.resolve(reference)
    if loading.is_adapter(folder):
        return loading.adapter_config(folder).task_type == TaskType.SEQ_CLS
    architectures = loading.load_config(reference).architectures
    return any(name.endswith("ForSequenceClassification") for name in architectures or [])


def _policy(reference: str, evaluation: Evaluation) -> Loaded:
    return load(reference, evaluation.template)


def _rows(evaluation: Evaluation, rewards_model: bool) -> rows.Rows:
    """Read the rows, and check that they are all of one kind which the evaluation can measure."""
    data = evaluation.data
    kinds: tuple[type[Any], ...] = (Text, Conversation, Preference)
    if rewards_model:
        kinds = (Preference, Ranking)
    elif evaluation.reward or data.format in PROMPTS:
        kinds = (Prompt,)
    names = ("format", "keys", "keep", "on_bad_row", "limit")
    settings: dict[str, Any] = {name: getattr(data, name) for name in names}
    try:
        loaded = rows.load(data_reference(data.eval, Path()), kinds, **settings)
    except rows.BadRow as bad:
        if Prompt in kinds or rewards_model:
            raise
        raise UserError(f"{bad}; prompts need reward:, or reference: with data.format: prompt") from bad
    first = type(loaded.rows[0])
    other = next((row for row in loaded.rows if type(row) is not first), None)
    if other is not None and not rewards_model:
        raise UserError(
            f"{other.source}: a {type(other).__name__} among rows of type {first.__name__}: evaluate each type "
            "separately"
        )
    if first is Preference and not rewards_model and evaluation.reference is None:
        raise UserError("data.eval holds pairs: the implicit rewards of a policy need a reference: set reference:")
    if first is Prompt and not evaluation.reward and evaluation.reference is None:
        raise UserError("data.eval holds prompts: set reward: to score answers, or reference: for the KL")
    if first is not Prompt and "generation" in evaluation.model_fields_set:
        raise UserError("generation: applies only to prompts; nothing is sampled from these rows")
    if evaluation.reference is not None and (rewards_model or first not in (Prompt, Preference)):
        raise UserError("reference: applies only to a policy evaluated on prompts or pairs: remove this key")
    return loaded


# --- one model ----------------------------------------------------------------------------------------------------


def _measure_policy(
    loaded: Loaded, eval_rows: list[Row], evaluation: Evaluation, rewards: list[NamedReward], reference: Loaded | None
) -> Measured:
    kind = type(eval_rows[0])
    if kind is Prompt:
        return _measure_answers(loaded, eval_rows, evaluation, rewards, reference)
    if kind is Preference:
        assert reference is not None
        return _measure_pairs(loaded, eval_rows, evaluation, reference)
    method = Pretrain() if kind is Text else SFT()
    examples, changed = method.examples(
        eval_rows, loaded.tokenizer, _length(loaded.model, loaded.tokenizer, evaluation)
    )
    losses: dict[str, float] = {}
    counts: dict[str, float] = {}
    sequences = [sequence for example in examples for sequence in example.sequences]
    for sequence, values in zip(sequences, logprobs(loaded.model, sequences), strict=True):
        losses[sequence.source] = losses.get(sequence.source, 0.0) - math.fsum(values)
        counts[sequence.source] = counts.get(sequence.source, 0.0) + len(values)
    means = {source: losses[source] / counts[source] for source in losses}
    measures = {"perplexity": Measure(means, counts, exp=True), "nll per token": Measure(means, counts)}
    return Measured(measures, changed=changed)


def _length(model: Any, tokenizer: Any, evaluation: Evaluation) -> Truncation:
    """The truncation settings. The default max_length is the model's limit."""
    limit, data = longest(unwrap(model).config, tokenizer), evaluation.data
    return ModelTruncation(
        max_length=data.max_length or limit, too_long=data.too_long, on_bad_row=data.on_bad_row, model_limit=limit
    )


def _measure_pairs(loaded: Loaded, eval_rows: list[Row], evaluation: Evaluation, reference: Loaded) -> Measured:
    """Implicit rewards log p(answer) - log p_reference(answer) of both answers (Rafailov et al. 2023)."""
    sums: list[dict[str, list[float]]] = []
    changed: list[Changed] = []
    for one in (reference, loaded):
        to_examples = partial(Renderer(one.tokenizer).comparisons, learned=True)
        examples, its_changes = encode(eval_rows, to_examples, _length(one.model, one.tokenizer, evaluation))
        changed += its_changes
        values = iter(logprobs(one.model, [sequence for example in examples for sequence in example.sequences]))
        sums.append({example.source: [math.fsum(next(values)) for _ in example.sequences] for example in examples})
    before, after = sums
    rewards = {
        source: [value - start for value, start in zip(values, before[source], strict=True)]
        for source, values in after.items()
        if source in before
    }
    margins = {source: chosen - rejected for source, (chosen, rejected) in rewards.items()}
    measures = {"accuracy": Measure({s: _share(m) for s, m in margins.items()}), "margin": Measure(margins)}
    pairs = [
        _pair_sample(example, row, Pair(0, 1), rewards[example.source])
        for example, row in _with_rows(examples, eval_rows)
        if example.source in rewards
    ]
    return Measured(measures, pairs, changed=changed)


def _with_rows(examples: list[Example], eval_rows: list[Row]) -> list[tuple[Example, Preference | Ranking]]:
    """Each example with the row that it was made of."""
    by_source = {row.source: row for row in eval_rows if isinstance(row, Preference | Ranking)}
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


def _measure_rewards(reference: str, eval_rows: list[Row], evaluation: Evaluation) -> Measured:
    """Accuracy and margin of a reward model. The pairs of a ranking count as one row."""
    tokenizer = loading.load_tokenizer(reference)
    if evaluation.template is not None:
        set_template(tokenizer, evaluation.template)
    prepare_template(tokenizer)
    model = loading.load_reward_model(reference).to("cuda" if torch.cuda.is_available() else "cpu")
    examples, changed = RewardModel().examples(eval_rows, tokenizer, _length(model, tokenizer, evaluation))
    pad_id: Any = tokenizer.pad_token_id
    layout = Layout([model], pad_id=pad_id or 0)
    row_scores: list[list[float]] = [[] for _ in examples]
    with evaluating(model):
        for group, _, values in layout.passes(lambda batch: scores(model, batch).tolist(), examples, TOKEN_BUDGET):
            in_order = iter(values)
            for i in group:
                row_scores[i] = [next(in_order) for _ in examples[i].sequences]
    accuracies, margins, samples = {}, {}, []
    for (example, row), mine in zip(_with_rows(examples, eval_rows), row_scores, strict=True):
        pairs = [_pair_sample(example, row, pair, mine) for pair in example.pairs]
        accuracies[example.source] = fmean(_share(pair["margin"]) for pair in pairs)
        margins[example.source] = fmean(pair["margin"] for pair in pairs)
        samples += pairs
    measures = {"accuracy": Measure(accuracies), "margin": Measure(margins)}
    return Measured(measures, samples, changed=changed)


def _measure_answers(
    loaded: Loaded, eval_rows: list[Row], evaluation: Evaluation, rewards: list[NamedReward], reference: Loaded | None
) -> Measured:
    prompts = [row for row in eval_rows if isinstance(row, Prompt)]
    tokens = Renderer(loaded.tokenizer).prompts(prompts)
    check_room(loaded.model, prompts, tokens)
    sampling = evaluation.generation
    ends, requests = frozenset(eos_ids(loaded.model, loaded.tokenizer)), []
    for i, ids in enumerate(tokens):
        seeds = [request_seed(evaluation.seed, i, g, 0) for g in range(sampling.samples)]
        requests += [Request(ids, seed, sampling, ends) for seed in seeds]
    trajectories = sample_and_score(
        [row for row in prompts for _ in range(sampling.samples)],
        requests,
        rewards,
        LocalGenerator(loaded.model, loaded.tokenizer),
        loaded.tokenizer,
        seed=(evaluation.seed, 0, 0),
    )
    by_row: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_row.setdefault(trajectory.source, []).append(trajectory)

    def measure(value: Callable[[list[Trajectory]], float]) -> Measure:
        return Measure({source: value(mine) for source, mine in by_row.items()})

    measures = {"score": measure(lambda mine: fmean(r.score for r in mine))} if len(rewards) > 1 else {}
    for reward in rewards:
        measures |= _of_reward(reward.name, trajectories, sampling.samples, any(r.weight for r in rewards), measure)
    if reference is not None:
        name, ratios = _log_ratios(loaded, reference, trajectories, evaluation)
        measures[name] = measure(lambda mine: fmean(ratios[id(r)] for r in mine))
    measures["tokens"] = measure(lambda mine: fmean(len(r.tokens) for r in mine))
    measures["stopped"] = measure(lambda mine: fmean(float(r.stopped) for r in mine))
    totals = {source: [r.score for r in mine] for source, mine in by_row.items()}
    return Measured(measures, sample_rows(trajectories, "eval"), totals if any(r.weight for r in rewards) else {})


def _of_reward(
    name: str,
    trajectories: list[Trajectory],
    n: int,
    chosen: bool,
    measure: Callable[[Callable[[list[Trajectory]], float]], Measure],
) -> dict[str, Measure]:
    """The mean of a reward, its pass@k if all rewards are 0 or 1, and its value for the best of k by score."""
    measures = {name: measure(lambda mine: fmean(r.rewards[name] for r in mine))}
    ks = [2**power for power in range(n.bit_length())]
    if {r.rewards[name] for r in trajectories} <= {0.0, 1.0}:
        for k in ks:
            measures[f"{name} pass@{k}"] = measure(
                lambda mine, k=k: pass_at_k(n, round(sum(r.rewards[name] for r in mine)), k)
            )
    for k in ks[1:] if chosen else []:
        measures[f"{name} best of {k}"] = measure(
            lambda mine, k=k: best_of_k([r.score for r in mine], [r.rewards[name] for r in mine], k)
        )
    return measures


def _log_ratios(
    loaded: Loaded, reference: Loaded, trajectories: list[Trajectory], evaluation: Evaluation
) -> tuple[str, dict[int, float]]:
    """Sum of log p - log p_reference over each completion. Without top-k and top-p, its mean estimates the KL."""
    if loaded.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise UserError(
            f"reference: {reference.reference} has another vocabulary than {loaded.reference}: cannot compute the KL"
        )
    sampling = evaluation.generation
    whole = sampling.temperature > 0 and sampling.top_k is None and sampling.top_p is None
    transform = SamplingTransform(sampling.temperature or 1.0)
    ratios = dict.fromkeys(map(id, trajectories), 0.0)
    owners = [(id(t), sequence) for t in trajectories for sequence in t.sequences]
    sides = [logprobs(one.model, [sequence for _, sequence in owners], transform) for one in (loaded, reference)]
    for (owner, _), a, b in zip(owners, *sides, strict=True):
        ratios[owner] += math.fsum(a) - math.fsum(b)
    return "kl" if whole else "log ratio", ratios


# --- intervals ----------------------------------------------------------------------------------------------------


def _compared(done: list[Measured], evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """Each measure with its interval. For two models, also the paired difference and the win rate."""
    table: dict[str, dict[str, Any]] = {}
    for name, measure in done[0].measures.items():
        if len(done) == 1:
            table[name] = _interval([measure], evaluation)
        elif name in done[1].measures:
            both = [measure, done[1].measures[name]]
            table[name] = _interval(both[:1], evaluation) | {
                "against": _interval(both[1:], evaluation),
                "difference": _interval(both, evaluation),
            }
    if len(done) == 2 and done[0].scores:
        wins = {
            source: fmean(_share(a - b) for a, b in zip(mine, done[1].scores[source], strict=True))
            for source, mine in done[0].scores.items()
        }
        table["win rate"] = _interval([Measure(wins)], evaluation)
    return table


def _interval(measures: list[Measure], evaluation: Evaluation) -> dict[str, float]:
    """The value and interval of one measure, or of the difference of two on the rows that both have."""
    sources = [source for source in measures[0].values if all(source in m.values for m in measures)]
    if not sources:
        raise UserError("no rows left to evaluate: all of them were dropped for their length; raise data.max_length")
    columns = torch.cat([measure.columns(sources) for measure in measures], dim=1)

    def statistic(means: Tensor) -> Tensor:
        values = [measure.of(means[:, 2 * i : 2 * i + 2]) for i, measure in enumerate(measures)]
        return values[0] if len(values) == 1 else values[0] - values[1]

    value = statistic(columns.mean(0, keepdim=True)).item()
    low, high = bootstrap(columns, statistic, evaluation.resamples, evaluation.seed)
    return {"value": value, "low": low, "high": high, "rows": len(sources)}


# --- display ------------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> Table:
    """A table of measures with their 95 % intervals."""
    names = result["models"]
    rows = [["measure", *_ends(names), *(["difference"] if len(names) == 2 else [])]]
    for name, interval in result["measures"].items():
        both = [interval[key] for key in ("against", "difference") if key in interval]
        cells = [_cell(one) for one in [interval, *both]]
        rows.append([name, *cells, *[""] * (len(names) * 2 - 1 - len(cells))])
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
