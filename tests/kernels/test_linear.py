"""Linear layers by oneDNN against torch's own."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from burnish import kernels
from burnish.kernels import linear as module
from burnish.kernels.linear import Linear, has_onednn

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="no oneDNN for AVX-512 on this processor")
SHAPES = [(1, 24), (9, 24), (3, 1, 24), (2, 64, 24), (0, 24)]


def pair(size: int, bias: bool, width: int = 24) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(width, size, bias=bias)
    quick = kernels.enable(copy.deepcopy(plain))
    assert type(quick) is Linear
    assert type(plain) is nn.Linear
    return plain, quick


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [40, module.LARGE // 24 + 1])
def test_products_equal_those_of_torch(shape, bias, size):
    plain, quick = pair(size, bias)
    for x in (torch.randn(shape), torch.randn(*shape[:-1], 48)[..., ::2]):
        with torch.no_grad():
            torch.testing.assert_close(quick(x), plain(x))


@needs_onednn
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (9, module.FEW_COLUMNS + 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_those_of_torch(shape, bias, expanded):
    gradients = []
    layers = pair(40, bias, shape[-1])
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=draw)
    weights = torch.randn(*shape[:-1], 40, generator=draw)
    for layer in layers:
        x = values.clone().requires_grad_()
        y = layer(x)
        (y.sum() if expanded else (y * weights).sum()).backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_frozen_parameters_get_no_gradient():
    _, quick = pair(40, bias=True)
    quick.requires_grad_(False)
    x = torch.randn(16, 24, requires_grad=True)
    quick(x).sum().backward()
    assert x.grad is not None
    assert quick.weight.grad is None
    quick.requires_grad_(True)
    quick(x.detach()).sum().backward()
    assert quick.weight.grad is not None


class Quantized(nn.Linear):
    """Has another product than its weights say."""

    def forward(self, input):
        return input


@pytest.mark.parametrize("known", [pytest.param(True, marks=needs_onednn), False])
def test_only_plain_layers_change_and_only_for_what_the_kernel_takes(known, monkeypatch):
    monkeypatch.setattr(module, "has_onednn", lambda: known)
    model: Any = nn.Sequential(nn.Linear(4, 4), Quantized(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    model[3].forward = lambda input: input  # another library's
    kernels.enable(model)
    quick = Linear if known else nn.Linear
    assert [type(layer) for layer in model] == [quick, Quantized, quick, nn.Linear]
    x = torch.randn(32, 4)
    double = torch.nn.functional.linear(x.double(), model[2].weight, model[2].bias)
    assert torch.equal(model[2](x.double()), double)
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](x).dtype == torch.bfloat16


EVER_NEW_LENGTHS = """
import torch
from torch import nn
from burnish import kernels

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
layers = kernels.enable(nn.Sequential(nn.Linear(256, 832), nn.Linear(832, 256), nn.Linear(256, 256)))
for length in range(100, 240):
    layers(torch.randn(length, 256, requires_grad=True)).sum().backward()
    if length == 110:
        early = resident()
print(resident() - early)
"""


@needs_onednn
def test_the_memory_of_kernel_caches_is_bounded():
    limits = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    own = {name: value for name, value in os.environ.items() if name not in limits}
    grown = [
        float(subprocess.check_output([sys.executable, "-c", EVER_NEW_LENGTHS], env=own | given))
        for given in ({}, dict.fromkeys(limits, "1024"))
    ]
    assert grown[0] < grown[1] / 4, grown
