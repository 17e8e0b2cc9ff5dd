"""Copies of weights in oneDNN's layout compute what the weights compute, and nothing else sees them."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from burnish import kernels
from burnish.kernels import blocked, linear
from burnish.kernels.lora import LoraLinear

needs_onednn = pytest.mark.skipif(not linear.has_onednn(), reason="no oneDNN for AVX-512 on this processor")
PLENTY = 2**40
SIZE = 256
assert SIZE**2 >= blocked.FEWEST_WEIGHTS


def layer(dtype: torch.dtype, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return kernels.enable(nn.Linear(SIZE, SIZE + 72, bias=bias)).to(dtype)


class Body(nn.Module):
    """One linear layer, which peft can adapt."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def adapted(dtype: torch.dtype, bias: bool = False) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["layer"], init_lora_weights=False)
    model: Any = kernels.enable(peft.get_peft_model(Body(bias), config))  # type: ignore[arg-type]
    assert any(type(module) is LoraLinear for module in model.modules())
    model.base_model.model.layer.base_layer.to(dtype)
    return model


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, SIZE), (4, 1, SIZE), (33, SIZE), (2, 300, SIZE)], ids=str)
@pytest.mark.parametrize("make", [layer, adapted])
@torch.no_grad()
def test_products_equal_those_of_the_weights(make: Any, shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    model = make(dtype, bias)
    copies = blocked.copies(model, PLENTY)
    assert len(copies) == 1
    for x in (torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 2 * SIZE, dtype=dtype)[..., ::2]):
        expected = model(x)
        with blocked.using(copies):
            got, again = model(x), model(x)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # one bit of bfloat16
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(got, again)


@needs_onednn
@torch.no_grad()
def test_an_adapter_and_its_base_are_rounded_once() -> None:
    model = adapted(torch.bfloat16)
    x = torch.randn(64, SIZE).bfloat16()
    inner = model.base_model.model.layer
    inner.lora_B["default"].weight.fill_(0)
    with blocked.using(blocked.copies(model, PLENTY)):
        before = model(x).float()
        inner.lora_B["default"].weight.fill_(1e-4)
        after = model(x).float()
    wanted = x.float() @ inner.lora_A["default"].weight.t() * inner.scaling["default"]
    wanted = wanted @ inner.lora_B["default"].weight.t()
    # the part of the update that reaches the output; with two roundings, most of it is lost
    assert float(((after - before) * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.15)


@needs_onednn
def test_copies_are_used_only_in_their_context_and_only_for_what_they_fit() -> None:
    model: Any = layer(torch.float32, bias=True)
    copies = blocked.copies(model, PLENTY)
    x = torch.randn(4, SIZE)
    stale = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()  # shows which of the two weights a layer uses
        zeros = model(x)
        with blocked.using(copies):
            torch.testing.assert_close(model(x), nn.functional.linear(x, stale, model.bias), atol=1e-5, rtol=1e-5)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(model(x), zeros.bfloat16())
            model.double()
            assert torch.equal(model(x.double()), zeros.double())
            model.float()
        assert torch.equal(model(x), zeros)
    with blocked.using(copies):
        out = model(x)
        out.sum().backward()
    assert torch.equal(out, zeros) and model.weight.grad.abs().sum() > 0


@needs_onednn
def test_state_dicts_and_copies_of_a_model_have_only_its_weights() -> None:
    model: Any = nn.Sequential(layer(torch.float32))
    names, before = list(model.state_dict()), dict(vars(model[0]))
    with torch.no_grad(), blocked.using(blocked.copies(model, PLENTY)):
        assert list(model.state_dict()) == names
        assert [name for name, _ in model.named_buffers()] == []
    assert vars(model[0]) == before
    assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)


class Quantized(nn.Linear):
    """Has another product than its weights say."""


def test_other_layers_have_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_onednn", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: weight, raising=False)
    model: Any = kernels.enable(
        nn.Sequential(
            nn.Linear(SIZE, SIZE),
            nn.Linear(SIZE, SIZE).bfloat16(),
            nn.Linear(SIZE, SIZE).double(),
            nn.Linear(SIZE, SIZE).half(),
            nn.Linear(SIZE, SIZE, device="meta"),
            nn.Linear(SIZE, 4),
            Quantized(SIZE, SIZE),
            nn.Linear(SIZE, SIZE),
        )
    )
    model[7].forward = lambda input: input  # another library's
    assert list(blocked.copies(model, 6 * SIZE**2)) == [model[0], model[1]]
    assert blocked.copies(model, 6 * SIZE**2 - 1) == {}


def test_processors_without_the_kernels_have_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_onednn", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    model: Any = kernels.enable(nn.Linear(SIZE, SIZE))
    copies = blocked.copies(model, PLENTY)
    assert copies == {}
    with torch.no_grad(), blocked.using(copies):
        x = torch.randn(2, SIZE)
        assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
