"""Estimators of the KL divergence from sampled tokens, and an adaptive KL coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burnish.errors import UserError
from burnish.math.choices import Estimate
from burnish.math.tensors import learned, same_shape

# Bound of log-ratios, so that their exp cannot overflow.
LOG_RATIO_LIMIT = 20.0


def estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Estimate = "k1", mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) per token sampled from the policy, with d = logprobs - ref_logprobs.

    k1 = d (unbiased, can be negative), k2 = d^2 / 2 (biased, at least 0), k3 = exp(-d) - 1 + d (unbiased, at least 0;
    d is clamped to at least -20, so that exp cannot overflow).

    Choose the estimator by where the KL counts. In the reward, k1 gives the gradient of the reverse KL. As a loss, k2
    gives the gradient of the reverse KL and k3 that of the forward KL; the expected gradient of k1 is 0.
    Source: Schulman, "Approximating KL divergence", 2020.

    Args:
        logprobs: (B, T), log-probabilities under the policy that sampled the tokens.
        ref_logprobs: (B, T), log-probabilities under the reference.
        kind: k1, k2 or k3.
        mask: (B, T), True for tokens that count; None counts every token.

    Returns:
        (B, T), in nats, 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ.
        UserError: if the kind is unknown.
    """
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if mask is None:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
    logprobs, ref_logprobs = learned(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        difference = difference.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-difference) + difference
    raise UserError(f"unknown KL estimate {kind!r}: expected k1, k2 or k3")


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that keeps the KL near a target: ``AdaptiveKL(coef=0.2, target=6.0, horizon=10000)``.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon. Instances are immutable: ``update`` returns a new one.
    ``dataclasses.asdict(controller)`` gives its state, and ``AdaptiveKL(**state)`` restores it.
    Source: Ziegler et al., "Fine-tuning language models from human preferences", 2019.

    Attributes:
        coef: the coefficient, at least 0.
        target: the target KL, in nats per sequence, above 0.
        horizon: the number of sequences over which the coefficient adapts, above 0.
    """

    coef: float
    target: float = 6.0
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if not (self.coef >= 0 and self.target > 0 and self.horizon > 0):
            raise UserError(
                f"an adaptive KL coefficient needs coef >= 0, target > 0 and horizon > 0, "
                f"got coef {self.coef}, target {self.target}, horizon {self.horizon}"
            )

    def update(self, kl: float, n: int) -> AdaptiveKL:
        """Return the controller after n more sequences.

        Args:
            kl: the mean KL per sequence, summed over its tokens, in nats.
            n: the number of sequences sampled since the last update, less than 5 * horizon.

        Raises:
            UserError: if n is so large for the horizon that the coefficient could become 0 or negative.
            ValueError: if the KL is not finite.
        """
        if n >= 5 * self.horizon:
            raise UserError(
                f"a horizon of {self.horizon:g} is too short for {n} sequences per update: the KL coefficient could "
                f"become 0 or negative; use a horizon above {n / 5:g}"
            )
        if not math.isfinite(kl):
            raise ValueError(f"the KL to the reference must be finite, got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * n / self.horizon))
