"""A model for sampling and scoring: its weights on a device, and its tokenizer with a chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import TaskType
from transformers import PreTrainedTokenizerBase

from burnish.models import loading
from burnish.models.heads import StepValueHead
from burnish.models.precision import weights_dtype
from burnish.models.settings import Precision
from burnish.render.templates import prepare_template, set_template


@dataclass(frozen=True)
class Loaded:
    """A loaded model: ``Loaded("runs/tiny/ppo", model, tokenizer)``."""

    reference: str
    model: Any
    tokenizer: Any
    is_reward_model: bool = False
    """Whether the model scores sequences. Otherwise, it is a language model."""
    value_head: StepValueHead | None = None
    """The head that estimates the value of reasoning steps, if the model has one."""


def load(
    reference: str,
    template: str | None = None,
    precision: Precision = "auto",
    *,
    trust_remote_code: bool = False,
    reward_model: bool = False,
) -> Loaded:
    """Load a model and its tokenizer, on the GPU if there is one.

    Args:
        reference: the folder of a model, adapter or stage, a .gguf file or a hub id.
        template: name of a plain template that replaces the stored one.
        precision: decides the dtype of the weights. ``auto`` is float32 for a reward model, whose scores would change.
        trust_remote_code: run the code that comes with the model.
        reward_model: load a sequence classifier with one label instead of a language model.

    Raises:
        UserError: if the model cannot be loaded, or there is no such template.
    """
    tokenizer = load_tokenizer(reference, template, trust_remote_code)
    width = loading.width(reference, trust_remote_code=trust_remote_code)
    load_weights = loading.load_reward_model if reward_model else loading.load_policy
    model: Any = load_weights(
        reference,
        dtype=weights_dtype("float32" if reward_model and precision == "auto" else precision, width),
        trust_remote_code=trust_remote_code,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = None if reward_model else loading.load_value_head(reference, model)
    return Loaded(reference, model.to(device).eval(), tokenizer, reward_model, head and head.to(device))


def load_tokenizer(reference: str, template: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and prepare its template, or the plain template of this name."""
    tokenizer = loading.load_tokenizer(reference, trust_remote_code=trust_remote_code)
    if template is not None:
        set_template(tokenizer, template)
    prepare_template(tokenizer)
    return tokenizer


def is_reward_model(reference: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model is a sequence classifier, by its config."""
    folder = loading.resolve(reference)
    if loading.is_adapter(folder):
        return loading.adapter_config(folder).task_type == TaskType.SEQ_CLS
    architectures = loading.load_config(reference, trust_remote_code=trust_remote_code).architectures
    return any(name.endswith("ForSequenceClassification") for name in architectures or [])
