"""Linear layers of a model that is not being trained, by the faster of two kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 8
"""Below so many rows oneDNN takes longer to start than it saves."""

LARGE = 2**20
"""Weights from which on it pays for few rows too."""


def has_onednn() -> bool:
    """Whether oneDNN's kernels for AVX-512 are here, which need half the time of MKL's on processors not by Intel."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product x weight^T + bias of ``torch.nn.functional.linear``, without a gradient.

    Args:
        x: (..., H) float32 on a CPU with oneDNN.
        weight: (N, H).
        bias: (N,).

    Returns:
        (..., N).
    """
    if x.numel() < FEW_ROWS * x.shape[-1] and weight.numel() < LARGE:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def quick_linear(model: nn.Module) -> Iterator[None]:
    """Let the float32 linear layers of a model on a CPU use oneDNN, without gradients, as long as the context lasts."""
    layers: list[Any] = []
    if has_onednn():
        layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear  # not the quantized ones, which inherit from it
            and "forward" not in vars(module)  # nor one that another library has wrapped
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ]
    for module in layers:
        module.forward = partial(linear, weight=module.weight, bias=module.bias)
    try:
        yield
    finally:
        for module in layers:
            del module.forward
