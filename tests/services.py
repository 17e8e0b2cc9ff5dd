"""Services on a free port in this process, and what they score: ``from services import TOKEN, running``."""

from __future__ import annotations

import random
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx2
import torch
from transformers import LlamaForSequenceClassification

from builders import character_tokenizer, llama
from burnish.rewards.model import ModelReward
from burnish.serving.http import Service, listening
from burnish.types import Trajectory

TOKEN = "a-token-of-the-tests"


@contextmanager
def running(service: Service[Any, Any], app: Any = None, port: int = 0) -> Iterator[str]:
    """Run a service, or an app around it, and yield its address."""
    worker = threading.Thread(target=service.worker.run)
    worker.start()
    try:
        with listening(app or service.app, port=port, grace=1) as url:
            yield url
    finally:
        service.worker.stop()
        worker.join()


def model_reward(seed: int = 0) -> ModelReward:
    """A reward model with random weights."""
    config = llama().config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
    return ModelReward(model, character_tokenizer())


def completions(count: int, seed: int = 0) -> list[Trajectory]:
    """Completions of random letters, 1 to 40 of them, for prompts of 1 to 20."""
    chance = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(chance.choices(string.ascii_lowercase, k=chance.randint(1, longest)))

    return [
        Trajectory.from_text(
            text(40),
            ({"role": "user", "content": text(20)},),
            tokens=range(i % 5),
            columns={"answer": i},
            source=f"prompts.jsonl:{i + 1}",
        )
        for i in range(count)
    ]


def request(method: str, url: str, **settings: Any) -> httpx2.Response:
    """A request of a new client, without reading the certificates of the system, which takes 0.1 seconds."""
    return httpx2.request(method, url, verify=False, **settings)


get, post = partial(request, "GET"), partial(request, "POST")
