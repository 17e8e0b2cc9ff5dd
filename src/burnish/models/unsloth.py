"""Language models loaded through Unsloth, whose kernels train adapters faster and in less memory on a GPU.

In training, an Unsloth model ignores attention masks. This is exact for rows padded on the right, so the caller must
not pack rows or share prompts.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import transformers
from torch import nn

from burnish.errors import UserError
from burnish.models import loading
from burnish.models.bases import Base
from burnish.models.settings import AdapterConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""What ``all-linear`` means: Unsloth takes a list of names."""


def require(where: str = "loader: unsloth") -> Any:
    """The class ``unsloth.FastLanguageModel``.

    Raises:
        UserError: Unsloth is not installed, or there is no GPU.
    """
    if importlib.util.find_spec("unsloth") is None:
        raise UserError(
            f"{where}: Unsloth is not installed: pip install a release of unsloth that allows transformers "
            f"{transformers.__version__}, or remove loader"
        )
    if not torch.cuda.is_available():
        raise UserError(f"{where}: Unsloth needs a CUDA GPU, and this machine has none: remove loader")
    return importlib.import_module("unsloth").FastLanguageModel


def load_policy(
    reference: str,
    *,
    dtype: torch.dtype,
    adapter: AdapterConfig | None = None,
    base: Base | None = None,
    activation_checkpointing: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a causal language model with ``FastLanguageModel``, and put a fresh adapter on it.

    Args:
        reference: a folder or a hub id of a whole model.
        dtype: of the weights.
        adapter: the adapter. Without it, all weights are trained.
        base: the model that ``reference`` names, which is recorded with the adapter.
        activation_checkpointing: use Unsloth's own, which offloads activations to the memory of the CPU.
        seed: of the adapter's weights.
        trust_remote_code: run the code that comes with the model.

    Raises:
        UserError: Unsloth cannot be used here, cannot load the model, or does not support the adapter.
    """
    fast = require()
    if loading.is_adapter(folder := loading.resolve(reference)):
        raise UserError(f"loader: unsloth: {reference} is an adapter: expected a whole model")
    config = loading.load_config(folder, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    checkpointing = "unsloth" if activation_checkpointing else False
    quantize = adapter.quantize if adapter else None
    try:
        model, _ = fast.from_pretrained(
            model_name=folder,
            max_seq_length=config.max_position_embeddings,  # longer inputs would be truncated
            dtype=dtype,
            load_in_4bit=quantize == "nf4",
            load_in_8bit=quantize == "int8",
            load_in_16bit=adapter is not None and quantize is None,
            full_finetuning=adapter is None,
            use_gradient_checkpointing=checkpointing,
            trust_remote_code=trust_remote_code,
        )
        if adapter is not None:
            model = fast.get_peft_model(
                model,
                r=adapter.r,
                target_modules=TARGETS if adapter.targets == "all-linear" else adapter.targets,
                lora_alpha=adapter.alpha,
                lora_dropout=adapter.dropout,
                bias="none",
                use_gradient_checkpointing=checkpointing,
                random_state=seed,
                use_rslora=adapter.rslora,
            )
            model.trained_on = base
    except (ValueError, RuntimeError, TypeError, NotImplementedError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(f"loader: unsloth: {reference}: {' '.join(str(error).split())}") from error
    return model
