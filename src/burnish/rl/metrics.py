"""Metrics of trajectories, for training and evaluation, and rows of samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.math.statistics import RowSums
from burnish.types import Example, Trajectory


def summary(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means over trajectories: score, each reward, length, and the fraction that stopped."""
    n = len(trajectories)
    scores = torch.tensor([t.score for t in trajectories], dtype=torch.float64)
    lengths = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.float64)
    return {
        "score": scores.mean().item(),
        "score_std": scores.std(correction=0).item(),
        "ties": 1 - len(scores.unique()) / n,
        "length": lengths.mean().item(),
        "stopped": sum(t.stopped for t in trajectories) / n,
    } | {f"reward_{name}": sum(t.rewards[name] for t in trajectories) / n for name in trajectories[0].rewards}


def value_metrics(returns: Tensor, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Means of returns and values over learned tokens, and the explained variance of the returns."""
    returns, values = returns[mask], values[mask]
    variance = returns.var(correction=0)
    explained = 1 - (returns - values).var(correction=0) / variance if variance > 0 else torch.zeros(())
    return {
        "returns": returns.mean().item(),
        "values": values.mean().item(),
        "explained_variance": explained.item(),
    }


def interval(name: str, values: list[float]) -> dict[str, float]:
    """The mean of independent values with its 95 % interval (normal approximation): name, name_low and name_high."""
    x = torch.tensor(values, dtype=torch.float64)
    mean = x.mean().item()
    if len(x) < 2:
        return {name: mean}
    half = 1.959964 * x.std().item() / math.sqrt(len(x))
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def evaluation(trajectories: list[Trajectory], examples: list[Example], start: Mapping[str, float]) -> dict[str, float]:
    """Means with intervals: score, each reward, KL per trajectory (k1), and win rate against the initial policy.

    Args:
        trajectories: scored trajectories.
        examples: the examples of the trajectories. With a reference, they have ``ref_logprobs``, and ``kl_logprobs`` or
            ``old_logprobs`` unless the sampler's log-probabilities are used.
        start: scores before training by source, for the prompts where they were measured.
    """
    metrics = summary(trajectories) | interval("score", [t.score for t in trajectories])
    for name in trajectories[0].rewards:
        metrics |= interval(f"reward_{name}", [t.rewards[name] for t in trajectories])
    if _has_reference(examples):
        metrics |= interval("kl", [_log_ratio(example) for example in examples])
    pairs = [(t.score, start[t.source]) for t in trajectories if t.source in start]
    if pairs:
        won = interval("win_rate", [(after > before) + 0.5 * (after == before) for after, before in pairs])
        metrics |= {name: min(max(share, 0.0), 1.0) for name, share in won.items()}
    return metrics


def row_sums(trajectories: list[Trajectory], examples: list[Example]) -> dict[str, RowSums]:
    """Score, each reward, length and KL (k1) of each row, with arguments as in ``evaluation``."""
    values: dict[str, list[float]] = {
        "score": [t.score for t in trajectories],
        "length": [float(len(t.tokens)) for t in trajectories],
        "stopped": [float(t.stopped) for t in trajectories],
    }
    values |= {f"reward_{name}": [t.rewards[name] for t in trajectories] for name in trajectories[0].rewards}
    if _has_reference(examples):
        values["kl"] = [_log_ratio(example) for example in examples]
    sources = [t.source for t in trajectories]
    return {name: RowSums(_summed(sources, of)) for name, of in values.items()}


def _summed(sources: list[str], values: list[float]) -> dict[str, tuple[float, float]]:
    """The sum and the number of the values of each row, which may have several trajectories."""
    rows: dict[str, tuple[float, float]] = {}
    for source, value in zip(sources, values, strict=True):
        total, count = rows.get(source, (0.0, 0.0))
        rows[source] = (total + value, count + 1.0)
    return rows


def _has_reference(examples: list[Example]) -> bool:
    return all("ref_logprobs" in s.arrays for example in examples for s in example.sequences)


def _log_ratio(example: Example) -> float:
    """Sum of log p - log p_reference over all sampled tokens."""

    def total(*names: str) -> float:
        arrays = [s.arrays for s in example.sequences]
        name = next(name for name in names if name in arrays[0])
        return math.fsum(np.concatenate([of[name] for of in arrays]))

    return total("kl_logprobs", "old_logprobs", "sampler_logprobs") - total("ref_logprobs")


def sample_rows(trajectories: list[Trajectory], kind: str) -> list[dict[str, Any]]:
    """Rows of samples.jsonl. ``kind`` is ``train`` or ``eval``."""
    return [
        {
            "kind": kind,
            "prompt": t.prompt[-1]["content"],
            "completion": t.text,
            "score": t.score,
            "rewards": dict(t.rewards),
            "finish_reason": t.finish_reason,
            "source": t.source,
        }
        for t in trajectories
    ]


def completed_row(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory of one turn as a row to train on: prompt, completion, score, rewards, and columns in ``meta``."""
    prompt = trajectory.prompt
    row: dict[str, Any] = {
        "prompt": prompt[0]["content"] if len(prompt) == 1 and prompt[0]["role"] == "user" else list(prompt),
        "completion": trajectory.text,
    }
    if trajectory.rewards:
        row |= {"score": trajectory.score, "rewards": dict(trajectory.rewards)}
    row["finish_reason"] = trajectory.finish_reason
    return row | ({"meta": dict(trajectory.columns)} if trajectory.columns else {})
