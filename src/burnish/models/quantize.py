"""Quantized bases under adapters (QLoRA, Dettmers et al. 2023), with bitsandbytes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from burnish.errors import UserError
from burnish.models.settings import Quantization


def require(kind: Quantization, where: str = "quantize") -> None:
    """Check that this machine can quantize, before anything is loaded; ``where`` is the setting for messages.

    Raises:
        UserError: bitsandbytes is not installed, or it has no kernels for this machine's device.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{where}: {kind} needs bitsandbytes, which is not installed: pip install 'burnish[gpu]', or remove "
            "quantize to keep the base in full precision"
        )
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in bitsandbytes.supported_torch_devices:
        raise UserError(
            f"{where}: {kind} needs a CUDA GPU: this machine has none, and bitsandbytes {bitsandbytes.__version__} "
            "does not run on a CPU; remove quantize to keep the base in full precision"
        )


def settings(kind: Quantization, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Settings with which transformers quantizes while loading: 4-bit NormalFloat with double quantization, or int8.

    Products with 4-bit weights are computed in ``dtype``. The head is not quantized.
    """
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantized(model: nn.Module) -> bool:
    """Whether a transformers model has quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def prepare(model: Any) -> None:
    """Freeze a quantized base. Its other weights (norms, embeddings, the head) stay in the dtype of its products.

    In float32, embeddings would make the states between layers float32 too, which are kept for the backward pass. The
    other weights are copied, because a weight that is a view of the model's file keeps the whole file in memory.
    """
    for weight in model.parameters():
        weight.requires_grad_(False)
        if weight.is_floating_point():
            weight.data = weight.data.clone()
    for module in model.modules():
        # On CPUs with these instructions, bitsandbytes packs the weights in the first pass without gradients, for a
        # kernel that has no backward pass. Nothing would be learned from then on.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
