"""Forward passes of transformers models on micro-batches: hidden states, log-probabilities, scores, values.

The language-model head runs on the positions that are asked for and on no others, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Literal, NamedTuple
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
LAYERS = ("layer_types", "layers_block_type", "attention_layers")  # names of a config's list of what its layers are
ATTENTION = frozenset({"attention", "full_attention", "sliding_attention", "global", "local"})
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 5e-3}  # share of the largest hidden state; float32: 1e-3


class SamplingTransform(NamedTuple):
    """How logits become the distribution that is sampled from: ``SamplingTransform(temperature=0.7, top_p=0.9)``."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


PLAIN = SamplingTransform()


def unwrap(model: nn.Module) -> Any:
    """The transformers model, with adapter layers inside it if it has any."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Leave dropout and gradients out for as long as the context lasts."""
    # Not inference_mode: buffers that a forward pass updates (dynamic rotary frequencies) must stay usable in training.
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def backbone(model: nn.Module) -> nn.Module:
    """The part of a model that makes hidden states."""
    return unwrap(model).base_model


def head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The language-model head: hidden states (..., H) to logits (..., V), in float32 or wider.

    Covers what some architectures do after the matrix product: soft-capping (Gemma), division (Granite),
    multiplication (Cohere).
    """
    base = unwrap(model)
    project = base.get_output_embeddings()
    config = base.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)

    def logits(hidden: Tensor) -> Tensor:
        z = upcast(project(hidden))
        z = z if scale == 1.0 else z * scale
        return z if cap is None else cap * torch.tanh(z / cap)

    return logits


def hidden_states(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Last hidden states (B, T, H) of a causal model. A padded row and a packed one give the same for a sequence.

    Raises:
        UserError: a packed sequence is longer than the model's attention window.
    """
    body = backbone(model)
    window = getattr(unwrap(model).config.get_text_config(), "sliding_window", None)
    if batch.packed and window is not None and int(batch.positions.max()) >= window:
        last = batch.positions.flatten()[batch.ends]
        raise UserError(
            f"{batch.sources[int(last.argmax())]}: packed, it is longer than the attention "
            f"window of {window} tokens of {type(unwrap(model)).__name__}: train with packed=False"
        )
    if batch.runs is not None and has_varlen(model):
        # transformers takes a mask of four dimensions as it is, and makes none
        sees: dict[str, Any] = {"attention_mask": batch.tokens.new_empty(1, 1, 0, 0), "segments": batch.runs}
    else:
        sees = {"attention_mask": attention_mask(batch, next(body.parameters()).dtype)}
    return body(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **sees).last_hidden_state


def can_share(model: nn.Module) -> bool:
    """Whether sequences behind a shared prompt have the hidden states that they have alone.

    Not those of an encoder, which sees both ways, nor with ALiBi, which counts the columns between two tokens.
    """
    base = unwrap(model)
    if base not in _shares:
        _shares[base] = _causal_without_windows(model) and _same_states(model, _trial(model, 3), shared=True)
    return _shares[base]


def can_pack(model: nn.Module) -> bool:
    """Whether sequences in one row, behind a block mask, have the hidden states that they have alone."""
    return _same_states(model, _trial(model, 1, 1, 1), packed=True)


