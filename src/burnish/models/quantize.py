"""A frozen base in 4 or 8 bits under a trained adapter (QLoRA, Dettmers et al. 2023), through bitsandbytes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import peft
import torch
from torch import nn
from transformers import BitsAndBytesConfig

from burnish.errors import UserError
from burnish.models.settings import Quantization


def require(kind: Quantization, where: str = "quantize") -> None:
    """Refuse what this machine cannot do, before anything is loaded; ``where`` is the setting that asks for it.

    Raises:
        UserError: bitsandbytes is not installed, or it has no kernels for the device of this machine.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{where}: {kind} needs bitsandbytes, which is not installed: pip install 'burnish[gpu]', or leave "
            "quantize out: the base is then kept in full precision"
        )
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in bitsandbytes.supported_torch_devices:
        raise UserError(
            f"{where}: {kind} needs a CUDA GPU: this machine has none, and bitsandbytes {bitsandbytes.__version__} "
            "does not run on a CPU; leave quantize out: the base is then kept in full precision"
        )


def settings(kind: Quantization) -> BitsAndBytesConfig:
    """How transformers quantizes while it loads: 4-bit NormalFloat with double quantization, or 8 bits by row.

    Matrix products are computed in bfloat16 where the GPU can, else in float32. The head is left as it is.
    """
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    fast = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if fast else torch.float32,
    )


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights of a transformers model are kept in fewer bits than they are computed in."""
    return bool(getattr(model, "is_quantized", False))


def prepare(model: Any) -> None:
    """Freeze a quantized base, and put what is not quantized (norms, embeddings, the head) in float32."""
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    for module in model.modules():
        # on CPUs with these instructions bitsandbytes would, in the first pass without gradient, pack the weights for a
        # kernel through which nothing is learned from then on
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
