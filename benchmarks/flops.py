"""Floating-point operations that a job's results need, whoever computes them, and the rate of this machine.

A forward pass takes 2 operations a weight and token, training 6. A prompt that several sequences share counts once,
the head counts where a log-probability is used, and attention where a token may look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from workload import BODY

HIDDEN, LAYERS = BODY["hidden_size"], BODY["num_hidden_layers"]
WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * BODY["intermediate_size"])


def body(sequences: Iterable[tuple[int, list[int]]]) -> int:
    """A forward pass without the head over (tokens of the prompt, tokens of each of its answers)."""
    total = 0
    for prompt, answers in sequences:
        tokens = prompt + sum(answers)
        seen = prompt**2 / 2 + sum(prompt * answer + answer**2 / 2 for answer in answers)
        total += 2 * WEIGHTS * tokens + int(4 * HIDDEN * LAYERS * seen)
    return total


def head(positions: int, vocabulary: int) -> int:
    """A forward pass of the head."""
    return 2 * HIDDEN * vocabulary * positions


def needed(method: str, sequences: list[tuple[int, list[int]]], vocabulary: int) -> int:
    """Of the updates over these sequences once: 3 forward passes; in DPO one more of the reference, in PPO a critic's.

    What PPO, GRPO and RLOO do before the update is left out.
    """
    learned = 0 if method == "reward" else sum(sum(answers) for _, answers in sequences)
    policy = body(sequences) + head(learned, vocabulary)
    return 3 * policy + (policy if method == "dpo" else 3 * body(sequences) if method == "ppo" else 0)


def multiply_rate(product: Callable[[Any, Any], Any], seconds: float = 0.5) -> float:
    """The best rate of a float32 matrix product in operations per CPU second, over a few large shapes."""
    import torch

    best = 0.0
    for n in (512, 1024, 2048):
        a, b = torch.rand(n, n), torch.rand(n, n)
        times, began = [], time.process_time()
        while time.process_time() - began < seconds:
            start = time.process_time()
            for _ in range(3):
                product(a, b)
            times.append((time.process_time() - start) / 3)
        best = max(best, 2 * n**3 / min(times))
    return best
