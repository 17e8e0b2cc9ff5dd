"""The store of prefixes: what it holds, and that a tree of requests computes each of its tokens once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from builders import SIZES, llama
from burnish.generate.kv_cache import SlotCache
from burnish.generate.local import LocalGenerator
from burnish.generate.prefixes import PrefixStore
from burnish.generate.protocol import Completion, Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.models.heads import SharedCritic

TOKEN_BYTES = 2 * 2 * 8
"""The cache of ``written`` has two layers, each with a key and a value of one float64 a token."""


def place(text: tuple[int, ...], layer: int) -> float:
    """A number that only the last token of this text has in this layer."""
    return float(sum((token + 1) * 9**i for i, token in enumerate(text))) + layer / 4


def written(texts: list[tuple[int, ...]]) -> SlotCache:
    """A cache in which slot i holds text i: its keys are their ``place``, and its values are the negatives."""
    cache = SlotCache(2, torch.device("cpu"))
    cache.reserve(slots=max(1, len(texts)))
    for index, layer in enumerate(cache.stores):
        layer.lazy_initialization(*[torch.zeros(1, 1, 1, 1, dtype=torch.float64)] * 2)
        for slot, text in enumerate(texts):
            for column in range(len(text)):
                layer.keys[slot, 0, column, 0] = place(text[: column + 1], index)
                layer.values[slot, 0, column, 0] = -place(text[: column + 1], index)
    return cache


def put(prefixes: PrefixStore, texts: list[tuple[int, ...]]) -> None:
    prefixes.store(texts, range(len(texts)), written(texts))


def check_loads(prefixes: PrefixStore, texts: list[tuple[int, ...]]) -> None:
    """Each text's longest stored prefix is loaded with the keys and values that were written for it."""
    matches = [prefixes.match(text) for text in texts]
    cache = written([()] * (len(texts) + 1))
    if not any(matches):
        return
    prefixes.load(matches, cache, start=1)
    for slot, (text, nodes) in enumerate(zip(texts, matches, strict=True), start=1):
        for index, layer in enumerate(cache.stores):
            expected = [place(text[: column + 1], index) for column in range(len(nodes))]
            assert layer.keys[slot, 0, : len(nodes), 0].tolist() == expected
            assert layer.values[slot, 0, : len(nodes), 0].tolist() == [-x for x in expected]
            assert not layer.keys[0].any()


def test_texts_share_the_nodes_of_their_common_beginning() -> None:
    prefixes = PrefixStore(2**20)
    put(prefixes, [(5, 6, 7), (5, 6, 8, 9), (5, 6)])
    assert len(prefixes) == 5  # 5, 6, 7 are nodes 0, 1, 2; 8 and 9 after 5, 6 are nodes 3, 4; the last text is not new
    assert prefixes.match((5, 6, 8, 9, 1)) == [0, 1, 3, 4]
    assert prefixes.match((5, 6, 9)) == [0, 1]
    assert prefixes.match((6, 5)) == prefixes.match(()) == []
    put(prefixes, [(6,), (5, 6, 7, 7)])
    assert prefixes.match((5, 6, 7, 7)) == [0, 1, 2, 6] and prefixes.match((6, 5)) == [5]
    check_loads(prefixes, [(5, 6, 8, 9, 1), (6, 5), (5, 6, 7, 7), (1, 2)])


def test_a_full_store_keeps_what_the_next_plan_begins_with() -> None:
    prefixes = PrefixStore(4 * TOKEN_BYTES + TOKEN_BYTES // 2)
    put(prefixes, [(1, 2, 3), (4,)])
    assert len(prefixes) == 4 and not prefixes.full
    put(prefixes, [(1, 2, 6, 7), (4, 5)])
    assert len(prefixes) == 4 and prefixes.full  # there is no room for the 6 in (1, 2, 6, 7)
    assert prefixes.match((1, 2, 6)) == [0, 1]
    prefixes.make_room([(1, 2, 6, 8), (4, 4)])
    assert [prefixes.match(text) for text in ((1, 2, 3), (4, 5))] == [[0, 1], [2]]
    check_loads(prefixes, [(1, 2, 3), (4, 5)])
    put(prefixes, [(1, 2, 6)])
    assert prefixes.match((1, 2, 6)) == [0, 1, 3] and not prefixes.full
    prefixes.make_room([])
    assert len(prefixes) == 4  # it is not full
    check_loads(prefixes, [(1, 2, 6), (4, 5)])


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=5)


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS, st.integers(0, 20))
def test_what_is_loaded_is_what_was_stored(
    plans: list[list[tuple[int, ...]]], asked: list[tuple[int, ...]], limit: int
) -> None:
    everything, limited = PrefixStore(2**20), PrefixStore(limit * TOKEN_BYTES)
    for texts in plans:
        for prefixes in (everything, limited):
            prefixes.make_room(texts)
            put(prefixes, texts)
            check_loads(prefixes, asked)
        assert len(limited) <= limit
    beginnings = {text[:end] for texts in plans for text in texts for end in range(1, len(text) + 1)}
    assert len(everything) == len(beginnings)
    for text in asked:
        longest = max((end for end in range(1, len(text) + 1) if text[:end] in beginnings), default=0)
        assert len(everything.match(text)) == longest >= len(limited.match(text))


# --- the generator ------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer that writes token i as the letter i."""

    pad_token_id = None

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return ["".join(chr(97 + token % 26) for token in row) for row in rows]


