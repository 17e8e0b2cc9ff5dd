"""A quantized base is frozen, and the adapter has the gradient of the dequantized weights."""

import copy
import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from burnish import kernels
from burnish.errors import UserError
from burnish.kernels.lora import OneRounding
from burnish.models import quantize
from burnish.models.adapters import add_adapter
from burnish.models.batching import collate
from burnish.models.forward import head, hidden_states, scores, token_logprobs
from burnish.models.heads import Network, separate_critic
from burnish.models.loading import describe, load_policy, load_reward_model, summary
from burnish.models.merge import policy_of
from burnish.models.settings import AdapterConfig
from burnish.types import Example, Sequence

BATCH = collate([Example((Sequence((5, 9, 2, 30, 7, 11), (False,) + (True,) * 5, "x"),))], 0)
# the quantiles of a normal distribution of Dettmers et al. 2023, appendix E
NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
CHECKPOINTING = [None, {"use_reentrant": False}, {"use_reentrant": True}]
LORA: dict[str, Any] = {"r": 4}


@pytest.fixture
def bnb() -> Any:
    return pytest.importorskip("bitsandbytes")


@pytest.fixture
def base(tiny_llama, tmp_path) -> Path:
    """A model whose rows are as long as blocks of 4-bit weights need."""
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(
    base: Path,
    kind: Any,
    load: Any = load_policy,
    task: Any = "CAUSAL_LM",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Any:
    torch.manual_seed(0)
    model = load(str(base), quantized=kind, dtype=dtype)
    model = add_adapter(model, AdapterConfig(**LORA | settings), task, describe(str(base))).eval()
    return shaken(kernels.enable(model))


def shaken(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def meant(model: Any, bnb: Any) -> Any:
    """The same model in full precision, of the weights that the quantized ones stand for."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if not isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
                continue
            if isinstance(layer, bnb.nn.Linear4bit):
                weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            else:
                weight = layer.state.CB.float() * layer.state.SCB[:, None] / 127  # a largest value of each row
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            plain.weight = nn.Parameter(weight.float(), requires_grad=False)
            setattr(parent, name, plain)
    return model


def gradient(model: Any) -> dict[str, torch.Tensor]:
    logprobs, _ = token_logprobs(model, hidden_states(model, BATCH), BATCH)
    model.zero_grad()
    (-logprobs.sum()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    x, y = (torch.cat([grads[name].flatten() for name in sorted(grads) if "lora_" in name]) for grads in (a, b))
    return ((x - y).norm() / y.norm()).item()


# --- machines that cannot ------------------------------------------------------------------------------------------


def test_without_bitsandbytes_it_is_refused_before_anything_is_loaded(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    with pytest.raises(UserError, match=r"quantize: nf4 needs bitsandbytes, which is not installed: pip install"):
        load_policy("no/such-model", quantized="nf4")


def test_without_kernels_for_the_machine_it_is_refused(monkeypatch):
    fake: Any = SimpleNamespace(supported_torch_devices={"cuda"}, __version__="0.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"a\.b: int8 needs a CUDA GPU: this machine has none"):
        quantize.require("int8", "a.b")


def test_the_settings_for_bitsandbytes():
    four, eight = quantize.settings("nf4", torch.bfloat16), quantize.settings("int8", torch.bfloat16)
    assert four.load_in_4bit and four.bnb_4bit_quant_type == "nf4" and four.bnb_4bit_use_double_quant
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert eight.load_in_8bit and not eight.load_in_4bit


# --- machines that can ---------------------------------------------------------------------------------------------


def test_four_bits_are_the_nearest_level_of_each_block(bnb):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.functional.quantize_4bit(x, quant_type="nf4", compress_statistics=False)
    levels, largest = torch.tensor(NF4), x.abs().amax(1, keepdim=True)
    nearest = levels[(x[..., None] / largest[..., None] - levels).abs().argmin(-1)] * largest
    torch.testing.assert_close(bnb.functional.dequantize_4bit(packed, state), nearest, atol=1e-5, rtol=1e-5)
    packed, state = bnb.functional.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
    twice = bnb.functional.dequantize_4bit(packed, state)
    assert 0 < (twice - nearest).abs().max() < 0.02 * largest.max()  # the largest of a block in 8 bits


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_the_adapter_has_the_gradient_of_the_dequantized_weights(checkpointing, base, bnb):
    model = adapted(base, "nf4")
    expected = gradient(meant(model, bnb))
    with torch.no_grad():
        hidden_states(model, BATCH)  # a pass without gradient must leave the way of the gradient open
    if checkpointing is not None:
        Network(model).activation_checkpointing_enable(activation_checkpointing_kwargs=checkpointing)
    actual = gradient(model.train())
    assert all("lora_" in name for name in actual) and distance(actual, expected) < 1e-5
    first = {name: g for name, g in actual.items() if "layers.0" in name}
    assert first and all(g.norm() > 0 for g in first.values())


def test_eight_bits_have_the_gradient_of_their_weights_up_to_the_rounding_of_activations(base, bnb):
    model = adapted(base, "int8")
    # activations are rounded to 8 bits too: a relative error of about 1 / 127 in each layer
    assert distance(gradient(model), gradient(meant(model, bnb))) < 0.05


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_only_matrices_are_quantized_and_the_base_is_not_trained(kind, base, bnb):
    model = adapted(base, kind, dora=kind == "nf4")
    inner = model.get_base_model()
    quantized = [n for n, m in inner.named_modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    assert len({name.removesuffix(".base_layer") for name in quantized}) == 14
    assert isinstance(inner.lm_head, nn.Linear) and head(model)(torch.zeros(1, 64)).dtype == torch.float32
    assert all(p.dtype == torch.float32 for n, p in inner.named_parameters() if "norm" in n or "embed" in n)
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} <= {
        "lora_A",
        "lora_B",
        "lora_magnitude_vector",
    }
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    plain = hf.AutoModelForCausalLM.from_pretrained(base).num_parameters()
    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    assert summary(model, tokenizer)["parameters"] == plain + trained
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    gradient(model.train())
    optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_in_bfloat16_the_other_weights_and_the_states_are_bfloat16(kind, base, bnb):
    model = adapted(base, kind, dtype=torch.bfloat16)
    others = [p for n, p in model.named_parameters() if "norm" in n or "embed" in n or "lm_head" in n]
    assert len(others) >= 6 and all(p.dtype == torch.bfloat16 for p in others)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert hidden_states(model, BATCH).dtype == torch.bfloat16


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_the_gradient_in_bfloat16_differs_by_rounding(checkpointing, base, bnb):
    model = adapted(base, "nf4", dtype=torch.bfloat16)
    expected = gradient(meant(model, bnb).float())
    if checkpointing is not None:
        Network(model).activation_checkpointing_enable(activation_checkpointing_kwargs=checkpointing)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradient(model.train())
    assert distance(actual, expected) < 0.03


def test_a_new_adapter_changes_nothing_and_a_small_one_is_not_rounded_away(base, bnb):
    model = adapted(base, "nf4", dtype=torch.bfloat16)
    layer: Any = model.get_base_model().model.layers[0].self_attn.q_proj
    assert OneRounding in type(layer).mro()
    update, x = layer.lora_B["default"].weight, torch.randn(512, 64).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        update.zero_()
        before = layer(x)
        assert torch.equal(before, layer.base_layer(x))
        update.fill_(1e-4)
        wanted = x.float() @ layer.lora_A["default"].weight.t() @ update.t() * layer.scaling["default"]
        moved = layer(x).float() - before.float()
    assert float((moved * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.15)


def test_weights_that_bitsandbytes_has_packed_for_a_cpu_are_left_to_it(base, bnb):
    model = adapted(base, "nf4", dtype=torch.bfloat16)
    layer: Any = model.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.base_layer.support_avx512bf16_for_cpu = bnb.functional.has_avx512bf16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = layer(x).float()
        layer.base_layer(x)  # packs
        torch.testing.assert_close(layer(x).float(), before, atol=0.02 * before.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_generators_in_other_processes_get_the_same_model(kind, base, tmp_path, bnb):
    model = adapted(base, kind, dtype=torch.bfloat16)
    torch.save(model, tmp_path / "model.pt")
    stored = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        assert torch.equal(hidden_states(stored, BATCH), hidden_states(model, BATCH))


def test_it_is_merged_into_the_full_precision_base(base, tmp_path, bnb):
    model = adapted(base, "nf4")
    Network(model).save_policy(tmp_path / "adapter")
    merged = policy_of(model, tmp_path / "adapter")
    assert not quantize.is_quantized(merged) and merged.dtype == torch.float32
    exact = hf.AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, value in merged.state_dict().items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("_proj.weight"):
            layer = model.get_submodule(key)
            delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 8  # alpha / r
            torch.testing.assert_close(value, exact[name] + delta.detach(), atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(value, exact[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_reward_model_has_a_score_head_in_full_precision(dtype, base, bnb):
    model = adapted(base, "nf4", load_reward_model, "SEQ_CLS", dtype)
    score = model.get_base_model().score.modules_to_save["default"]
    assert isinstance(score, nn.Linear) and score.weight.requires_grad and score.weight.dtype == torch.float32
    scores(model, BATCH).sum().backward()
    assert score.weight.grad is not None


def test_a_quantized_policy_cannot_have_a_separate_critic(base, bnb):
    with pytest.raises(UserError, match="use critic: shared"):
        separate_critic(adapted(base, "nf4"))
