"""Training on completions of other generators than the local one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from burnish import PPO
from burnish.generate.continuous import ContinuousGenerator
from burnish.generate.sampling import Sampling
from burnish.types import Prompt

CONTINUOUS = partial(ContinuousGenerator, slots=4, page_size=16, max_batch_tokens=64)


def test_continuous_batching_trains_to_the_same_bytes_also_after_a_resume(
    make_trainer: Any, policy: Any, weights: Any, tmp_path: Any
) -> None:
    rows = [Prompt(({"role": "user", "content": f"{i} + 1"},), {}, f"prompts:{i}") for i in range(12)]

    def trained(name: str, start: str | None = None) -> Any:
        method = PPO(
            lambda answers: [sum(a.tokens) % 9 / 4 - 1 for a in answers],
            Sampling(max_new_tokens=6),
            CONTINUOUS,
            epochs=2,
            mini_batches=2,
        )
        settings: dict[str, Any] = {"output_dir": str(tmp_path / name), "save_strategy": "steps", "save_steps": 4}
        trainer = make_trainer(method, policy(), rows, batch=4, lr=1e-2, **settings)
        trainer.train(resume_from_checkpoint=start)
        return trainer

    straight = trained("straight")
    again = trained("again")
    resumed = trained("resumed", str(tmp_path / "straight" / "checkpoint-4"))
    assert weights(straight.network.policy) == weights(again.network.policy) == weights(resumed.network.policy)
    lines = [line for line in straight.state.log_history if "sampler_mismatch" in line]
    assert len(lines) == 3
    # the sampler takes the pad token out of the distribution, and the trainer does not
    assert all(0 < line["sampler_mismatch"] < 0.03 for line in lines)
    assert lines[0]["ratio"] == pytest.approx(1, abs=1e-5)
