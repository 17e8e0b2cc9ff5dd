"""What the key ``precision`` means: in which dtype weights are kept, and in which dtype passes compute.

=========  ===================  ===============================================  =====================
precision  trained weights      weights that are not trained                     passes in training
=========  ===================  ===============================================  =====================
float32    float32              float32                                          float32
bf16       float32              bfloat16                                         autocast to bfloat16
fp16       float32              float16                                          autocast to float16
auto       bf16 on a GPU that supports it, otherwise float32
=========  =========================================================================================

Weights that are not trained are the base under an adapter, and a model that only runs. A reference that is a copy of
the trained model keeps its dtype, so that both compute the same at first.
"""

from __future__ import annotations

import torch

from burnish.models.settings import Precision

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(precision: Precision, gpu: bool | None = None) -> Precision:
    """``float32``, ``bf16`` or ``fp16``: what ``auto`` means here.

    Args:
        precision: the key.
        gpu: whether there is a GPU that supports bfloat16. None means that of this machine.
    """
    if precision != "auto":
        return precision
    if gpu is None:
        gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if gpu else "float32"


def weights_dtype(precision: Precision, *, trained: bool = False, gpu: bool | None = None) -> torch.dtype:
    """The dtype of a model's weights. ``trained`` says whether all of them are, rather than an adapter or none."""
    return torch.float32 if trained else DTYPES[resolve(precision, gpu)]


def autocast_dtype(precision: Precision, gpu: bool | None = None) -> torch.dtype | None:
    """The dtype to which training passes are cast; None without autocast."""
    chosen = resolve(precision, gpu)
    return None if chosen == "float32" else DTYPES[chosen]
