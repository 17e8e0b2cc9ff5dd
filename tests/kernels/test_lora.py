"""LoRA layers compute what peft's compute, and in bfloat16 do not lose small updates."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

from burnish import kernels
from burnish.kernels.lora import LoraLinear, Product


class Body(nn.Module):
    """One linear layer, which peft can adapt."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 80, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def adapted(bias: bool = False, dropout: float = 0.0, **settings: Any) -> tuple[Any, Any]:
    """A model with an adapter, in peft's layers and in ours."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=8, lora_alpha=12, lora_dropout=dropout, target_modules=["layer"], init_lora_weights=False, **settings
    )
    theirs = peft.get_peft_model(Body(bias), config)  # type: ignore[arg-type]
    ours = kernels.enable(copy.deepcopy(theirs))
    assert any(type(module) is LoraLinear for module in ours.modules())
    return theirs, ours


def passed(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)  # for dropout
    out = model(x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"output": out.detach(), "input": x.grad, **gradients}


@pytest.mark.parametrize("shape", [(40, 48), (2, 30, 48)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("all_trained", [False, True])
def test_outputs_and_gradients_equal_those_of_peft(
    bias: bool, dropout: float, shape: tuple[int, ...], all_trained: bool
) -> None:
    theirs, ours = adapted(bias, dropout)
    for model in (theirs, ours):
        model.get_submodule("base_model.model.layer.base_layer").weight.requires_grad_(all_trained)
    x = torch.randn(shape)
    expected, got = passed(theirs, x), passed(ours, x)
    assert expected.keys() == got.keys() and len(got) == 4 + all_trained
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-4, rtol=1e-5, msg=name)


HALF = pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])


def in_half(model: Any, autocast: bool) -> Any:
    """The model, whose base is in bfloat16 unless autocast is used, and the context to call it in."""
    if not autocast:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


@HALF
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_in_bfloat16_are_those_of_float32_up_to_rounding(autocast: bool, dropout: float) -> None:
    theirs, ours = adapted(dropout=dropout)
    x = torch.randn(64, 48)
    expected = passed(theirs, x.bfloat16().float())
    with in_half(ours, autocast):
        got = passed(ours, x if autocast else x.bfloat16())
    assert got["output"].dtype == torch.bfloat16
    for name, tensor in expected.items():
        assert (got[name].float() - tensor).norm() < 0.01 * tensor.norm(), name


@HALF
@pytest.mark.parametrize("fused", [True, False], ids=["function", "operations"])
def test_small_updates_are_not_rounded_away(autocast: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setattr("burnish.kernels.lora.fits", lambda x, dtype, weight: False)
    theirs, ours = adapted()
    x = torch.randn(512, 48)
    moved = {}
    for name, model in (("theirs", theirs), ("ours", ours)):
        layer = model.get_submodule("base_model.model.layer")
        update = layer.lora_B["default"].weight
        with torch.no_grad(), in_half(model, autocast):
            given = x if autocast else x.bfloat16()
            update.zero_()
            before = model(given).float()
            assert torch.equal(before, model.base_model.model.layer.base_layer(given).float())
            update.fill_(1e-4)
            after = model(given).float()
            inner = given.float() @ layer.lora_A["default"].weight.t() * layer.scaling["default"]
            wanted = inner @ update.float().t()
        # the part of the update that reaches the output
        moved[name] = float(((after - before) * wanted).sum() / wanted.square().sum())
    assert moved["ours"] == pytest.approx(1, abs=0.15)
    assert moved["theirs"] < 0.7


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_weight_in_four_bits_is_unpacked_in_each_pass_and_not_kept(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for bitsandbytes: tests/models/test_quantize.py has the real layers."""
    calls = []

    def dequantize_4bit(packed: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        calls.append(packed)
        return state[packed.long()]

    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", SimpleNamespace(dequantize_4bit=dequantize_4bit))  # type: ignore[arg-type]
    torch.manual_seed(0)
    levels, packed = torch.linspace(-1, 1, 16), torch.randint(16, (80, 48), dtype=torch.uint8)
    weight = nn.Parameter(packed, requires_grad=False)
    weight.quant_state = levels  # type: ignore[attr-defined]
    x, a, b = torch.randn(2, 30, 48).bfloat16(), torch.randn(8, 48), torch.randn(80, 8)
    seen = None if dropout == 0.0 else nn.functional.dropout(x, dropout)

    def made(weight: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, seen)]
        factors = [t.clone().requires_grad_() for t in (a, b)]
        out = Product.apply(*inputs, weight, *factors, 0.5)
        saved = [t for t in out.grad_fn.saved_tensors if t is not None and t.shape == (80, 48)]
        assert [t.dtype for t in saved] == [weight.dtype]
        wanted = [t for t in [*inputs, *factors] if t is not None]
        return [out, *torch.autograd.grad((out.float() * factor).sum(), wanted)]

    factor = torch.linspace(-1, 1, 2 * 30 * 80).view(2, 30, 80)
    expected = made(levels[packed.long()], torch.float32)
    got = made(weight, torch.bfloat16)
    assert len(calls) == 2 and all(call.dtype == torch.uint8 for call in calls)
    assert got[0].dtype == torch.bfloat16
    for one, tensor in zip(got, expected, strict=True):
        assert (one.float() - tensor).norm() < 0.01 * tensor.norm()


def test_other_layers_are_left_to_peft() -> None:
    x = torch.randn(5, 48)
    theirs, ours = adapted(use_dora=True)
    assert torch.allclose(theirs(x), ours(x), atol=1e-6)
    theirs, ours = adapted(lora_bias=True, bias=True)
    assert torch.allclose(theirs(x), ours(x), atol=1e-6)
    theirs, ours = adapted()
    for model in (theirs, ours):
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False))
    with torch.no_grad():
        for (_, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
            b.copy_(a)
    for model in (theirs, ours):
        model.base_model.set_adapter(["default", "second"])
    assert torch.allclose(theirs(x), ours(x), atol=1e-6)
    with theirs.disable_adapter(), ours.disable_adapter():
        assert torch.allclose(theirs(x), ours(x), atol=1e-6)
    theirs.merge_adapter()
    ours.merge_adapter()
    assert torch.allclose(theirs(x), ours(x), atol=1e-5)
    assert torch.allclose(theirs.double()(x.double()), ours.double()(x.double()), atol=1e-12)
