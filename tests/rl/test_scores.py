"""Scores of an update by hand."""

from __future__ import annotations

from dataclasses import replace

from burnish.rl.scores import final_scores
from burnish.types import Trajectory


def trajectory(score: float, finish_reason: str = "stop", tokens: int = 2) -> Trajectory:
    sampled = Trajectory.from_text("!", tokens=[7] * tokens, finish_reason=finish_reason, source="row 1")
    return replace(sampled, score=score, rewards={"one": score})


def test_final_scores_by_hand() -> None:
    trajectories = [
        trajectory(-3.0),
        trajectory(0.5, "length"),
        trajectory(2.0, "context"),
        trajectory(1.0),
    ]
    expected = {
        (): [-3.0, 0.5, 2.0, 1.0],
        (2.0,): [-6.0, 1.0, 4.0, 2.0],
        (2.0, 1.5): [-1.5, 1.0, 1.5, 1.5],
        (2.0, 1.5, "subtract", 3.0): [-1.5, -2.0, -1.5, 1.5],
        (1.0, None, "replace", -4.0): [-3.0, -4.0, -4.0, 1.0],
    }
    for arguments, scores in expected.items():
        assert final_scores(trajectories, *arguments).tolist() == scores