def has_varlen(model: nn.Module) -> bool:
    """Whether packed rows need no mask: ``attention.varlen`` is switched on here, where a trial of it is right."""
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
    """Whether packed rows, which have no padding, are the fastest: on a CPU, and where a GPU has a kernel for them.

    With autocast it is to be asked as the model is to run.
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
    return causal and not windows and "local" not in _layers(config)


def _layers(config: Any) -> list[str]:
    return next((list(found) for name in LAYERS if (found := getattr(config, name, None))), [])


def _trial(model: nn.Module, *answers: int) -> list[Example]:
    """Examples of so many different answers each, all to one short prompt."""
    vocabulary = unwrap(model).config.get_text_config().vocab_size
    tokens = ((1, 2, 3, 4, *(7 * answer + t for t in range(5, 15))) for answer in count())
    rows = (Sequence(tuple(i % vocabulary for i in ids), (False,) * 4 + (True,) * 10, "trial") for ids in tokens)
    return [Example(tuple(islice(rows, n))) for n in answers]


def _same_states(model: nn.Module, trial: list[Example], **layout: Any) -> bool:
    """Whether a few tokens, in evaluation mode, have the same hidden states in this layout as one sequence a row."""
    base = unwrap(model)
    config = base.config.get_text_config()
    # convolutions and recurrences carry what they have seen into the next sequence of the row
    if config.is_encoder_decoder or getattr(base, "_is_stateful", False) or not ATTENTION.issuperset(_layers(config)):
        return False
    batches = (batch.to(base.device) for batch in (collate(trial, 0), collate(trial, 0, **layout)))
    try:
        with evaluating(model):
            expected, found = (hidden_states(model, batch).flatten(0, 1)[batch.ends] for batch in batches)
    except (RuntimeError, ValueError, TypeError):  # it takes no mask of four dimensions
        return False
    rounding = ROUNDING.get(computed_in(expected.dtype, expected.device), 1e-3)
    return bool((found - expected).abs().max() <= rounding * expected.abs().max())


def token_logprobs(
    model: nn.Module,
    hidden: Tensor,
    batch: MicroBatch,
    mask: Tensor,
    how: SamplingTransform = PLAIN,
    entropies: Literal["off", "measured", "learned"] = "measured",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token where ``mask`` (B, T) is True, and the entropy it was drawn at; 0 elsewhere.

    Both (B, T), of the warped distribution; the entropy has a gradient where it is learned, and is 0 where it is off.
    A token is always among those that top-k and top-p keep: it was when it was sampled, and rounding or an update that
    moves it past their edge would else make its probability 0.
    The head sees only the positions before masked tokens; where their logits do not fit one chunk they are computed
    again in the backward pass instead of being kept.
    """
    flat = hidden.flatten(0, 1)
    at = shift_right(torch.arange(mask.numel(), device=mask.device).view_as(mask))[mask]
    targets = batch.tokens[mask]
    logits_of = head(model)

    def chunk(rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        plain = logits_of(rows)
        z = kept = plain if how == PLAIN else warp(plain, how.temperature, how.top_k, how.top_p)
        if how.top_k is not None or how.top_p is not None:
            at = tokens.unsqueeze(-1)
            kept = z.scatter(-1, at, plain.gather(-1, at) / how.temperature)
        measured = entropies != "off"
        logprobs, drawn_at = logprobs_and_entropy(kept, tokens, measured and kept is z)
        if measured and kept is not z:
            drawn_at = logprobs_and_entropy(z, tokens)[1]
        return logprobs, drawn_at if entropies == "learned" else drawn_at.detach()

    step = max(1, LOGITS_AT_ONCE // unwrap(model).config.get_text_config().vocab_size)
    pieces = []
    for rows, tokens in zip(flat[at].split(step), targets.split(step), strict=True):
        recompute = len(at) > step and torch.is_grad_enabled()
        pieces.append(checkpoint(chunk, rows, tokens, use_reentrant=False) if recompute else chunk(rows, tokens))
    logprobs, drawn_at = (torch.cat(part) for part in zip(*pieces, strict=True))
    zeros = torch.zeros(mask.shape, dtype=logprobs.dtype, device=mask.device)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, drawn_at)


def learned_logprobs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Log-probabilities (B, T) of the learned tokens, 0 elsewhere."""
    return token_logprobs(model, hidden_states(model, batch), batch, batch.loss_mask, entropies="off")[0]


def scores(model: nn.Module, batch: MicroBatch, label: int = 0) -> Tensor:
    """Raw scalar score (N,) of each sequence under a sequence-classification model.

    A causal model is read at the last attended token, found by the mask and not by any token id; an encoder pools
    as its class does and takes rows padded on the right.
    """
    base = unwrap(model)
    if hasattr(base, "score"):
        last = hidden_states(model, batch).flatten(0, 1)[batch.ends]
        logits = base.score(last)
    else:
        if batch.packed or bool(
            (batch.positions != torch.arange(batch.tokens.shape[1], device=batch.tokens.device))
            .logical_and(batch.segments > 0)
            .any()
        ):
            raise ValueError("an encoder takes one sequence a row, padded on the right")
        logits = base(input_ids=batch.tokens, attention_mask=attention_mask(batch, base.dtype)).logits
    return upcast(logits[:, label])


def token_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Values (B, T) of a token-classification model: entry t is predicted before token t is chosen."""
    return values_of(score_head(model), hidden_states(model, batch))


def score_head(model: nn.Module) -> Any:
    """The linear layer that turns hidden states into labels, by the two names that transformers gives it."""
    base = unwrap(model)
    return base.score if hasattr(base, "score") else base.classifier


def values_of(score: nn.Module, hidden: Tensor) -> Tensor:
    """Values (B, T) of a scalar head on hidden states (B, T, H), entry t predicted before token t is chosen."""
    return shift_right(upcast(score(hidden.to(next(score.parameters()).dtype))[..., 0]))
