"""Linear layers that use oneDNN for float32 on a CPU; on AMD processors this takes half the time of MKL."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEW_ROWS = 8
"""With fewer rows, oneDNN's overhead is larger than its gain."""

FEW_COLUMNS = 64
"""A product with fewer columns takes up to five times as long as its transpose."""

LARGE = 2**20
"""With this many weights oneDNN is faster for few rows too."""


def has_onednn() -> bool:
    """Whether this machine has oneDNN's kernels for AVX-512."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Linear(nn.Linear):
    """A ``torch.nn.Linear`` that uses oneDNN for float32 on a CPU, with or without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., H) to (..., N)."""
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


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x weight^T + bias, (..., N), of x (..., H), weight (N, H) and bias (N,), without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Product(torch.autograd.Function):
    """The product x weight^T + bias, and its gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        """(..., N)."""
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients: g weight of x, g^T x of the weight, and the sum of g over rows of the bias."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if of_x else None,
            _of_weight(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """g^T x, (N, H); as the transpose of x^T g if x has few columns, as for LoRA's second factor."""
    if x.size(1) < FEW_COLUMNS:
        return product(x.t(), gradient.t()).t()
    return product(gradient.t(), x.t())
