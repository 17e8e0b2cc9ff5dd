"""Scalar heads, critics, and the network that is trained.

A reward model is transformers' sequence classifier with one label, and a separate critic is its token classifier with
one label, so both load with transformers alone.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, TaskType
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from burnish import kernels
from burnish.errors import UserError
from burnish.math.tensors import upcast
from burnish.models import adapters, bases
from burnish.models.adapters import trained_on, wrap
from burnish.models.dropout import disable_dropout
from burnish.models.forward import backbone, head_output, hidden_states, score_head, token_values, unwrap, values_of
from burnish.models.quantize import is_quantized
from burnish.models.sharding import load_state_dict
from burnish.types import MicroBatch

VALUE_HEAD = "value_head.safetensors"


def init_score(model: PreTrainedModel) -> None:
    """Draw a new score head: normal with standard deviation 1 / sqrt(hidden + 1)."""
    score: nn.Linear = model.score  # type: ignore[assignment]
    nn.init.normal_(score.weight, std=1 / math.sqrt(score.in_features + 1))


def widen(head: nn.Module) -> None:
    """Convert a head to float32 if it has fewer bits.

    In bfloat16, its scores would have three digits, and rounding would swallow its small updates.
    """
    for parameter in head.parameters():
        parameter.data = upcast(parameter.data)


class SharedCritic(nn.Module):
    """A value head on the policy's hidden states, initialized to zero, in float32 or wider, without dropout."""

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, dtype=torch.promote_types(dtype, torch.float32))
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)


class StepValueHead(nn.Module):
    """The value of the text so far, V_t = tanh(w h_t + b), initialized to zero, in float32 or wider, without dropout.

    Entry t reads hidden state t, without a shift: it judges the text up to and including token t. The tanh is part of
    the head, so training and search see the same values. ``delimiter`` is the text that ends a step. It is saved with
    the weights, because search must split a text where training did.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32, delimiter: str = "\n") -> None:
        super().__init__()
        self.value = nn.Linear(hidden_size, 1, dtype=torch.promote_types(dtype, torch.float32))
        self.delimiter = delimiter
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values (B, T) in [-1, 1] of hidden states (B, T, H)."""
        return torch.tanh(upcast(head_output(self.value, hidden)[..., 0]))


def head_values(head: SharedCritic | StepValueHead, hidden: Tensor) -> Tensor:
    """The values (...) of hidden states (..., H). Each judges the text up to and including its token."""
    if isinstance(head, StepValueHead):
        return head(hidden)
    return upcast(head_output(head.score, hidden)[..., 0])


