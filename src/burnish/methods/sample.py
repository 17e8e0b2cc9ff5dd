"""Completes prompts and scores the completions: the Grow step of ReST, and the samples of best-of-n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from burnish.methods import ROW_METHODS
from burnish.methods.settings import SampleConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.rl.collect import sample_prompts
from burnish.rl.metrics import completed_row, sample_rows
from burnish.types import Prompt, Row

SHOWN = 4
"""Number of prompts of a chunk whose first completion a person can read in the report."""


class Sample(RowMethod):
    """Writes ``samples.jsonl``, a row for each completion, and ``ranked.jsonl``, the distinct ones of each prompt.

    A row of samples has the prompt, the completion, its score, every reward, the reason why it ended, its seed, an id
    such as ``17-2`` (the third completion of prompt 17, counted from 0), and in ``meta`` the prompt's other columns.
    Empty completions are left out, because no method can learn from them. A prompt is in ``ranked.jsonl`` if its
    completions have at least two different scores.
    """

    spec = ROW_METHODS["sample"]

    def __init__(self, **settings: Any) -> None:
        self.settings = SampleConfig(**settings)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Complete and score a chunk of prompts."""
        prompts = [row for row in rows if isinstance(row, Prompt)]
        requests, trajectories = sample_prompts(
            prompts, first, run.model, run.tokenizer, run.generator, run.sampling, run.rewards, run.seed
        )
        samples = run.sampling.samples
        written, ranked = [], []
        counts: Counter[str] = Counter()
        measured: dict[str, list[float]] = {"length": [], "stopped": [], "empty": []}
        scored = bool(run.rewards)
        for start in range(0, len(trajectories), samples):
            everyone = trajectories[start : start + samples]
            group = zip(everyone, requests[start : start + samples], strict=True)
            mine = [
                {**completed_row(trajectory), "seed": request.seed, "id": f"{first + start // samples}-{g}"}
                for g, (trajectory, request) in enumerate(group)
                if trajectory.text
            ]
            written += mine
            counts["made" if mine else "skipped: every completion is empty"] += 1
            ranking = _ranking(mine) if scored else None
            if ranking is not None:
                ranked.append(ranking)
            measured["length"].append(fmean(len(t.tokens) for t in everyone))
            measured["stopped"].append(fmean(float(t.stopped) for t in everyone))
            measured["empty"].append(fmean(float(not t.text) for t in everyone))
            if scored:
                measured.setdefault("score", []).append(fmean(t.score for t in everyone))
                for name in everyone[0].rewards:
                    measured.setdefault(f"reward_{name}", []).append(fmean(t.rewards[name] for t in everyone))
        files = {"samples.jsonl": written, "ranked.jsonl": ranked}
        return Made(files, counts, measured, sample_rows(trajectories[::samples][:SHOWN], "train"))


def _ranking(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The distinct completions of a prompt with their scores; None if there are no two different scores."""
    scores: dict[str, float] = {}
    for sample in samples:
        scores.setdefault(sample["completion"], sample["score"])
    if len(set(scores.values())) < 2:
        return None
    return {"prompt": samples[0]["prompt"], "completions": list(scores), "scores": list(scores.values())}
