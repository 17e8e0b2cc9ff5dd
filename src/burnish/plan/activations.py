"""What a forward pass keeps for the backward pass, counted in a pass that computes shapes but no numbers.

The pass runs the model's own code on fake tensors, so it counts any architecture, precision and adapter. For a token in
a Llama layer, with hidden size H, intermediate size I, and K for all key heads, it gives the number of values below
(Korthikanti et al. 2022 count the same for GPT).

==============================================  ======================================================
two norms                                       6 H + 2: input, normalized input, output; root mean square
query, key, value and output of the attention   2 H + 2 K, or with PyTorch's kernel for CPUs 4 H, as it repeats keys
input of the attention's last product           0, or with that kernel H, as it is a copy of the output
normalizers of the attention                    one in float32 for each head, or none with ``kernels.grouped``
gate, its activation, up, and their product     4 I
==============================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from burnish import kernels
from burnish.errors import UserError
from burnish.kernels import attention, grouped
from burnish.math.tensors import upcast
from burnish.models.forward import backbone, layer_types, unwrap
from burnish.types import Segments

PLANNED = "burnish-plan"
"""The name of an attention implementation that keeps for a packed row what that of a run keeps."""


@dataclass(frozen=True)
class PassSettings:
    """How a pass computes: ``PassSettings(gpu=True, autocast=torch.bfloat16)``."""

    gpu: bool
    """Whether on a GPU, which has a flash kernel, instead of a CPU."""
    autocast: torch.dtype | None = None
    """The dtype of autocast; None without autocast."""
    grouped: bool = False
    """Whether a CPU can compute attention with ``kernels.grouped``, instead of PyTorch's kernel."""


def kept_bytes(model: nn.Module, rows: int, width: int, settings: PassSettings) -> int:
    """The bytes that autograd keeps of a forward pass over rows of tokens, without those of the weights.

    Logits are not included, since they are computed from the hidden states at learned tokens only.

    Args:
        model: a transformers model or a peft model around one, on the meta device.
        rows: number of rows; 1 if sequences are packed into one row.
        width: number of tokens of a row.
        settings: how it computes.

    Raises:
        UserError: if the model's code needs numbers.
    """
    body = backbone(model)
    packed = rows == 1 and can_pack(model)
    key = (*_signature(model, body), rows, width, packed, settings)
    if key not in _known:
        _known[key] = _kept(model, body, rows, width, packed, settings)
    return _known[key]


_known: dict[tuple[Any, ...], int] = {}
"""Bytes of passes that were counted before. A critic has the layers of its policy, and advice tries many settings."""


def _signature(model: nn.Module, body: nn.Module) -> tuple[Any, ...]:
    """What decides which tensors a pass has: the code, the config without its labels, and the weights."""
    config = unwrap(model).config.to_dict()
    settings = repr({key: value for key, value in config.items() if key not in ("architectures", *LABELS)})
    weights = tuple((name, w.shape, w.dtype, w.requires_grad) for name, w in body.named_parameters())
    return type(body), settings, weights


LABELS = ("id2label", "label2id", "problem_type")
"""Keys of a config that only a head reads."""


def _kept(model: nn.Module, body: nn.Module, rows: int, width: int, packed: bool, settings: PassSettings) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # which keeps the key from being used again
        return tensor

    with FakeTensorMode(), _attention(model, packed, settings):
        own = _fakes(body)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", settings.autocast or torch.bfloat16, settings.autocast is not None):
            _run(model, body, own, rows, width)
        weights = {tensor.untyped_storage()._cdata for tensor in own.values()}
        return sum(storage.nbytes() for key, storage in storages.items() if key not in weights)


def checkpointed_bytes(kept: int, layers: int, tokens: int, hidden_bytes: int) -> int:
    """The bytes that autograd keeps with activation checkpointing: the input of each layer, and all of one layer.

    Args:
        kept: what it keeps without (``kept_bytes``).
        layers: number of layers L.
        tokens: number of tokens T.
        hidden_bytes: bytes of the hidden state of one token h.

    Returns:
        L T h + kept / L (Chen et al. 2016).
    """
    return layers * tokens * hidden_bytes + kept // layers


