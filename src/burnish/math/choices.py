"""The names that settings choose between. This module does not import torch, so that checking a recipe is fast."""

from __future__ import annotations

from typing import Literal

Estimate = Literal["k1", "k2", "k3"]
"""Estimators of the KL divergence per token (``math.kl``)."""

Baseline = Literal["none", "mean", "rloo", "group_mean", "group_std", "batch_whitened", "reinforce++-baseline"]
"""Baselines of a completion's reward (``math.advantages``)."""

Divergence = Literal["forward", "reverse", "jensen_shannon"]
"""Divergences between the distributions of a student and its teacher (``math.distillation``)."""

PreferenceLoss = Literal[
    "sigmoid", "robust", "ipo", "hinge", "sppo", "apo_zero", "apo_down", "nca_pair", "simpo", "orpo"
]
"""Losses of pairs of answers (``math.preference``)."""

WITHOUT_REFERENCE = ("simpo", "orpo")
WITH_SMOOTHING = ("sigmoid", "robust", "simpo")
WITH_MARGIN = ("sigmoid", "robust", "hinge", "simpo")
WITH_SOFT_LABELS = ("sigmoid", "ipo", "hinge", "simpo")
