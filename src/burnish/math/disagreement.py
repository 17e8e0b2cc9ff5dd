"""How much several predictions of one label disagree: which pairs to ask people about next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def disagreement(probabilities: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The mutual information of a binary label and the choice of the predictor, in nats: H(mean p) - mean H(p).

    It is 0 where all predictors say the same, however unsure they are, and ln 2 where half of them are sure of one
    label and half of the other (BALD, Houlsby et al. 2011).

    Args:
        probabilities: (M, N) probability of the label by each of M predictors for N items.

    Returns:
        (N,) one number for each item.

    Raises:
        ValueError: a number is not a probability.
    """
    p = np.asarray(probabilities, np.float64)
    if p.ndim != 2 or not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"expected (M, N) probabilities in [0, 1], got shape {p.shape}")
    return np.maximum(_entropy(p.mean(axis=0)) - _entropy(p).mean(axis=0), 0.0)


def _entropy(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """H(p) of a binary label in nats, where 0 ln 0 is 0."""
    inside = np.clip(p, np.finfo(np.float64).tiny, 1 - np.finfo(np.float64).epsneg)
    entropy = -(inside * np.log(inside) + (1 - inside) * np.log1p(-inside))
    return np.where((p == 0) | (p == 1), 0.0, entropy)
