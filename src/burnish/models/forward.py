"""Forward passes of transformers models on micro-batches: hidden states, log-probabilities, scores, values.

The language-model head is computed only at the positions that are needed, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count, islice
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burnish import kernels
from burnish.errors import UserError
from burnish.kernels import attention
from burnish.kernels.attention import computed_in, has_kernel
from burnish.math.tensors import logprobs_and_entropy, shift_right, upcast, warp
from burnish.models.batching import attention_mask, collate
from burnish.types import Example, MicroBatch, Sequence

LOGITS_AT_ONCE = 2**26  # elements of a chunk of logits: 256 MiB in float32
LAYER_TYPES = ("layer_types", "layers_block_type", "attention_layers")  # config attributes that list the layers' types
HALF = frozenset({torch.bfloat16, torch.float16})
ATTENTION = frozenset({"attention", "full_attention", "sliding_attention", "global", "local"})
EQUAL = 1e-3  # the largest difference of equal hidden states in float32, relative to the largest state
SIMILAR = (
    0.05  # the same with quantized weights, of the median sequence; a layout that is wrong changes it by 0.15 or more
)


class SamplingTransform(NamedTuple):
    """Turns logits into the distribution to sample from: ``SamplingTransform(temperature=0.7, top_p=0.9)``."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


PLAIN = SamplingTransform()


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside a peft model, with its adapter layers; any other model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch off dropout, gradients and compiled layers within the context."""
    # not inference_mode: training must still be able to use the buffers that a forward pass updates
    training = [module for module in model.modules() if module.training]
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if training:
        model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, as it names their classes."""
    names = unwrap(model)._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def backbone(model: nn.Module) -> nn.Module:
    """The part of a model that computes hidden states, without its head."""
    return unwrap(model).base_model


def head(model: nn.Module, wide: bool = True) -> Callable[[Tensor], Tensor]:
    """The language-model head: a function from hidden states (..., H) to logits (..., V).

    It includes what some architectures do after the matrix product: soft-capping (Gemma), division (Granite) or
    multiplication (Cohere).

    Args:
        model: a causal language model.
        wide: whether logits are converted to float32, if they are in half precision. If not, logits on which nothing
            was computed after the matrix product stay as they are, which saves memory.
    """
    base = unwrap(model)
    project = base.get_output_embeddings()
    config = base.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)

    def logits(hidden: Tensor) -> Tensor:
        z = project(hidden)
        if wide or scale != 1.0 or cap is not None:
            z = upcast(z)
        z = z if scale == 1.0 else z * scale
        return z if cap is None else cap * torch.tanh(z / cap)

    return logits


