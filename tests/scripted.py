"""A generator that writes what a test tells it to, instead of sampling from a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from burnish.generate.protocol import Completion, Handle, PlanQueue, Request


class ScriptedGenerator:
    """Completes a prompt with ``script(prompt)``: a text, or a text and a finish reason. Special tokens are tokens.

    ``plans`` are the requests of each wave. Completions finish in reverse order, one a poll.
    """

    overlaps = False

    def __init__(self, tokenizer: Any, script: Callable[[str], str | tuple[str, str]], slots: int = 64) -> None:
        self.tokenizer, self.script, self.slots = tokenizer, script, slots
        self.plans: list[list[Request]] = []
        self.queue = PlanQueue()
        self.done: list[tuple[Handle, Completion]] = []

    def update_weights(self, version: int, weights: Any) -> None:
        """There are no weights."""

    def submit(self, requests: Sequence[Request], version: int) -> list[Handle]:
        """Complete all requests."""
        self.plans.append(list(requests))
        handles = self.queue.submit(requests)
        self.queue.clear()
        self.done += [(handle, self._completion(one)) for handle, one in zip(handles, requests, strict=True)]
        return handles

    def _completion(self, request: Request) -> Completion:
        said = self.script(self.tokenizer.decode(list(request.tokens)))
        text, reason = (said, "stop") if isinstance(said, str) else said
        every = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        ids = every[: request.sampling.longest]
        reason = reason if len(ids) == len(every) else "length"
        return Completion(ids, -0.25 * np.ones(len(ids)), None, None, reason, 0)

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """The last completion that was not given yet."""
        return [self.done.pop()] if self.done else []

    def drop_cache(self) -> None:
        """There is no cache."""

    def close(self) -> None:
        """There is nothing to release."""
