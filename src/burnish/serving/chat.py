"""The service of ``burnish serve judge``: chat completions in the format of OpenAI, with log-probabilities."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

import torch
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, complete, derived_seed
from burnish.generate.protocol import Request as Sampled
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.models.forward import evaluating, head, hidden_states
from burnish.models.layout import Layout
from burnish.models.loaded import Loaded
from burnish.render.renderer import Renderer
from burnish.serving.http import Limits, Service, ServiceError, answer, application, parsed, read_body
from burnish.serving.worker import Worker
from burnish.types import Config, Example, Message, Sequence

DEFAULT_TOKENS = 512
"""Maximum number of tokens of an answer if the request sets none."""

LEAST = -9999.0
"""What OpenAI's service writes for a log-probability of minus infinity, which JSON does not have."""

POSITIONS_AT_ONCE = 64
"""Number of positions whose logits are computed together."""


class TextPart(Config):
    """A part of a message: ``{"type": "text", "text": "Hello"}``."""

    type: Literal["text"]
    text: str


class ChatMessage(Config):
    """One message: ``{"role": "user", "content": "Hello"}``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def message(self) -> Message:
        """The message as rows have it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Config, use_attribute_docstrings=True):
    """The body of ``POST /v1/chat/completions``. Keys that would have no effect are errors.

    ``{"model": "judge", "messages": [{"role": "user", "content": "A or B?"}], "max_tokens": 1, "logprobs": true,
    "top_logprobs": 20}``
    """

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """Another name of max_tokens."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    """Equal requests with a seed get equal answers."""
    n: int | None = Field(None, ge=1, le=1024)
    """Number of answers."""
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    """Number of likeliest tokens at each position, at most the whole vocabulary."""
    stream: Literal[False] | None = None
    user: str | None = None

    def sampling(self) -> Sampling:
        """The settings for sampling.

        Raises:
            UserError: if they contradict each other.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise UserError("max_tokens and max_completion_tokens are the same: send one of them")
        return Sampling(
            max_new_tokens=self.max_tokens or self.max_completion_tokens or DEFAULT_TOKENS,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
        )


class Chat:
    """Answers chat requests with a model in this process.

    ``Chat(loaded, "judge").answer(request)`` is a dict in the format of OpenAI's chat completions.
    """

    def __init__(self, loaded: Loaded, name: str) -> None:
        self.loaded, self.name = loaded, name
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.generator = LocalGenerator(self.model, self.tokenizer, frozen=True)
        self.renderer = Renderer(self.tokenizer)
        self.layout = Layout([self.model], pad_id=self.tokenizer.pad_token_id or 0)
        self._texts: dict[int, str] = {}

    def answer(self, asked: ChatRequest) -> dict[str, Any]:
        """Answer a request.

        Raises:
            UserError: if the template rejects the messages, or they fill the context window.
        """
        prompt = self.renderer.prompt(tuple(message.message() for message in asked.messages), "messages")
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        ends, sampling = frozenset(eos_ids(self.model, self.tokenizer)), asked.sampling()
        requests = [Sampled(prompt, derived_seed("chat", seed, i), sampling, ends) for i in range(asked.n or 1)]
        completions = complete(self.generator, requests, self.generator.version)
        self.generator.drop_cache()
        sampled = sum(len(completion.tokens) for completion in completions)
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [self._choice(asked, i, prompt, completion) for i, completion in enumerate(completions)],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
        }

    def _choice(
        self, asked: ChatRequest, index: int, prompt: tuple[int, ...], completion: Completion
    ) -> dict[str, Any]:
        tokens = completion.tokens.tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for stop in asked.sampling().stop:
            text = text.partition(stop)[0]  # as in OpenAI's service, an answer does not include its stop string
        logprobs = {"content": self.logprobs(prompt, tokens, asked.top_logprobs or 0)} if asked.logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if completion.finish_reason == "stop" else "length",
            "logprobs": logprobs,
        }

    def logprobs(self, prompt: tuple[int, ...], tokens: list[int], top: int) -> list[dict[str, Any]]:
        """Log-probabilities of sampled tokens and of the ``top`` likeliest at each position, from one forward pass.

        They are those of the model, whatever the temperature. The token that ends the answer has an entry, too.
        """
        ids = [*prompt, *tokens]
        mask = [i >= len(prompt) for i in range(len(ids))]
        batch = self.layout.collate([Example((Sequence(ids, mask, "request"),))])
        found: list[dict[str, Any]] = []
        with evaluating(self.model):
            hidden = hidden_states(self.model, batch)[0, len(prompt) - 1 : len(ids) - 1]
            for start in range(0, len(tokens), POSITIONS_AT_ONCE):
                rows = slice(start, start + POSITIONS_AT_ONCE)
                values = head(self.model)(hidden[rows]).float().log_softmax(-1)
                own = values.gather(-1, torch.tensor(tokens[rows], device=values.device).unsqueeze(-1)).squeeze(-1)
                best, best_ids = values.topk(min(top, values.shape[-1]), dim=-1)
                for token, logprob, logprobs, likeliest in zip(
                    tokens[rows], own.tolist(), best.tolist(), best_ids.tolist(), strict=True
                ):
                    others = zip(self._texts_of(likeliest), logprobs, strict=True)
                    entry = _entry(self._texts_of([token])[0], logprob)
                    found.append({**entry, "top_logprobs": [_entry(text, number) for text, number in others]})
        return found

    def _texts_of(self, ids: list[int]) -> list[str]:
        """The texts of tokens inside a sentence, where some tokenizers keep a leading space."""
        if new := [i for i in dict.fromkeys(ids) if i not in self._texts]:
            anchor: list[int] = self.tokenizer.encode("a", add_special_tokens=False)
            decoded = self.tokenizer.batch_decode(
                [anchor, *([*anchor, i] for i in new)], clean_up_tokenization_spaces=False
            )
            self._texts |= {i: text.removeprefix(decoded[0]) for i, text in zip(new, decoded[1:], strict=True)}
        return [self._texts[i] for i in ids]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    known = None if "\ufffd" in text else list(text.encode())  # a part of a character
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": known}


def chat_service(chat: Chat, token: str, limits: Limits | None = None) -> Service[ChatRequest, dict[str, Any]]:
    """The service of a model.

    Args:
        chat: the model.
        token: the bearer token of every request.
        limits: limits of requests.

    Raises:
        UserError: if the token is too short.
    """
    limits = limits or Limits()
    worker = Worker[ChatRequest, dict[str, Any]](lambda items: [chat.answer(item) for item in items])

    async def completions(request: Request) -> Response:
        asked = parsed(ChatRequest, await read_body(request, limits))
        if asked.model != chat.name:
            raise ServiceError(404, "not_found", f"no model {asked.model!r}: this service has {chat.name!r}")
        try:
            asked.sampling()
        except UserError as error:
            raise ServiceError(400, "invalid", str(error)) from error
        (answered,) = await answer(request, worker.submit([asked]))
        return JSONResponse(answered)

    async def models(_: Request) -> Response:
        model = {"id": chat.name, "object": "model", "created": 0, "owned_by": "burnish"}
        return JSONResponse({"object": "list", "data": [model]})

    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
    ]
    about = {"service": "judge", "name": chat.name}
    return Service(worker, application(routes, about, token, limits))
