"""Completes prompts and scores the completions: the Grow step of ReST, and the samples of best-of-n."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from burnish.methods import ROW_METHODS
from burnish.methods.settings import SampleConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.render.encode import outcome
from burnish.rl.collect import sample_prompts
from burnish.rl.metrics import completed_row, sample_rows
from burnish.types import Prompt, Row, Trajectory

SHOWN = 4
"""Number of prompts of a chunk whose first completion a person can read in the report."""

OUTCOMES = {"skipped": "skipped: cannot be encoded", "dropped": "dropped: too long"}
"""What the counts call prompts that are not completed."""


class Sample(RowMethod):
    """Writes ``samples.jsonl``, a row for each completion, and ``ranked.jsonl``, the distinct ones of each prompt.

    A row of samples has the prompt, the completion, its score, every reward, its finish reason, its seed, an id such as
    ``17-2`` (both numbers count from 0: prompt 17, completion 2), and in ``meta`` the prompt's other columns.
    Empty completions are left out, because no method can learn from them. A prompt is in ``ranked.jsonl`` if its
    completions have at least two different scores.
    """

    spec = ROW_METHODS["sample"]

    def __init__(self, **settings: Any) -> None:
        self.settings = SampleConfig(**settings)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Complete and score a chunk of prompts."""
        prompts = [row for row in rows if isinstance(row, Prompt)]
        done, changed = sample_prompts(
            prompts, first, run.load(), run.generator, run.sampling, run.truncation, run.rewards, run.seed
        )
        reasons = dict(changed)
        written, ranked = [], []
        counts = Counter(OUTCOMES[what] for what in map(outcome, reasons.values()) if what in OUTCOMES)
        measured: dict[str, list[float]] = defaultdict(list)
        for index, requests, trajectories in done:
            mine = [
                {**completed_row(trajectory), "seed": request.seed, "id": f"{index}-{g}"}
                for g, (trajectory, request) in enumerate(zip(trajectories, requests, strict=True))
                if trajectory.text
            ]
            written += mine
            made = "made, for a shortened prompt" if trajectories[0].source in reasons else "made"
            counts[made if mine else "skipped: every completion is empty"] += 1
            if run.rewards:
                ranking = _ranking(mine)
                ranked += [] if ranking is None else [ranking]
                measured["ranked"].append(float(ranking is not None))
            for name, values in _measures(trajectories).items():
                measured[name].append(fmean(values))
        files = {"samples.jsonl": written, "ranked.jsonl": ranked}
        shown = [one.trajectories[0] for one in done[:SHOWN]]
        return Made(files, counts, measured, sample_rows(shown, "train"))


def _measures(trajectories: list[Trajectory]) -> dict[str, list[float]]:
    """The measures of each completion of a prompt."""
    measures = {
        "length": [float(len(t.tokens)) for t in trajectories],
        "stopped": [float(t.stopped) for t in trajectories],
        "empty": [float(not t.text) for t in trajectories],
    }
    if trajectories[0].rewards:
        measures["score"] = [t.score for t in trajectories]
    return measures | {f"reward_{name}": [t.rewards[name] for t in trajectories] for name in trajectories[0].rewards}


def _ranking(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The distinct completions of a prompt with their scores; None if there are no two different scores."""
    scores: dict[str, float] = {}
    for sample in samples:
        scores.setdefault(sample["completion"], sample["score"])
    if len(set(scores.values())) < 2:
        return None
    return {"prompt": samples[0]["prompt"], "completions": list(scores), "scores": list(scores.values())}
