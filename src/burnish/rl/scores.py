"""Turns the scores of rewards into the scores that an update uses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.math.advantages import Moments
from burnish.types import Trajectory


def final_scores(
    trajectories: list[Trajectory],
    scale: float = 1.0,
    clip: float | None = None,
    missing_eos: Literal["none", "subtract", "replace"] = "none",
    penalty: float = 1.0,
    moments: Moments | None = None,
) -> Tensor:
    """Scores (N,): normalized by running moments, scaled, and clipped to [-clip, clip].

    ``missing_eos`` applies to trajectories that did not stop: ``subtract`` lowers their score by ``penalty``, and
    ``replace`` sets it to ``penalty``.
    """
    scores = torch.tensor([t.score for t in trajectories], dtype=torch.float64)
    scores = (scores if moments is None else moments.normalize(scores)) * scale
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    cut = torch.tensor([not t.stopped for t in trajectories])
    if missing_eos == "subtract":
        return torch.where(cut, scores - penalty, scores)
    if missing_eos == "replace":
        return torch.where(cut, penalty, scores)
    return scores
