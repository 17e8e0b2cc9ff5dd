"""Noise on the embeddings depends only on the tokens, the step, the seed and the length of the sequence."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.models.adapters import add_adapter
from burnish.models.batching import collate
from burnish.models.dropout import DropoutKeys, TokenDropout
from burnish.models.noise import EmbeddingNoise
from burnish.models.settings import AdapterConfig
from burnish.types import Example, MicroBatch, Sequence

ALPHA = 5.0


class Table(torch.nn.Module):
    """A model of an embedding alone, whose vectors are 0, so that what it gives is the noise."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embeddings = torch.nn.Embedding(64, width, dtype=dtype)
        torch.nn.init.zeros_(self.embeddings.weight)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings


def lay_out(sequences: list[list[int]], **layout: Any) -> MicroBatch:
    """One example a sequence; none but its last token is learned."""
    made = [Sequence(tuple(s), (False,) * (len(s) - 1) + (len(s) > 1,), "x") for s in sequences]
    return collate([Example((s,)) for s in made], 0, **layout)


def noise_of(batch: MicroBatch, seed: int = 0, step: int = 0, **table: Any) -> list[torch.Tensor]:
    """The noise (length, width) of each sequence."""
    model = Table(**table)
    with EmbeddingNoise(model, ALPHA).of(batch, seed, step), torch.no_grad():
        flat = model.embeddings(batch.tokens).flatten(0, 1)
    return [flat[a : b + 1] for a, b in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)]


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from(["left", "right"]),
    st.sampled_from([0, 50]),
)
def test_no_layout_changes_the_noise(sequences, packed, side, pad_to):
    noises = noise_of(lay_out(sequences, packed=packed, side=side, pad_to=pad_to))
    for sequence, noise in zip(sequences, noises, strict=True):
        torch.testing.assert_close(noise, noise_of(lay_out([sequence]))[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_its_strength_depends_on_the_length_of_the_sequence(packed):
    lengths = [3, 100, 9, 30]
    noises = noise_of(lay_out([[i % 7 for i in range(n)] for n in lengths], packed=packed), width=256)
    for n, noise in zip(lengths, noises, strict=True):
        strongest = ALPHA / math.sqrt(n * 256)
        assert 0.99 * strongest < noise.abs().max() <= strongest


def test_it_is_uniform_and_independent_of_tokens_features_steps_and_seeds():
    batch = lay_out([[i % 3 for i in range(200)]])
    strongest = ALPHA / math.sqrt(200 * 64)
    drawn = torch.stack(
        [torch.stack([noise_of(batch, seed, step, width=64)[0] for step in range(4)]) for seed in (0, 1, 42)]
    )
    x = drawn / strongest  # (seeds, steps, tokens, features)
    n = x.numel()
    assert x.abs().max() <= 1
    assert abs(x.mean()) < 4.5 / math.sqrt(3 * n)
    # the variance of x^2 is 1/5 - 1/9
    assert abs(x.square().mean() - 1 / 3) < 4.5 * math.sqrt(4 / 45 / n)
    shares = torch.histc(x, 20, -1, 1) / n
    assert (shares - 0.05).abs().max() < 4.5 * math.sqrt(0.05 * 0.95 / n)
    assert len(x.unique()) > 0.999 * n
    for dimension in range(4):
        for distance in range(1, min(4, x.shape[dimension])):
            size = x.shape[dimension] - distance
            a, b = x.narrow(dimension, 0, size), x.narrow(dimension, distance, size)
            assert abs((a * b).mean()) < 4.5 / 3 / math.sqrt(a.numel())


def test_it_is_independent_of_the_masks_of_dropout():
    batch = lay_out([[i % 3 for i in range(2000)]])
    keys = DropoutKeys()
    layers = [TokenDropout(0.5, keys).train() for _ in range(4)]
    (noise,) = noise_of(batch, width=64)
    noise = noise * math.sqrt(2000 * 64) / ALPHA
    with keys.of(batch, 0, 0):
        for layer in layers:
            kept = layer(torch.ones(1, 2000, 64))[0].double() - 1
            for x in (noise, noise.roll(1, 1), noise.abs() - 0.5):
                assert abs((kept * x).mean()) < 4.5 / math.sqrt(3 * kept.numel())


def test_the_random_state_does_not_matter():
    batch = lay_out([[1, 2, 3]])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    (first,) = noise_of(batch)
    torch.manual_seed(1)
    (second,) = noise_of(batch)
    assert torch.equal(first, second)
    torch.set_rng_state(state)
    model = Table()
    before = torch.get_rng_state()
    with EmbeddingNoise(model, ALPHA).of(batch, 0, 0):
        model.embeddings(batch.tokens)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_the_same_in_every_dtype_and_keeps_the_dtype(dtype):
    batch = lay_out([[1, 2, 3], [4, 5]])
    for exact, rounded in zip(noise_of(batch), noise_of(batch, dtype=dtype), strict=True):
        assert rounded.dtype == dtype
        torch.testing.assert_close(rounded.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-9)


@pytest.mark.parametrize("lora", [False, True])
def test_it_ends_with_the_context_even_after_an_error(lora, tiny_llama):
    model: Any = tiny_llama()
    if lora:
        model = add_adapter(model, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM")
    embeddings = model.get_input_embeddings()
    before, attributes = embeddings(torch.tensor([[1, 2, 3]])), dict(vars(embeddings))
    batch = lay_out([[1, 2, 3]])
    noise = EmbeddingNoise(model, ALPHA)
    with pytest.raises(ZeroDivisionError), noise.of(batch, 0, 0):
        inside = embeddings(batch.tokens)
        _ = 1 / 0
    assert (inside - before).abs().min() > 0
    assert torch.equal(embeddings(batch.tokens), before)
    assert not embeddings._forward_hooks and list(vars(embeddings)) == list(attributes)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_without_alpha_there_is_no_noise(alpha):
    model, batch = Table(), lay_out([[1, 2, 3]])
    with EmbeddingNoise(model, alpha).of(batch, 0, 0):
        assert not model.embeddings(batch.tokens).any()
