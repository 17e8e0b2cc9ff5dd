"""Runs in bfloat16: the sampler's copy, resuming, and the mismatch of sampler and trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from builders import llama
from burnish import GRPO, PPO, SFT
from burnish.generate.local import LocalGenerator
from burnish.generate.sampling import Sampling
from burnish.generate.settings import GeneratorSettings, factory
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.training.engine import sampling_dtype
from tiny_runs import PROMPTS, ROWS, weights


def test_only_float32_weights_whose_passes_are_in_bfloat16_are_copied() -> None:
    policy = llama()
    adapted = add_adapter(llama(dtype=torch.bfloat16), AdapterConfig(), "CAUSAL_LM")
    assert sampling_dtype(policy, "bf16") is torch.bfloat16
    assert sampling_dtype(add_adapter(llama(), AdapterConfig(), "CAUSAL_LM"), "bf16") is torch.bfloat16
    for other in ((policy, "no"), (policy, "fp16"), (adapted, "bf16")):
        assert sampling_dtype(*other) is None
    quantized: Any = SimpleNamespace(dtype=torch.float32, is_quantized=True)
    assert sampling_dtype(quantized, "bf16") is None


@pytest.mark.parametrize("name", ["local", "continuous"])
def test_the_copy_follows_the_policy_and_the_mismatch_is_corrected(name: Any, make: Any) -> None:
    method: Any = GRPO(
        lambda trajectories: [float(len(set(t.tokens))) for t in trajectories],
        Sampling(max_new_tokens=8, samples=2),
        factory(GeneratorSettings(name=name)),
    )
    trainer = make(method, rows=PROMPTS, max_steps=3, num_train_epochs=3, bf16=True)
    trainer.train()
    sampler, policy = trainer.engine.generation_model, trainer.network.policy
    assert method.sampler.generator.model is sampler is not policy
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    before = dict(llama().named_parameters())
    assert any(not torch.equal(before[key], weight) for key, weight in policy.named_parameters())
    trainer.evaluate(PROMPTS)  # loads the weights after the last update
    copies = dict(sampler.named_parameters())
    assert all(torch.equal(copies[key], weight.bfloat16()) for key, weight in policy.named_parameters())
    lines = [line for line in trainer.state.log_history if "sampler_mismatch" in line]
    assert len(lines) == 3
    for line in lines:
        assert 1e-5 < line["sampler_mismatch"] < 0.05
        assert 0 < line["effective_sample_size"] <= 1  # the correction is on


def test_without_a_copy_nothing_is_corrected(make: Any) -> None:
    method = GRPO(lambda trajectories: [float(len(t.tokens)) for t in trajectories], Sampling(samples=2))
    trainer = make(method, rows=PROMPTS, max_steps=1)
    trainer.train()
    assert trainer.engine.generation_model is trainer.network.policy
    assert not any("effective_sample_size" in line for line in trainer.state.log_history)


def ppo(generator: Any = LocalGenerator) -> PPO:
    sampling = Sampling(max_new_tokens=8, samples=2)
    return PPO(lambda answers: [float(len(set(t.tokens))) for t in answers], sampling, generator)


def adapted() -> Any:
    """An adapter in float32 on a base in bfloat16."""
    torch.manual_seed(0)
    return add_adapter(llama(dtype=torch.bfloat16), AdapterConfig(r=4), "CAUSAL_LM")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
@pytest.mark.parametrize("model", [llama, adapted])
@pytest.mark.parametrize("method, rows", [(SFT, ROWS), (ppo, PROMPTS)])
def test_a_resumed_run_in_bfloat16_ends_with_the_same_bytes(
    method: Any, rows: Any, model: Any, make: Any, tmp_path: Path
) -> None:
    settings = {"bf16": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight, again = (make(method(), model(), rows, folder=tmp_path / "run", **settings) for _ in range(2))
    straight.train()
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert weights(again) == weights(straight)
    assert {p.dtype for p in straight.network.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
@pytest.mark.parametrize("model", [llama, adapted])
def test_in_half_precision_rounding_is_corrected_and_another_sampler_stops_the_run(model: Any, make: Any) -> None:
    class Liar(LocalGenerator):
        def poll(self, timeout: float | None) -> Any:
            return [(handle, replace(c, logprobs=c.logprobs - 0.3)) for handle, c in super().poll(timeout)]

    trainer = make(ppo(), model(), PROMPTS, bf16=True, max_steps=1)
    trainer.train()
    (line,) = (line for line in trainer.state.log_history if "sampler_mismatch" in line)
    assert 1e-5 < line["sampler_mismatch"] < 0.05 and 0.9 < line["effective_sample_size"] < 1
    with pytest.raises(RuntimeError, match=r"differ by 0\.3 nats per token on average \(limit 0\.2\)"):
        make(ppo(Liar), model(), PROMPTS, bf16=True, max_steps=1).train()
