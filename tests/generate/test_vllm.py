"""The generator on a vLLM server, against a stand-in for the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import pytest
import torch

from builders import character_tokenizer, llama
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete
from burnish.generate.sampling import Sampling
from burnish.generate.vllm import VllmGenerator
from vllm_server import GlooBroadcast, serving

ENDS = frozenset({2, 30, 41})


def requests(n: int = 6, **sampling: Any) -> list[Request]:
    settings = Sampling(**({"max_new_tokens": 8} | sampling))
    return [Request(tuple(range(9, 11 + i % 3)), i, settings, ENDS) for i in range(n)]


def generator(model: Any, url: str, **settings: Any) -> VllmGenerator:
    return VllmGenerator(model, character_tokenizer(), slots=4, url=url, group=GlooBroadcast, **settings)


def assert_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.finish_reason, one.version) == (other.finish_reason, other.version)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_goes_as_files() -> None:
    base = llama()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(llama(), lora).eval()
    tokenizer = character_tokenizer()
    with serving(base, tokenizer) as vllm:
        ours = generator(model, vllm.url)
        ours.update_weights(3, ((n, p) for n, p in model.named_parameters() if p.requires_grad))
        local = LocalGenerator(model, tokenizer)
        local.update_weights(3, ())
        assert_equal(complete(ours, requests(), 3), complete(local, requests(), 3))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(3)
        ours.update_weights(4, ((n, p) for n, p in model.named_parameters() if p.requires_grad))
        local.update_weights(4, ())
        assert_equal(complete(ours, requests(), 4), complete(local, requests(), 4))
        ours.close()
        assert vllm.calls == [
            "/v1/models",
            "/tokenize",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ]


def test_weights_go_as_tensors() -> None:
    served, model, tokenizer = llama(), llama(seed=1), character_tokenizer()
    with serving(served, tokenizer) as vllm:
        ours = generator(model, vllm.url)
        local = LocalGenerator(model, tokenizer)
        for version in (0, 1):
            ours.update_weights(version, model.named_parameters())
            local.update_weights(version, ())
            assert_equal(complete(ours, requests(), version), complete(local, requests(), version))
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
        ours.close()
        update = [
            *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            *("/reset_prefix_cache", "/resume"),
        ]
        init = ["/shutdown_weight_transfer_engine", "/get_world_size", "/init_weight_transfer_engine"]
        assert vllm.calls[2:] == [*init, *update, *update, "/shutdown_weight_transfer_engine"]
