"""Prompts as token ids in; completions as token ids, with the log-probability of every sampled token, out.

A fixed number of slots share one key/value cache in which every row has its own length, so that no prompt is padded
on the left. A prompt is read once for all its samples; a finished row leaves, and a waiting request takes its place.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache

from burnish import kernels
from burnish.errors import UserError
from burnish.generate.kv_cache import SlotCache, layer_windows
from burnish.generate.sampling import Sampling
from burnish.kernels import decoding
from burnish.math.tensors import upcast, warp
from burnish.models.forward import backbone, evaluating, head, unwrap
from burnish.types import Completion

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, that are read in one forward pass; more would only cost memory."""

FULL_PREFILL = 1024
"""Prompt tokens of one forward pass from which on padding costs more than another pass."""

DRAW_BLOCK = 128
"""Tokens of the vocabulary that are summed before one of their sums is drawn; 128 divides most vocabularies."""


class Request(NamedTuple):
    """A prompt's token ids and the seed of what is drawn for it: ``Request((1, 9, 8), request_seed(0, 17, 0, 3))``."""

    tokens: tuple[int, ...]
    seed: int


def request_seed(run_seed: int, prompt: int, sample: int, iteration: int) -> int:
    """A seed in [0, 2**63) of its own for each (run seed, prompt, sample, iteration), the same on every machine."""
    key = f"{run_seed}/{prompt}/{sample}/{iteration}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@dataclass
class LocalGenerator:
    """Generates in this process with a transformers causal language model, plain or with an adapter, CPU or GPU.

    ``LocalGenerator()(model, [Request((1, 9, 8), 5)], Sampling(), eos_ids=(2,), pad_id=0)`` is
    ``[Completion((42, 2), (-0.1, -0.3), "stop")]``. A request's completion does not depend on the others.
    """

    batch_size: int = 64
    """Rows that are decoded together, at most."""

    def __call__(
        self,
        model: Any,
        requests: list[Request],
        sampling: Sampling,
        *,
        eos_ids: Collection[int],
        pad_id: int | None,
        tokenizer: Any = None,
    ) -> list[Completion]:
        """Complete every request once, in the order given.

        ``sampling.samples`` is the caller's: n samples are n requests with equal tokens, which share their prefix.
        A completion keeps its stop token. Log-probabilities are those of the warped distribution before ``pad_id``
        and early end-of-sequence tokens are taken out of it, which is what a forward pass over the result gives.

        Raises:
            UserError: stop strings without a tokenizer; an empty prompt or one that fills the context window; a
                model whose attention cannot be cached row by row.
        """
        if sampling.stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer: pass tokenizer=, or leave stop empty")
        if not requests:
            return []
        with evaluating(kernels.enable(model)):
            rows = _Rows(model, min(self.batch_size, len(requests)), sampling, eos_ids, pad_id, tokenizer)
            return rows.complete(requests)


