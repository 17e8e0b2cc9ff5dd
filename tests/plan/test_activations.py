"""What a forward pass keeps: the formula for Llama, adapters, precisions and caches, without any numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, GPT2Config, LlamaConfig

from burnish.errors import UserError
from burnish.kernels import grouped
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.plan.activations import PassSettings, cache_bytes, checkpointed_bytes, kept_bytes
from burnish.types import Segments

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
H, INNER, K, HEADS = 64, 96, 16, 8
CPU, GPU = PassSettings(gpu=False), PassSettings(gpu=True)


def empty(config: Any, kind: Any = AutoModelForCausalLM, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return kind.from_config(config, dtype=dtype)


def of_layer(settings: PassSettings, tokens: int = 48, dtype: torch.dtype = torch.float32) -> int:
    """The bytes of one more layer."""
    models = [empty(LlamaConfig(**SIZES, num_hidden_layers=layers), dtype=dtype) for layers in (2, 3)]
    fewer, more = (kept_bytes(model, 1, tokens, settings) for model in models)
    return more - fewer


def test_a_llama_layer_keeps_what_the_formula_says() -> None:
    on_cpu = 6 * H + 2 + 5 * H + HEADS + 4 * INNER
    on_gpu = 6 * H + 2 + 2 * H + 2 * K + HEADS + 4 * INNER
    assert of_layer(CPU) == 48 * 4 * on_cpu
    assert of_layer(GPU) == 48 * 4 * on_gpu
    assert of_layer(PassSettings(gpu=False, grouped=True)) == 48 * 4 * (on_gpu - HEADS)


def test_grouped_attention_keeps_what_is_planned() -> None:
    kept: list[torch.Tensor] = []
    query, key, value = (torch.randn(1, heads, 48, 8).requires_grad_() for heads in (HEADS, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        grouped.attend(query, key, value, None, Segments((30, 18), (None, None)))
    assert sum(x.nbytes for x in kept) == 48 * 4 * (2 * H + 2 * K)


def test_padded_rows_keep_about_as_much_as_a_packed_one() -> None:
    model = empty(LlamaConfig(**SIZES, num_hidden_layers=2))
    assert kept_bytes(model, 4, 24, CPU) == pytest.approx(kept_bytes(model, 1, 96, CPU), rel=0.06)


def test_autocast_keeps_the_weights_in_half_precision() -> None:
    """Of the linear layers, whatever the number of tokens: the norms are computed in float32."""
    model = empty(LlamaConfig(**SIZES, num_hidden_layers=2))
    linear = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    half = PassSettings(gpu=True, autocast=torch.bfloat16)
    few, more = kept_bytes(model, 1, 1, half), kept_bytes(model, 1, 101, half)
    assert few - (more - few) // 100 == pytest.approx(2 * linear, rel=1e-3)
    assert (more - few) / 100 < kept_bytes(model, 1, 1, GPU)


def test_a_frozen_base_keeps_no_inputs_of_its_layers_but_the_adapter_does() -> None:
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    whole = kept_bytes(empty(config), 1, 32, CPU)
    few = add_adapter(empty(config), AdapterConfig(r=4, targets=["q_proj"]), "CAUSAL_LM")
    assert kept_bytes(few, 1, 32, CPU) < 0.9 * whole


def test_a_cached_token_has_a_key_and_a_value_in_each_layer() -> None:
    assert cache_bytes(empty(LlamaConfig(**SIZES, num_hidden_layers=3))) == 2 * 3 * K * 4
    assert cache_bytes(empty(LlamaConfig(**SIZES, num_hidden_layers=3), dtype=torch.bfloat16)) == 2 * 3 * K * 2


def test_with_checkpointing_only_inputs_of_layers_and_one_layer_are_kept() -> None:
    assert checkpointed_bytes(kept=1000, layers=10, tokens=5, hidden_bytes=4) == 10 * 5 * 4 + 100


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100), AutoModelForCausalLM),
        (
            BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64),
            AutoModelForSequenceClassification,
        ),
    ],
)
def test_other_architectures_are_counted_too(config: Any, kind: Any) -> None:
    model = empty(config, kind)
    assert kept_bytes(model, 2, 32, CPU) == pytest.approx(2 * kept_bytes(model, 1, 32, CPU), rel=0.05)


def test_code_that_needs_numbers_is_named() -> None:
    model = empty(LlamaConfig(**SIZES, num_hidden_layers=1))

    def choosy(*inputs: Any, **more: Any) -> Any:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    model.model.forward = choosy
    with pytest.raises(UserError, match=r"LlamaForCausalLM: its memory cannot be planned: Tensor.item\(\)"):
        kept_bytes(model, 1, 8, CPU)
