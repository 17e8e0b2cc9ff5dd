"""Sampling in bfloat16 while the policy's weights stay in float32, with a CPU that stands for a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from builders import llama
from burnish import GRPO
from burnish.generate.sampling import Sampling
from burnish.generate.settings import GeneratorSettings, factory
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.training import engine
from burnish.training.engine import sampling_dtype
from tiny_runs import PROMPTS

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_only_float32_weights_on_a_gpu_with_passes_in_bfloat16_are_copied() -> None:
    policy = llama()
    adapted = add_adapter(llama(dtype=torch.bfloat16), AdapterConfig(), "CAUSAL_LM")
    assert sampling_dtype(policy, GPU, "bf16") is torch.bfloat16
    assert sampling_dtype(add_adapter(llama(), AdapterConfig(), "CAUSAL_LM"), GPU, "bf16") is torch.bfloat16
    for other in ((policy, CPU, "bf16"), (policy, GPU, "no"), (policy, GPU, "fp16"), (adapted, GPU, "bf16")):
        assert sampling_dtype(*other) is None
    quantized: Any = SimpleNamespace(dtype=torch.float32, is_quantized=True)
    assert sampling_dtype(quantized, GPU, "bf16") is None


@pytest.mark.parametrize("name", ["local", "continuous"])
def test_the_copy_follows_the_policy_and_the_mismatch_is_corrected(name: Any, make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "sampling_dtype", lambda *_: torch.bfloat16)
    method: Any = GRPO(
        lambda trajectories: [float(len(set(t.tokens))) for t in trajectories],
        Sampling(max_new_tokens=8, samples=2),
        factory(GeneratorSettings(name=name)),
    )
    trainer = make(method, rows=PROMPTS, max_steps=3, num_train_epochs=3)
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