def sliding() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = SIZES | {"vocab_size": 105, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return MistralForCausalLM(MistralConfig(**shape, sliding_window=6, initializer_range=0.2)).double().eval()


def same(ours: Completion, theirs: Completion, with_values: bool) -> bool:
    def near(x: Any, y: Any) -> bool:
        return x == pytest.approx(y, abs=1e-9)

    if with_values:
        assert (
            ours.values is not None and near(ours.values, theirs.values) and near(ours.final_value, theirs.final_value)
        )
    return (
        ours.tokens.tolist() == theirs.tokens.tolist()
        and near(ours.logprobs, theirs.logprobs)
        and ours.finish_reason == theirs.finish_reason
    )


@pytest.mark.parametrize("kind", ["values", "no values", "sliding window", "stop strings"])
def test_a_tree_computes_each_token_once_and_once_more_for_each_value(kind: str) -> None:
    model = sliding() if kind == "sliding window" else llama(dtype=torch.float64)
    torch.manual_seed(3)
    critic = SharedCritic(32, torch.float64)
    torch.nn.init.normal_(critic.score.weight)
    values, stop = kind != "no values", ["c", "xy"] if kind == "stop strings" else []
    computed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].numel()))
    sampling, ends = Sampling(max_new_tokens=6, stop=stop), frozenset(range(20, 32))
    generator = LocalGenerator(model, Letters(), critic, slots=5)
    choose = random.Random(0)
    roots = [tuple(choose.randrange(5, 105) for _ in range(17)) for _ in range(2)]
    leaves, depths, seeds, sampled = list(roots), dict.fromkeys(roots, 0), iter(range(1000)), 0
    everything: list[tuple[Request, Completion]] = []
    for wave in range(8):
        chosen = leaves if wave == 0 else choose.sample(leaves, 4)  # also leaves of much earlier waves
        leaves = [leaf for leaf in leaves if leaf not in chosen]
        requests = [
            Request(leaf, request_seed(0, next(seeds), 0, 0), sampling, ends, values, keep_cache=True)
            for leaf in chosen
            for _ in range(3)
        ]
        for request, completion in zip(requests, complete(generator, requests), strict=True):
            everything.append((request, completion))
            sampled += len(completion.tokens) + values
            if wave:
                assert completion.cached_tokens == len(request.tokens) - 1
            child = (*request.tokens, *completion.tokens.tolist())
            depths[child] = depths[request.tokens] + 1
            leaves.append(child)
    hook.remove()
    assert sum(computed) == sum(len(root) - 1 for root in roots) + sampled
    assert len(depths) > 10 * generator.slots and max(depths.values()) >= 4
    fresh = complete(LocalGenerator(model, Letters(), critic), [replace(r, keep_cache=False) for r, _ in everything])
    for (_, ours), theirs in zip(everything, fresh, strict=True):
        assert same(ours, theirs, values)
    assert {len(completion.tokens) for _, completion in everything} >= {1, 6}


def test_texts_of_a_plan_with_more_requests_than_slots_are_all_stored() -> None:
    """Turns of nine conversations, with answers in between, on two slots."""
    model = llama(dtype=torch.float64)
    sampling, choose = Sampling(max_new_tokens=5), random.Random(1)

    def written(count: int) -> tuple[int, ...]:
        return tuple(choose.randrange(5, 105) for _ in range(count))

    generator, texts, known = LocalGenerator(model, slots=2), [written(5 + i) for i in range(9)], list[int]()
    for turn in range(3):
        requests = [Request(text, 9 * turn + i, sampling, keep_cache=i != 4) for i, text in enumerate(texts)]
        done = complete(generator, requests)
        fresh = complete(LocalGenerator(model, slots=2), [replace(request, keep_cache=False) for request in requests])
        assert all(same(ours, theirs, False) for ours, theirs in zip(done, fresh, strict=True))
        if turn:  # all but the last token sampled, which was not computed; and nothing of the text that is not kept
            assert [c.cached_tokens for c in done] == [0 if i == 4 else known[i] for i in range(9)]
        texts = [(*text, *c.tokens.tolist()) for text, c in zip(texts, done, strict=True)]
        known = [len(text) - 1 for text in texts]
        texts = [(*text, *written(1 + i % 3)) for i, text in enumerate(texts)]


def test_little_memory_costs_only_time_and_equal_plans_give_equal_bytes() -> None:
    model = llama(dtype=torch.float64)
    sampling, token_bytes = (
        Sampling(max_new_tokens=5),
        2 * 2 * 2 * 8 * 8,
    )  # 2 layers, keys and values, 2 heads of size 8

    def conversations(tokens: int) -> tuple[list[Any], list[int]]:
        generator = LocalGenerator(model, slots=3, prefix_bytes=tokens * token_bytes)
        texts, done, stored = [(7, 8, 9 + i, 10 + i) for i in range(6)], list[Any](), list[int]()
        for turn in range(4):
            wave = [Request(text, 9 * turn + i, sampling, keep_cache=True) for i, text in enumerate(texts)]
            completions = complete(generator, wave)
            done += [(c.tokens.tolist(), c.logprobs.tolist(), c.cached_tokens) for c in completions]
            texts = [(*text, *c.tokens.tolist(), 50 + turn) for text, c in zip(texts, completions, strict=True)]
            assert generator._session is not None
            stored.append(len(generator._session.prefixes))
        return done, stored

    everything, whole = conversations(1000)
    some, limited = conversations(40)
    assert max(limited) == 40 < whole[1] < whole[2]
    assert [tokens for tokens, _, _ in some] == [tokens for tokens, _, _ in everything]
    for (_, ours, cached), (_, theirs, most) in zip(some, everything, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9) and cached <= most
    assert 0 < sum(cached for _, _, cached in some[6:]) < sum(cached for _, _, cached in everything[6:])
    assert conversations(40) == (some, limited)
    nothing, none = conversations(0)
    assert none == [0] * 4 and all(cached == 0 for _, _, cached in nothing)
