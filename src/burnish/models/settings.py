"""Settings of adapters. This module does not import torch, so that a recipe is checked quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.types import Config

Quantization = Literal["nf4", "int8"]


class AdapterConfig(Config):
    """A LoRA adapter (Hu et al. 2021): ``AdapterConfig(r=16, alpha=32)``."""

    r: int = Field(16, gt=0, le=65536, description="rank")
    alpha: float = Field(32, gt=0, description="the update is scaled by alpha / r (rslora: alpha / sqrt(r))")
    dropout: float = Field(0.0, ge=0, lt=1, description="on the adapter's input; off in RL, reward and value models")
    targets: str | list[str] = Field(
        "all-linear", description="module names, a pattern of whole names, or all-linear (every one but the head)"
    )
    rslora: bool = Field(False, description="rank-stabilized scaling")
    dora: bool = Field(False, description="weight-decomposed adapters")
    quantize: Quantization | None = Field(
        None, description="keep the frozen base in 4 bits (nf4) or 8 bits (int8); needs bitsandbytes"
    )
