"""A generator on transformers' continuous batching: a paged cache, shared prefixes, and CUDA graphs on a GPU.

What transformers 5.23 asks for, and what is done about it here:

- All requests of a batch draw from the global random state. A plan runs from a seed that is made of its requests'
  seeds, inside one ``poll``, and the state is put back afterwards.
- The background thread takes requests from its queue by the clock. A plan is queued whole while the thread is paused.
- The size of the cache comes from free memory unless it is set. It is computed from the plan.
- A pause keeps cached prefixes, which belong to old weights. A session lasts for one plan.
- Temperature, top-k and top-p belong to a session. Requests that differ in them run one group after the other.
- Evaluation mode and the attention implementation are not put back. Both are restored.
- Stop strings are unknown: a completion is cut behind the first one, and what came after it was computed for nothing.
- ``min_new_tokens`` is dropped, and there are no values. Both are refused.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from burnish.errors import UserError
from burnish.generate.local import check_requests, load_named
from burnish.generate.protocol import Completion, Handle, Request
from burnish.generate.stop_strings import completes_stop
from burnish.kernels import attention
from burnish.models.forward import SamplingTransform, evaluating, unwrap


class ContinuousGenerator:
    """Generates with the live weights of a model of this process, by transformers' continuous batching.

    Equal plans with equal weights give equal bytes, but a completion is not a function of its own seed alone: the
    requests of a plan share one random stream. Log-probabilities are those of the processed distribution, out of which
    the pad id is taken.

    Args:
        model: a causal language model that transformers can run with a paged cache.
        tokenizer: its pad id is never sampled, and it decodes where stop strings are looked for.
        slots: requests that are decoded together, at most.
        max_batch_tokens: tokens of one forward pass, at most.
        page_size: tokens whose keys and values are one block of the cache.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, slots: int = 256, max_batch_tokens: int = 4096, page_size: int = 64
    ) -> None:
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.max_batch_tokens, self.page_size = max_batch_tokens, page_size
        self.version = 0
        self._submitted = 0
        self._plans: deque[tuple[Handle, list[Request]]] = deque()

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Load weights where they differ from the model's own."""
        self.drop_cache()
        load_named(self.model, weights)
        self.version = version

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Queue a plan of requests.

        Raises:
            UserError: a request that continuous batching cannot serve, with the reason.
        """
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        if any(request.return_values for request in requests):
            raise UserError("the continuous generator gives no values: leave return_values out, and score completions")
        if any(request.sampling.min_new_tokens and request.stop_ids for request in requests):
            raise UserError(
                "generation.min_new_tokens: transformers' continuous batching drops it; take it out, or set generator: "
                "{name: local}"
            )
        check_requests(requests, self.model, self.tokenizer, critic=None)
        first = self._submitted
        self._submitted += len(requests)
        if requests:
            self._plans.append((first, list(requests)))
        return list(range(first, self._submitted))

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Complete the oldest plan. It runs to its end, whatever the timeout: see the random state above."""
        if not self._plans:
            return []
        first, requests = self._plans.popleft()
        groups: dict[SamplingTransform, list[int]] = {}
        for index, request in enumerate(requests):
            s = request.sampling
            groups.setdefault(SamplingTransform(s.temperature, s.top_k, s.top_p), []).append(index)
        done: list[tuple[Handle, Completion]] = []
        for transform, members in groups.items():
            completions = self._run([requests[index] for index in members], transform)
            done += [(first + index, made) for index, made in zip(members, completions, strict=True)]
        return done

    def drop_cache(self) -> None:
        """Nothing is kept between plans; no request may be in flight."""
        if self._plans:
            raise RuntimeError("requests are in flight: poll them all first")

    def close(self) -> None:
        """Drop requests in flight."""
        self._plans.clear()

    # --- one session ----------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], transform: SamplingTransform) -> list[Completion]:
        """Completions of requests that draw from the same kind of distribution."""
        base = unwrap(self.model)
        context = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
        limits = [_limit(request) for request in requests]
        rooms = [
            limit if context is None else min(limit, context - len(request.tokens))
            for request, limit in zip(requests, limits, strict=True)
        ]
        outputs: dict[str, Any] = {}
        with _restored(self.model):
            manager = base.init_continuous_batching(self._generation(transform), self._batching(requests, rooms))
            manager.start()
            try:
                with manager.pause():
                    for index, (request, room) in enumerate(zip(requests, rooms, strict=True)):
                        ends = sorted(request.stop_ids) or -1
                        manager.add_request(list(request.tokens), str(index), room, eos_token_id=ends)
                while len(outputs) < len(requests):
                    output = manager.get_result(timeout=1.0)
                    if output is None:
                        if not manager.is_running():
                            error = manager.background_thread_status.fatal_error
                            raise RuntimeError(f"continuous batching failed: {error}")
                        continue
                    if output.error is not None:
                        raise RuntimeError(f"continuous batching failed: {output.error}")
                    outputs[output.request_id] = output
            finally:
                manager.stop(hard_stop=len(outputs) < len(requests))
        made = [outputs[str(index)] for index in range(len(requests))]
        return [self._completion(*parts, transform) for parts in zip(requests, limits, made, strict=True)]

    def _generation(self, transform: SamplingTransform) -> GenerationConfig:
        """All settings that would else come from the model's own generation config."""
        drawn = transform.temperature > 0
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        return GenerationConfig(
            do_sample=drawn,
            temperature=transform.temperature if drawn else None,
            top_k=transform.top_k or 0 if drawn else None,
            top_p=transform.top_p or 1.0 if drawn else None,
            suppress_tokens=None if pad is None else [pad],
            eos_token_id=-1,
            max_new_tokens=1,
        )

    def _batching(self, requests: list[Request], rooms: list[int]) -> ContinuousBatchingConfig:
        """Sizes that depend on the plan alone: enough blocks for as many of the longest requests as there are slots."""
        longest = max(len(request.tokens) + room for request, room in zip(requests, rooms, strict=True))
        together = min(self.slots, len(requests))
        seeds = hashlib.blake2b(repr([request.seed for request in requests]).encode(), digest_size=4).digest()
        return ContinuousBatchingConfig(
            page_size=self.page_size,
            num_blocks=together * (math.ceil(longest / self.page_size) + 1),
            max_batch_tokens=max(self.max_batch_tokens, together),
            max_requests_per_batch=together,
            return_logprobs=True,
            seed=int.from_bytes(seeds, "big"),
        )

    def _completion(self, request: Request, limit: int, output: Any, transform: SamplingTransform) -> Completion:
        tokens, logprobs = output.generated_tokens, output.logprobs
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"continuous batching gave {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        finish_reason = "length" if len(tokens) >= limit else "context"
        if tokens[-1] in request.stop_ids:
            finish_reason = "stop"
        if stop := request.sampling.stop:
            begun = range(max(1, request.sampling.min_new_tokens), len(tokens) + 1)
            stopped = completes_stop(self.tokenizer, [tokens[:count] for count in begun], stop)
            if True in stopped:
                count = begun[stopped.index(True)]
                tokens, logprobs, finish_reason = tokens[:count], logprobs[:count], "stop"
        greedy = transform.temperature == 0
        return Completion(
            tokens=np.array(tokens, dtype=np.int64),
            logprobs=np.zeros(len(tokens)) if greedy else np.array(logprobs, dtype=np.float64),
            values=None,
            final_value=None,
            finish_reason=finish_reason,
            version=self.version,
        )


def _limit(request: Request) -> int:
    """The most tokens that a request may get, which its seed draws from ``length_range``."""
    if request.sampling.length_range is None:
        return request.sampling.max_new_tokens
    generator = torch.Generator().manual_seed(request.seed)
    low, high = request.sampling.length_range
    return int(torch.randint(low, high, (), generator=generator))


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Put back what continuous batching changes: random states, evaluation mode, and the attention implementation."""
    base = unwrap(model)
    before = base.config._attn_implementation
    devices = [base.device] if base.device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices):
        if before == attention.NAME:
            base.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            if base.config._attn_implementation != before:
                base.set_attn_implementation(before)
