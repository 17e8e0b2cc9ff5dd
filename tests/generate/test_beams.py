"""Beam search against enumeration, exact probabilities and transformers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from burnish.errors import UserError
from burnish.generate.beams import Beams, search
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling
from burnish.math.tensors import token_logprobs

EOS = 2
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(vocabulary: int = 30, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = SHAPE | {"vocab_size": vocabulary} | changes
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


class Done(NamedTuple):
    """A completion as plain values, which can be compared."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def run(model: Any, prompt: tuple[int, ...], seed: int = 0, tokenizer: Any = None, **settings: Any) -> Any:
    done = search(model, prompt, Beams(**settings), seed, eos_ids=(EOS,), pad_id=0, tokenizer=tokenizer)
    return [Done(tuple(c.tokens.tolist()), tuple(c.logprobs.tolist()), c.finish_reason) for c in done]


@torch.no_grad()
def logprob(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> float:
    ids = torch.tensor([[*prompt, *completion]])
    return token_logprobs(model(ids).logits, ids)[0, len(prompt) :].sum().item()


def every_completion(vocabulary: int, limit: int) -> list[tuple[int, ...]]:
    """All completions that end with EOS or at the limit, without the pad token 0."""
    completions = []
    for n in range(1, limit + 1):
        for tokens in itertools.product(range(1, vocabulary), repeat=n):
            if EOS not in tokens[:-1] and (tokens[-1] == EOS or n == limit):
                completions.append(tokens)
    return completions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_beams_find_what_enumeration_finds(seed: int, penalty: float) -> None:
    model, prompt = llama(5, seed), (1, 3, 4)
    ranked = sorted(
        (-logprob(model, prompt, tokens) / len(tokens) ** penalty, tokens) for tokens in every_completion(5, 4)
    )
    completions = run(model, prompt, beams=4**4, returned=5, length_penalty=penalty, max_new_tokens=4)
    assert [c.tokens for c in completions] == [tokens for _, tokens in ranked[:5]]
    assert [c.finish_reason for c in completions] == ["stop" if c.tokens[-1] == EOS else "length" for c in completions]
    for completion, (score, _) in zip(completions, ranked, strict=False):
        assert math.fsum(completion.logprobs) == pytest.approx(-score * len(completion.tokens) ** penalty, abs=1e-4)


def test_fewer_completions_are_returned_if_no_more_exist() -> None:
    completions = run(llama(4), (1, 3), beams=50, returned=50, max_new_tokens=2)
    assert sorted(c.tokens for c in completions) == sorted(every_completion(4, 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("beams", "penalty"), [(2, 1.0), (4, 0.0), (4, 1.0), (5, 2.0), (3, -0.5)])
def test_beams_equal_those_of_transformers(seed: int, beams: int, penalty: float) -> None:
    model, prompt = llama(30, seed), (5, 9, 8, 4)
    completions = run(model, prompt, beams=beams, returned=beams, length_penalty=penalty, max_new_tokens=12)
    reference = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        suppress_tokens=[0],
    )[:, len(prompt) :].tolist()
    ended = [row[: row.index(EOS) + 1] if EOS in row else row for row in reference]
    assert [list(c.tokens) for c in completions] == ended


def test_a_sliding_window_is_respected() -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = SHAPE | {"vocab_size": 30, "sliding_window": 4}
    model: Any = MistralForCausalLM(MistralConfig(**settings)).eval()
    for completion in run(model, (5, 9, 8, 4, 7, 6), beams=3, returned=3, max_new_tokens=10):
        expected = logprob(model, (5, 9, 8, 4, 7, 6), completion.tokens)
        assert math.fsum(completion.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_one_beam_is_greedy(seed: int) -> None:
    model, prompt = llama(30, seed), (5, 9, 8)
    sampling = Sampling(temperature=0.0, max_new_tokens=12, min_new_tokens=2)
    generator = LocalGenerator(model, SimpleNamespace(pad_token_id=0))
    (greedy,) = complete(generator, [Request(prompt, 0, sampling, frozenset({EOS}))])
    (completion,) = run(model, prompt, beams=1, max_new_tokens=12, min_new_tokens=2)
    assert completion.tokens == tuple(greedy.tokens.tolist()) and completion.finish_reason == greedy.finish_reason
    assert math.fsum(completion.logprobs) == pytest.approx(logprob(model, prompt, completion.tokens), abs=1e-4)


def test_one_sampled_beam_has_the_sampling_distribution() -> None:
    """With 3,000 draws, the standard error of a frequency is at most 0.0092; 4 standard errors are allowed."""
    model, prompt, draws = llama(6), (5, 1), 3000
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    top = logits / 0.6
    top[top < top.topk(3).values[-1]] = -torch.inf
    top[0] = -torch.inf
    expected = top.softmax(-1).tolist()
    settings: dict[str, Any] = {"beams": 1, "sample": True, "temperature": 0.6, "top_k": 3, "max_new_tokens": 1}
    counts = Counter(run(model, prompt, seed=seed, **settings)[0].tokens[0] for seed in range(draws))
    for token, share in enumerate(expected):
        assert counts[token] / draws == pytest.approx(share, abs=4 * 0.0092)
        assert share > 0 or counts[token] == 0


def test_beams_are_drawn_without_replacement() -> None:
    """Two of three tokens without replacement: P({a, b}) = p_a p_b / (1 - p_a) + p_b p_a / (1 - p_b)."""
    model, prompt, draws = llama(4), (3, 1), 3000
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    p = (logits[1:] / 2.0).softmax(-1).tolist()
    settings: dict[str, Any] = {"beams": 2, "returned": 2, "sample": True, "temperature": 2.0, "max_new_tokens": 1}
    pairs = Counter(frozenset(c.tokens[0] for c in run(model, prompt, seed=seed, **settings)) for seed in range(draws))
    for a, b in itertools.combinations(range(3), 2):
        expected = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        assert pairs[frozenset((a + 1, b + 1))] / draws == pytest.approx(expected, abs=4 * 0.0092)


def test_beam_sampling_depends_on_its_seed_alone() -> None:
    model, settings = llama(), {"beams": 4, "returned": 4, "sample": True, "top_k": 10, "temperature": 0.6}
    torch.manual_seed(1)
    first = run(model, (5, 9, 8), seed=3, max_new_tokens=8, **settings)
    torch.manual_seed(2)
    assert run(model, (5, 9, 8), seed=3, max_new_tokens=8, **settings) == first
    assert run(model, (5, 9, 8), seed=4, max_new_tokens=8, **settings) != first
    assert len({c.tokens for c in first}) == 4
    ranks = [math.fsum(c.logprobs) / len(c.tokens) for c in first]
    assert ranks == sorted(ranks, reverse=True)


def test_stop_strings_end_a_beam(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model, prompt = tiny_llama(initializer_range=0.02), (5, 9, 8)
    plain = run(model, prompt, beams=2, max_new_tokens=6, tokenizer=tiny_tokenizer)
    stop = tiny_tokenizer.decode(plain[0].tokens[1:3])
    for completion in run(model, prompt, beams=2, returned=2, max_new_tokens=6, tokenizer=tiny_tokenizer, stop=[stop]):
        text = tiny_tokenizer.decode(completion.tokens)
        assert (stop in text) == (completion.finish_reason == "stop")
        assert text.find(stop) in (-1, len(text) - len(stop))


def test_the_context_window_ends_a_completion() -> None:
    model = llama(30, eos_token_id=None, max_position_embeddings=8)
    completions = run(model, (5, 9, 8, 7, 6), beams=2, max_new_tokens=12, min_new_tokens=12)
    assert [(len(c.tokens), c.finish_reason) for c in completions] == [(3, "context")]
    with pytest.raises(UserError, match="a prompt of 8 tokens leaves no room"):
        run(model, (5,) * 8, beams=2)
    with pytest.raises(UserError, match="the prompt is empty"):
        run(model, (), beams=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 2, "returned": 3}, "at most 2 completions"),
        ({"top_k": 10}, "top_k applies only to sampled beams"),
        ({"samples": 2, "temperature": 0.5}, "samples, temperature applies only to sampled beams"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens 9 is more than max_new_tokens 8"),
        ({"length_penalty": 1000.0}, "length_penalty: expected 10 or less"),
        ({"length_penalty": math.nan}, "length_penalty"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Beams(**settings)
