"""What benchmarks/ablations.py takes away changes the time of a step, and not its gradient."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.kernels import grouped, linear, lora
from burnish.models import forward, layout
from tiny_runs import distance, gradient
from tiny_runs import lora as adapted

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
PATCHED: list[tuple[Any, str]] = [
    (layout, "micro_batches"),
    (linear, "has_onednn"),
    (grouped, "fits"),
    (lora.LoraLinear, "forward"),
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
        *(("IN_HALF", name) for name in ("attention", "lora", "logits")),
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
