"""Metrics of trajectories by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from burnish.rl.metrics import interval, row_sums, summary, value_metrics
from burnish.types import Example, Trajectory


def trajectory(score: float, finish_reason: str = "stop", tokens: int = 2) -> Trajectory:
    sampled = Trajectory.from_text("!", tokens=[7] * tokens, finish_reason=finish_reason, source="row 1")
    return replace(sampled, score=score, rewards={"one": score})


def test_summary_by_hand() -> None:
    metrics = summary([trajectory(1.0), trajectory(1.0, "length", 6), trajectory(4.0), trajectory(0.0, "context", 2)])
    assert metrics == {
        "score": 1.5,
        "score_std": 1.5,
        "ties": 0.25,
        "length": 3.0,
        "stopped": 0.5,
        "reward_one": 1.5,
    }


def test_rows_by_hand() -> None:
    rows = [replace(trajectory(1.0, "length", 6), source="a:1"), replace(trajectory(4.0), source="a:2")]
    rows = [replace(t, sequences=tuple(s.with_arrays(old_logprobs=[-0.5] * len(s)) for s in t.sequences)) for t in rows]
    found = row_sums(rows, [Example(t.sequences) for t in rows])
    assert {name: dict(one.rows) for name, one in found.items()} == {
        "score": {"a:1": (1.0, 1.0), "a:2": (4.0, 1.0)},
        "reward_one": {"a:1": (1.0, 1.0), "a:2": (4.0, 1.0)},
        "length": {"a:1": (6.0, 1.0), "a:2": (2.0, 1.0)},
        "stopped": {"a:1": (0.0, 1.0), "a:2": (1.0, 1.0)},
    }
    referenced = [
        Example(tuple(s.with_arrays(ref_logprobs=[-1.5] * len(s)) for s in t.sequences)) for t in rows
    ]  # log-ratios of 1 at every token
    sizes = [sum(len(s) for s in t.sequences) for t in rows]
    assert row_sums(rows, referenced)["kl"].rows == {"a:1": (sizes[0], 1.0), "a:2": (sizes[1], 1.0)}


def test_interval_by_hand() -> None:
    metrics = interval("x", [1.0, 2.0, 3.0, 6.0])
    half = 1.959964 * math.sqrt(14 / 3 / 4)  # squares around 3: 4 + 1 + 0 + 9 over n - 1
    assert metrics == pytest.approx({"x": 3.0, "x_low": 3 - half, "x_high": 3 + half})
    assert interval("x", [2.0]) == {"x": 2.0}


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    returns = torch.tensor([[0.0, 2.0, 4.0, 6.0, 50.0]])
    exact = value_metrics(returns, returns + 3, mask)
    assert exact == pytest.approx({"returns": 3.0, "values": 6.0, "explained_variance": 1.0})
    none = value_metrics(returns, torch.full((1, 5), 3.0), mask)
    assert none["explained_variance"] == 0.0
    half = value_metrics(returns, torch.tensor([[0.0, 2.0, 0.0, 2.0, 9.0]]), mask)
    assert half["explained_variance"] == pytest.approx(1 - 4 / 5)  # errors 0 0 4 4, variance 4; of the returns 5
    assert value_metrics(torch.ones(1, 5), returns, mask)["explained_variance"] == 0.0
