"""Completes prompts and scores the completions: the Grow step of ReST, and the samples of best-of-n."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from burnish.data.formats import At, check_values
from burnish.data.recognition import parse
from burnish.errors import UserError
from burnish.methods import ROW_METHODS
from burnish.methods.settings import SampleConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.render.encode import outcome
from burnish.rl.collect import sample_prompts
from burnish.rl.metrics import completed_row, of_episodes, sample_rows
from burnish.types import Conversation, Prompt, Row, Trajectory

SHOWN = 4
"""Number of prompts of a chunk whose first completion a person can read in the report."""

OUTCOMES = {"skipped": "skipped: cannot be encoded", "dropped": "dropped: too long"}
"""What the counts call prompts that are not completed."""


class Sample(RowMethod):
    """Writes ``samples.jsonl``, a row for each completion, and ``ranked.jsonl``, the distinct ones of each prompt.

    A row of samples has the prompt, the completion, its score, every reward, its finish reason, its seed, an id such as
    ``17-2`` (both numbers count from 0: prompt 17, completion 2), and in ``meta`` the prompt's other columns.
    Empty completions are left out, because no method can learn from them. A prompt is in ``ranked.jsonl`` if its
    completions have at least two different scores. Without rewards, all scores in ``ranked.jsonl`` are 0, so that a
    judge or people can rank the completions.

    The completion of an episode is a list of messages, with tool calls and results, and its prompt has what the
    environment says first. If this differs, the episodes of a prompt are ranked in several rows.
    """

    spec = ROW_METHODS["sample"]

    def __init__(self, **settings: Any) -> None:
        self.settings = SampleConfig(**settings)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Complete and score a chunk of prompts."""
        prompts = [row for row in rows if isinstance(row, Prompt)]
        done, changed = sample_prompts(
            prompts,
            first,
            run.load(),
            run.generator,
            run.sampling,
            run.truncation,
            run.rewards,
            run.seed,
            run.environments,
        )
        reasons = dict(changed)
        written, ranked = [], []
        counts = Counter(OUTCOMES[what] for what in map(outcome, reasons.values()) if what in OUTCOMES)
        measured: dict[str, list[float]] = defaultdict(list)
        for index, requests, trajectories in done:
            mine = [
                {**completed_row(trajectory), "seed": request.seed, "id": f"{index}-{g}"}
                for g, (trajectory, request) in enumerate(zip(trajectories, requests, strict=True))
            ]
            mine = [row for row in mine if _learnable(row)]
            written += mine
            made = "made, for a shortened prompt" if trajectories[0].source in reasons else "made"
            counts[made if mine else "skipped: every completion is empty"] += 1
            measured["empty"].append(1 - len(mine) / len(trajectories))
            rankings = _rankings(mine)
            ranked += rankings
            if run.rewards:
                measured["ranked"].append(float(bool(rankings)))
            for name, values in _measures(trajectories).items():
                measured[name].append(fmean(values))
        files = {"samples.jsonl": written, "ranked.jsonl": ranked}
        shown = [one.trajectories[0] for one in done[:SHOWN]]
        return Made(files, counts, measured, sample_rows(shown, "train", run.tokenizer))


def _measures(trajectories: list[Trajectory]) -> dict[str, list[float]]:
    """The measures of each completion of a prompt."""
    measures = {
        "length": [float(len(t.tokens)) for t in trajectories],
        "stopped": [float(t.stopped) for t in trajectories],
    }
    measures |= of_episodes(trajectories)
    if trajectories[0].rewards:
        measures["score"] = [t.score for t in trajectories]
    return measures | {f"reward_{name}": [t.rewards[name] for t in trajectories] for name in trajectories[0].rewards}


def _learnable(row: Mapping[str, Any]) -> bool:
    """Whether methods can learn from a sample: it is not empty, and an episode can be written and read again.

    The policy may write an empty message, or a tool call with a number that JSON does not have.
    """
    if isinstance(row["completion"], str):
        return bool(row["completion"])
    try:
        json.dumps(row["completion"], allow_nan=False)
        check_values(row["completion"], At(""))
        parse({"prompt": row["prompt"], "completion": row["completion"]}, (Conversation,), "")
    except (UserError, ValueError):
        return False
    return True


def _rankings(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The distinct completions of each prompt with their scores, if there are two, and two different scores."""
    prompts: dict[str, dict[str, Any]] = {}
    for sample in samples:
        given = {key: sample[key] for key in ("prompt", "tools") if key in sample}
        row = prompts.setdefault(json.dumps(given), {**given, "completions": [], "scores": []})
        if sample["completion"] not in row["completions"]:
            row["completions"].append(sample["completion"])
            row["scores"].append(sample.get("score", 0.0))
    scored = any("score" in sample for sample in samples)
    return [row for row in prompts.values() if len(set(row["scores"]) if scored else row["scores"]) > 1]
