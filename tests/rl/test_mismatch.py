"""The difference between sampler and trainer, and the limit that stops a run."""

from __future__ import annotations

import math

import pytest

from burnish.rl.mismatch import mean_sampler_mismatch
from burnish.types import Example, Sequence


def test_the_mismatch_is_a_mean_over_learned_tokens() -> None:
    def examples(*sampled: float) -> list[Example]:
        rows = (((9.0, *sampled[:2]), (False, True, True)), ((9.0, sampled[2], 9.0), (False, True, False)))
        arrays = [{"old_logprobs": (0.0,) * 3, "sampler_logprobs": theirs} for theirs, _ in rows]
        return [Example((Sequence((5,) * 3, on, "row", a),)) for (_, on), a in zip(rows, arrays, strict=True)]

    assert mean_sampler_mismatch(examples(0.1, -0.2, 0.0), 0.11) == pytest.approx(0.1)
    for bad in ((0.1, -0.2, 0.0), (math.nan,) * 3, (-math.inf,) * 3):
        with pytest.raises(RuntimeError, match="from the distribution that was sampled"):
            mean_sampler_mismatch(examples(*bad), 0.09)
