"""Linear layers by oneDNN against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from burnish.models import linear as module
from burnish.models.linear import has_onednn, linear, quick_linear

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="no oneDNN for AVX-512 on this processor")


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 24), (9, 24), (3, 1, 24), (2, 64, 24), (0, 24)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [40, module.LARGE // 24 + 1])
def test_the_products_are_those_of_torch(shape, bias, size):
    torch.manual_seed(0)
    layer = nn.Linear(24, size, bias=bias).requires_grad_(False)
    x = torch.randn(shape)
    torch.testing.assert_close(linear(x, layer.weight, layer.bias), F.linear(x, layer.weight, layer.bias))
    columns = torch.randn(*shape[:-1], 48)[..., ::2]
    torch.testing.assert_close(linear(columns, layer.weight, layer.bias), F.linear(columns, layer.weight, layer.bias))


class Quantized(nn.Linear):
    """Has another product than its weights say."""

    def forward(self, input):
        return input


@pytest.mark.parametrize("known", [pytest.param(True, marks=needs_onednn), False])
def test_layers_have_their_own_product_back(known, monkeypatch):
    monkeypatch.setattr(module, "has_onednn", lambda: known)
    model = nn.Sequential(nn.Linear(4, 4), Quantized(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    model[3].forward = lambda input: input  # another library's
    before = [dict(vars(layer)) for layer in model]
    with pytest.raises(RuntimeError), quick_linear(model):
        assert ["forward" in vars(layer) for layer in model] == [known, False, False, True]
        raise RuntimeError
    assert [dict(vars(layer)) for layer in model] == before
