"""The sizes of models on the meta device."""

from __future__ import annotations

from torch import nn

from burnish.models.forward import layers_of, unwrap
from burnish.models.settings import Quantization
from burnish.plan.memory import ModelSize, state_bytes

QUANTIZED: dict[Quantization, float] = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""Bytes of a quantized weight (Dettmers et al. 2023): nf4 has a scale in 8 bits for each block of 64 weights, and a
scale in float32 for each 256 of these."""


def model_size(
    name: str,
    model: nn.Module,
    *,
    heads: list[nn.Module] | None = None,
    quantized: Quantization | None = None,
    optimizer: str = "adamw_torch",
    arguments: str | None = None,
) -> ModelSize:
    """The sizes of a model.

    Args:
        name: its role, such as policy.
        model: a transformers model, or a peft model around one.
        heads: layers that are trained on top of it.
        quantized: how the weights of the linear layers of a frozen base are kept.
        optimizer: ``trainer.optim``.
        arguments: ``trainer.optim_args``.
    """
    base = unwrap(model)
    sizes = _weights(model, quantized)
    for head in heads or []:
        sizes |= _weights(head, None)
    trained = {key: size for key, size in sizes.items() if size.trained}
    layers = [_weights(layer, quantized) for layer in layers_of(model)]
    inner = {key for layer in layers for key in layer}
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    count = sum(weight.count for weight in trained.values())
    return ModelSize(
        name,
        weights=sum(weight.bytes for weight in sizes.values()),
        rest=sum(weight.bytes for key, weight in sizes.items() if key not in inner),
        layer=max((sum(w.bytes for w in layer.values()) for layer in layers), default=0),
        trained=sum(weight.bytes for weight in trained.values()),
        trained_rest=sum(weight.bytes for key, weight in trained.items() if key not in inner),
        trained_layer=max((sum(w.bytes for w in layer.values() if w.trained) for layer in layers), default=0),
        states=state_bytes(optimizer, arguments, sum(weight.bytes for weight in trained.values()), count),
        embedding=embedding.nbytes if embedding.requires_grad else 0,
        tied=tied,
    )


class _Weight:
    """A parameter: its number of values, its bytes, and whether it is trained."""

    def __init__(self, parameter: nn.Parameter, each: float | None) -> None:
        self.count = parameter.numel()
        self.trained = parameter.requires_grad
        self.bytes = parameter.nbytes if each is None else int(each * self.count)


def _weights(model: nn.Module, quantized: Quantization | None) -> dict[int, _Weight]:
    """The parameters of a module by identity, so that tied ones count once."""
    if quantized is None:
        return {id(p): _Weight(p, None) for p in model.parameters()}
    head = unwrap(model).get_output_embeddings() if hasattr(unwrap(model), "get_output_embeddings") else None
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    found = {}
    for p in model.parameters():
        each = QUANTIZED[quantized] if id(p) in linear and not p.requires_grad else None
        found[id(p)] = _Weight(p, each)
    return found