def cache_bytes(model: nn.Module) -> int:
    """The bytes of the keys and values of one token in all layers."""
    body = backbone(model)
    cache = DynamicCache(config=unwrap(model).config.get_text_config(decoder=True))
    with FakeTensorMode(), torch.no_grad():
        _run(model, body, _fakes(body), 1, 1, past_key_values=cache, use_cache=True)
    return sum(
        layer.keys.nbytes + layer.values.nbytes  # type: ignore[union-attr]
        for layer in cache.layers
    )


def _fakes(body: nn.Module) -> dict[str, Tensor]:
    """Fake tensors on the CPU in place of the weights and buffers, by name."""
    weights = {
        name: torch.empty(w.shape, dtype=w.dtype, requires_grad=w.requires_grad) for name, w in body.named_parameters()
    }
    return weights | {name: torch.empty(x.shape, dtype=x.dtype) for name, x in body.named_buffers()}


def _run(model: nn.Module, body: nn.Module, own: dict[str, Tensor], rows: int, width: int, **more: Any) -> None:
    inputs: dict[str, Any] = {"input_ids": torch.zeros(rows, width, dtype=torch.long)}
    if _decodes(model):
        # given a mask of four dimensions, transformers makes none of its own
        mask: dict[str, Any] = {"attention_mask": torch.zeros(rows, 1, width, width)}
        if unwrap(model).config._attn_implementation == PLANNED:
            mask = {"attention_mask": torch.empty(rows, 1, 0, 0)}
        inputs |= {"position_ids": torch.arange(width).repeat(rows, 1), "use_cache": False, **mask}
    try:
        functional_call(body, own, (), inputs | more)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{type(unwrap(model)).__name__}: its memory cannot be planned: {reason}") from error


def can_pack(model: nn.Module) -> bool:
    """Whether sequences can be packed into one row, by what the model is; a run also tries it."""
    base = unwrap(model)
    full = "sliding_attention" not in layer_types(base.config.get_text_config(decoder=True))
    return bool(
        base.config._attn_implementation == "sdpa" and base._supports_attention_backend and _decodes(model) and full
    )


def _decodes(model: nn.Module) -> bool:
    """Whether a model reads positions, as language models do, in contrast to encoders."""
    base = unwrap(model)
    return hasattr(base, "score") or base.get_output_embeddings() is not None


@contextmanager
def _attention(model: nn.Module, packed: bool, settings: PassSettings) -> Iterator[None]:
    """Within the context, the model attends as it would in training, to one packed row or to padded ones."""
    config = unwrap(model).config
    before = config._attn_implementation
    if packed:
        kernels.prepare_process()
        AttentionInterface.register(PLANNED, partial(_attend, settings))
        AttentionMaskInterface.register(PLANNED, sdpa_mask)
        config._attn_implementation = PLANNED
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    settings: PassSettings,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention implementation for transformers: states (1, T, heads, size), and no weights."""
    in_groups = settings.grouped and grouped.is_faster(query.shape[1], key.shape[1])
    if (settings.gpu or in_groups) and not dropout:
        return _Flash.apply(query, key, value, settings.gpu), None  # type: ignore[return-value]
    with torch.autocast("cpu", enabled=False):
        q, k, v = upcast(query), upcast(key), upcast(value)
        states = attention.by_sequence(q, k, v, dropout, scaling, Segments((query.shape[2],), (None,)))
        return states.to(query.dtype), None


class _Flash(torch.autograd.Function):
    """Keeps what FlashAttention does (Dao et al. 2022): its inputs, its output, and a number per head and token.

    ``normalizers`` says whether it keeps these numbers.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, normalizers: bool) -> Tensor:
        output = query.new_empty(query.transpose(1, 2).shape)
        sums = [query.new_empty(query.shape[:-1], dtype=torch.float32)] if normalizers else []
        ctx.save_for_backward(query, key, value, output, *sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("no gradient is computed")
