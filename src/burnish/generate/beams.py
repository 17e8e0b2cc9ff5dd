"""Beam search and beam-sampling: the likeliest completions of one prompt, best first.

Prompts are searched one at a time, so there is no padding and results do not depend on other prompts.

Without sampling, transformers' ``generate`` finds the same beams (a test compares them), but it has these limitations,
measured with transformers 5.23:

- It pads its results with completions of probability 0: if only 7 completions are possible, 50 beams return 50, of
  which 43 have a score of -5e8. With ``top_k=2``, four sampled beams of one token include two tokens that top-k had
  removed or that were already taken.
- It scores sampled beams by the warped logits: at temperature 0.5, -22.3 where the model's log p is -11.1. Token
  log-probabilities require ``output_scores``, which keeps (beams, V) numbers for every decoding step.
- It samples from the global random state, so a search cannot have its own seed.
- It returns no finish reasons, and takes unset options from the model's generation config.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers.cache_utils import DynamicCache

from burnish.errors import UserError
from burnish.generate.protocol import Completion
from burnish.generate.sampling import check_temperature
from burnish.generate.stopping import completes_stop
from burnish.math.tensors import upcast, warp
from burnish.models.forward import backbone, evaluating, head, unwrap
from burnish.types import Config


class Beams(Config, use_attribute_docstrings=True):
    """Settings of beam search: ``Beams(beams=4, sample=True, top_k=10, temperature=0.6)``."""

    beams: Annotated[int, Field(ge=1)] = 4
    """Number of beams kept after every token."""
    sample: bool = False
    """Sample the next beams without replacement instead of taking the likeliest."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sample beams in proportion to p ** (1 / temperature)."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample only from the k likeliest next tokens of each beam."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample only from the smallest set of likeliest next tokens of each beam whose total probability reaches top_p."""
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] = 1.0
    """Rank completions of n tokens by log p / n ** length_penalty: 0 ranks by log p, 1 by its mean per token."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Maximum number of tokens. A completion that reaches it ends with finish reason ``length``."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Minimum number of tokens before an end-of-sequence token or a stop string can end a completion."""
    returned: Annotated[int, Field(ge=1)] = 1
    """Number of completions to return, at most ``beams``."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Number of searches per prompt, each with its own seed."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Stop strings. A completion ends with the token that completes one of them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.returned > self.beams:
            raise ValueError(f"{self.beams} beams find at most {self.beams} completions: cannot return {self.returned}")
        check_temperature(self.temperature)
        drawn = {"top_k", "top_p", "temperature", "samples"} & self.model_fields_set
        if drawn and not self.sample:
            raise ValueError(f"{', '.join(sorted(drawn))} applies only to sampled beams: set sample to true")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        return self


class _Beam(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = ""

    def rank(self, length_penalty: float) -> float:
        return math.fsum(self.logprobs) / len(self.tokens) ** length_penalty


def search(
    model: Any,
    prompt: tuple[int, ...],
    settings: Beams,
    seed: int = 0,
    *,
    eos_ids: Collection[int],
    pad_id: int | None,
    tokenizer: Any = None,
) -> list[Completion]:
    """Search for the best completions of a prompt's token ids.

    Returns ``settings.returned`` completions, best first, or fewer if there are no more.

    Let s = sum log p of a beam's tokens. Each iteration ranks all pairs of a beam and a next token. Beam search ranks
    by s. Beam-sampling draws without replacement with probability proportional to exp(s / temperature), among the next
    tokens that top-k and top-p allow (with Gumbel noise, Kool et al. 2019). The first ``beams`` unfinished candidates
    continue. Finished candidates among the first ``beams`` are kept if they rank among the best ``beams`` by
    s / n ** length_penalty. The search stops at ``max_new_tokens``, or when no open beam outranks the worst kept
    completion. This is exact for a length penalty of 0 and a heuristic otherwise. With one beam, the search is greedy
    decoding or plain sampling.

    Log-probabilities are the model's own, without temperature, top-k and top-p. ``pad_id`` is never chosen.

    Raises:
        UserError: if there are stop strings but no tokenizer, the prompt is empty or fills the context window, or
            logits are NaN.
    """
    if settings.stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer: pass tokenizer=, or leave stop empty")
    with evaluating(model):
        ended = _Search(model, prompt, settings, seed, eos_ids, pad_id, tokenizer).run()
    return [
        Completion(np.array(beam.tokens), np.array(beam.logprobs), None, None, beam.finish_reason, version=0)
        for beam in ended[: settings.returned]
    ]


def _limit(model: Any, prompt: tuple[int, ...], settings: Beams) -> tuple[int, str]:
    """The maximum number of tokens in a completion, and the finish reason of completions that reach it."""
    if not prompt:
        raise UserError("the prompt is empty; expected at least one token, such as BOS")
    context = getattr(unwrap(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = settings.max_new_tokens if context is None else context - len(prompt)
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves no room in the model's context window of {context}: "
            "shorten the prompt"
        )
    return min(room, settings.max_new_tokens), "context" if room < settings.max_new_tokens else "length"


class _Search:
    """The open beams of one prompt, which share a KV cache, and its finished beams."""

    def __init__(
        self,
        model: Any,
        prompt: tuple[int, ...],
        settings: Beams,
        seed: int,
        eos_ids: Collection[int],
        pad_id: int | None,
        tokenizer: Any,
    ) -> None:
        config = unwrap(model).config.get_text_config(decoder=True)
        self.body, self.head, self.device = backbone(model), head(model), unwrap(model).device
        self.prompt, self.settings, self.tokenizer = prompt, settings, tokenizer
        self.limit, self.reason_at_limit = _limit(model, prompt, settings)
        self.eos = sorted(set(eos_ids))
        self.never = [] if pad_id is None or pad_id in eos_ids else [pad_id]
        self.cache = DynamicCache(config=config)
        self.noise = torch.Generator().manual_seed(seed)
        self.live = [_Beam((), ())]
        self.ended: list[_Beam] = []

    def run(self) -> list[_Beam]:
        """Run the search and return the finished beams, best first."""
        inputs = torch.tensor([self.prompt])
        while self.live:
            hidden = self.body(input_ids=inputs.to(self.device), past_key_values=self.cache, use_cache=True)
            self._step(upcast(self.head(hidden.last_hidden_state[:, -1])))
            if self._settled():
                break
            inputs = torch.tensor([[beam.tokens[-1]] for beam in self.live])
        return self.ended

    def _step(self, logits: Tensor) -> None:
        """Extend the open beams by one token, given their next-token logits (beams, V)."""
        if bool(logits.isnan().any()):
            raise UserError("the model's logits are not numbers (NaN): its weights are broken or training diverged")
        logprobs = logits.log_softmax(-1)
        parents, live = [], []
        for place, (parent, token) in enumerate(self._candidates(logits, logprobs)):
            before = self.live[parent]
            beam = _Beam((*before.tokens, token), (*before.logprobs, logprobs[parent, token].item()))
            if finish := self._finish(beam):
                if place < self.settings.beams:
                    self.ended.append(beam._replace(finish_reason=finish))
            else:
                parents.append(parent)
                live.append(beam)
            if len(live) == self.settings.beams:
                break
        self.live = live
        self.ended.sort(key=lambda beam: -beam.rank(self.settings.length_penalty))
        del self.ended[self.settings.beams :]
        if parents:
            self.cache.reorder_cache(torch.tensor(parents, device=self.device))  # type: ignore[arg-type]

    def _candidates(self, logits: Tensor, logprobs: Tensor) -> list[tuple[int, int]]:
        """Pairs of a beam's index and its next token, best first."""
        settings = self.settings
        sums = torch.tensor([math.fsum(beam.logprobs) for beam in self.live], dtype=torch.float64, device=self.device)
        order = sums[:, None] + logprobs.double()
        if settings.sample:
            kept = warp(logits, settings.temperature, settings.top_k, settings.top_p) > -torch.inf
            uniform = torch.rand(order.shape, generator=self.noise, dtype=torch.float64).to(self.device)
            order = (order / settings.temperature - (-uniform.log()).log()).masked_fill(~kept, -torch.inf)
        order[:, self.never] = -torch.inf
        if len(self.live[0].tokens) < settings.min_new_tokens:
            order[:, self.eos] = -torch.inf
        # Enough candidates to continue with, whichever of them end. Stop strings can end more of them.
        wanted = (len(self.eos) + (2 if settings.stop else 1)) * settings.beams
        best = order.flatten().topk(min(wanted, order.numel()))
        indices = best.indices[best.values > -torch.inf].tolist()
        return [divmod(index, order.shape[1]) for index in indices]

    def _finish(self, beam: _Beam) -> str:
        count = len(beam.tokens)
        if beam.tokens[-1] in self.eos:
            return "stop"
        if self.settings.stop and count >= self.settings.min_new_tokens:
            (stopped,) = completes_stop(self.tokenizer, [list(beam.tokens)], self.settings.stop)
            if stopped:
                return "stop"
        return self.reason_at_limit if count >= self.limit else ""

    def _settled(self) -> bool:
        """Whether no open beam outranks the worst kept completion."""
        if len(self.ended) < self.settings.beams or not self.live:
            return not self.live
        penalty = self.settings.length_penalty
        return max(beam.rank(penalty) for beam in self.live) <= self.ended[-1].rank(penalty)
