"""What a generator is asked for and what it gives: requests in, completions out, both as token ids.

This file does not import torch, so that recipes, rewards and other processes can read it.
"""

from __future__ import annotations

import hashlib
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
"""Names a submitted request until its completion is polled."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt's token ids, and how one completion of it is drawn.

    ``Request((1, 9, 8), request_seed(0, 17, 0, 3), Sampling(temperature=0.7), stop_ids=frozenset({2}))``

    The completion ends with the first of ``stop_ids``. ``sampling.samples`` is the caller's: n samples are n requests
    with equal tokens and different seeds. With ``return_values`` the completion has the critic's values.
    """

    tokens: tuple[int, ...]
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    return_values: bool = False


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled completion.

    ``Completion(np.array([42, 2]), np.array([-0.1, -0.3]), None, None, "stop", version=3)``

    ``tokens`` is int64 (T,) and includes the stop token. ``logprobs`` is float64 (T,), of the distribution that was
    sampled from (temperature, top-k and top-p applied). Where the request asked for values, ``values`` is float64 (T,):
    entry t is the critic's estimate of the text before token t, and ``final_value`` that of the whole text. Otherwise
    both are None. ``finish_reason`` is ``stop`` (a stop id or a stop string), ``length`` (the request's limit) or
    ``context`` (the model's window is full). ``version`` is that of the weights.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    values: np.ndarray | None
    final_value: float | None
    finish_reason: str
    version: int


class Generator(Protocol):
    """Completes prompts with a policy's weights.

    The requests of one ``submit`` are a plan. Which of them share a batch depends on the plans alone, never on the
    clock, so that equal plans after an equal ``update_weights`` give equal bytes.
    """

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Take new weights, named as the model names its parameters, or an adapter's folder, and drop every cache.

        Parameters that are not named keep their values. No request may be in flight.
        """
        ...

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Queue requests for the weights of this version.

        Raises:
            UserError: a request that this generator or its model cannot serve.
        """
        ...

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Completions that are done, in any order; waits for the first for at most ``timeout`` seconds (None: always).

        Gives an empty list where the time is over or nothing is in flight.
        """
        ...

    def drop_cache(self) -> None:
        """Forget keys and values of earlier requests and free their memory; no request may be in flight."""
        ...

    def close(self) -> None:
        """Free what the generator holds. Requests in flight are lost."""
        ...


class GeneratorFactory(Protocol):
    """Makes a generator for a model: the class ``LocalGenerator``, or what ``generate.settings.factory`` gives."""

    def __call__(self, model: Any, tokenizer: Any) -> Generator:
        """A generator of this model's completions."""
        ...


def complete(generator: Generator, requests: SequenceOf[Request], version: int = 0) -> list[Completion]:
    """Submit requests to a generator that has nothing else in flight, and wait for all completions, in their order."""
    handles = generator.submit(requests, version)
    done: dict[Handle, Completion] = {}
    while len(done) < len(handles):
        done.update(generator.poll(None))
    return [done[handle] for handle in handles]


def request_seed(run_seed: int, prompt: int, sample: int, iteration: int) -> int:
    """A seed in [0, 2**63) of its own for each (run seed, prompt, sample, iteration), the same on every machine."""
    key = f"{run_seed}/{prompt}/{sample}/{iteration}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
