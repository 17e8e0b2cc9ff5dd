"""How far the members of an ensemble disagree about a yes-or-no question."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def disagreement(p: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The mutual information between the answer and the member that gives it.

    H(mean of p) - mean of H(p), with the entropy H(p) = -p log p - (1 - p) log(1 - p): 0 if all members say the same,
    and log 2 if half of them are sure of yes and the others of no. Members that are all unsure do not disagree.
    Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning".

    Args:
        p: the probability of yes by each member for each question, of shape (members, questions).

    Returns:
        The disagreement about each question in nats, of shape (questions,).
    """
    given = np.asarray(p, np.float64)
    return np.maximum(0.0, _entropy(given.mean(axis=0)) - _entropy(given).mean(axis=0))


def _entropy(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(p, 1e-300, 1.0)
    outside = np.clip(1 - p, 1e-300, 1.0)
    return -(inside * np.log(inside) + outside * np.log(outside))
