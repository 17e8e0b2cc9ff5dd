"""A generator in this process, for transformers causal language models, with or without an adapter, on a CPU or GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish import kernels, machine
from burnish.errors import UserError
from burnish.generate.protocol import Completion, Handle, PlanQueue, Request
from burnish.generate.session import DecodingSession
from burnish.kernels import blocked
from burnish.models.forward import evaluating, unwrap
from burnish.models.heads import SharedCritic, StepValueHead, load_weights
from burnish.models.limits import check_ids

COPIED_SHARE = 8
"""The copies of a model's weights, in all processes of a machine, may take one part in so many of its memory."""

FEWEST_TOKENS = 8
"""Copies that are made for one plan pay off if one of its completions may have so many tokens."""


class LocalGenerator:
    """Generates with the live weights of a model in this process.

    ``complete(LocalGenerator(model, tokenizer), [Request((1, 9, 8), seed=5)])`` returns a list of one ``Completion``.

    Each completion is drawn with its own seed, so its tokens do not depend on the rest of the batch, except through
    rounding. The keys and values of requests with ``keep_cache`` are stored until ``update_weights`` or ``drop_cache``,
    and a request of a later plan computes only what comes after the longest stored text that it begins with.
    Log-probabilities are those of the warped distribution before the pad id and early stop ids are masked, as in a
    forward pass over the completed text.

    Args:
        model: a causal language model. Passing its own parameters to ``update_weights`` copies nothing.
        tokenizer: decodes tokens to detect stop strings. Its pad id is never sampled. With None, there are no stop
            strings and every id can be sampled.
        critic: the head that computes values of sampled tokens, for requests with ``return_values``.
        slots: maximum number of rows decoded together.
        prefix_bytes: maximum memory of stored keys and values. If it is reached, no more are stored in this plan, and
            the next plan drops those that it does not begin with. By default, a quarter of a GPU's memory, or 2 GiB.
        frozen: whether the weights change only in ``update_weights``. If so, the copies described below are kept
            between plans.

    On a CPU with AVX-512, plans are decoded with copies of the weights of linear layers, which makes sampling faster,
    most of all with few rows. They are made when a plan of at least ``FEWEST_TOKENS`` new tokens begins, and dropped
    when no plan is left, so the weights may change between plans but not during one. The copies need as much memory as
    those weights; if that is more than an eighth of the machine's memory, divided by the number of training processes
    on it, none are made. Log-probabilities differ by rounding from those without.
    """

    overlaps = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        critic: SharedCritic | StepValueHead | None = None,
        slots: int = 64,
        prefix_bytes: int | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.critic, self.slots = model, tokenizer, critic, slots
        self.version = 0
        self.prefix_bytes, self.frozen = prefix_bytes, frozen
        self._plans = PlanQueue()
        self._current: Handle | None = None  # the handle of the first request of the plan that is being decoded
        self._session: DecodingSession | None = None
        self._blocked: blocked.Blocked = {}

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
        """Load weights, except those that are the model's own tensors, and drop the cache."""
        self.drop_cache()
        self._blocked = {}
        load_named(self.model, weights)
        self.version = version

    def submit(self, requests: SequenceOf[Request], version: int) -> list[Handle]:
        """Queue a plan of requests.

        Raises:
            UserError: if a prompt is empty or fills the context window, or if a request has stop strings without a
                tokenizer or asks for values without a critic.
        """
        if version != self.version:
            raise ValueError(f"requests for weights of version {version}: the generator holds version {self.version}")
        check_requests(requests, self.model, self.tokenizer, self.critic)
        return self._plans.submit(requests)

    def poll(self, timeout: float | None) -> list[tuple[Handle, Completion]]:
        """Decode until a completion is finished or the time is over, but at least one token. Plans run one by one."""
        end = None if timeout is None else time.monotonic() + timeout
        done: list[tuple[Handle, Completion]] = []
        try:
            with evaluating(self.model):
                while not done and self._begun():
                    assert self._session is not None and self._current is not None
                    with blocked.using(self._blocked):
                        done = [(self._current + index, completion) for index, completion in self._session.step()]
                    if end is not None and time.monotonic() >= end:
                        break
            self._drop_copies()
        except BaseException:
            self.close()
            raise
        return done

    @property
    def _busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._plans) or (self._session is not None and self._session.busy)

    def _drop_copies(self) -> None:
        """Drop the copies of weights that may change before the next plan, if no requests are in flight."""
        if not self.frozen and not self._busy:
            self._blocked = {}

    def _begun(self) -> bool:
        """Whether a plan is being decoded. Begins the next plan if the current one is complete."""
        if self._session is not None and self._session.busy:
            return True
        self._current = None
        if not self._plans:
            return False
        if self._session is None:
            model = kernels.enable(self.model)
            self._session = DecodingSession(
                model, self.tokenizer, self.critic, self.slots, self.version, self.prefix_bytes
            )
        self._current, requests = self._plans.popleft()
        longest = max((request.sampling.longest for request in requests), default=0)
        if not self._blocked and (self.frozen or longest >= FEWEST_TOKENS):
            self._blocked = blocked.copies(kernels.enable(self.model), most_copied_bytes())
        self._session.begin(requests)
        return True

    def tokens_so_far(self, handle: Handle) -> list[int]:
        """The tokens sampled so far for a request that is being decoded."""
        assert self._session is not None and self._current is not None
        return self._session.tokens_of(handle - self._current)

    def cancel(self) -> None:
        """Cancel all requests in flight. The cache is kept."""
        self._plans.clear()
        if self._session is not None:
            self._session.cancel()
        self._drop_copies()

    def drop_cache(self) -> None:
        """Drop the keys and values of earlier requests."""
        if self._busy:
            raise RuntimeError("requests are in flight: poll them all first")
        self._session = None

    def close(self) -> None:
        """Drop the cache and all requests in flight."""
        self._plans.clear()
        self._session, self._blocked = None, {}


