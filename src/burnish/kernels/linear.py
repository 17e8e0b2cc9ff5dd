"""Linear layers that use oneDNN for float32 on a CPU. On AMD processors, this takes half as long as MKL."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEW_ROWS = 8
"""With fewer rows than this, oneDNN's overhead is larger than its gain."""

FEW_COLUMNS = 64
"""A product with fewer columns than this takes up to five times as long as its transpose."""

LARGE = 2**20
"""With at least this many weights, oneDNN is faster even for few rows."""


def has_onednn() -> bool:
    """Whether this machine can use oneDNN's kernels for AVX-512."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Linear(nn.Linear):
    """A ``torch.nn.Linear`` that uses oneDNN for float32 on a CPU, with or without gradients."""

    blocked: Tensor | None = None
    """A copy of the weight in oneDNN's layout, only within the context ``kernels.blocked.using``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., H) to (..., N)."""
        if (copy := blocked_weight(self, input.dtype)) is not None and not torch.is_autocast_enabled("cpu"):
            return product(input, copy, self.bias)
        plain = (
            input.dtype != torch.float32
            or self.weight.dtype != torch.float32
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
            or (input.numel() < FEW_ROWS * self.in_features and self.weight.numel() < LARGE)
        )
        if plain:
            return super().forward(input)
        if torch.is_grad_enabled():
            return Product.apply(input, self.weight, self.bias)  # type: ignore[return-value]
        return product(input, self.weight, self.bias)


def blocked_weight(layer: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    """The copy of a layer's weight in oneDNN's layout, if there is one of this dtype and no gradient is needed."""
    copy = layer.blocked if isinstance(layer, Linear) else None
    return copy if copy is not None and copy.dtype == dtype and not torch.is_grad_enabled() else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias, (..., N), for x (..., H), weight (N, H) and bias (N,), without gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Product(torch.autograd.Function):
    """x weight^T + bias, with gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        """Compute x weight^T + bias, (..., N)."""
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """For a gradient g of the output: g weight (x), g^T x (weight), and the sum of g over rows (bias)."""
        x, weight = ctx.saved_tensors
        x_needs, weight_needs, bias_needs = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if x_needs else None,
            weight_gradient(rows, x.flatten(0, -2)) if weight_needs else None,
            rows.sum(0) if bias_needs else None,
        )


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """g^T x, (N, H). Computed as the transpose of x^T g if x has few columns, as for LoRA's second factor."""
    if x.size(1) < FEW_COLUMNS:
        return product(x.t(), gradient.t()).t()
    return product(gradient.t(), x.t())
