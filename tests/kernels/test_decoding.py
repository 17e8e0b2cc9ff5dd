"""Attention with one query per row against transformers' own, in single layers and in generation."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from builders import llama
from burnish import kernels
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling
from burnish.kernels.decoding import ROWS, attend

ROWS_OF_CACHE = ROWS + 3  # a second group, which is not full


def tensors(heads, key_heads):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS_OF_CACHE, heads, 1, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 30, key_heads, 64, 8, generator=generator, dtype=torch.float64)
    columns = torch.randint(1, 40, (ROWS_OF_CACHE,), generator=generator)
    hidden = torch.arange(40) >= columns[:, None]
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    return query, key[:ROWS_OF_CACHE, :, :40], value[:ROWS_OF_CACHE, :, :40], mask[:, None, None], columns.tolist()


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_rows_attend_as_in_transformers(heads, key_heads, scaling):
    query, key, value, mask, columns = tensors(heads, key_heads)
    layer = SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=scaling)  # type: ignore[arg-type]
    for known in (columns, None):
        states, _ = attend(layer, query, key, value, mask, scaling=scaling, columns=known)
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-12)


def test_what_is_beyond_a_group_of_rows_is_not_read():
    query, key, value, mask, columns = tensors(4, 2)
    expected, _ = attend(None, query, key, value, mask, columns=columns)
    for start in range(0, ROWS_OF_CACHE, ROWS):
        for x in (key, value):
            x[start : start + ROWS, :, max(columns[start : start + ROWS]) :] = torch.nan
    states, _ = attend(None, query, key, value, mask, columns=columns)
    assert torch.equal(states, expected)


def test_what_it_does_not_know_is_left_to_transformers():
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attend(None, *tensors(4, 4)[:4], softcap=3.0)


def test_generations_are_those_of_fused_attention(monkeypatch):
    sizes: dict[str, Any] = {"vocab_size": 50, "intermediate_size": 48, "initializer_range": 0.3, "eos_token_id": None}
    model = llama(**sizes, bos_token_id=None, pad_token_id=None)
    sampling, ends, pads = Sampling(max_new_tokens=30), frozenset({3, 5, 8}), SimpleNamespace(pad_token_id=0)
    wanted = [Request(tuple(range(2, 3 + length)), length, sampling, ends) for length in range(1, 41)]

    def run():
        return complete(LocalGenerator(model, pads, slots=24), wanted)

    completions = run()
    assert model.config._attn_implementation == "sdpa", "the model has its own attention back"
    monkeypatch.setattr(kernels, "decoding_attention", lambda config, on: nullcontext())
    expected = run()
    assert [c.tokens.tolist() for c in completions] == [c.tokens.tolist() for c in expected]
    for a, b in zip(completions, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_models_attention_comes_back_after_an_error():
    config = SimpleNamespace(_attn_implementation="sdpa")
    with pytest.raises(RuntimeError), kernels.decoding_attention(config, True):
        assert config._attn_implementation != "sdpa"
        raise RuntimeError
    with kernels.decoding_attention(config, False):
        assert config._attn_implementation == "sdpa"
    assert config._attn_implementation == "sdpa"
