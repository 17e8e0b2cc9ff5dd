"""A request as vLLM's route ``/v1/completions`` takes it, and its answer, which is checked against the request."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from burnish.errors import UserError
from burnish.generate.draw import length_limit
from burnish.generate.protocol import Completion, Request
from burnish.generate.stopping import completes_stop
from burnish.generate.vllm_weights import Target

NEVER = -100.0
"""The lowest bias of a token that vLLM accepts."""
IMPOSSIBLE = -9999.0
"""What vLLM reports as the log-probability of a token with probability 0."""

ROUNDING = 1e-5
"""By how much a log-probability may exceed 0."""


class AnswerError(UserError):
    """The server's answer does not fit the request."""


class LostError(Exception):
    """The request has to be repeated: the server aborted it, or sampled with other weights than it was sent."""


class Sizes(NamedTuple):
    """What limits tokens: the size of the vocabulary, the context window, and the pad id, which is never sampled."""

    vocabulary: int
    context: int | None
    pad: int | None


def room(request: Request, context: int | None) -> int:
    """The maximum number of tokens of a completion: the request's limit, or what fits into the context window."""
    limit = length_limit(request)
    return limit if context is None else min(limit, context - len(request.tokens))


def body(request: Request, target: Target, sizes: Sizes) -> dict[str, object]:
    """The body of a request. Everything is set that would otherwise come from the model's generation config."""
    s, limit = request.sampling, room(request, sizes.context)
    never = {} if sizes.pad is None or sizes.pad in request.stop_ids else {str(sizes.pad): NEVER}
    return {
        "model": target.model,
        "prompt": list(request.tokens),
        "max_tokens": limit,
        "min_tokens": min(s.min_new_tokens, limit),
        "seed": request.seed,
        "temperature": s.temperature,
        "top_k": s.top_k or 0,
        "top_p": s.top_p or 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": never,
        "stop": s.stop,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,  # only these stop ids end the completion
        "skip_special_tokens": False,  # stop strings can contain special tokens
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
    }


def read(answer: Any, request: Request, target: Target, sizes: Sizes, tokenizer: Any, version: int) -> Completion:
    """The completion in an answer. It ends with the token that completes the first stop string.

    Raises:
        LostError: if it was aborted, or sampled with other weights.
        AnswerError: if it does not fit the request.
    """
    try:
        (choice,) = answer["choices"]
        prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
        names, logprobs = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        reason, stopped_by = choice["finish_reason"], choice.get("stop_reason")
        model, spans = answer["model"], choice.get("weight_versions")
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"expected one choice with tokens and log-probabilities, got {_short(answer)}") from error
    if reason == "abort":
        raise LostError("the server aborted a completion, as it does when it shuts down")
    if target.weights is not None and (others := {span["version"] for span in spans or ()} - {target.weights}):
        raise LostError(f"expected a completion of the weights {target.weights}, got one of {min(others)}")
    if target.weights is not None and not spans:
        raise AnswerError("the answer does not say which weights have sampled it (weight_versions)")
    if model != target.model:
        raise AnswerError(f"expected a completion of the model {target.model}, got one of {model}")
    if prompt != list(request.tokens):
        raise AnswerError(
            f"expected a completion of the tokens {_short([*request.tokens])}, got one of {_short(prompt)}"
        )
    limit = room(request, sizes.context)
    _check_tokens(tokens, sizes.vocabulary, limit)
    if names != [f"token_id:{token}" for token in tokens] or len(logprobs) != len(tokens):
        raise AnswerError(
            f"expected a log-probability of each of {len(tokens)} tokens, got {len(logprobs)} of {_short(names)}"
        )
    for place, value in enumerate(logprobs):
        if not isinstance(value, int | float) or not IMPOSSIBLE < value <= ROUNDING:
            raise AnswerError(f"token {place} has the log-probability {value}: expected at most 0, and more than -9999")
    count, ended = len(tokens), reason
    if stop := request.sampling.stop:
        counts = range(max(1, request.sampling.min_new_tokens), count + 1)
        stops = completes_stop(tokenizer, [tokens[:k] for k in counts], stop)
        if True in stops:
            count, ended = counts[stops.index(True)], "stop"
    if count == len(tokens):
        _check_end(tokens, reason, stopped_by, request, limit)
    if ended == "length" and limit < length_limit(request):
        ended = "context"
    greedy = request.sampling.temperature == 0
    return Completion(
        tokens=np.array(tokens[:count], dtype=np.int64),
        logprobs=np.zeros(count) if greedy else np.array(logprobs[:count], dtype=np.float64),
        values=None,
        final_value=None,
        finish_reason=ended,
        version=version,
    )


def _check_tokens(tokens: list[int], vocabulary: int, limit: int) -> None:
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= limit:
        raise AnswerError(f"expected 1 to {limit} tokens, got {_short(tokens)}")
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise AnswerError(f"token {place} is {token}: expected an id below {vocabulary}, the model's vocabulary")


def _check_end(tokens: list[int], reason: str, stopped_by: int | str | None, request: Request, limit: int) -> None:
    """Check that a finish reason fits the tokens. vLLM reports a stop string as ``stop_reason``."""
    early = next((place for place, token in enumerate(tokens[:-1]) if token in request.stop_ids), None)
    if early is not None:
        raise AnswerError(
            f"token {early} is the stop id {tokens[early]}, but {len(tokens) - 1 - early} tokens follow it"
        )
    ends = tokens[-1] in request.stop_ids
    if reason == "stop":
        fits = ends or stopped_by in request.sampling.stop
    else:
        fits = reason == "length" and len(tokens) == limit and not ends
    if not fits:
        raise AnswerError(
            f"the finish reason {reason!r} does not fit {len(tokens)} tokens that end with {tokens[-1]}: the limit is "
            f"{limit}, and the stop ids are {sorted(request.stop_ids)}"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."
