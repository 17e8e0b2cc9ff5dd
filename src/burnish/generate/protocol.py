"""The interface of generators: requests in, completions out, both as token ids.

This module does not import torch, so that recipes, rewards and other processes can import it quickly.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from burnish.generate.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

Handle = int
"""Identifies a submitted request until its completion is polled."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt's token ids, and the settings for sampling one completion.

    ``Request((1, 9, 8), request_seed(0, 17, 0, 3), Sampling(temperature=0.7), stop_ids=frozenset({2}))``

    The completion ends at the first token in ``stop_ids``. Generators ignore ``sampling.samples``: for n samples, the
    caller submits n requests with the same tokens and different seeds. With ``return_values``, the completion includes
    the critic's values. ``keep_cache`` says that a later request will begin with this text, so that the generator keeps
    its keys and values if it can.
    """

    tokens: tuple[int, ...]
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    return_values: bool = False
    keep_cache: bool = False


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled completion.

    ``Completion(np.array([42, 2]), np.array([-0.1, -0.3]), None, None, "stop", version=3)``

    ``tokens`` is int64 (T,) and includes the stop token. ``logprobs`` is float64 (T,), under the sampling distribution
    (after temperature, top-k and top-p). If the request set ``return_values``, ``values`` is float64 (T,): entry t is
    the critic's value of the text before token t, and ``final_value`` is the value of the whole text. Otherwise both
    are None. ``finish_reason`` is ``stop`` (a stop id or a stop string), ``length`` (the request's limit) or
    ``context`` (the model's context window is full). ``version`` is the version of the weights. ``cached_tokens`` is
    the number of the request's tokens that the generator still knew from an earlier request.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    values: np.ndarray | None
    final_value: float | None
    finish_reason: str
    version: int
    cached_tokens: int = 0


class Generator(Protocol):
    """Completes prompts with a policy's weights.

    The requests of one ``submit`` form a plan. Which requests share a batch depends only on the plans and never on
    timing, so equal plans after an equal ``update_weights`` give identical bytes.

    ``slots`` is the maximum number of requests that are decoded together. ``overlaps`` says that requests are completed
    while this process computes, between two polls; a generator without this attribute works only in ``poll``.
    """

    slots: int
    overlaps: bool

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Load new weights, keyed by parameter name, or an adapter's folder, and drop all caches.

        Other parameters keep their values. No request may be in flight.
        """
        ...

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Queue requests for the weights of this version.

        Raises:
            UserError: if this generator or its model cannot serve a request.
        """
        ...

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Return finished completions, in any order. Waits at most ``timeout`` seconds for the first (None: no limit).

        Returns an empty list if the time is over or nothing is in flight.
        """
        ...

    def drop_cache(self) -> None:
        """Drop the keys and values of earlier requests and free their memory. No request may be in flight."""
        ...

    def close(self) -> None:
        """Release all resources. Requests in flight are lost."""
        ...


class PlanQueue(deque[tuple[Handle, list[Request]]]):
    """Submitted plans, oldest first. Each is the handle of its first request, and its requests."""

    submitted = 0

    def submit(self, requests: SequenceOf[Request]) -> list[Handle]:
        """Append a plan, unless it is empty, and return the handles of its requests."""
        handles = list(range(self.submitted, self.submitted + len(requests)))
        self.submitted += len(requests)
        if requests:
            self.append((handles[0], list(requests)))
        return handles


class GeneratorFactory(Protocol):
    """Creates a generator for a model: the class ``LocalGenerator``, or the result of ``generate.settings.factory``."""

    def __call__(self, model: Any, tokenizer: Any) -> Generator:
        """Create a generator for this model."""
        ...


def complete(generator: Generator, requests: SequenceOf[Request], version: int = 0) -> list[Completion]:
    """Submit requests to an idle generator and wait for all completions. Returns them in the order of the requests."""
    handles = generator.submit(requests, version)
    done: dict[Handle, Completion] = {}
    while len(done) < len(handles):
        done.update(generator.poll(None))
    return [done[handle] for handle in handles]


def request_seed(run_seed: int, prompt: int, sample: int, iteration: int) -> int:
    """A seed in [0, 2**63) for each (run seed, prompt, sample, iteration). It is the same on every machine."""
    return derived_seed(run_seed, prompt, sample, iteration)


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) for each sequence of numbers and names. It is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
