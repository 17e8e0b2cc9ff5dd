"""Compares the log-probabilities of sampler and trainer: what is learned has to be what was sampled."""

from __future__ import annotations

import math

import numpy as np

from burnish.types import Example


def mean_sampler_mismatch(examples: list[Example], limit: float) -> float:
    """Mean difference of ``old_logprobs`` and ``sampler_logprobs`` over learned tokens, in nats.

    Raises:
        RuntimeError: it is above the limit (``within``).
    """
    sequences = [s for example in examples for s in example.sequences]
    differences = [np.abs(s.arrays["old_logprobs"] - s.arrays["sampler_logprobs"])[s.loss_mask] for s in sequences]
    every = np.concatenate(differences) if differences else np.zeros(0)
    return within(math.fsum(every) / max(len(every), 1), limit)


def within(mismatch: float, limit: float, statistic: str = "on average") -> float:
    """The difference between sampler and trainer, in nats a token, if it is within the limit.

    ``statistic`` says, for the message, how the differences of all tokens became one number.

    Raises:
        RuntimeError: it is above the limit, or not a number.
    """
    if not mismatch <= limit:
        raise RuntimeError(
            f"the sampler's and the trainer's log-probabilities differ by {mismatch:.2g} a token {statistic} (limit "
            f"{limit:g}): what is learned would not be what was sampled; if this is expected, raise "
            "method.max_sampler_mismatch"
        )
    return mismatch
