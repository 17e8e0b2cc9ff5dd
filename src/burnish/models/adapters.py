"""Low-rank adapters through peft: on policies, reward models and critics."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from transformers import PreTrainedModel

from burnish import kernels
from burnish.errors import UserError
from burnish.models.bases import Base
from burnish.models.settings import AdapterConfig
from burnish.models.sharding import gathered_in, mesh_of, shard_frozen, whole

Task = Literal["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS"]


def add_adapter(model: PreTrainedModel, config: AdapterConfig, task: Task, base: Base | None = None) -> peft.PeftModel:
    """Put a fresh adapter on a model; the logits stay the same, the base is frozen, and heads stay trainable.

    Args:
        model: the base.
        config: of the adapter.
        task: what kind of model it is.
        base: the model that ``model`` was loaded from; it is recorded beside the adapter when that is saved.

    Raises:
        UserError: the model has no module named in ``targets``, or one of them cannot have an adapter.
    """
    names = [f".{name}" for name, _ in model.named_modules()]
    listed = [] if isinstance(config.targets, str) else config.targets
    linear = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    hint = f"the linear layers of {type(model).__name__} are {', '.join(linear)}"
    if unknown := [target for target in listed if not any(name.endswith(f".{target}") for name in names)]:
        raise UserError(f"adapter.targets: no module {unknown[0]!r}: {hint}")
    lora = peft.LoraConfig(
        task_type=task,
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=config.targets,
        use_rslora=config.rslora,
        use_dora=config.dora,
    )
    try:
        adapted = wrap(model, lora)
    except ValueError as error:
        raise UserError(
            f"adapter.targets: {str(error).splitlines()[0]} A string is a pattern that has to match whole names: {hint}"
        ) from error
    adapted.trained_on = base  # type: ignore[assignment]
    return adapted


def trained_on(model: nn.Module) -> Base | None:
    """The base that an adapter was trained on; None if it is not recorded, as with other tools' adapters."""
    return vars(model).get("trained_on")


def wrap(model: nn.Module, config: peft.PeftConfig) -> peft.PeftModel:
    """``peft.get_peft_model`` without peft's warning."""
    with without_warning():
        return peft.get_peft_model(model, config)  # type: ignore[arg-type, return-value]


def save(model: peft.PeftModel, folder: str | Path, **kwargs: Any) -> None:
    """Save an adapter as peft does, but list its target modules in the same order in every process."""
    for config in model.peft_config.values():
        if isinstance(config, peft.LoraConfig) and isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)
    model.save_pretrained(str(folder), **kwargs)


def load(model: peft.PeftModel, folder: str | Path) -> None:
    """Load the weights of a saved adapter, also into a sharded model. Missing or unexpected weights are an error."""
    with nullcontext() if mesh_of(model) is None else implicit_replication():
        result = model.load_adapter(str(folder), adapter_name=str(model.active_adapter), is_trainable=True)
    if wrong := [*result.missing_keys, *result.unexpected_keys]:
        raise ValueError(f"{folder}: its weights are not those of the model's adapter: {', '.join(wrong[:3])}")


@contextmanager
def without_warning() -> Iterator[None]:
    """Hide a deprecation warning that peft causes: it reads an attribute that transformers has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


@contextmanager
def disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Disable a model's adapter within the context, so that the model computes what its base does."""
    if not isinstance(model, peft.PeftModel):
        raise ValueError("expected a model with an adapter")
    with model.disable_adapter():
        yield model


def is_fresh(model: peft.PeftModel) -> bool:
    """Whether an adapter is untrained and so changes nothing: the second factor of every layer is 0.

    On the meta device, where weights have no values, an adapter counts as untrained.
    """
    factors = [p for name, p in model.named_parameters() if "lora_B" in name or "lora_embedding_B" in name]
    return bool(factors) and not any(torch.any(whole(p) != 0) for p in factors if not p.is_meta)


class Reference:
    """The reference model: the policy as it is now. The base if the policy's adapter is fresh, else a frozen copy."""

    def __init__(self, policy: nn.Module) -> None:
        fresh = isinstance(policy, peft.PeftModel) and is_fresh(policy)
        self.frozen = None if fresh else kernels.enable(copy.deepcopy(policy)).eval().requires_grad_(False)

    def equals(self, policy: nn.Module) -> bool:
        """Whether the weights of ``policy`` are still those of the reference."""
        if self.frozen is None:
            return isinstance(policy, peft.PeftModel) and is_fresh(policy)
        with self.use(policy) as frozen:
            pairs = zip(frozen.parameters(), policy.parameters(), strict=True)
            return all(torch.equal(whole(kept), whole(now)) for kept, now in pairs)

    @contextmanager
    def use(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Use the reference of ``policy`` within the context. If the policy is sharded, so is a frozen copy of it."""
        if self.frozen is None:
            with disabled(policy) as base:
                yield base
            return
        if mesh_of(self.frozen) is None:
            self.frozen.to(next(policy.parameters()).device)
            if (mesh := mesh_of(policy)) is not None:
                shard_frozen(self.frozen, mesh, gathered_in(policy))
        yield self.frozen

    def offload(self) -> None:
        """Move a frozen copy to the CPU, unless it is sharded, until it is used again."""
        if self.frozen is not None and mesh_of(self.frozen) is None:
            self.frozen.to("cpu")
