"""Metrics of trajectories, for training and evaluation, and rows of samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.math.statistics import RowSums
from burnish.render.spans import learned_spans
from burnish.rl.environment import ERRORS
from burnish.types import Example, Message, Messages, Trajectory

FINISH = ("stop", "length", "context", "turns", "done", "error")
"""Why an episode ends (``Trajectory``)."""


def summary(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means over trajectories: score, each reward, length, and the fraction that stopped."""
    n = len(trajectories)
    scores = torch.tensor([t.score for t in trajectories], dtype=torch.float64)
    lengths = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.float64)
    return {
        "score": scores.mean().item(),
        "score_std": scores.std(correction=0).item(),
        "ties": 1 - len(scores.unique()) / n,
        "length": lengths.mean().item(),
        "stopped": sum(t.stopped for t in trajectories) / n,
        **{f"reward_{name}": sum(t.rewards[name] for t in trajectories) / n for name in trajectories[0].rewards},
        **{name: sum(values) / n for name, values in of_episodes(trajectories).items()},
    }


def of_episodes(trajectories: list[Trajectory]) -> dict[str, list[float]]:
    """What episodes with an environment did, one number for each; {} without an environment.

    ``finished_REASON`` is 1 for episodes with this finish reason, and ``tool_error_KIND`` counts errors of this kind.
    """
    if not any(map(is_episode, trajectories)):
        return {}
    sampled = [float(len(t.tokens)) for t in trajectories]
    whole = [float(sum(len(s) for s in t.sequences)) for t in trajectories]
    prompts = [float(t.turns[0].prompt_tokens if t.turns else len(t.sequences[0])) for t in trajectories]
    values = {
        "turns": [float(len(t.turns)) for t in trajectories],
        "sequences": [float(len(t.sequences)) for t in trajectories],
        "environment_tokens": [a - b - c for a, b, c in zip(whole, sampled, prompts, strict=True)],
        "computed_tokens": [
            float(sum(turn.prompt_tokens - turn.cached_tokens + turn.tokens for turn in t.turns)) for t in trajectories
        ],
        "tool_calls": [float(len(t.tool_calls)) for t in trajectories],
        "tool_errors": [float(len(t.tool_errors)) for t in trajectories],
    }
    values |= {f"tool_error_{kind}": [float(t.tool_errors.count(kind)) for t in trajectories] for kind in ERRORS}
    return values | {f"finished_{why}": [float(t.finish_reason == why) for t in trajectories] for why in FINISH}


def is_episode(trajectory: Trajectory) -> bool:
    """Whether there was an environment. One that fails at once leaves an episode without turns."""
    return not trajectory.turns or any(turn.message is not None for turn in trajectory.turns)


