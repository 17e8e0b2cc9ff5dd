"""Beam search and beam-sampling: the likeliest completions of one prompt, best first.

One prompt is searched at a time, so that no prompt is padded and its result depends on no other.

transformers' ``generate`` finds the same beams without sampling (a test compares them), but lacks what this file
gives. Measured with transformers 5.23:

- It fills up with what has probability 0: of 7 possible completions it returns 50 for 50 beams, 43 of them with a score
  of -5e8; with ``top_k=2``, four sampled beams of one token hold two tokens that top-k had left out or taken already.
- Scores of sampled beams are those of the warped logits: at temperature 0.5, -22.3 where the model's log p is -11.1.
  Log-probabilities of tokens need ``output_scores``, which keeps (beams, V) numbers for every step.
- It draws from the global random state, so that a search has no seed of its own.
- It gives no finish reasons, and takes what is not set from the model's generation config.
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
from burnish.generate.stop_strings import completes_stop
from burnish.math.tensors import upcast, warp
from burnish.models.forward import backbone, evaluating, head, unwrap
from burnish.types import Config


class Beams(Config, use_attribute_docstrings=True):
    """How completions are searched for: ``Beams(beams=4, sample=True, top_k=10, temperature=0.6)``."""

    beams: Annotated[int, Field(ge=1)] = 4
    """Continuations that are kept at every step."""
    sample: bool = False
    """Draw the continuations that are kept, without replacement, instead of taking the likeliest."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Continuations are drawn by p ** (1 / temperature)."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Draw among the k likeliest next tokens of each beam only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Draw among the likeliest next tokens of each beam that together have this probability."""
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] = 1.0
    """Completions of n tokens are ranked by log p / n ** length_penalty: 0 by log p, 1 by its mean."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """A completion that has not stopped by then ends with finish ``length``."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """No end-of-sequence token is taken and no stop string is looked for before so many tokens."""
    returned: Annotated[int, Field(ge=1)] = 1
    """Completions that are given, at most ``beams``."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Searches a prompt, each with a seed of its own."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """A completion ends with the token that completes one of these strings."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.returned > self.beams:
            raise ValueError(f"{self.beams} beams find at most {self.beams} completions: cannot return {self.returned}")
        drawn = {"top_k", "top_p", "temperature", "samples"} & self.model_fields_set
        if drawn and not self.sample:
            raise ValueError(f"{', '.join(sorted(drawn))} set how beams are drawn, and nothing is drawn: add sample")
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
    how: Beams,
    seed: int = 0,
    *,
    eos_ids: Collection[int],
    pad_id: int | None,
    tokenizer: Any = None,
) -> list[Completion]:
    """The best completions of a prompt's token ids, best first: ``how.returned`` of them, or fewer where no more exist.

    With s = sum log p of a beam's tokens, each step goes over all beams and next tokens. Beam search takes the largest
    s. Beam-sampling draws without replacement with probability proportional to exp(s / temperature), among what
    top-k and top-p leave of each beam's next tokens (by Gumbel noise, Kool et al. 2019). The first ``beams`` that do
    not stop go on; those that stop before them in that order are kept, the best ``beams`` by s / n ** length_penalty.
    The search ends at ``max_new_tokens``, or when no beam would rank above the worst kept one if it ended now. One
    beam is greedy, or plain sampling.

    Log-probabilities are the model's own, without temperature, top-k and top-p; ``pad_id`` is never taken.

    Raises:
        UserError: stop strings without a tokenizer; an empty prompt, or one that fills the context window; logits that
            are not numbers.
    """
    if how.stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer: pass tokenizer=, or leave stop empty")
    limit, cut = _limit(model, prompt, how)
    with evaluating(model):
        ended = _Search(model, prompt, how, seed, limit, cut, eos_ids, pad_id, tokenizer).run()
    return [
        Completion(np.array(beam.tokens), np.array(beam.logprobs), None, None, beam.finish_reason, version=0)
        for beam in ended[: how.returned]
    ]


def _limit(model: Any, prompt: tuple[int, ...], how: Beams) -> tuple[int, str]:
    """The most tokens of a completion, and the finish of those that reach it."""
    if not prompt:
        raise UserError("the prompt is empty; expected at least one token, such as BOS")
    context = getattr(unwrap(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = how.max_new_tokens if context is None else context - len(prompt)
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves no room in the model's context window of {context}: "
            "cut the prompts to fewer tokens"
        )
    return min(room, how.max_new_tokens), "context" if room < how.max_new_tokens else "length"


class _Search:
    """The live beams of one prompt, whose keys and values share a cache, and those that ended."""

    def __init__(
        self,
        model: Any,
        prompt: tuple[int, ...],
        how: Beams,
        seed: int,
        limit: int,
        cut: str,
        eos_ids: Collection[int],
        pad_id: int | None,
        tokenizer: Any,
    ) -> None:
        config = unwrap(model).config.get_text_config(decoder=True)
        self.body, self.head, self.device = backbone(model), head(model), unwrap(model).device
        self.prompt, self.how, self.limit, self.cut, self.tokenizer = prompt, how, limit, cut, tokenizer
        self.eos = sorted(set(eos_ids))
        self.never = [] if pad_id is None or pad_id in eos_ids else [pad_id]
        self.cache = DynamicCache(config=config)
        self.noise = torch.Generator().manual_seed(seed)
        self.live = [_Beam((), ())]
        self.ended: list[_Beam] = []

    def run(self) -> list[_Beam]:
        """Beams that ended, best first."""
        inputs = torch.tensor([self.prompt])
        while self.live:
            hidden = self.body(input_ids=inputs.to(self.device), past_key_values=self.cache, use_cache=True)
            self._step(upcast(self.head(hidden.last_hidden_state[:, -1])))
            if self._settled():
                break
            inputs = torch.tensor([[beam.tokens[-1]] for beam in self.live])
        return self.ended

    def _step(self, logits: Tensor) -> None:
        """Extend the live beams by a token, given the logits (beams, V) that follow them."""
        if bool(logits.isnan().any()):
            raise UserError("the model's logits are not numbers (NaN): its weights are broken or training diverged")
        logprobs = logits.log_softmax(-1)
        parents, live = [], []
        for place, (parent, token) in enumerate(self._candidates(logits, logprobs)):
            before = self.live[parent]
            beam = _Beam((*before.tokens, token), (*before.logprobs, logprobs[parent, token].item()))
            if finish := self._finish(beam):
                if place < self.how.beams:
                    self.ended.append(beam._replace(finish_reason=finish))
            else:
                parents.append(parent)
                live.append(beam)
            if len(live) == self.how.beams:
                break
        self.live = live
        self.ended.sort(key=lambda beam: -beam.rank(self.how.length_penalty))
        del self.ended[self.how.beams :]
        if parents:
            self.cache.reorder_cache(torch.tensor(parents, device=self.device))  # type: ignore[arg-type]

    def _candidates(self, logits: Tensor, logprobs: Tensor) -> list[tuple[int, int]]:
        """Beams and their next tokens in the order in which they are taken."""
        how = self.how
        sums = torch.tensor([math.fsum(beam.logprobs) for beam in self.live], dtype=torch.float64, device=self.device)
        order = sums[:, None] + logprobs.double()
        if how.sample:
            kept = warp(logits, how.temperature, how.top_k, how.top_p) > -torch.inf
            uniform = torch.rand(order.shape, generator=self.noise, dtype=torch.float64).to(self.device)
            order = (order / how.temperature - (-uniform.log()).log()).masked_fill(~kept, -torch.inf)
        order[:, self.never] = -torch.inf
        if len(self.live[0].tokens) < how.min_new_tokens:
            order[:, self.eos] = -torch.inf
        # So many that, whichever end, enough are left to go on; stop strings may end more.
        wanted = (len(self.eos) + (2 if how.stop else 1)) * how.beams
        best = order.flatten().topk(min(wanted, order.numel()))
        indices = best.indices[best.values > -torch.inf].tolist()
        return [divmod(index, order.shape[1]) for index in indices]

    def _finish(self, beam: _Beam) -> str:
        count = len(beam.tokens)
        if beam.tokens[-1] in self.eos:
            return "stop"
        if self.how.stop and count >= self.how.min_new_tokens:
            (stopped,) = completes_stop(self.tokenizer, [list(beam.tokens)], self.how.stop)
            if stopped:
                return "stop"
        return self.cut if count >= self.limit else ""

    def _settled(self) -> bool:
        """Whether no live beam would rank above the worst of the kept ones if it ended now."""
        if len(self.ended) < self.how.beams or not self.live:
            return not self.live
        penalty = self.how.length_penalty
        return max(beam.rank(penalty) for beam in self.live) <= self.ended[-1].rank(penalty)