def most_copied_bytes(processes: int | None = None) -> int:
    """The memory that copies may take in one of so many processes on this machine; by default, those of this run."""
    return machine.memory_bytes() // (COPIED_SHARE * (processes or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def load_named(model: Any, weights: Iterable[tuple[str, Tensor]] | Path) -> None:
    """Load named tensors, or an adapter's folder, into a model. Tensors that are the model's own are not copied.

    Raises:
        ValueError: if the model has no parameter of a tensor's name and shape.
    """
    if isinstance(weights, Path):
        load_weights(model, weights)
        return
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                got = f"{tuple(own[name].shape)}, expected" if name in own else "no such parameter: given"
                raise ValueError(f"{type(unwrap(model)).__name__}: {name}: {got} {tuple(tensor.shape)}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)


def check_requests(requests: SequenceOf[Request], model: Any, tokenizer: Any, critic: Any) -> None:
    """Check that a generator with this model, tokenizer and critic can serve requests.

    Raises:
        UserError: if a prompt is empty or fills the context window, or if a request has stop strings without a
            tokenizer or asks for values without a critic.
    """
    if tokenizer is None and any(request.sampling.stop for request in requests):
        raise UserError("stop strings need a tokenizer: pass tokenizer=, or leave stop empty")
    if critic is None and any(request.return_values for request in requests):
        raise UserError("values need a critic that is a head on the policy: pass critic=, or remove return_values")
    config = unwrap(model).config.get_text_config(decoder=True)
    context, vocabulary = getattr(config, "max_position_embeddings", None), config.vocab_size
    for index, request in enumerate(requests):
        if not request.tokens:
            raise UserError(f"request {index}: the prompt is empty; expected at least one token, such as BOS")
        if context is not None and len(request.tokens) >= context:
            raise UserError(
                f"request {index}: a prompt of {len(request.tokens)} tokens leaves no room in the model's context "
                f"window of {context}: shorten the prompt"
            )
        check_ids(request.tokens, vocabulary, f"request {index}")