def save_head(head: nn.Module, path: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Save the weights of a scalar head, and the delimiter of a step-level one.

    If the head is sharded, ``state_dict`` is its state dict with full tensors.
    """
    metadata = {"delimiter": head.delimiter} if isinstance(head, StepValueHead) else None
    save_file(head.state_dict() if state_dict is None else state_dict, path, metadata=metadata)


def load_head(head: nn.Module, path: Path) -> None:
    """Load what ``save_head`` saved.

    Raises:
        UserError: the file cannot be read, or the names or shapes of its weights are not those of the head.
    """
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    actual, expected = ({n: tuple(x.shape) for n, x in part.items()} for part in (weights, head.state_dict()))
    if actual != expected:
        raise UserError(f"{path}: not the weights of a {type(head).__name__}: it holds {actual}, expected {expected}")
    load_state_dict(head, weights)
    if isinstance(head, StepValueHead):
        with safe_open(path, "pt") as file:
            head.delimiter = (file.metadata() or {}).get("delimiter", head.delimiter)


def is_step_value_head(path: Path) -> bool:
    """Whether a file has the weights of a step-level value head, and not of another critic."""
    try:
        with safe_open(path, "pt") as file:
            return "delimiter" in (file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def separate_critic(
    policy: nn.Module, reward_model: nn.Module | None = None, scale: float = 1.0, shift: float = 0.0
) -> nn.Module:
    """Make a critic that is a separate model, with the weights of a reward model or else of the policy.

    If the policy has an adapter, the critic has an adapter of the same kind, on its own base.

    Args:
        policy: the policy.
        reward_model: a causal reward model of the policy's shape. If it has one label, the critic starts with the
            values scale * score + shift. Without it, the critic starts at 0.
        scale: see ``reward_model``.
        shift: see ``reward_model``.

    Raises:
        UserError: the model is quantized, or its architecture has no token-classification model.
    """
    if is_quantized(unwrap(reward_model if reward_model is not None else policy)):
        raise UserError("a quantized model cannot be copied as a critic: use critic: shared, or remove quantize")
    start = copy.deepcopy(reward_model if reward_model is not None else policy)
    source: PreTrainedModel = start.merge_and_unload() if isinstance(start, PeftModel) else start  # type: ignore
    labels = {"id2label": {0: "value"}, "label2id": {"value": 0}}
    config = type(source.config).from_dict(source.config.to_dict() | labels)
    # all weights are trained unless the critic gets an adapter
    dtype = source.dtype if isinstance(policy, PeftModel) else torch.promote_types(source.dtype, torch.float32)
    try:
        critic = AutoModelForTokenClassification.from_config(config, dtype=dtype)
    except ValueError as error:
        raise UserError(
            f"{type(source).__name__} has no token-classification model to use as a critic: use critic: shared"
        ) from error
    backbone(critic).load_state_dict(backbone(source).state_dict())
    with torch.no_grad():
        new, old = score_head(critic), getattr(source, "score", None)
        widen(new)
        nn.init.zeros_(new.weight)
        nn.init.zeros_(new.bias)
        if isinstance(old, nn.Linear) and old.out_features == 1:
            new.weight.copy_(old.weight * scale)
            nn.init.constant_(new.bias, shift)
    if isinstance(policy, PeftModel):
        lora: Any = copy.copy(policy.active_peft_config)
        lora.task_type, lora.modules_to_save = TaskType.TOKEN_CLS, None
        lora.base_model_name_or_path = None  # it names the policy's base, which is not the critic's
        critic = wrap(critic, lora)
    return disable_dropout(critic)


class Network(nn.Module):
    """The network that is trained: a policy (or another model that a method trains), and perhaps a critic.

    ``frozen`` are further models that read the same micro-batches, such as a teacher. They are no part of the module:
    they are not trained, wrapped or saved. The engine moves them to its device.

    Unknown attributes are those of the policy, so callbacks of HF users can treat a network as the model.
    """

    def __init__(self, policy: nn.Module, critic: nn.Module | None = None, frozen: tuple[nn.Module, ...] = ()) -> None:
        super().__init__()
        self.policy = kernels.enable(policy)
        self.critic = critic if critic is None else kernels.enable(critic)
        self.frozen = tuple(kernels.enable(model) for model in frozen)
        # transformers refuses to train a quantized model; here only the frozen base of an adapter can be quantized
        self.is_quantized = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("policy"), name)

    @property
    def models(self) -> list[nn.Module]:
        """The models that run over the tokens of a batch: the policy, and a critic that is not just a head on it."""
        separate = self.critic is not None and not isinstance(self.critic, SharedCritic | StepValueHead)
        return [self.policy, self.critic] if separate else [self.policy]  # type: ignore[list-item]

    @property
    def heads(self) -> list[nn.Module]:
        """The layer of a critic that is a head on the policy."""
        if isinstance(self.critic, SharedCritic):
            return [self.critic.score]
        return [self.critic.value] if isinstance(self.critic, StepValueHead) else []

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Apply a function of this network to a micro-batch: ``network(function, batch)``.

        Every forward pass goes through here, so the hooks of FSDP run for it. Other
        inputs are those of the policy: ``network(input_ids)``.
        """
        if len(inputs) == 2 and isinstance(inputs[1], MicroBatch):
            function, batch = inputs
            return function(batch)
        return self.policy(*inputs, **keywords)

    def values(self, batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """The critic's values (B, T). A head on the policy reads ``hidden`` (B, T, H), or computes it if it is None."""
        if isinstance(self.critic, SharedCritic | StepValueHead):
            states = hidden_states(self.policy, batch) if hidden is None else hidden
            return (
                self.critic(states) if isinstance(self.critic, StepValueHead) else values_of(self.critic.score, states)
            )
        assert self.critic is not None
        return token_values(self.critic, batch)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn on activation checkpointing in the policy and in a separate critic."""
        for model in self.models:
            unwrap(model).activation_checkpointing_enable(**kwargs)
            if isinstance(model, PeftModel):
                # recomputed layers have gradients only if their inputs have, and the embeddings are frozen
                unwrap(model).enable_input_require_grads()

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save the policy as transformers and peft do, and the critic in the subfolder ``critic``.

        If the network is sharded, ``state_dict`` is its state dict with full tensors.
        """
        self.save_policy(folder, state_dict, **kwargs)
        if isinstance(self.critic, PeftModel):
            adapters.save(self.critic, Path(folder) / "critic", state_dict=_part(state_dict, "critic."))
        elif isinstance(self.critic, PreTrainedModel):
            self.critic.save_pretrained(str(Path(folder) / "critic"), state_dict=_part(state_dict, "critic."))

    def save_policy(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save the policy, with the record of its adapter's base and with a value head on it."""
        if isinstance(self.policy, PeftModel):
            adapters.save(self.policy, folder, state_dict=_part(state_dict, "policy."), **kwargs)
        else:
            self.policy.save_pretrained(folder, state_dict=_part(state_dict, "policy."), **kwargs)  # type: ignore
        if (base := trained_on(self.policy)) is not None:
            bases.record(Path(folder), base)
        if isinstance(self.critic, SharedCritic | StepValueHead):
            save_head(self.critic, Path(folder) / VALUE_HEAD, _part(state_dict, "critic."))

    def load_weights(self, folder: str | Path) -> None:
        """Load what ``save_pretrained`` saved. Missing or unexpected weights are an error."""
        load_weights(self.policy, Path(folder))
        if isinstance(self.critic, SharedCritic | StepValueHead):
            load_head(self.critic, Path(folder) / VALUE_HEAD)
        elif self.critic is not None:
            load_weights(self.critic, Path(folder) / "critic")


def _part(state_dict: dict[str, Tensor] | None, prefix: str) -> dict[str, Tensor] | None:
    """The weights of a part of the network, by their names in that part."""
    if state_dict is None:
        return None
    return {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a saved model or adapter. Missing or unexpected weights are an error."""
    if isinstance(model, PeftModel):
        adapters.load(model, folder)
        return
    loaded, info = type(model).from_pretrained(  # type: ignore[attr-defined]
        folder, dtype=unwrap(model).dtype, output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"]:
        wrong = sorted([*info["missing_keys"], *info["unexpected_keys"]])
        raise ValueError(f"{folder}: its weights are not those of {type(model).__name__}: {', '.join(wrong[:3])}")
    load_state_dict(model, loaded.state_dict())