def value_metrics(returns: Tensor, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Means of returns and values over learned tokens, and the explained variance of the returns."""
    returns, values = returns[mask], values[mask]
    variance = returns.var(correction=0)
    explained = 1 - (returns - values).var(correction=0) / variance if variance > 0 else torch.zeros(())
    return {
        "returns": returns.mean().item(),
        "values": values.mean().item(),
        "explained_variance": explained.item(),
    }


def interval(name: str, values: list[float]) -> dict[str, float]:
    """The mean of independent values with its 95 % interval (normal approximation): name, name_low and name_high."""
    x = torch.tensor(values, dtype=torch.float64)
    mean = x.mean().item()
    if len(x) < 2:
        return {name: mean}
    half = 1.959964 * x.std().item() / math.sqrt(len(x))
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def evaluation(trajectories: list[Trajectory], examples: list[Example], start: Mapping[str, float]) -> dict[str, float]:
    """Means with intervals: score, each reward, KL per trajectory (k1), and win rate against the initial policy.

    Args:
        trajectories: scored trajectories.
        examples: the examples of the trajectories. With a reference, they have ``ref_logprobs``, and ``kl_logprobs`` or
            ``old_logprobs`` unless the sampler's log-probabilities are used.
        start: scores before training by source, for the prompts where they were measured.
    """
    metrics = summary(trajectories) | interval("score", [t.score for t in trajectories])
    for name in trajectories[0].rewards:
        metrics |= interval(f"reward_{name}", [t.rewards[name] for t in trajectories])
    if _has_reference(examples):
        metrics |= interval("kl", [_log_ratio(example) for example in examples])
    pairs = [(t.score, start[t.source]) for t in trajectories if t.source in start]
    if pairs:
        won = interval("win_rate", [(after > before) + 0.5 * (after == before) for after, before in pairs])
        metrics |= {name: min(max(share, 0.0), 1.0) for name, share in won.items()}
    return metrics


def row_sums(trajectories: list[Trajectory], examples: list[Example]) -> dict[str, RowSums]:
    """Score, each reward, length and KL (k1) of each row, with arguments as in ``evaluation``."""
    values: dict[str, list[float]] = {
        "score": [t.score for t in trajectories],
        "length": [float(len(t.tokens)) for t in trajectories],
        "stopped": [float(t.stopped) for t in trajectories],
    }
    values |= {f"reward_{name}": [t.rewards[name] for t in trajectories] for name in trajectories[0].rewards}
    values |= of_episodes(trajectories)
    if _has_reference(examples):
        values["kl"] = [_log_ratio(example) for example in examples]
    sources = [t.source for t in trajectories]
    return {name: RowSums(_summed(sources, of)) for name, of in values.items()}


def _summed(sources: list[str], values: list[float]) -> dict[str, tuple[float, float]]:
    """The sum and the number of the values of each row, which may have several trajectories."""
    rows: dict[str, tuple[float, float]] = {}
    for source, value in zip(sources, values, strict=True):
        total, count = rows.get(source, (0.0, 0.0))
        rows[source] = (total + value, count + 1.0)
    return rows


def _has_reference(examples: list[Example]) -> bool:
    return all("ref_logprobs" in s.arrays for example in examples for s in example.sequences)


def _log_ratio(example: Example) -> float:
    """Sum of log p - log p_reference over all sampled tokens."""

    def total(*names: str) -> float:
        arrays = [s.arrays for s in example.sequences]
        name = next(name for name in names if name in arrays[0])
        return math.fsum(np.concatenate([of[name] for of in arrays]))

    return total("kl_logprobs", "old_logprobs", "sampler_logprobs") - total("ref_logprobs")


def sample_rows(trajectories: list[Trajectory], kind: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of samples.jsonl. ``kind`` is ``train`` or ``eval``.

    An episode with an environment also has its ``messages`` after the prompt, and its ``sequences`` as text that is
    learned or not.
    """
    return [
        {
            "kind": kind,
            "prompt": t.prompt[-1]["content"],
            "completion": t.text,
            "score": t.score,
            "rewards": dict(t.rewards),
            "finish_reason": t.finish_reason,
            "source": t.source,
        }
        | (_transcript(t, tokenizer) if is_episode(t) else {})
        for t in trajectories
    ]


def _transcript(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """The messages and sequences of an episode. A message of the policy says what was special about its turn."""
    messages: list[dict[str, Any]] = []
    for turn in trajectory.turns:
        own = {
            "finish_reason": "" if turn.finish_reason == "stop" else turn.finish_reason,
            "errors": list(turn.errors),
            "reward": turn.reward,
        }
        messages.append({**(turn.message or {}), **{name: value for name, value in own.items() if value}})
        messages += [{**reply} for reply in turn.replies]
    return {"messages": messages, "sequences": [learned_spans(s, tokenizer) for s in trajectory.sequences]}


def completed_row(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as a row to train on: prompt, completion, score, rewards, and columns in ``meta``.

    The completion is text, or the messages of an episode up to the policy's last one.
    """
    prompt, completion = trajectory.prompt, list(trajectory.messages)
    while completion and completion[-1]["role"] != "assistant":
        completion.pop()
    row: dict[str, Any] = {
        "prompt": text_or_messages(prompt),
        "completion": completion if is_episode(trajectory) else trajectory.text,
    }
    if trajectory.tools:
        row["tools"] = list(trajectory.tools)
    if trajectory.rewards:
        row |= {"score": trajectory.score, "rewards": dict(trajectory.rewards)}
    row["finish_reason"] = trajectory.finish_reason
    return row | ({"meta": dict(trajectory.columns)} if trajectory.columns else {})


def text_or_messages(prompt: Messages) -> str | list[Message]:
    """The text of a prompt that is one message of the user, or else its messages, as in a row."""
    return prompt[0]["content"] if len(prompt) == 1 and prompt[0]["role"] == "user" else list(prompt)