def hidden_states(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The last hidden states (B, T, H) of a causal model, the same whether rows are padded or packed.

    Raises:
        UserError: a packed sequence is longer than the model's attention window.
    """
    body = backbone(model)
    window = getattr(unwrap(model).config.get_text_config(), "sliding_window", None)
    if batch.packed and window is not None and int(batch.positions.max()) >= window:
        last = batch.positions.flatten()[batch.ends]
        raise UserError(
            f"{batch.sources[int(last.argmax())]}: longer than the attention window of {window} tokens of "
            f"{type(unwrap(model)).__name__}, which packed rows cannot use: train with packed=False"
        )
    if batch.row_segments is not None and has_varlen(model):
        # given a mask of four dimensions, transformers makes none of its own
        attend: dict[str, Any] = {
            "attention_mask": batch.tokens.new_empty(1, 1, 0, 0),
            "segments": attention.Packed(batch.row_segments),
        }
    else:
        attend = {"attention_mask": attention_mask(batch, next(body.parameters()).dtype)}
    return body(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **attend).last_hidden_state


def can_share(model: nn.Module) -> bool:
    """Whether sequences that share a prompt in one row have the same hidden states as in separate rows.

    This is not so in an encoder, which attends in both directions, or with ALiBi, which counts the columns between two
    tokens.
    """
    base = unwrap(model)
    if base not in _shares:
        _shares[base] = _causal_without_windows(model) and _same_states(model, _trial(model, 3), shared=True)
    return _shares[base]


def can_pack(model: nn.Module) -> bool:
    """Whether sequences in one row, with a block mask, have the same hidden states as in separate rows."""
    return _same_states(model, _trial(model, 1, 1, 1), packed=True)


def has_varlen(model: nn.Module) -> bool:
    """Whether packed rows need no mask. Switches on ``attention.varlen`` if a trial gives the right hidden states."""
    base = unwrap(model)
    if base.config._attn_implementation != attention.NAME and base not in _tried:
        _tried.add(base)
        if base.config._attn_implementation == "sdpa" and base._supports_attention_backend:
            kernels.use_packed_attention(base, True)
            trial = _trial(model, 3, 1)
            if not (_causal_without_windows(model) and _same_states(model, trial, packed=True, shared=True)):
                kernels.use_packed_attention(base, False)
    return base.config._attn_implementation == attention.NAME


def prefers_packed(model: nn.Module) -> bool:
    """Whether packed rows are the fastest layout: on a CPU, and on a GPU that has a kernel for them.

    Call it under the same autocast as the forward passes, since the kernel depends on the dtype.
    """
    base = unwrap(model)
    fast = base.device.type == "cpu" or has_kernel(computed_in(base.dtype, base.device), base.device)
    return fast and has_varlen(model)


_tried: WeakSet[nn.Module] = WeakSet()
_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _causal_without_windows(model: nn.Module) -> bool:
    base = unwrap(model)
    config = base.config.get_text_config()
    causal = hasattr(base, "score") or base.get_output_embeddings() is not None
    windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return causal and not windows and "local" not in layer_types(config)


def layer_types(config: Any) -> list[str]:
    """What each layer does, as the config says: ``["full_attention", "sliding_attention"]``; empty if it does not."""
    return next((list(types) for name in LAYER_TYPES if (types := getattr(config, name, None))), [])


def _trial(model: nn.Module, *answers: int) -> list[Example]:
    """Examples with these numbers of answers, all different, to one short prompt."""
    vocabulary = unwrap(model).config.get_text_config().vocab_size
    tokens = ((1, 2, 3, 4, *(7 * answer + t for t in range(5, 15))) for answer in count())
    rows = (Sequence(tuple(i % vocabulary for i in ids), (False,) * 4 + (True,) * 10, "trial") for ids in tokens)
    return [Example(tuple(islice(rows, n))) for n in answers]


def _same_states(model: nn.Module, trial: list[Example], **layout: Any) -> bool:
    """Whether a few tokens have the same hidden states in this layout as with one sequence per row.

    They are compared in float32. In half precision, rounding alone changes some states of a deep model by half.
    """
    base = unwrap(model)
    config = base.config.get_text_config()
    # convolutions and recurrences carry their state into the next sequence of the row
    only_attention = ATTENTION.issuperset(layer_types(config))
    if config.is_encoder_decoder or getattr(base, "_is_stateful", False) or not only_attention:
        return False
    batches = [batch.to(base.device) for batch in (collate(trial, 0), collate(trial, 0, **layout))]
    try:
        with evaluating(model):
            if computed_in(base.dtype, base.device) in HALF:
                hidden_states(model, batches[1])  # the kernel for half precision may not take these shapes
            with in_float32(model):
                expected, actual = (hidden_states(model, batch).flatten(0, 1)[batch.ends] for batch in batches)
    except (RuntimeError, ValueError, TypeError):  # the model does not take a mask of four dimensions
        return False
    if getattr(base, "is_quantized", False):  # its products are rounded
        return bool(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median() <= SIMILAR)
    return bool((actual - expected).abs().max() <= EQUAL * expected.abs().max())


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 within the context, without autocast, whatever the dtype of the weights.

    The weights of a layer are converted while it runs, so there is no copy of the whole model. Quantized weights stay
    as they are.
    """
    layers = layers_of(model)
    inside = {module for layer in layers for module in layer.modules()}
    others = [module for module in model.modules() if module not in inside and not any(module.children())]
    stored: dict[nn.Parameter, Tensor] = {}

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value

    def convert(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        for weight in module.parameters():
            if weight.dtype in HALF:
                stored[weight] = weight.data
                weight.data = weight.data.float()
        # the mask has the dtype of the weights
        return tuple(map(wide, arguments)), {name: wide(value) for name, value in named.items()}

    def restore(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters():
            if weight in stored:
                weight.data = stored.pop(weight)

    hooks = [module.register_forward_pre_hook(convert, with_kwargs=True) for module in (*layers, *others)]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in (*layers, *others)]
    try:
        with torch.autocast(unwrap(model).device.type, enabled=False):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def token_logprobs(
    model: nn.Module,
    hidden: Tensor,
    batch: MicroBatch,
    transform: SamplingTransform = PLAIN,
    entropies: Literal["off", "measured", "learned"] = "measured",
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of learned tokens, and the entropies of the distributions that they were drawn from.

    The head is computed only at the positions before them. If the logits do not fit into one chunk, they are
    not stored, but computed again in the backward pass.

    Args:
        model: a causal language model.
        hidden: its hidden states (B, T, H).
        batch: the tokens.
        transform: temperature, top-k and top-p of the distribution. Top-k and top-p always keep the token itself: they
            did when it was sampled, and its probability must not become 0 by rounding or by an update.
        entropies: ``measured`` has no gradient, ``learned`` has one, and ``off`` gives zeros.

    Returns:
        Log-probabilities (B, T) and entropies (B, T), both 0 at tokens that are not learned.
    """
    logits_of = head(model, wide=transform != PLAIN)

    def chunk(rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        plain = logits_of(rows)
        temperature, top_k, top_p = transform
        z = kept = plain if transform == PLAIN else warp(plain, temperature, top_k, top_p)
        if top_k is not None or top_p is not None:
            at = tokens.unsqueeze(-1)
            kept = z.scatter(-1, at, plain.gather(-1, at) / temperature)
        measured = entropies != "off"
        once = kept is z  # then nothing else uses the logits
        logprobs, drawn_at = logprobs_and_entropy(kept, tokens, measured and once, overwrite=once)
        if measured and not once:
            drawn_at = logprobs_and_entropy(z, tokens)[1]
        return logprobs, drawn_at if entropies == "learned" else drawn_at.detach()

    logprobs, drawn_at = at_learned(chunk, [hidden], batch, unwrap(model).config.get_text_config().vocab_size)
    return logprobs, drawn_at


def at_learned(
    function: Callable[..., tuple[Tensor, ...]], hidden: list[Tensor], batch: MicroBatch, logits: int
) -> list[Tensor]:
    """Apply a function of logits at the positions before learned tokens, in chunks.

    If there are several chunks, their logits are not stored, but computed again in the backward pass.

    Args:
        function: maps hidden states (N, H) of each model and the tokens (N,) that they predict to tensors (N,).
        hidden: the hidden states (B, T, H) of each model.
        batch: the tokens.
        logits: number of logits that the function computes for a token.

    Returns:
        The function's results as (B, T), 0 at tokens that are not learned.
    """
    shape, size, device = batch.tokens.shape, batch.tokens.numel(), batch.tokens.device
    at = shift_right(torch.arange(size, device=device).view(shape)).flatten()[batch.learned]
    step = max(1, LOGITS_AT_ONCE // logits)
    recompute = len(at) > step and torch.is_grad_enabled()
    inputs = [*(states.flatten(0, 1)[at] for states in hidden), batch.tokens.flatten()[batch.learned]]
    pieces = []
    for piece in zip(*(one.split(step) for one in inputs), strict=True):
        pieces.append(checkpoint(function, *piece, use_reentrant=False) if recompute else function(*piece))
    found = [torch.cat(part) for part in zip(*pieces, strict=True)]
    return [x.new_zeros(size).scatter(0, batch.learned, x).view(shape) for x in found]


def learned_logprobs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The log-probabilities (B, T) of the learned tokens, 0 elsewhere."""
    return token_logprobs(model, hidden_states(model, batch), batch, entropies="off")[0]


def scores(model: nn.Module, batch: MicroBatch, label: int = 0) -> Tensor:
    """The raw scores (N,) of the sequences under a sequence-classification model.

    A causal model is read at the last token of each sequence, which is known from the layout, not from the pad id. An
    encoder pools as its class does; it takes one sequence per row, padded on the right.

    Raises:
        ValueError: the rows of an encoder are packed, or padded on the left.
    """
    base = unwrap(model)
    if hasattr(base, "score"):
        last = hidden_states(model, batch).flatten(0, 1)[batch.ends]
        logits = head_output(base.score, last)
    else:
        if batch.packed or bool(
            (batch.positions != torch.arange(batch.tokens.shape[1], device=batch.tokens.device))
            .logical_and(batch.segments > 0)
            .any()
        ):
            raise ValueError("an encoder takes one sequence per row, padded on the right")
        logits = base(input_ids=batch.tokens, attention_mask=attention_mask(batch, base.dtype)).logits
    return upcast(logits[:, label])


def token_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The values (B, T) of a token-classification model. Entry t is predicted before token t is chosen."""
    return values_of(score_head(model), hidden_states(model, batch))


def score_head(model: nn.Module) -> Any:
    """The linear layer that maps hidden states to labels; transformers names it ``score`` or ``classifier``."""
    base = unwrap(model)
    return base.score if hasattr(base, "score") else base.classifier


def values_of(score: nn.Module, hidden: Tensor) -> Tensor:
    """The values (B, T) of a scalar head on hidden states (B, T, H). Entry t is predicted before token t is chosen."""
    return shift_right(upcast(head_output(score, hidden)[..., 0]))


def head_output(head: nn.Module, states: Tensor) -> Tensor:
    """The output (..., labels) of a linear head on hidden states (..., H), computed in the dtype of its weights.

    Autocast, which would round values and scores to three digits, is off.
    """
    # with an adapter, the attribute is the weight that is in use
    weight = head.weight if hasattr(head, "weight") else next(head.parameters(), states)
    dtype = cast(Tensor, weight).dtype
    device = states.device.type
    exact = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
    with exact:
        return head(states.to(dtype))