# --- the distribution ---------------------------------------------------------------------------------------------


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling, banned: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens (B,) by inverting the cumulative distribution at ``uniforms``, and their log-probabilities (B,).

    p = softmax(warp(logits)); token = the first v at which sum_{w <= v} p_w > u sum_w p_w, over the w not banned. The
    log-probability is log p[token] with the banned tokens still in p. Where p allows banned tokens only, the likeliest
    other one is taken, with its log-probability before top-k and top-p. Greedy log-probabilities are 0.

    Args:
        logits: (B, V).
        uniforms: (B,) float64 in [0, 1).
        sampling: temperature, top_k and top_p.
        banned: (B, V) or (1, V) bool, True for what is not to be sampled; None where nothing is.

    Raises:
        UserError: if a row has logits that are not numbers.
    """
    if sampling.temperature == 0:
        values, tokens = (logits if banned is None else logits.masked_fill(banned, -torch.inf)).max(-1)
        _check_numbers(values)
        return tokens, torch.zeros_like(upcast(values))
    warped = warp(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    largest = warped.amax(-1, keepdim=True)
    weights = (warped - largest).exp_()
    # In two levels, since a running sum over V numbers is slow on every device.
    blocks = F.pad(weights, (0, -weights.shape[-1] % DRAW_BLOCK)) if weights.shape[-1] % DRAW_BLOCK else weights
    blocks = blocks.unflatten(-1, (-1, DRAW_BLOCK))
    sums = blocks.sum(-1)
    normalizer = largest[:, 0] + sums.sum(-1).log()
    if banned is not None:
        blocks.flatten(1)[:, : weights.shape[-1]].masked_fill_(banned, 0.0)
        sums = blocks.sum(-1)
    block, rest = _invert(sums, uniforms)
    within, _ = _invert(blocks[torch.arange(len(block), device=block.device), block], rest)
    tokens = block * DRAW_BLOCK + within
    nothing = ~(sums.sum(-1) > 0)
    if bool(nothing.any()):
        _check_numbers(sums)
        plain = upcast(logits) / sampling.temperature
        allowed = plain if banned is None else plain.masked_fill(banned, -torch.inf)
        tokens = torch.where(nothing, allowed.argmax(-1), tokens)
        warped = torch.where(nothing[:, None], plain, warped)
        normalizer = torch.where(nothing, plain.logsumexp(-1), normalizer)
    return tokens, warped.gather(-1, tokens[:, None])[:, 0] - normalizer


def _check_numbers(values: Tensor) -> None:
    if bool(values.isnan().any()):
        raise UserError(
            "the model's logits are not numbers (NaN): its weights are broken or training diverged; a lower "
            "learning_rate or an earlier checkpoint would work"
        )


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index (B,) of the weight (B, V) in which each uniform number falls, and how far into it, again in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # Below 1 by more than the product's rounding, else a last index of weight 0 could be drawn.
    target = uniforms[:, None].clamp(max=1 - 2**-40) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index).double()
    return index[:, 0], ((target - cumulative.gather(-1, index) + weight) / weight)[:, 0].clamp(0.0, 1.0)


def completes_stop(tokenizer: Any, rows: list[list[int]], stop: list[str]) -> list[bool]:
    """Which rows of tokens end in a text with a stop string in it."""
    # A token is at least one byte of text, so that so many tokens hold the longest string and a cut character.
    span = max(len(text.encode()) for text in stop) + 4
    ends = [row[-span:] for row in rows]
    texts = tokenizer.batch_decode(ends, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [any(text in end for text in stop) for end in texts]


# --- the rows -----------------------------------------------------------------------------------------------------


class _Rows:
    """The slots, of which the first ``live`` are being decoded. A slot is one entry of every tensor of ``state``."""

    def __init__(
        self, model: Any, slots: int, sampling: Sampling, eos_ids: Collection[int], pad_id: int | None, tokenizer: Any
    ) -> None:
        base = unwrap(model)
        self.config = config = base.config.get_text_config(decoder=True)
        self.body, self.head, self.tokenizer, self.sampling = backbone(model), head(model), tokenizer, sampling
        self.device, self.dtype = base.device, base.dtype
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        layers, self.windows = layer_windows(model)
        self.by_rows = decoding.is_faster(base)
        self.cache = SlotCache(layers, slots, self.device)
        self.slots, self.live, self.length = slots, 0, 0
        vocabulary = torch.arange(config.vocab_size, device=self.device)
        self.ends = torch.isin(vocabulary, torch.tensor(sorted(eos_ids), dtype=torch.long, device=self.device))
        self.never = None if pad_id is None or pad_id in eos_ids else (vocabulary == pad_id)[None]

        def column(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=self.device)

        self.state = {
            "request": column(),
            "position": column(),  # of the next input: how many tokens the cache holds
            "input": column(),
            "count": column(),
            "limit": column(),
            "uniforms": column(sampling.longest, dtype=torch.float64),
            "tokens": column(sampling.longest),
            "logprobs": column(sampling.longest, dtype=torch.promote_types(self.dtype, torch.float32)),
        }

    def complete(self, requests: list[Request]) -> list[Completion]:
        """One completion for every request, in their order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            if not request.tokens:
                raise UserError(f"request {index}: the prompt is empty; expected at least one token, such as BOS")
            if self.context is not None and len(request.tokens) >= self.context:
                raise UserError(
                    f"request {index}: a prompt of {len(request.tokens)} tokens leaves no room in the model's context "
                    f"window of {self.context}: cut the prompts to fewer tokens"
                )
            groups.setdefault(tuple(request.tokens), []).append(index)
        waiting = deque(
            members[start : start + self.slots]
            for _, members in sorted(groups.items(), key=lambda group: -len(group[0]))
            for start in range(0, len(members), self.slots)
        )
        completions: dict[int, Completion] = {}
        while waiting or self.live:
            for batch in self._next(waiting, requests):
                self._admit(batch, requests)
            completions.update(self._evict(self._sample(self._decode()), requests))
        return [completions[index] for index in range(len(requests))]

    def _next(self, waiting: deque[list[int]], requests: list[Request]) -> list[list[list[int]]]:
        """The groups of equal prompts that take their places now, in batches of similar length."""
        free = self.slots - self.live
        if self.live and free < self.slots // 8:  # reading a prompt alone costs as much as reading several
            return []
        batches, width = list[list[list[int]]](), 0
        while waiting and len(waiting[0]) <= free:
            length = len(requests[waiting[0][0]].tokens)
            read = len(batches[-1]) * width if batches else 0
            if not batches or read + width > PREFILL_TOKENS or (read >= FULL_PREFILL and length < width * 3 // 4):
                batches.append([])
                width = length
            free -= len(waiting[0])
            batches[-1].append(waiting.popleft())
        return batches

    def _admit(self, groups: list[list[int]], requests: list[Request]) -> None:
        """Read each group's prompt once, but for its last token, and give all its requests a slot that begins so."""
        prompts = [requests[members[0]].tokens for members in groups]
        members = [index for group in groups for index in group]
        here = slice(self.live, self.live + len(members))
        width = max(len(prompt) for prompt in prompts) - 1
        if width > 0:
            inputs = torch.tensor([[*prompt[:-1], *[0] * (width + 1 - len(prompt))] for prompt in prompts])
            positions = torch.arange(width, device=self.device)[None]
            prefix = DynamicCache()
            # Padding is on the right, where a causal model does not look, so that no mask is needed for it.
            self.body(
                input_ids=inputs.to(self.device),
                attention_mask=self._mask(positions, width) if any(self.windows.values()) else None,
                position_ids=positions.expand(len(prompts), -1),
                past_key_values=prefix,
                use_cache=True,
            )
            owner = [row for row, group in enumerate(groups) for _ in group]
            self.cache.copy(prefix, torch.tensor(owner, device=self.device), self.live)
        draws = [self._draws(requests[index]) for index in members]
        lengths = torch.tensor([len(requests[index].tokens) for index in members])
        limits = torch.tensor([limit for limit, _ in draws])
        if self.context is not None:
            limits = torch.minimum(limits, self.context - lengths)
        self.state["request"][here] = torch.tensor(members, device=self.device)
        self.state["position"][here] = (lengths - 1).to(self.device)
        self.state["input"][here] = torch.tensor([requests[i].tokens[-1] for i in members], device=self.device)
        self.state["count"][here] = 0
        self.state["limit"][here] = limits.to(self.device)
        self.state["uniforms"][here] = torch.stack([uniforms for _, uniforms in draws]).to(self.device)
        self.live += len(members)
        self.length = max(self.length, width)

    def _draws(self, request: Request) -> tuple[int, Tensor]:
        """The most tokens this request may get, and a uniform number for each: functions of its seed alone."""
        generator = torch.Generator().manual_seed(request.seed)
        limit = self.sampling.max_new_tokens
        if self.sampling.length_range is not None:
            low, high = self.sampling.length_range
            limit = int(torch.randint(low, high, (), generator=generator))
        return limit, torch.rand(self.sampling.longest, generator=generator, dtype=torch.float64)

    def _mask(self, positions: Tensor, length: int) -> Any:
        """Masks (B, 1, T, length), additive, for queries at ``positions`` (B, T), one for each type of layer."""
        column = torch.arange(length, device=self.device)
        masks = {}
        for kind, window in self.windows.items():
            seen = column <= positions[..., None]
            if window is not None:
                seen &= column > positions[..., None] - window
            zeros = torch.zeros_like(seen, dtype=self.dtype)[:, None]
            masks[kind] = zeros.masked_fill_(~seen[:, None], torch.finfo(self.dtype).min)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _decode(self) -> Tensor:
        """Logits (B, V) of the next token of every live row."""
        self.length += 1
        positions = self.state["position"][: self.live]
        self.cache.at(positions, self.length)
        with kernels.decoding_attention(self.config, self.by_rows):
            hidden = self.body(
                input_ids=self.state["input"][: self.live, None],
                attention_mask=self._mask(positions[:, None], self.length),
                position_ids=positions[:, None],
                past_key_values=self.cache,
                use_cache=True,
                **({"columns": (positions + 1).tolist()} if self.by_rows else {}),
            ).last_hidden_state
        return self.head(hidden[:, -1])

    def _sample(self, logits: Tensor) -> Tensor:
        """Append a token to every live row; 0 for those that go on, 1 at their limit, 2 at their stop token. (B,)."""
        live = {name: tensor[: self.live] for name, tensor in self.state.items()}
        at = live["count"][:, None].clone()
        banned = self.never
        if self.sampling.min_new_tokens:
            early = self.ends & (at < self.sampling.min_new_tokens)
            banned = early if banned is None else banned | early
        tokens, logprobs = draw(logits, live["uniforms"].gather(1, at)[:, 0], self.sampling, banned)
        live["tokens"].scatter_(1, at, tokens[:, None])
        live["logprobs"].scatter_(1, at, logprobs[:, None])
        live["input"].copy_(tokens)
        live["count"] += 1
        live["position"] += 1
        stopped = self.ends[tokens]
        if self.sampling.stop:
            stopped |= self._completes_stop(live["tokens"], live["count"])
        return torch.where(stopped, 2, (live["count"] >= live["limit"]).long())

    def _completes_stop(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Which rows' last tokens, (B, longest), decode to a text with a stop string in it. (B,)."""
        rows = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        found = torch.tensor(completes_stop(self.tokenizer, rows, self.sampling.stop), device=self.device)
        return found & (counts >= self.sampling.min_new_tokens)

    def _evict(self, ended: Tensor, requests: list[Request]) -> dict[int, Completion]:
        """Completions of the rows that ended, by request; the last live rows move to their places."""
        flags = ended.tolist()
        gone = [row for row, flag in enumerate(flags) if flag]
        if not gone:
            return {}
        completions = {}
        columns = [self.state[name][gone].tolist() for name in ("request", "count", "tokens", "logprobs")]
        for row, request, count, tokens, logprobs in zip(gone, *columns, strict=True):
            cut = count < self._draws(requests[request])[0]  # by the context window
            finish = "stop" if flags[row] == 2 else "context" if cut else "length"
            completions[request] = Completion(tuple(tokens[:count]), tuple(logprobs[:count]), finish)
        self.live -= len(gone)
        holes = [row for row in gone if row < self.live]
        movers = [row for row, flag in enumerate(flags) if row >= self.live and not flag]
        if holes:
            source, target = torch.tensor([movers, holes], device=self.device)
            self.cache.move(source, target)
            for tensor in self.state.values():
                tensor[target] = tensor[source]
        self.length = int(self.state["position"][: self.live].max()) if self.live else 0
        return completions
