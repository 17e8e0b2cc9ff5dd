"""Decoding with slots: a fixed number of rows share one key/value cache in which every row has its own length.

There is no left padding. A prompt is computed once for all its samples. A finished row is evicted, and a waiting
request is admitted to its slot. The keys and values of an evicted row are stored if its request says so, and a request
of a later plan that begins with a stored text computes only the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from burnish import kernels
from burnish.generate.draw import draw
from burnish.generate.kv_cache import SlotCache, layer_windows
from burnish.generate.prefixes import PrefixStore, default_bytes
from burnish.generate.protocol import Completion, Request
from burnish.generate.stopping import completes_stop
from burnish.kernels import decoding
from burnish.models.forward import SamplingTransform, backbone, head, unwrap
from burnish.models.heads import head_values

PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens, including padding, in one forward pass. More would only need more memory."""

FULL_PREFILL = 1024
"""From this many prompt tokens in a forward pass on, padding costs more than another pass."""

RUNNING, LIMIT, STOP = range(3)


class Group(NamedTuple):
    """Requests with the same prompt, by their indices, and the nodes of the longest stored prefix of the prompt.

    The prefix does not include the prompt's last token, which is the first input of every request.
    """

    members: list[int]
    prompt: tuple[int, ...]
    prefix: list[int]

    @property
    def rest(self) -> int:
        """The number of tokens to compute before the requests can start."""
        return len(self.prompt) - 1 - len(self.prefix)


