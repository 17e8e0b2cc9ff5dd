"""A generator based on transformers' continuous batching: paged cache, shared prefixes, and CUDA graphs on a GPU.

It works around these limitations of transformers 5.23:

- All requests of a batch draw from the global random state. A plan therefore runs within one ``poll``, from a seed
  derived from the seeds of its requests, and the global state is restored afterwards.
- When the background thread takes a request from its queue depends on timing. The whole plan is queued while the thread
  is paused.
- The size of the cache depends on free memory unless it is set. It is computed from the plan.
- A pause keeps cached prefixes, which belong to old weights. Every plan gets its own session.
- Temperature, top-k and top-p belong to a session. Requests with different ones run in groups, one after the other.
- It changes evaluation mode and the attention implementation and does not restore them. Both are restored here.
- It has no stop strings. Completions are truncated after the first one, so the tokens after it are wasted work.
- It ignores ``min_new_tokens`` and returns no values. Requests with either are refused.
"""

from __future__ import annotations

import hashlib
import math
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
from burnish.generate.draw import length_limit
from burnish.generate.local import check_requests, load_named
from burnish.generate.protocol import Completion, Handle, PlanQueue, Request
from burnish.generate.stopping import completes_stop
from burnish.kernels import attention
from burnish.models.forward import SamplingTransform, evaluating, unwrap


class ContinuousGenerator:
    """Generates with the live weights of a model in this process, using transformers' continuous batching.

    Equal plans with equal weights give identical bytes. However, a completion does not depend on its own seed alone,
    because the requests of a plan share one random stream. Log-probabilities are those of the processed distribution,
    in which the pad id has probability 0.

    Args:
        model: a causal language model that transformers can run with a paged cache.
        tokenizer: decodes tokens to detect stop strings. Its pad id is never sampled.
        slots: maximum number of requests decoded together.
        max_batch_tokens: maximum number of tokens in a forward pass.
        page_size: number of tokens in a block of the cache.
    """

    overlaps = False

    def __init__(
        self, model: Any, tokenizer: Any = None, slots: int = 256, max_batch_tokens: int = 4096, page_size: int = 64
    ) -> None:
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.max_batch_tokens, self.page_size = max_batch_tokens, page_size
        self.version = 0
        self._plans = PlanQueue()

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Load weights, except those that are the model's own tensors."""
        self.drop_cache()
        load_named(self.model, weights)
        self.version = version

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Queue a plan of requests.

        Raises:
            UserError: if continuous batching cannot serve a request.
        """
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        if any(request.return_values for request in requests):
            raise UserError("the continuous generator returns no values: remove return_values")
        if any(request.sampling.min_new_tokens and request.stop_ids for request in requests):
            raise UserError(
                "generation.min_new_tokens: transformers' continuous batching ignores it: remove it, or set generator: "
                "{name: local}"
            )
        if any(request.sampling.top_p not in (None, 1.0) for request in requests):
            check_top_p(unwrap(self.model).device)
        check_requests(requests, self.model, self.tokenizer, critic=None)
        return self._plans.submit(requests)

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Complete the oldest plan. It always runs to its end, whatever the timeout, because it uses global state."""
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
        """Check that no request is in flight. No cache is kept between plans."""
        if self._plans:
            raise RuntimeError("requests are in flight: poll them all first")

    def close(self) -> None:
        """Drop requests in flight."""
        self._plans.clear()

    # --- one session ----------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], transform: SamplingTransform) -> list[Completion]:
        """Complete requests that have the same sampling transform."""
        base = unwrap(self.model)
        context = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
        limits = [length_limit(request) for request in requests]
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
        """All settings that would otherwise come from the model's own generation config."""
        sampled = transform.temperature > 0
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        return GenerationConfig(
            do_sample=sampled,
            temperature=transform.temperature if sampled else None,
            top_k=transform.top_k or 0 if sampled else None,
            top_p=transform.top_p or 1.0 if sampled else None,
            suppress_tokens=None if pad is None else [pad],
            eos_token_id=-1,
            max_new_tokens=1,
        )

    def _batching(self, requests: list[Request], rooms: list[int]) -> ContinuousBatchingConfig:
        """Sizes that depend only on the plan: enough blocks to fill every slot with the longest request."""
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
            raise RuntimeError(
                f"continuous batching returned {len(tokens)} tokens with {len(logprobs)} log-probabilities"
            )
        finish_reason = "length" if len(tokens) >= limit else "context"
        if tokens[-1] in request.stop_ids:
            finish_reason = "stop"
        if stop := request.sampling.stop:
            counts = range(max(1, request.sampling.min_new_tokens), len(tokens) + 1)
            stopped = completes_stop(self.tokenizer, [tokens[:count] for count in counts], stop)
            if True in stopped:
                count = counts[stopped.index(True)]
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


def check_top_p(device: torch.device) -> None:
    """Raise a UserError if transformers' top-p, which needs a cumulative sum, would fail on this device."""
    if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        raise UserError(
            "generation.top_p: transformers' continuous batching cannot compute it with full_determinism on a GPU: "
            "remove one of the two, or set generator: {name: local}"
        )


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Restore what continuous batching changes: random states, evaluation mode, and the attention implementation."""
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
