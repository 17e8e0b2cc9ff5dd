"""Dropout whose masks depend only on the tokens and the optimizer step, so that no layout changes a gradient.

``torch.nn.Dropout`` draws masks from a random state, so the mask of a token depends on the token's place in the
micro-batch. Here the mask is a hash of the seed, the step, the layer, the feature, and all tokens up to this one. A
prompt has the same mask whether it is computed once or for each of its answers. An exact resume needs no random state,
and recomputed activations get the same mask again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.forward import unwrap
from burnish.types import MicroBatch

LEVELS = 2**16  # masks are drawn with 16 bits, so probabilities are rounded to multiples of 1 / 65,536
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, which spreads consecutive numbers
CONFIG_FIELDS = ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout")


class DropoutKeys:
    """The keys of the tokens of the current micro-batch, which all dropout layers of a network read."""

    def __init__(self) -> None:
        self.layers = 0
        self.current: Tensor | None = None

    @contextmanager
    def of(self, batch: MicroBatch, seed: int, step: int) -> Iterator[None]:
        """Draw masks for this micro-batch within the context, in its forward pass and in recomputed activations."""
        self.current = token_keys(batch, seed, step) if self.layers else None
        try:
            yield
        finally:
            self.current = None


class TokenDropout(nn.Dropout):
    """``torch.nn.Dropout`` on vectors of tokens, with masks from the tokens' keys; without keys, as in the parent."""

    offset: Tensor

    def __init__(self, p: float, keys: DropoutKeys, device: torch.device | None = None) -> None:
        super().__init__(p)
        self.keys = keys
        # a tensor, because torch.compile would compile the layers again for every number
        offset = torch.tensor(offset_of(keys.layers), dtype=torch.int32, device=device)
        self.register_buffer("offset", offset, persistent=False)
        keys.layers += 1

    def forward(self, input: Tensor) -> Tensor:
        """Set each element of ``input``, (B, T, H) or (B * T, H), to 0 with probability p, else divide it by 1 - p."""
        keys = self.keys.current
        if not self.training or keys is None or not 0 < self.p < 1:
            return super().forward(input)
        width = input.shape[-1]
        # each hash gives two numbers of 16 bits
        drawn = hashes(keys.view(input.shape[:-1]), self.offset, -(-width // 2)).view(torch.int16)[..., :width]
        dropped = min(round(self.p * LEVELS), LEVELS - 1)
        return torch.where(drawn >= dropped - LEVELS // 2, input, 0) * (LEVELS / (LEVELS - dropped))


def token_keys(batch: MicroBatch, seed: int, step: int) -> Tensor:
    """A key (B, T), int32, for each token: a hash of the seed, the step, and the sequence's tokens up to this one.

    The tokens enter as a sum of hashes of (token, position), so that a shared prompt adds the same number to the keys
    of all its answers.
    """
    segments = batch.segments
    terms = mix(mix(batch.tokens.int() + _signed(GOLDEN)) + batch.positions.int()).where(segments > 0, 0)
    rows, width = terms.shape
    totals = terms.new_zeros(rows, width + 1).scatter_add_(1, segments, terms)  # of each segment
    before = totals.cumsum(1, dtype=torch.int32) - totals  # of all earlier segments in the row
    prefixes = terms.cumsum(1, dtype=torch.int32) - before.gather(1, segments) + totals.gather(1, batch.parents)
    start = mix(mix(terms.new_full((), _signed(seed))) + _signed(step))
    return mix(prefixes ^ start)


def offset_of(layer: int) -> int:
    """What is added to the keys in a layer of this number."""
    return _signed(layer * GOLDEN)


def hashes(keys: Tensor, offset: Tensor | int, width: int) -> Tensor:
    """Hashes (..., width), int32, of the tokens' keys (...), the offset of a layer, and each feature."""
    return mix(mix(keys + offset).unsqueeze(-1) ^ _features(width, keys.device))


def mix(x: Tensor) -> Tensor:
    """Hash each number of an int32 tensor, by lowbias32 of Wellons, "Prospecting for hash functions" (2018)."""
    # the bit masks turn the arithmetic shifts into logical ones
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(x: int) -> int:
    """The low 32 bits of a number as an int32."""
    return (x + 2**31) % 2**32 - 2**31


@lru_cache(maxsize=16)
def _features(width: int, device: torch.device) -> Tensor:
    """A hash of each feature number."""
    return mix(torch.arange(1, width + 1, dtype=torch.int32, device=device))


def key_dropout(models: list[nn.Module]) -> DropoutKeys:
    """Replace the dropout layers of models by ``TokenDropout``, and switch off all other dropout with a warning.

    Other dropout is that on attention weights, which belong to two tokens, and dropout that a model computes with a
    function instead of a layer.
    """
    keys = DropoutKeys()
    others: dict[str, float] = {}
    for model in models:
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Dropout) and layer.p}
        probabilities, device = switch_off(model), unwrap(model).device
        for name in _called_with_tokens(model, layers):
            model.set_submodule(name, TokenDropout(probabilities.pop(name), keys, device).train(layers[name].training))
        others |= probabilities
    if others:
        # without their prefixes, the names are the same in all layers
        names = sorted({f"{name.rpartition('.')[2]} {p:g}" for name, p in others.items()})
        warnings.warn(
            f"dropout of the model is switched off: {', '.join(names)}. It does not act on one token at a time, so its "
            "masks would depend on how a step is cut into micro-batches. To silence this warning, set it to 0 in the "
            "model's config.json",
            stacklevel=3,
        )
    return keys


def disable_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability to 0, so that the same tokens always give the same numbers."""
    switch_off(model)
    return model


def switch_off(model: nn.Module) -> dict[str, float]:
    """Set every dropout probability to 0, and return the nonzero ones by module and attribute name."""
    nonzero: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            nonzero[name] = module.p
            module.p = 0.0
    for config in {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values():
        for attribute in CONFIG_FIELDS:
            if getattr(config, attribute, None):
                nonzero[f"config.{attribute}"] = getattr(config, attribute)
                setattr(config, attribute, 0.0)
    # layers that call functional.dropout instead of nn.Dropout store the probability in an attribute
    for name, module in model.named_modules():
        probabilities = {n: value for n, value in vars(module).items() if "drop" in n and isinstance(value, float)}
        for attribute in (n for n, value in probabilities.items() if value):
            nonzero[f"{name}.{attribute}"] = probabilities[attribute]
            setattr(module, attribute, 0.0)
    return nonzero


def _called_with_tokens(model: nn.Module, layers: dict[str, nn.Dropout]) -> list[str]:
    """The names of the layers that a forward pass calls exactly once, with one vector for each token."""
    if not layers:
        return []
    rows, width = 2, 5
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}

    def record(name: str) -> torch.utils.hooks.RemovableHandle:
        return layers[name].register_forward_pre_hook(lambda _, inputs: shapes[name].append(tuple(inputs[0].shape)))

    handles = [record(name) for name in layers]
    modes = {module: module.training for module in model.modules()}
    base = unwrap(model)
    try:
        # adapters with DoRA call their dropout only in training mode
        model.train()
        with torch.no_grad():
            # without the head, which does not run on all tokens of a batch
            base.base_model(input_ids=torch.zeros(rows, width, dtype=torch.long, device=base.device))
    finally:
        for module, training in modes.items():
            module.training = training
        for handle in handles:
            handle.remove()
    fits = ((rows, width), (rows * width,))
    return [name for name, calls in shapes.items() if len(calls) == 1 and calls[0][:-1] in fits]
