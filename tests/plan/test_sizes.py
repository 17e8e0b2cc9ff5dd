"""The sizes of models without weights: the same as those of the modules that are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.plan.sizes import QUANTIZED, model_size

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, pad_token_id=0
)
ATTENTION, MLP = 4 * 64 * 64, 3 * 64 * 96
LAYER = ATTENTION + MLP + 2 * 64


def empty(**changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**(CONFIG.to_dict() | changes)), dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model(tied: bool) -> None:
    size = model_size("policy", empty(tie_word_embeddings=tied))
    embeddings = 100 * 64
    rest = 64 + embeddings * (1 if tied else 2)
    assert size.weights == size.trained == 4 * (2 * LAYER + rest)
    assert (size.rest, size.layer, size.states) == (4 * rest, 4 * LAYER, 2 * size.weights)
    assert (size.embedding, size.tied) == (4 * embeddings, tied)


def test_an_adapter_is_all_that_is_trained() -> None:
    """Of rank r, it has r (in + out) weights for each linear layer (Hu et al. 2021)."""
    model = add_adapter(empty(tie_word_embeddings=True), AdapterConfig(r=8), "CAUSAL_LM")
    size = model_size("policy", model)
    assert size.trained == 4 * 2 * 8 * (4 * (64 + 64) + 3 * (64 + 96)) == size.weights - 4 * (2 * LAYER + 64 + 6400)
    assert size.embedding == size.trained_rest == 0 and size.states == 2 * size.trained


def test_quantized_linear_layers_and_the_rest_in_its_own_dtype() -> None:
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model = add_adapter(base, AdapterConfig(r=8), "CAUSAL_LM")
    size = model_size("policy", model, quantized="nf4")
    adapter = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    linear = 2 * (ATTENTION + MLP)
    assert size.weights - adapter == pytest.approx(linear * QUANTIZED["nf4"] + 2 * (5 * 64 + 2 * 6400), rel=1e-3)
    assert 0.5 < QUANTIZED["nf4"] < 0.52
