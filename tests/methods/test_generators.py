"""Training on completions of other generators than the local one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from burnish import GRPO, PPO
from burnish.generate.continuous import ContinuousGenerator
from burnish.generate.local import LocalGenerator
from burnish.generate.sampling import Sampling
from burnish.generate.vllm import VllmGenerator
from burnish.types import Prompt
from fake_vllm import GlooBroadcast, Serving, serving

CONTINUOUS = partial(ContinuousGenerator, slots=4, page_size=16, max_batch_tokens=64)


PROMPTS = [Prompt(({"role": "user", "content": f"{i} + 1"},), {}, f"prompts:{i}") for i in range(8)]


def score(answers: Any) -> list[float]:
    return [sum(answer.tokens) % 9 / 4 - 1 for answer in answers]


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


def on(vllm: Serving) -> Any:
    return partial(VllmGenerator, slots=8, url=vllm.url, group=GlooBroadcast)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_vllm_server_trains_like_the_local_generator(
    make_trainer: Any, policy: Any, tiny_tokenizer: Any, tmp_path: Any, adapter: bool
) -> None:
    def trained(generator: Any) -> Any:
        torch.manual_seed(0)
        model = policy(lora=adapter)
        if adapter:
            method: Any = GRPO(score, Sampling(max_new_tokens=5, samples=3), generator)
        else:
            method = PPO(score, Sampling(max_new_tokens=5), generator, epochs=1, mini_batches=2)
        trainer = make_trainer(method, model, PROMPTS, batch=4, lr=1e-2)
        trainer.train()
        method.close()
        return trainer

    with serving(policy(), tiny_tokenizer) as vllm:
        ours, local = trained(on(vllm)), trained(LocalGenerator)
        assert vllm.lives == 1
    names = ("sampler_mismatch", "score", "kl", "loss")
    compared = 0
    for one, other in zip(ours.state.log_history, local.state.log_history, strict=True):
        for name in names:
            if name in other:
                assert one[name] == pytest.approx(other[name], abs=1e-5), name
                compared += 1
    assert compared >= 6
    assert all(line["sampler_mismatch"] < 1e-5 for line in ours.state.log_history if "sampler_mismatch" in line)
    for a, b in zip(ours.network.policy.parameters(), local.network.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_a_vllm_server_whose_log_probabilities_drift_stops_the_run(
    make_trainer: Any, policy: Any, tiny_tokenizer: Any
) -> None:
    def drift(answer: dict[str, Any]) -> None:
        logprobs = answer["choices"][0]["logprobs"]
        off = 0.02 * vllm.calls.count("/finish_weight_update")
        logprobs["token_logprobs"] = [value - off for value in logprobs["token_logprobs"]]

    with serving(policy(), tiny_tokenizer) as vllm:
        vllm.change = drift
        method = GRPO(score, Sampling(max_new_tokens=3, samples=2), on(vllm))
        trainer = make_trainer(method, policy(), PROMPTS, batch=2)
        with pytest.raises(
            RuntimeError, match=r"sampler and trainer differ by 0.06 nats per token on average \(limit 0"
        ):
            trainer.train()
        method.close()
    seen = [line["sampler_mismatch"] for line in trainer.state.log_history if "sampler_mismatch" in line]
    assert seen == pytest.approx([0.02, 0.04], abs=1e-4)
