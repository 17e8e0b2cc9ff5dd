"""Compares the log-probabilities of sampler and trainer, which should agree."""

from __future__ import annotations

import math

import numpy as np

from burnish.types import Example

LIMIT = 0.05
"""Default limit in float32, in nats per token. Rounding gives about 1e-6."""

LIMIT_IN_HALF = 0.2
"""Default limit if weights or passes are in half precision. For a model of 30 layers, rounding gives about 0.05."""


def limit_of(setting: float | None, in_half: bool) -> float:
    """The limit that ``max_sampler_mismatch`` sets, or its default."""
    return setting if setting is not None else LIMIT_IN_HALF if in_half else LIMIT


def mean_sampler_mismatch(examples: list[Example], limit: float) -> float:
    """Mean absolute difference between ``old_logprobs`` and ``sampler_logprobs`` over learned tokens, in nats.

    Raises:
        RuntimeError: if it exceeds the limit.
    """
    sequences = [s for example in examples for s in example.sequences]
    differences = [np.abs(s.arrays["old_logprobs"] - s.arrays["sampler_logprobs"])[s.loss_mask] for s in sequences]
    every = np.concatenate(differences) if differences else np.zeros(0)
    return within(math.fsum(every) / max(len(every), 1), limit)


def within(mismatch: float, limit: float, statistic: str = "on average") -> float:
    """Return the mismatch between sampler and trainer, in nats per token, after checking it against a limit.

    ``statistic`` tells the reader of the message how the mismatch was computed from the differences of all tokens.

    Raises:
        RuntimeError: if the mismatch exceeds the limit or is NaN.
    """
    if not mismatch <= limit:
        raise RuntimeError(
            f"the log-probabilities of sampler and trainer differ by {mismatch:.2g} nats per token {statistic} (limit "
            f"{limit:g}), so training would not learn from the distribution that was sampled; if this is expected, "
            "raise method.max_sampler_mismatch"
        )
    return mismatch
