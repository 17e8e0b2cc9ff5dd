"""What benchmarks/ablations.py takes away changes the time of a step, and not its gradient."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import complete
from burnish.kernels import attention, blocked, grouped, linear, lora
from burnish.models import forward, layout
from generating import PAD, requests
from tiny_runs import distance, gradient
from tiny_runs import lora as adapted

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
PATCHED: list[tuple[Any, str]] = [
    (layout, "micro_batches"),
    (linear, "has_onednn"),
    (grouped, "fits"),
    (lora.LoraLinear, "forward"),
    (blocked, "copies"),
    (attention, "sdpa"),
    (forward, "head"),
    (forward, "at_learned"),
]


@pytest.fixture
def ablations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module. What its patches replace is restored after the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("ablations", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for place, name in PATCHED:
        monkeypatch.setattr(place, name, getattr(place, name))
    return importlib.import_module("ablations")


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *(("ABLATIONS", name) for name in ("products", "packing", "sorting", "budget", "head", "all")),
        *(("IN_HALF", name) for name in ("attention", "padded", "lora", "logits")),
    ],
)
def test_the_gradient_stays_the_same(table: str, name: str, ablations: Any, make: Any, tiny_llama: Any) -> None:
    before = gradient(make, model=adapted(tiny_llama()))
    one = getattr(ablations, table)[name]
    kept = [getattr(place, attribute) for place, attribute in PATCHED]
    one.patch()
    replaced = [getattr(place, attribute) for place, attribute in PATCHED] != kept
    assert replaced or one.trainer
    assert distance(gradient(make, model=adapted(tiny_llama()), **one.trainer), before) < 1e-5


@pytest.mark.skipif(not linear.has_onednn(), reason="no oneDNN for AVX-512 on this processor")
def test_completions_stay_the_same_up_to_rounding(
    ablations: Any, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "FEWEST_WEIGHTS", 0)
    model, done = tiny_llama(), []
    for patch in (lambda: None, ablations.IN_DECODING["blocked"].patch):
        patch()
        generator = LocalGenerator(model, PAD, frozen=True)
        done.append(complete(generator, requests(4)))
        assert bool(generator._blocked) == (len(done) == 1)
    for ours, without in zip(*done, strict=True):
        assert ours.tokens.tolist() == without.tokens.tolist()
        assert ours.logprobs == pytest.approx(without.logprobs, abs=1e-5)