class DecodingSession:
    """The slots of one model. The first ``live`` slots are being decoded.

    A plan is a list of requests that are completed together: ``begin(requests)``, then ``step()`` while ``busy``. There
    are as many slots as the largest plan so far needs, but at most ``max_slots``. A slot is one entry of every tensor
    in ``state``. ``prefix_bytes`` limits the memory of stored keys and values.
    """

    def __init__(
        self, model: Any, tokenizer: Any, critic: Any, max_slots: int, version: int, prefix_bytes: int | None
    ) -> None:
        base = unwrap(model)
        self.config = base.config.get_text_config(decoder=True)
        self.body, self.head, self.critic, self.tokenizer = backbone(model), head(model), critic, tokenizer
        self.device, self.dtype = base.device, base.dtype
        self.context: int | None = getattr(self.config, "max_position_embeddings", None)
        layers, self.windows = layer_windows(model)
        self.by_rows = decoding.is_faster(base)
        self.cache = SlotCache(layers, self.device)
        self.prefixes = PrefixStore(default_bytes(self.device) if prefix_bytes is None else prefix_bytes)
        self.max_slots, self.version, self.live, self.length = max_slots, version, 0, 0
        self.requests: list[Request] = []
        self.waiting: deque[Group] = deque()

    # --- plans ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """The number of rows that the cache has room for."""
        return self.cache.cursor.slots

    @property
    def busy(self) -> bool:
        """Whether some requests of the plan are not complete yet."""
        return bool(self.waiting or self.live)

    def begin(self, requests: list[Request]) -> None:
        """Start a plan. The previous one must be complete."""
        assert not self.busy
        self.requests = requests
        self.places = min(self.max_slots, len(requests))
        self.cache.reserve(slots=self.places)
        prompts: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            prompts.setdefault(request.tokens, []).append(index)
        self.prefixes.make_room(prompts)
        groups = [
            Group(members[start : start + self.places], prompt, prefix)
            for prompt, members in prompts.items()
            for prefix in [self.prefixes.match(prompt[:-1])]
            for start in range(0, len(members), self.places)
        ]
        self.waiting = deque(sorted(groups, key=lambda group: (bool(group.prefix), -group.rest, -len(group.prompt))))
        self._prepare_state()

    def _prepare_state(self) -> None:
        """Create tables of the settings that differ between requests, and the state of all slots."""
        samplings = [request.sampling for request in self.requests]
        self.longest = max(self._room(request) for request in self.requests)
        self.transforms = _distinct(_transform(request) for request in self.requests)
        self.stop_sets = _distinct(request.stop_ids for request in self.requests)
        self.values = any(request.return_values for request in self.requests)
        self.keeps = any(request.keep_cache for request in self.requests)
        self.stop_strings = any(s.stop for s in samplings)
        self.min_new_tokens = any(s.min_new_tokens for s in samplings)
        vocabulary = torch.arange(self.config.vocab_size, device=self.device)
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        ends = [torch.tensor(sorted(ids), dtype=torch.long, device=self.device) for ids in self.stop_sets]
        self.ends = torch.stack([torch.isin(vocabulary, ids) for ids in ends])
        padding = self._index(-1 if pad is None or pad in ids else pad for ids in self.stop_sets)[:, None]
        self.never = vocabulary == padding if bool((padding >= 0).any()) else None

        def column(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(self.slots, *shape, dtype=dtype, device=self.device)

        exact = torch.promote_types(self.dtype, torch.float32)
        width = self._width()
        self.state = {
            "request": column(),
            "position": column(),  # position of the next input, which is the number of tokens in the cache
            "input": column(),
            "count": column(),
            "limit": column(),
            "shortest": column(),
            "transform": column(),
            "stop_set": column(),
            "ended": column(),
            "return_values": column(dtype=torch.bool),
            "uniforms": column(width, dtype=torch.float64),
            "tokens": column(width),
            "logprobs": column(width, dtype=exact),
            "values": column(width if self.values else 0, dtype=exact),
        }
        self.limits = [0] * len(self.requests)
        self.cached = [len(request.tokens) - 1 for request in self.requests]  # all but the first sample of a prompt

    def _width(self) -> int:
        """The number of sampled tokens that the state has room for: as many as the cache, so that both grow together.

        There is one more entry than there can be tokens, because the value after the last token is computed too.
        """
        return min(self.longest, self.cache.cursor.capacity) + 1

    def _grow_state(self) -> None:
        """Make room in the state for the tokens that the cache has room for."""
        width = self._width()
        more = width - self.state["tokens"].shape[1]
        if more <= 0:
            return
        for name in ("uniforms", "tokens", "logprobs", *(["values"] if self.values else [])):
            self.state[name] = torch.nn.functional.pad(self.state[name], (0, more))
        for row, index in enumerate(self.state["request"][: self.live].tolist()):
            self.state["uniforms"][row] = _draws(self.requests[index], width)[1].to(self.device)

    def step(self) -> list[tuple[int, Completion]]:
        """Append a token to every row. Returns finished completions, with the indices of their requests."""
        for groups in self._next():
            self._admit(groups)
        return self._evict(self._sample(self._decode()))

    def tokens_of(self, index: int) -> list[int]:
        """The tokens sampled so far for a request that is being decoded."""
        row = self.state["request"][: self.live].tolist().index(index)
        return self.state["tokens"][row, : int(self.state["count"][row])].tolist()

    def cancel(self) -> None:
        """Cancel the plan. The keys and values of its rows are stored if their requests say so."""
        self.waiting.clear()
        self._store(list(range(self.live)))
        self.live = self.length = 0

    # --- admission ------------------------------------------------------------------------------------------------

    def _next(self) -> list[list[Group]]:
        """The groups to admit now, in batches that have a similar number of tokens to compute."""
        free = self.places - self.live
        if self.live and free < self.places // 8:  # a pass over one prompt takes as long as one over several
            return []
        batches, width = list[list[Group]](), 0
        while self.waiting and len(self.waiting[0].members) <= free:
            group = self.waiting.popleft()
            free -= len(group.members)
            read = len(batches[-1]) * width if batches else 0
            full = read + width > PREFILL_TOKENS or (read >= FULL_PREFILL and group.rest < width * 3 // 4)
            if not batches or full or bool(group.prefix) != bool(batches[-1][0].prefix):
                batches.append([])
                width = group.rest
            batches[-1].append(group)
        return batches

    def _admit(self, groups: list[Group]) -> None:
        """Compute each group's prompt once, without its last token, and start all its requests."""
        for group in groups:
            self.cached[group.members[0]] = len(group.prefix)
        owner = self._index(row for row, group in enumerate(groups) for _ in group.members)
        if groups[0].prefix:
            self._continue(groups, owner)
        else:
            self._prefill(groups, owner)
        self._start([index for group in groups for index in group.members])

    def _prefill(self, groups: list[Group], owner: Tensor) -> None:
        """Compute prompts, and copy that of group ``owner[i]`` to slot ``live + i``."""
        width = groups[0].rest
        if width == 0:
            return
        inputs = self._padded([group.prompt[:-1] for group in groups])
        positions = torch.arange(width, device=self.device)[None]
        prefix = DynamicCache()
        # Padding is on the right, where causal attention does not see it, so it needs no mask.
        self.body(
            input_ids=inputs,
            attention_mask=self._mask(positions, width) if any(self.windows.values()) else None,
            position_ids=positions.expand(len(groups), -1),
            past_key_values=prefix,
            use_cache=True,
        )
        self.cache.copy(prefix, owner, self.live)

    def _continue(self, groups: list[Group], owner: Tensor) -> None:
        """Load stored prefixes, compute the rest, and copy the prompt of group ``owner[i]`` to slot ``live + i``."""
        self.prefixes.load([group.prefix for group in groups], self.cache, self.live)
        if groups[0].rest:
            self._extend([group for group in groups if group.rest])
        if len(owner) > len(groups):
            targets = torch.arange(self.live, self.live + len(owner), device=self.device)
            self.cache.place(self.live + owner, targets, max(len(group.prompt) for group in groups) - 1)

    def _extend(self, groups: list[Group]) -> None:
        """Compute the rest of prompts whose prefixes are in the next slots."""
        inputs = self._padded([group.prompt[len(group.prefix) : -1] for group in groups])
        positions = self._index(len(group.prefix) for group in groups)[:, None]
        positions = positions + torch.arange(inputs.shape[1], device=self.device)
        # Keys of padding are written after the prompt, where they are overwritten before any query sees them.
        if self.context is not None:
            positions = positions.clamp(max=self.context - 1)
        length = int(positions.max()) + 1
        self.cache.at(positions, length, start=self.live)
        self.body(
            input_ids=inputs,
            attention_mask=self._mask(positions, length),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )

    def _padded(self, rows: list[tuple[int, ...]]) -> Tensor:
        """Rows of tokens, padded on the right with zeros. (B, T)."""
        width = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)

    def _start(self, members: list[int]) -> None:
        """Start requests in the next slots, whose cache holds their prompts without the last token."""
        here = slice(self.live, self.live + len(members))
        requests = [self.requests[index] for index in members]
        width = self.state["uniforms"].shape[1]
        draws = [_draws(request, width) for request in requests]
        for index, (limit, _) in zip(members, draws, strict=True):
            self.limits[index] = limit
        lengths = torch.tensor([len(request.tokens) for request in requests])
        limits = torch.tensor([limit for limit, _ in draws])
        if self.context is not None:
            limits = torch.minimum(limits, self.context - lengths)
        columns = {
            "request": members,
            "position": lengths - 1,
            "input": [request.tokens[-1] for request in requests],
            "count": 0,
            "limit": limits,
            "shortest": [request.sampling.min_new_tokens for request in requests],
            "transform": [self.transforms.index(_transform(request)) for request in requests],
            "stop_set": [self.stop_sets.index(request.stop_ids) for request in requests],
            "ended": RUNNING,
            "return_values": [request.return_values for request in requests],
        }
        for name, column in columns.items():
            self.state[name][here] = torch.as_tensor(column, device=self.device)
        self.state["uniforms"][here] = torch.stack([uniforms for _, uniforms in draws]).to(self.device)
        self.live += len(members)
        self.length = max(self.length, int(lengths.max()) - 1)

    def _room(self, request: Request) -> int:
        """The maximum number of tokens that a request may get, at most what fits into the context window."""
        longest = request.sampling.longest
        return longest if self.context is None else min(longest, self.context - len(request.tokens))

    # --- decoding -------------------------------------------------------------------------------------------------

    def _index(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.long, device=self.device)

    def _mask(self, positions: Tensor, length: int) -> Any:
        """Additive masks (B, 1, T, length) for queries at ``positions`` (B, T), one for each type of layer."""
        column = torch.arange(length, device=self.device)
        masks = {}
        for kind, window in self.windows.items():
            seen = column <= positions[..., None]
            if window is not None:
                seen &= column > positions[..., None] - window
            hidden = torch.full_like(seen, torch.finfo(self.dtype).min, dtype=self.dtype)
            masks[kind] = hidden.masked_fill_(seen, 0.0)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _decode(self) -> Tensor:
        """The hidden states (B, H) from which the next token of every live row is drawn."""
        self.length += 1
        positions = self.state["position"][: self.live, None]
        self.cache.at(positions, self.length)
        self._grow_state()
        with kernels.decoding_attention(self.config, self.by_rows):
            return self.body(
                input_ids=self.state["input"][: self.live, None],
                attention_mask=self._mask(positions, self.length),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **({"columns": (positions[:, 0] + 1).tolist()} if self.by_rows else {}),
            ).last_hidden_state[:, -1]

    def _sample(self, hidden: Tensor) -> list[int]:
        """Append a token to every live row. Returns for each row whether it is RUNNING, at its LIMIT, or at a STOP."""
        live = {name: tensor[: self.live] for name, tensor in self.state.items()}
        at = live["count"][:, None].clone()
        tokens, logprobs = self._draw(self.head(hidden), live, at)
        live["tokens"].scatter_(1, at, tokens[:, None])
        live["logprobs"].scatter_(1, at, logprobs[:, None])
        live["input"].copy_(tokens)
        live["position"] += 1
        if not self.values:
            live["count"] += 1
            return self._ended(live, tokens).tolist()
        # A row with return_values stays for one more pass, which computes the value after its last token.
        live["values"].scatter_(1, at, head_values(self.critic, hidden)[:, None].to(live["values"].dtype))
        complete = live["ended"] != RUNNING
        live["count"] += ~complete
        live["ended"].copy_(torch.where(complete, live["ended"], self._ended(live, tokens)))
        return torch.where(complete | ~live["return_values"], live["ended"], RUNNING).tolist()

    def _draw(self, logits: Tensor, live: dict[str, Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token (B,) of every live row, at index ``at`` (B, 1), with its log-probability (B,)."""
        banned = self.never
        if banned is not None and len(self.stop_sets) > 1:
            banned = banned[live["stop_set"]]
        if self.min_new_tokens:
            early = self.ends[live["stop_set"]] & (at < live["shortest"][:, None])
            banned = early if banned is None else banned | early
        uniforms = live["uniforms"].gather(1, at)[:, 0]
        if len(self.transforms) == 1:
            return draw(logits, uniforms, self.transforms[0], banned)
        tokens = torch.zeros_like(live["count"])
        logprobs = torch.zeros_like(live["logprobs"][:, 0])
        for kind in live["transform"].unique().tolist():
            rows = (live["transform"] == kind).nonzero()[:, 0]
            allowed = banned if banned is None or len(banned) == 1 else banned[rows]
            drawn = draw(logits[rows], uniforms[rows], self.transforms[kind], allowed)
            tokens[rows], logprobs[rows] = drawn[0], drawn[1].to(logprobs.dtype)
        return tokens, logprobs

    def _ended(self, live: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """RUNNING, LIMIT or STOP for each live row, given its last token, ``tokens`` (B,)."""
        stopped = self.ends[live["stop_set"], tokens]
        if self.stop_strings:
            stopped |= self._completes_stop(live)
        return torch.where(stopped, STOP, live["count"] >= live["limit"])

    def _completes_stop(self, live: dict[str, Tensor]) -> Tensor:
        """Whether the text of each live row contains one of its stop strings at its end. (B,)."""
        rows = [row[:count] for row, count in zip(live["tokens"].tolist(), live["count"].tolist(), strict=True)]
        stops = [tuple(self.requests[index].sampling.stop) for index in live["request"].tolist()]
        stopped = torch.zeros(len(rows), dtype=torch.bool)
        for stop in set(stops) - {()}:
            members = [row for row, mine in enumerate(stops) if mine == stop]
            stopped[members] = torch.tensor(completes_stop(self.tokenizer, [rows[row] for row in members], stop))
        return stopped.to(self.device) & (live["count"] >= live["shortest"])

    def _evict(self, ended: list[int]) -> list[tuple[int, Completion]]:
        """Return the completions of finished rows, and move the last live rows to their slots."""
        gone = [row for row, flag in enumerate(ended) if flag != RUNNING]
        if not gone:
            return []
        completions = self._completions(gone, ended)
        self._store(gone)
        self.live -= len(gone)
        holes = [row for row in gone if row < self.live]
        movers = [row for row, flag in enumerate(ended) if row >= self.live and flag == RUNNING]
        if holes:
            source, target = self._index(movers + holes), self._index(holes + movers)
            self.cache.place(source, target, self.length)
            for tensor in self.state.values():
                tensor[target] = tensor[source]
        self.length = int(self.state["position"][: self.live].max()) if self.live else 0
        return completions

    def _store(self, rows: list[int]) -> None:
        """Store the keys and values of rows whose requests say so."""
        if not (self.keeps and rows):
            return
        columns = [self.state[name][rows].tolist() for name in ("request", "position", "tokens")]
        kept = [
            ([*self.requests[index].tokens, *tokens][:position], row)
            for row, index, position, tokens in zip(rows, *columns, strict=True)
            if self.requests[index].keep_cache
        ]
        self.prefixes.store([text for text, _ in kept], [row for _, row in kept], self.cache)

    def _completions(self, rows: list[int], ended: list[int]) -> list[tuple[int, Completion]]:
        """The completions of rows, with the indices of their requests."""
        names = ("request", "count", "tokens", "logprobs", "values")
        columns = [self.state[name][rows].cpu().numpy() for name in names]
        completions = []
        for row, index, count, tokens, logprobs, values in zip(rows, *columns, strict=True):
            return_values = self.requests[index].return_values
            completion = Completion(
                tokens=tokens[:count],
                logprobs=logprobs[:count].astype(np.float64),
                values=values[:count].astype(np.float64) if return_values else None,
                final_value=float(values[count]) if return_values else None,
                finish_reason="stop" if ended[row] == STOP else "length" if count >= self.limits[index] else "context",
                version=self.version,
                cached_tokens=self.cached[index],
            )
            completions.append((int(index), completion))
        return completions


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The values without duplicates, in order of their first occurrence."""
    return list(dict.fromkeys(values))


def _draws(request: Request, count: int) -> tuple[int, Tensor]:
    """The maximum number of tokens of a request, and the first ``count`` of its uniform numbers, all by its seed."""
    generator = torch.Generator().manual_seed(request.seed)
    limit = request.sampling.max_new_tokens
    if request.sampling.length_range is not None:
        low, high = request.sampling.length_range
        limit = int(torch.randint(low, high, (), generator=generator))
    return limit, torch.rand(count, generator=generator, dtype=torch.float64)


def _transform(request: Request) -> SamplingTransform:
    """The temperature, top-k and top-p of a request."""
    return SamplingTransform(request.sampling.temperature, request.sampling.top_k, request.sampling.top_p)
