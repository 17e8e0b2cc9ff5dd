"""What tests of generators share: a tiny model, requests, and completions as plain values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import torch

import builders
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete
from burnish.generate.sampling import Sampling
from burnish.models import adapters

PAD = SimpleNamespace(pad_token_id=0)
ENDS = frozenset({3, 5, 8})


def llama(seed: int = 0, **config: Any) -> Any:
    return builders.llama(seed, **{"vocab_size": 50, "initializer_range": 0.3} | config)


def requests(n: int = 12, ends: frozenset[int] = ENDS, values: bool = False, **sampling: Any) -> list[Request]:
    """Requests with prompts of 2 to 8 tokens."""
    settings = Sampling(**({} if "length_range" in sampling else {"max_new_tokens": 20}) | sampling)
    return [Request(tuple(range(9, 11 + i % 7)), i, settings, ends, values) for i in range(n)]


def plain(completions: list[Completion]) -> list[Any]:
    """Completions as plain values, for an exact comparison."""
    return [tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in astuple(c)) for c in completions]


def check_adapters(make: Callable[[Any], Any], folder: Path) -> None:
    """Check that a generator, made from a model with an adapter, takes other adapters as tensors and as a folder."""

    def adapted(seed: int) -> Any:
        base = llama()
        torch.manual_seed(seed)
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(base, lora).eval()

    first, second = adapted(0), adapted(1)
    wanted = requests(4)
    expected = plain(complete(LocalGenerator(second, PAD), wanted))
    adapters.save(second, folder)
    generator = make(first)
    assert plain(complete(generator, wanted)) != expected
    generator.update_weights(0, ((n, p) for n, p in second.named_parameters() if p.requires_grad))
    assert plain(complete(generator, wanted)) == expected
    generator.update_weights(0, ((n, p) for n, p in first.named_parameters() if p.requires_grad))
    generator.update_weights(0, folder)
    assert plain(complete(generator, wanted)) == expected
    generator.close()


def environment_with_tests() -> dict[str, str]:
    """Variables with which a new Python process imports what this one does, and the tests."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
