"""Lets a judge label pairs and score samples: the preferences of RLAIF (Lee et al. 2023) and Constitutional AI."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from burnish import progress
from burnish.data.formats import other_columns
from burnish.errors import UserError
from burnish.judges.combine import agrees, clamp, expected_grade, kappa, label, label_of_grades
from burnish.judges.protocol import NoVerdictError, Question, Verdict
from burnish.judges.questions import pair_question, score_question
from burnish.judges.store import Answer
from burnish.methods import ROW_METHODS
from burnish.methods.settings import JudgeConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.rl.metrics import text_or_messages
from burnish.types import Conversation, Messages, Preference, Ranking, Row, Tools

SHOWN = 4
"""Number of rows of a chunk whose verdicts a person can read in the report."""
STORED = "every verdict so far is stored; run the same command again to ask only the others"


@dataclass
class _Item:
    """A pair of completions, or a single one, and the answers of the judge: those of each principle in turn."""

    index: int
    id: str
    source: str
    prompt: Messages
    tools: Tools
    completions: tuple[Messages, ...]
    columns: Mapping[str, Any]
    theirs: float | None
    """The label that the row has: above 0 if it prefers the first completion; of a single one, its score."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def failure(self) -> NoVerdictError | None:
        """Why there is no verdict on one of its questions."""
        return next((answer.verdict for answer in self.answers if isinstance(answer.verdict, NoVerdictError)), None)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts of each principle in turn: two on a pair, in both orders or of both grades; one on a sample."""
        return [answer.verdict for answer in self.answers if isinstance(answer.verdict, Verdict)]


class Judge(RowMethod):
    """Writes ``pairs.jsonl``, pairs with ``p_chosen``, or ``scored.jsonl``, samples with a ``score`` in [-1, 1].

    The judge reads every pair in both orders. p is the mean of both and over all principles, so that a judge that only
    looks at the position gives 0.5. With ``pointwise``, it grades each completion from 1 to 10 instead, and p is the
    probability that the first grade is higher. The likelier completion is ``chosen``. A sample is graded in the same
    way, and its score is the expected grade, rescaled to [-1, 1]. ``verdicts.jsonl`` has the probabilities of every
    question before they are combined, and ``failed.jsonl`` what has no verdict.
    """

    spec = ROW_METHODS["judge"]

    def __init__(self, **settings: Any) -> None:
        self.settings = JudgeConfig(**settings)

    @cached_property
    def principles(self) -> tuple[str | None, ...]:
        """What to judge by. None stands for the default."""
        return self.settings.principle_texts() or (None,)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Judge a chunk of rows."""
        indexed = enumerate(zip(rows, records, strict=True), start=first)
        items = [item for index, (row, record) in indexed for item in self._items(row, record, index)]
        questions = [question for item in items for question in self._questions(item)]
        progress.report("questions to the judge", first, first + len(rows))
        skip = self.settings.on_failure == "skip"
        each = len(questions) // max(len(items), 1)
        try:
            answers = run.judge(self.settings.judge).answers(questions, f"{first}", skip=skip)
        except NoVerdictError as error:
            at = items[error.index // each].source
            raise UserError(f"{at}: {error}; {STORED}, or set on_failure: skip") from error
        for k, item in enumerate(items):
            item.answers = answers[k * each : (k + 1) * each]
        return self._made(items, first, len(rows))

    def _items(self, row: Row, record: Mapping[str, Any], index: int) -> Iterator[_Item]:
        """What to judge of a row: a pair, several pairs, or a single completion."""
        columns = other_columns(record, type(row))
        if isinstance(row, Preference):
            p = 1.0 if row.p_chosen is None else row.p_chosen
            both = (row.chosen, row.rejected)
            yield _Item(index, f"{index}", row.source, row.prompt, row.tools, both, columns, p - 0.5)
        elif isinstance(row, Ranking):
            labelled = len(set(row.scores)) > 1
            for i, j in _pairs(row.scores, self.settings.pairs):
                both = (row.completions[i], row.completions[j])
                theirs = row.scores[i] - row.scores[j] if labelled else None
                name = f"{index}-{i}-{j}"
                yield _Item(index, name, row.source, row.prompt, row.tools, both, columns, theirs)
        elif isinstance(row, Conversation):
            start = len(row.messages) - 1 if row.completion_start is None else row.completion_start
            given = record.get("score")
            score = float(given) if isinstance(given, int | float) else None
            prompt, one = row.messages[:start], (row.messages[start:],)
            yield _Item(index, f"{index}", row.source, prompt, row.tools, one, columns, score)

    def _questions(self, item: _Item) -> Iterator[Question]:
        for principle in self.principles:
            if len(item.completions) == 1 or self.settings.pointwise:
                for completion in item.completions:
                    yield score_question(item.prompt, completion, principle)
            else:
                first, second = item.completions
                yield pair_question(item.prompt, first, second, principle)
                yield pair_question(item.prompt, second, first, principle)

    def _made(self, items: list[_Item], first: int, rows: int) -> Made:
        """The rows, counts and measures of what was judged."""
        files: dict[str, list[dict[str, Any]]] = {name: [] for name in self.spec.outputs}
        measured: dict[str, list[float]] = defaultdict(list)
        became: dict[int, Counter[str]] = {index: Counter() for index in range(first, first + rows)}
        shown: list[dict[str, Any]] = []
        for item in items:
            measured["failed"].append(float(item.failure is not None))
            if item.failure is not None:
                files["failed.jsonl"].append({**_name(item), "reason": str(item.failure)})
                became[item.index]["failed: no verdict"] += 1
                continue
            measured["mass_lost"].append(1 - fmean(verdict.mass for verdict in item.verdicts))
            measured["judge_seconds"].append(sum(verdict.seconds for verdict in item.verdicts))
            pair = len(item.completions) == 2
            row, result, kept = (self._pair if pair else self._single)(item, measured)
            files["verdicts.jsonl"].append(result)
            if kept:
                files["pairs.jsonl" if pair else "scored.jsonl"].append(row)
            became[item.index]["made" if kept else "skipped: a tie"] += 1
            if len(shown) < SHOWN:
                shown.append(_shown(item, row))
        counts = Counter(_became(outcomes) for outcomes in became.values())
        return Made(files, counts, measured, shown)

    def _pair(self, item: _Item, measured: dict[str, list[float]]) -> tuple[dict[str, Any], dict[str, Any], bool]:
        """The row of a pair, its line of verdicts, and whether it is kept."""
        given = [verdict.probabilities for verdict in item.verdicts]
        result: dict[str, Any] = {}
        if self.settings.pointwise:
            p = label_of_grades(given[::2], given[1::2])
        else:
            p, biased = label([one[0] for one in given[::2]], [one[0] for one in given[1::2]])
            measured["position_bias"].append(float(biased))
            result = {"biased": biased}
        measured["ties"].append(float(p == 0.5))
        if item.theirs is not None:
            measured["agreement"].append(float(agrees(p - 0.5, item.theirs)))
        limited = clamp(p, self.settings.clamp)
        chosen, rejected = item.completions if p >= 0.5 else item.completions[::-1]
        answers = {"chosen": _text_or_messages(chosen), "rejected": _text_or_messages(rejected)}
        row = _prompt(item) | answers | {"p_chosen": max(limited, 1 - limited)} | _provenance(item)
        result = {"p_first": p} | result | self._verdicts(item)
        return row, result, p != 0.5 or self.settings.ties == "keep"

    def _single(self, item: _Item, measured: dict[str, list[float]]) -> tuple[dict[str, Any], dict[str, Any], bool]:
        """The row of a single completion, its line of verdicts, and that it is kept."""
        score = fmean(expected_grade(verdict.probabilities) for verdict in item.verdicts)
        measured["score"].append(score)
        (completion,) = item.completions
        row = _prompt(item) | {"completion": _text_or_messages(completion), "score": score}
        result = {"score": score} | self._verdicts(item)
        return row | {"rewards": {"judge": score}} | _provenance(item), result, True

    def _verdicts(self, item: _Item) -> dict[str, Any]:
        """What verdicts.jsonl keeps: which row, its own label, and the probabilities before they are combined.

        Times are left out, because an interrupted run ends with the same bytes.
        """
        asked: tuple[dict[str, str], ...] = ({},)
        if len(item.completions) == 2:
            both = ("first", "second") if self.settings.pointwise else ("AB", "BA")
            asked = tuple({"graded" if self.settings.pointwise else "order": one} for one in both)
        keys = [
            ({} if principle is None else {"principle": principle}) | one
            for principle in self.principles
            for one in asked
        ]
        verdicts = [
            {
                **key,
                "probabilities": list(verdict.probabilities),
                "mass": verdict.mass,
                **({"reasoning": verdict.reasoning} if verdict.reasoning else {}),
                "calls": verdict.calls,
                "tokens": verdict.tokens,
                "cost": verdict.cost,
                "cached": answer.cached,
            }
            for key, answer, verdict in zip(keys, item.answers, item.verdicts, strict=True)
        ]
        return {**_name(item), "label": item.theirs, "verdicts": verdicts}

    def results(self, folder: Path, seed: int) -> Mapping[str, Mapping[str, float]]:
        """The total number of calls, cached verdicts and tokens, the cost, and Cohen's kappa with the labels."""
        lines = _read(folder / "verdicts.jsonl")
        verdicts = [verdict for line in lines for verdict in line["verdicts"]]
        asked = [verdict for verdict in verdicts if not verdict["cached"]]
        keys = {"calls": "calls", "judge_tokens": "tokens", "cost": "cost"}
        totals = {name: float(sum(verdict[key] for verdict in asked)) for name, key in keys.items()}
        totals["cached"] = float(len(verdicts) - len(asked))
        scored = _read(folder / "scored.jsonl")
        preferences = _between(lines, scored) if scored else [(one["p_first"] - 0.5, one["label"]) for one in lines]
        known = [(own, theirs) for own, theirs in preferences if theirs is not None]
        measures = {"kappa": kappa(*zip(*known, strict=True))} if known else {}
        if scored and known:
            measures["agreement"] = fmean(agrees(own, theirs) for own, theirs in known)
        return {"after": measures | totals}


def _pairs(scores: Sequence[float], which: str) -> list[tuple[int, int]]:
    """The pairs of completions to compare, by index, in their order."""
    best_first = sorted(range(len(scores)), key=lambda i: -scores[i])
    if which == "best_worst":
        return [(min(ends), max(ends)) for ends in [(best_first[0], best_first[-1])]]
    if which == "adjacent":
        return [(min(both), max(both)) for both in pairwise(best_first)]
    return list(combinations(range(len(scores)), 2))


def _became(outcomes: Counter[str]) -> str:
    """What became of a row, for the counts."""
    if "made" in outcomes:
        return "made" if "failed: no verdict" not in outcomes else "made, but not of all pairs: no verdict"
    return "failed: no verdict" if "failed: no verdict" in outcomes else "skipped: a tie"


def _prompt(item: _Item) -> dict[str, Any]:
    return {"prompt": text_or_messages(item.prompt)} | ({"tools": list(item.tools)} if item.tools else {})


def _provenance(item: _Item) -> dict[str, Any]:
    return {"id": item.id} | ({"meta": dict(item.columns)} if item.columns else {})


def _text_or_messages(completion: Messages) -> str | list[Any]:
    """The text of a completion that is one message without tool calls or reasoning, or else its messages."""
    plain = len(completion) == 1 and completion[0].keys() == {"role", "content"}
    return completion[0]["content"] if plain else list(completion)


def _name(item: _Item) -> dict[str, str]:
    """The id of an item, and the file and line of its row without the folder: a run can be moved before it resumes."""
    return {"id": item.id, "row": item.source.replace("\\", "/").rpartition("/")[2]}


def _shown(item: _Item, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of samples.jsonl."""
    keys = ("completion",) if "completion" in row else ("chosen", "rejected")
    texts = [row[key] if isinstance(row[key], str) else row[key][-1]["content"] for key in keys]
    if len(texts) == 2:
        texts = [f"[better with p = {row['p_chosen']:.3f}] {texts[0]}", f"[the other] {texts[1]}"]
    reasons = [f"[reasoning] {verdict.reasoning}" for verdict in item.verdicts if verdict.reasoning]
    return {
        "kind": "train",
        "prompt": item.prompt[-1]["content"] if item.prompt else "",
        "completion": "\n\n".join([*texts, *reasons]),
        "score": row.get("score", row.get("p_chosen")),
        "rewards": {},
        "finish_reason": "stop",
        "source": item.source,
    }


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _between(verdicts: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The preferences of the judge and of the labels between every two neighboring samples of the same prompt."""
    both = [(json.dumps(row["prompt"]), one["score"], one["label"]) for row, one in zip(scored, verdicts, strict=True)]
    pairs = []
    for _, samples in groupby(both, key=lambda one: one[0]):
        known = [(score, theirs) for _, score, theirs in samples if theirs is not None]
        pairs += [(a[0] - b[0], a[1] - b[1]) for a, b in combinations(known, 2)]
    return pairs
