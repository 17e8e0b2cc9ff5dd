"""Dropout whose masks depend on the tokens and the optimizer step alone, so that no layout changes a gradient.

``torch.nn.Dropout`` draws its mask from a random state, one number after another, so the mask of a token depends on
where the token lies in a micro-batch. Here it is a hash of the seed, the step, the layer, the feature and the tokens up
to and including this one. A prompt that several rows share has one mask, whether it runs once or once a row. Nothing
has to be kept for an exact resume, and activations that are computed again get the mask that they had.
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

LEVELS = 2**16  # a mask is drawn with 16 bits: probabilities are rounded to 1 / 65,536
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, which spreads consecutive numbers
IN_CONFIG = ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout")


class DropoutKeys:
    """One number for each token of the micro-batch that is learned now; all dropout layers of a network read it."""

    def __init__(self) -> None:
        self.layers = 0
        self.now: Tensor | None = None

    @contextmanager
    def of(self, batch: MicroBatch, seed: int, step: int) -> Iterator[None]:
        """Draw masks for this micro-batch, in its forward pass and where its activations are computed again."""
        self.now = token_keys(batch, seed, step) if self.layers else None
        try:
            yield
        finally:
            self.now = None


class TokenDropout(nn.Dropout):
    """``torch.nn.Dropout`` on a vector for each token, by the keys of these tokens; without keys the parent itself."""

    def __init__(self, p: float, keys: DropoutKeys) -> None:
        super().__init__(p)
        self.keys = keys
        self.number = keys.layers
        keys.layers += 1

    def forward(self, input: Tensor) -> Tensor:
        """(B, T, H) or (B * T, H) of the same shape; each element is 0 with probability p, else divided by 1 - p."""
        if not self.training or self.keys.now is None or not 0 < self.p < 1:
            return super().forward(input)
        width = input.shape[-1]
        # two numbers of 16 bits from each hash
        drawn = hashes(self.keys.now.view(input.shape[:-1]), self.number, -(-width // 2)).view(torch.int16)[..., :width]
        left_out = min(round(self.p * LEVELS), LEVELS - 1)
        return torch.where(drawn >= left_out - LEVELS // 2, input, 0) * (LEVELS / (LEVELS - left_out))


def token_keys(batch: MicroBatch, seed: int, step: int) -> Tensor:
    """A hash (B, T), int32, of the seed, the step, and the tokens of a sequence up to and including each.

    The sum of hashes of (token, position), so that a prefix that stands elsewhere, in front of several sequences, is
    one more summand.
    """
    segments = batch.segments
    each = mixed(mixed(batch.tokens.int() + _signed(GOLDEN)) + batch.positions.int()).where(segments > 0, 0)
    rows, width = each.shape
    whole = each.new_zeros(rows, width + 1).scatter_add_(1, segments, each)  # of each segment
    before = whole.cumsum(1, dtype=torch.int32) - whole  # of the segments that stand before it in the row
    prefixes = each.cumsum(1, dtype=torch.int32) - before.gather(1, segments) + whole.gather(1, batch.parents)
    start = mixed(mixed(each.new_tensor(_signed(seed))) + _signed(step))
    return mixed(prefixes ^ start)


def hashes(keys: Tensor, number: int, width: int) -> Tensor:
    """A hash (..., width), int32, of tokens' keys (...), of the layer of this number, and of each feature."""
    return mixed(mixed(keys + _signed(number * GOLDEN)).unsqueeze(-1) ^ _features(width, keys.device))


def mixed(x: Tensor) -> Tensor:
    """A hash of each number of an int32 tensor: lowbias32 of Wellons, "Prospecting for hash functions" (2018)."""
    # the mask makes a logical shift of the arithmetic one
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(x: int) -> int:
    """The last 32 bits of a number, read as an int32."""
    return (x + 2**31) % 2**32 - 2**31


@lru_cache(maxsize=16)
def _features(width: int, device: torch.device) -> Tensor:
    """A number for each hash of a token."""
    return mixed(torch.arange(1, width + 1, dtype=torch.int32, device=device))


def key_dropout(models: list[nn.Module]) -> DropoutKeys:
    """Replace the dropout layers of models by ``TokenDropout``; dropout that is no such layer is switched off.

    That is dropout on the weights of attention, which belong to two tokens, and what a model computes by a function in
    place of a layer. A warning names it.
    """
    keys = DropoutKeys()
    left: dict[str, float] = {}
    for model in models:
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Dropout) and layer.p}
        found = switch_off(model)
        for name in _called_with_tokens(model, layers):
            model.set_submodule(name, TokenDropout(found.pop(name), keys).train(layers[name].training))
        left |= found
    if left:
        # layers differ in their number alone
        names = sorted({f"{name.rpartition('.')[2]} {p:g}" for name, p in left.items()})
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
    """Set every dropout probability to 0; returns those that were not, by the names of modules and attributes."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            found[name] = module.p
            module.p = 0.0
    for config in {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values():
        for attribute in IN_CONFIG:
            if getattr(config, attribute, None):
                found[f"config.{attribute}"] = getattr(config, attribute)
                setattr(config, attribute, 0.0)
    # layers that call the function instead of nn.Dropout keep the probability in an attribute of their own
    for name, module in model.named_modules():
        probabilities = {n: value for n, value in vars(module).items() if "drop" in n and isinstance(value, float)}
        for attribute in (n for n, value in probabilities.items() if value):
            found[f"{name}.{attribute}"] = probabilities[attribute]
            setattr(module, attribute, 0.0)
    return found


def _called_with_tokens(model: nn.Module, layers: dict[str, nn.Dropout]) -> list[str]:
    """The names of those layers that a pass calls once, with a vector for each token; their probabilities are 0."""
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
        # adapters with DoRA call their dropout in training mode alone
        model.train()
        with torch.no_grad():
            # the head does not run on all tokens of a batch, so its dropout is none of these layers
            base.base_model(input_ids=torch.zeros(rows, width, dtype=torch.long, device=base.device))
    finally:
        for module, training in modes.items():
            module.training = training
        for handle in handles:
            handle.remove()
    fits = ((rows, width), (rows * width,))
    return [name for name, calls in shapes.items() if len(calls) == 1 and calls[0][:-1] in fits]
