"""Attention over packed rows without a mask equals attention over one sequence per row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import builders
from burnish.kernels import attention, enable, grouped
from burnish.models import forward
from burnish.models.batching import collate
from burnish.models.forward import has_varlen, hidden_states, prefers_packed
from burnish.types import Example, MicroBatch, Segments, Sequence

SIZES = builders.SIZES | {"num_key_value_heads": 2}
WITH = [getattr(hf, f"{name}Config") for name in ("Llama", "Qwen2", "Qwen3", "Granite", "Cohere", "GPTNeoX", "Olmo")]
WITHOUT = [hf.Gemma2Config, hf.MptConfig, hf.Lfm2Config]
PADDED = {"side": "left", "pad_to": 90}


def model_of(config: type, **settings: object) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config(**SIZES, **settings)).eval()


def example(prompt: int, *answers: int) -> Example:
    draw = torch.Generator().manual_seed(prompt)
    before = torch.randint(0, 64, (prompt,), generator=draw).tolist()
    rows = [(*before, *torch.randint(0, 64, (n,), generator=draw).tolist()) for n in answers]
    return Example(tuple(Sequence(row, (False,) * prompt + (True,) * (len(row) - prompt), "here") for row in rows))


EXAMPLES = [example(9, 5, 1, 7), example(4, 3), example(6, 6, 6)]


def last_states(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """States at the ends of sequences, and the gradients of a weighted sum of them."""
    model.zero_grad()
    states = hidden_states(model, batch).flatten(0, 1)[batch.ends]
    (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).sum().backward()
    return states.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("layout", [{}, {"shared": True}, {"shared": True, **PADDED}], ids=str)
@pytest.mark.parametrize("config", WITH, ids=lambda config: config.model_type)
def test_states_and_gradients_equal_those_of_one_sequence_per_row(config, layout):
    model = model_of(config).double()
    expected, gradients = last_states(model, collate(EXAMPLES, 0))
    assert has_varlen(model)
    states, ours = last_states(model, collate(EXAMPLES, 0, packed=True, **layout))
    # norms of the others are computed in float32
    limit = 1e-9 if config is hf.GPTNeoXConfig else 1e-5
    for a, b in zip([states, *ours], [expected, *gradients], strict=True):
        assert (a - b).norm() < limit * b.norm()


@pytest.mark.parametrize("config", WITHOUT, ids=lambda config: config.model_type)
def test_windows_biases_and_convolutions_are_unaffected(config):
    settings = {
        hf.MptConfig: {"d_model": 32, "n_heads": 4, "n_layers": 2},
        hf.Lfm2Config: {"layer_types": ["conv", "full_attention"]},
    }
    model = model_of(config, **settings.get(config, {}))
    before = model.config._attn_implementation
    assert not has_varlen(model)
    assert model.config._attn_implementation == before


def test_soft_caps_are_refused():
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="softcap"):
        attention.varlen(
            torch.nn.Module(),
            states,
            states,
            states,
            None,
            segments=attention.Packed(Segments((3,), (None,))),
            softcap=30.0,
        )


def test_a_model_with_packed_attention_still_takes_masks_and_generates():
    model = model_of(hf.LlamaConfig)
    ids = torch.arange(2, 14).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    inputs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    before = model(ids, attention_mask=mask).logits, model.generate(ids, **inputs)
    assert has_varlen(model)
    after = model(ids, attention_mask=mask).logits, model.generate(ids, **inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_saved_models_do_not_name_it(tmp_path):
    model = model_of(hf.LlamaConfig)
    assert has_varlen(model)
    model.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_recomputed_activations_see_the_same_runs():
    model = model_of(hf.LlamaConfig).double().train()
    batch = collate(EXAMPLES, 0, packed=True, shared=True)
    expected = last_states(model, batch)
    model.activation_checkpointing_enable()
    states = last_states(model, batch)
    assert torch.equal(states[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(states[1], expected[1], strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_padded_rows_in_half_precision_are_computed_in_float32_and_rounded_once(masked):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 7, 8).bfloat16() for _ in range(3)]
    mask = torch.zeros(2, 1, 7, 7, dtype=torch.bfloat16).masked_fill_(torch.ones(7, 7).triu(4).bool(), -1e9)
    layer, weights = SimpleNamespace(is_causal=False, num_key_value_groups=1), torch.randn(2, 7, 4, 8)

    def attended(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        states, _ = attention.sdpa(layer, *leaves, mask.to(dtype) if masked else None)  # type: ignore[arg-type]
        (states.float() * weights.bfloat16().float()).sum().backward()
        assert states.dtype == dtype
        return [states.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]

    for half, exact in zip(attended(torch.bfloat16), attended(torch.float32), strict=True):
        assert torch.equal(half, exact.bfloat16())


def test_an_encoder_trains_with_attention_in_float32_under_autocast(monkeypatch):
    config = hf.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model: Any = enable(hf.BertModel(config))
    plain, seen = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *a, **k: seen.append(q.dtype) or plain(q, *a, **k))
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids, attention_mask=mask).last_hidden_state.sum().backward()
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)
            model(input_ids=ids[:, :1], attention_mask=mask[:, :1])
    assert seen == [torch.float32, torch.float32, torch.bfloat16]


def test_without_onednn_half_precision_on_a_cpu_is_computed_in_float32(monkeypatch):
    monkeypatch.setattr(grouped, "fits", lambda dtype, device: False)
    segments = Segments((4, 3, 5, 6, 2), (None, 0, 0, None, 3))
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 20, 8, generator=draw).bfloat16() for heads in (4, 2, 2)]
    results = []
    for wide in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=not wide):
            q, k, v = (x.float() for x in leaves) if wide else leaves
            states, _ = attention.varlen(torch.nn.Module(), q, k, v, None, segments=attention.Packed(segments))
        states.bfloat16().float().square().sum().backward()
        results.append([states.bfloat16(), *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """The documented behavior of the GPU kernel, one sequence at a time."""
    assert window_size == (-1, 0)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert cu_q.dtype == cu_k.dtype == torch.int32
    out = []
    for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        one, keys, values = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        out.append(F.scaled_dot_product_attention(one, keys, values, seen, scale=scale, enable_gqa=True))
    return torch.cat(out, 1).transpose(0, 1)


@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.Qwen3Config], ids=lambda config: config.model_type)
def test_with_autocast_the_flash_kernel_gets_half_precision_of_float32_weights(config, monkeypatch):
    calls = []

    def watched(*args, **named):
        calls.append({x.dtype for x in args[:3]})
        return flash(*args, **named)

    monkeypatch.setattr(attention, "varlen_attn", watched)
    monkeypatch.setattr(attention, "has_kernel", lambda dtype, device: dtype is torch.bfloat16)
    model = model_of(config)
    expected = hidden_states(model, collate(EXAMPLES, 0)).flatten(0, 1)[collate(EXAMPLES, 0).ends]
    with torch.autocast("cpu", torch.bfloat16):
        assert prefers_packed(model)
        calls.clear()
        batch = collate(EXAMPLES, 0, packed=True, shared=True)
        states = hidden_states(model, batch).flatten(0, 1)[batch.ends]
    assert calls == [{torch.bfloat16}] * 2
    assert (states - expected).abs().max() < 2e-2 * expected.abs().max()


def test_on_a_gpu_rows_are_packed_where_passes_are_in_half_precision(monkeypatch):
    """Of a model that stands for one on a GPU: only its place and its dtype are read."""
    monkeypatch.setattr(forward, "has_varlen", lambda model: True)
    model: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert not prefers_packed(model)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.get_autocast_dtype("cuda") is torch.float16 and prefers_packed(model)
    finally:
        torch.set_autocast_enabled("cuda", False)
    model.dtype = torch.bfloat16
    assert prefers_packed(model)


def test_the_flash_kernel_gets_the_keys_of_a_parent_before_those_of_each_child(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", flash)
    segments = Segments((4, 3, 5, 6, 2), (None, 0, 0, None, 3))
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 20, 8, generator=draw)
    key, value = (torch.randn(1, 2, 20, 8, generator=draw) for _ in range(2))
    expected, _ = attention.varlen(
        torch.nn.Module(), query, key, value, None, scaling=0.3, segments=attention.Packed(segments)
    )
    torch.testing.assert_close(attention.on_gpu(query, key, value, 0.3, segments), expected)
