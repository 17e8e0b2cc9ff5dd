"""LoRA layers that do not round small updates away, as peft's own do in half precision.

A LoRA layer computes x W^T + s x A^T B^T. If both products are rounded to bfloat16 before they are added, an update
that is smaller than half of the distance between two such numbers changes nothing, because x W^T already is one of
them. With SmolLM2-135M, a first step that lowers the loss by 0.125 in float32 lowers it by only 0.036 in bfloat16.
Here, the second product is added to the first one before that is rounded. Weights in 4 bits are unpacked in the forward
pass and again in the backward pass, and not kept in between.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from burnish.kernels import linear
from burnish.kernels.attention import computed_in

HALF = (torch.bfloat16, torch.float16)
LINEAR = (nn.Linear, linear.Linear)

FEW_ROWS_ON_GPU = 64
"""Without gradients, the product of a weight in 4 bits with fewer rows is left to bitsandbytes. Not measured."""


class OneRounding(nn.Module):
    """The forward pass of a LoRA layer with one rounding, and with fewer operations on a CPU."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map (..., H) to (..., N)."""
        dtype = computed_in(x.dtype, x.device)
        name = self._only_adapter(args, kwargs)
        base: Any = self.base_layer
        in_product = fits(x, dtype, base.weight)
        if name is None or not (in_product or (dtype in HALF and packing(base.weight) is None)):
            return super().forward(x, *args, **kwargs)
        down: Any = self.lora_A[name]
        up: Any = self.lora_B[name]
        dropped: Tensor | None = self.lora_dropout[name](x)
        if dropped is x:
            dropped = None
        fused, weight = _differentiable, base.weight
        if in_product:
            fused, copy = Product.apply, linear.blocked_weight(base, dtype)
            weight = weight if copy is None else copy
        out: Any = fused(x.to(dtype), dropped, weight, down.weight, up.weight, self.scaling[name])
        return out if base.bias is None else out + base.bias.to(dtype)

    def _only_adapter(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The name of the adapter, if the layer is a plain one with a single active adapter; else None."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        plain = not (args or kwargs or self.disable_adapters or self.merged or self.fan_in_fan_out)
        if not plain or len(active) != 1 or active[0] in self.lora_variant:
            return None
        base, down, up = self.base_layer, self.lora_A[active[0]], self.lora_B[active[0]]
        known = type(base) in LINEAR or packing(base.weight) is not None
        return active[0] if known and type(down) in LINEAR and type(up) in LINEAR and up.bias is None else None


class LoraLinear(OneRounding, lora.Linear):
    """``peft.tuners.lora.Linear`` with one rounding, and with fewer operations on a CPU."""


def packing(weight: Tensor) -> Any:
    """How bitsandbytes has packed a weight in 4 bits, or None.

    None too if it has packed it again for its own kernel on a CPU, which only bitsandbytes can read.
    """
    how: Any = getattr(weight, "quant_state", None)
    return None if getattr(how, "packing_format_for_cpu", False) else how


def unpacked(weight: Tensor, how: Any, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix (N, H) of this dtype, for ``how`` as ``packing`` returned it."""
    if how is None:
        return weight.to(dtype)
    functional: Any = import_module("bitsandbytes.functional")
    return functional.dequantize_4bit(weight, how).to(dtype)


def fits(x: Tensor, dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether ``Product`` computes this dtype here: on a CPU, in float32 with oneDNN, or in bfloat16.

    With a weight in 4 bits, it computes half precision on any device. For few rows without gradients, as in sampling on
    a GPU, bitsandbytes has kernels that need no unpacked copy.
    """
    if torch.compiler.is_compiling():
        return False
    if packing(weight) is not None:
        few = x.numel() < FEW_ROWS_ON_GPU * x.shape[-1] and not torch.is_grad_enabled()
        return dtype in HALF and not (few and x.device.type != "cpu")
    if x.device.type != "cpu":
        return False
    return dtype == torch.bfloat16 or (dtype == x.dtype == torch.float32 and linear.has_onednn())


def _differentiable(x: Tensor, dropped: Tensor | None, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """As ``Product``, with the operations of PyTorch."""
    rows = x.flatten(0, -2)
    inner = (rows if dropped is None else dropped.to(x.dtype).flatten(0, -2)) @ a.to(x.dtype).t() * scale
    out = torch.addmm(inner @ b.to(x.dtype).t(), rows, weight.to(x.dtype).t())
    return out.view(*x.shape[:-1], -1)


class Product(torch.autograd.Function):
    """x W^T + scale x' A^T B^T with gradients, where x' is x after dropout, or x itself if it is None."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x: Tensor, dropped: Tensor | None, weight: Tensor, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """Compute (..., N) for x and x' (..., H), W (N, H), A (r, H) and B (N, r), in the dtype of x.

        W may be packed in 4 bits.
        """
        how = packing(weight)
        rows = x.flatten(0, -2)
        seen = rows if dropped is None else dropped.to(x.dtype).flatten(0, -2)
        inner = _times(seen, a.to(x.dtype)) * scale
        out = _plus(_times(inner, b.to(x.dtype)), rows, unpacked(weight, how, x.dtype))
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, seen, inner, weight, a, b)
        ctx.dropped, ctx.how, ctx.scale, ctx.shape = dropped is not None, how, scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """For a gradient g of the output and h = scale g B: g W + h A, or g W and h A; g^T x; h^T x'; g^T (x' A^T)."""
        rows, seen, inner, weight, a, b = ctx.saved_tensors
        x_needs, dropped_needs, weight_needs, a_needs, b_needs, _ = ctx.needs_input_grad
        g = gradient.flatten(0, -2)
        h = _times(g, b.to(g.dtype).t()) * ctx.scale
        of_x = of_dropped = None
        if x_needs:
            w, down = unpacked(weight, ctx.how, g.dtype).t(), a.to(g.dtype).t()
            of_x = _times(g, w) if ctx.dropped else _plus(_times(h, down), g, w)
            of_x = of_x.view(ctx.shape)
        if dropped_needs:
            of_dropped = _times(h, a.to(g.dtype).t()).view(ctx.shape)
        return (
            of_x,
            of_dropped,
            _crossed(g, rows).to(weight.dtype) if weight_needs else None,
            _crossed(h, seen).to(a.dtype) if a_needs else None,
            _crossed(g, inner).to(b.dtype) if b_needs else None,
            None,
        )


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """X weight^T."""
    return linear.product(x, weight) if x.dtype == torch.float32 else torch.mm(x, weight.t())


def _plus(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Added + x weight^T. In half precision, it is rounded once."""
    if x.dtype == torch.float32:
        return linear.product(x, weight).add_(added)
    if weight.is_mkldnn:  # a copy in oneDNN's layout
        return torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, None, "add")
    return torch.addmm(added, x, weight.t())


def _crossed(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient^T x."""
    return linear.weight_gradient(gradient, x) if x.dtype == torch.float32 else torch.mm(gradient.t(), x)
