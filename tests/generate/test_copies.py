"""Copies of weights for sampling: they change completions only by rounding, and are never stale."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish import machine
from burnish.generate.local import COPIED_SHARE, LocalGenerator
from burnish.generate.protocol import Completion, Request, complete
from burnish.generate.sampling import Sampling
from burnish.generate.settings import GeneratorSettings, factory
from burnish.kernels import blocked, linear
from generating import PAD, llama, plain, requests

needs_onednn = pytest.mark.skipif(not linear.has_onednn(), reason="no oneDNN for AVX-512 on this processor")


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the layers of a tiny model have copies."""
    monkeypatch.setattr(blocked, "FEWEST_WEIGHTS", 0)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each product with a copy."""
    rows, product = list[int](), linear.product

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.is_mkldnn:
            rows.append(x.shape[:-1].numel())
        return product(x, weight, bias)

    monkeypatch.setattr(linear, "product", counted)
    return rows


def check_equal(got: list[Completion], expected: list[Completion], tolerance: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=tolerance, rtol=0)


def without_copies(model: Any, wanted: list[Request]) -> list[Completion]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "copies", lambda model, max_bytes: {})
        return complete(LocalGenerator(model, PAD), wanted)


@needs_onednn
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str)
def test_completions_are_equal_up_to_rounding_and_plans_to_the_byte(
    count: int, dtype: torch.dtype, tolerance: float, products: list[int]
) -> None:
    model, wanted = llama().to(dtype), requests(count)
    expected = without_copies(model, wanted)
    assert not products
    generator = LocalGenerator(model, PAD)
    done = complete(generator, wanted)
    assert count in products
    check_equal(done, expected, tolerance)
    again = complete(LocalGenerator(model, PAD, frozen=True), wanted)
    assert plain(complete(generator, wanted)) == plain(done) == plain(again)
    products.clear()
    model(torch.tensor([[1, 2, 3]]))
    assert not products


@needs_onednn
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_new_weights_are_used_at_once(own: bool, frozen: bool, products: list[int]) -> None:
    model, other, wanted = llama(), llama(1), requests(4)
    generator = LocalGenerator(model, PAD, frozen=frozen)
    before = complete(generator, wanted)
    if own:
        model.load_state_dict(other.state_dict())
    generator.update_weights(0, (model if own else other).named_parameters())
    products.clear()
    after = complete(generator, wanted)
    assert products and plain(after) != plain(before)
    check_equal(after, without_copies(other, wanted), 1e-5)


@needs_onednn
def test_weights_may_change_between_plans() -> None:
    model, wanted = llama(), requests(4)
    generator = LocalGenerator(model, PAD)
    complete(generator, wanted)
    model.load_state_dict(llama(1).state_dict())
    check_equal(complete(generator, wanted), without_copies(model, wanted), 1e-5)


@needs_onednn
@pytest.mark.parametrize("frozen", [True, False])
def test_how_long_copies_are_kept(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, copies = list[weakref.ref[torch.Tensor]](), blocked.copies

    def kept(model: Any, max_bytes: int) -> blocked.Blocked:
        found = copies(model, max_bytes)
        made.append(weakref.ref(next(iter(found.values()))))
        return found

    monkeypatch.setattr(blocked, "copies", kept)
    model = llama()
    generator = LocalGenerator(model, PAD, frozen=frozen)
    assert generator.poll(None) == [] and not made
    complete(generator, requests(2))
    assert len(made) == 1 and (made[0]() is not None) == frozen
    complete(generator, [replace(request, sampling=Sampling(max_new_tokens=7)) for request in requests(2)])
    assert len(made) == 1  # too few tokens
    generator.submit(requests(2), 0)
    generator.poll(0.0)
    assert len(made) == (1 if frozen else 2) and made[-1]() is not None
    generator.cancel()
    assert (made[-1]() is not None) == frozen
    generator.update_weights(1, [])
    assert made[-1]() is None


@needs_onednn
def test_copies_need_at_most_an_eighth_of_the_memory(monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    model: Any = llama()
    needed = sum(module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear))
    for memory, processes in ((needed * COPIED_SHARE, 1), (needed * COPIED_SHARE * 2, 2)):
        for less in (0, 1):
            monkeypatch.setattr(machine, "memory_bytes", lambda memory=memory - less: memory)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
            products.clear()
            complete(LocalGenerator(model, PAD), requests(2))
            assert bool(products) == (not less)


def test_only_the_local_generator_of_a_frozen_model_keeps_copies() -> None:
    model = llama()
    made = [
        factory(GeneratorSettings(name=name), frozen=frozen)(model, PAD)
        for name in ("local", "continuous")
        for frozen in (True, False)
    ]
    assert [vars(generator).get("frozen", False) for generator in made] == [True, False, False, False]
