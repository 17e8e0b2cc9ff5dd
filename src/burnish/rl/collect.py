"""Prompts to scored experience: generate, score, and say what was seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from burnish.generate.protocol import Generator, Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.math.advantages import Moments
from burnish.protocols import Context
from burnish.rewards.functions import NamedReward, score
from burnish.types import Answer, Example, Prompt, Sequence


@dataclass(frozen=True)
class Rollout:
    """A prompt with one scored completion.

    ``Rollout(Sequence([5, 6, 42, 2], [False, False, True, True], "prompts.jsonl:3",
    {"sampler_logprobs": [0.0, 0.0, -0.1, -0.3]}), Answer(...), score=1.2, rewards={"reward": 1.2})``;
    ``sampler_logprobs`` are the sampler's log-probabilities, and ``step_rewards``, where a reward speaks of tokens,
    the part of the score that lies on each.
    """

    sequence: Sequence
    answer: Answer
    score: float
    rewards: Mapping[str, float]


def collect(
    rows: list[Prompt],
    prompts: list[tuple[int, ...]],
    indices: list[int],
    iteration: int,
    sampling: Sampling,
    rewards: list[NamedReward],
    context: Context,
    generator: Generator,
) -> list[Rollout]:
    """Sample ``sampling.samples`` completions of each chosen prompt and score them.

    Each completion has a seed of its own from (run seed, prompt, sample, iteration), and each reward one from (run
    seed, iteration, process, name). Processes share the work and all get the whole list, in the order of ``indices``
    and then of samples.
    """
    wanted = [(i, g) for i in indices for g in range(sampling.samples)]
    mine = wanted[context.rank :: context.world_size]
    policy, tokenizer = context.network.policy, context.tokenizer
    ends = frozenset(eos_ids(policy, tokenizer))
    requests = [Request(prompts[i], request_seed(context.seed, i, g, iteration), sampling, ends) for i, g in mine]
    trained = ((name, weight) for name, weight in policy.named_parameters() if weight.requires_grad)
    generator.update_weights(iteration, trained)
    completions = complete(generator, requests, iteration)
    generator.drop_cache()
    answers = [
        Answer(
            prompt=rows[i].messages,
            text=tokenizer.decode(completion.tokens, skip_special_tokens=True).strip(),
            tokens=tuple(completion.tokens.tolist()),
            finish_reason=completion.finish_reason,
            columns=rows[i].columns,
            source=rows[i].source,
        )
        for (i, _), completion in zip(mine, completions, strict=True)
    ]
    totals, by_name, of_tokens = score(answers, rewards, (context.seed, iteration, context.rank))
    done = [
        Rollout(
            sequence=Sequence(
                tokens=(*prompts[i], *answer.tokens),
                loss_mask=(False,) * len(prompts[i]) + (True,) * len(completion.tokens),
                source=answer.source,
                arrays={
                    "sampler_logprobs": (0.0,) * len(prompts[i]) + tuple(completion.logprobs.tolist()),
                    **({} if of_tokens is None else {"step_rewards": (0.0,) * len(prompts[i]) + of_tokens[k]}),
                },
            ),
            answer=answer,
            score=totals[k],
            rewards={name: values[k] for name, values in by_name.items()},
        )
        for k, ((i, _), completion, answer) in enumerate(zip(mine, completions, answers, strict=True))
    ]
    parts = context.gather(done)
    return [parts[k % context.world_size][k // context.world_size] for k in range(len(wanted))]


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return {i for i in ids if i is not None}


def summary(rollouts: list[Rollout]) -> dict[str, float]:
    """Means over rollouts: score and each reward by name, lengths, the share that stopped."""
    scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64)
    lengths = torch.tensor([len(r.answer.tokens) for r in rollouts], dtype=torch.float64)
    ties = 1 - len(set(scores.tolist())) / len(rollouts)
    return {
        "score": scores.mean().item(),
        "score_std": scores.std(correction=0).item(),
        "ties": ties,
        "length": lengths.mean().item(),
        "stopped": sum(r.answer.finish_reason == "stop" for r in rollouts) / len(rollouts),
    } | {f"reward_{name}": sum(r.rewards[name] for r in rollouts) / len(rollouts) for name in rollouts[0].rewards}


def interval(name: str, values: list[float]) -> dict[str, float]:
    """The mean of independent values and its 95 % interval (normal approximation), as name, name_low, name_high."""
    x = torch.tensor(values, dtype=torch.float64)
    mean = x.mean().item()
    if len(x) < 2:
        return {name: mean}
    half = 1.959964 * x.std().item() / math.sqrt(len(x))
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def evaluation(rollouts: list[Rollout], examples: list[Example], start: Mapping[str, float]) -> dict[str, float]:
    """Means over rollouts with intervals: score, each reward, KL (k1) of whole completions, win rate over ``start``.

    ``examples`` are those of the rollouts, where there is a reference with ``ref_logprobs`` and, unless the sampler's
    serve, with ``kl_logprobs`` or ``logprobs``;
    ``start`` the scores of prompts before training, by source, where they were measured.
    """
    scores = [r.score for r in rollouts]
    metrics = summary(rollouts) | interval("score", scores)
    for name in rollouts[0].rewards:
        metrics |= interval(f"reward_{name}", [r.rewards[name] for r in rollouts])
    arrays = [example.sequences[0].arrays for example in examples]
    if all("ref_logprobs" in a for a in arrays):
        ours = [
            next(a[name] for name in ("kl_logprobs", "old_logprobs", "sampler_logprobs") if name in a) for a in arrays
        ]
        theirs = [a["ref_logprobs"] for a in arrays]
        sums = [[math.fsum(x.tolist()) for x in side] for side in (ours, theirs)]
        metrics |= interval("kl", [x - y for x, y in zip(*sums, strict=True)])
    pairs = [(r.score, start[r.answer.source]) for r in rollouts if r.answer.source in start]
    if pairs:
        won = interval("win_rate", [(after > before) + 0.5 * (after == before) for after, before in pairs])
        metrics |= {name: min(max(share, 0.0), 1.0) for name, share in won.items()}
    return metrics


def samples(rollouts: list[Rollout], kind: str) -> list[dict[str, Any]]:
    """Rows of samples.jsonl."""
    return [
        {
            "kind": kind,
            "prompt": r.answer.prompt[-1]["content"],
            "completion": r.answer.text,
            "score": r.score,
            "rewards": dict(r.rewards),
            "finish_reason": r.answer.finish_reason,
            "source": r.answer.source,
        }
        for r in rollouts
    ]


def final_scores(
    rollouts: list[Rollout],
    scale: float = 1.0,
    clip: float | None = None,
    missing_eos: Literal["none", "subtract", "replace"] = "none",
    penalty: float = 1.0,
    moments: Moments | None = None,
) -> Tensor:
    """Scores (N,) as an update uses them: normalized, scaled, clipped to +- clip, with a rule for what did not stop."""
    scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64)
    scores = (scores if moments is None else moments.normalize(scores)) * scale
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    cut = torch.tensor([r.answer.finish_reason != "stop" for r in rollouts])
    if missing_eos == "subtract":
        return torch.where(cut, scores - penalty, scores)
    if missing_eos == "replace":
        return torch.where(cut, penalty, scores)
    return scores


def mean_sampler_mismatch(examples: list[Example], limit: float) -> float:
    """Mean gap over learned tokens between the trainer's ``logprobs`` and the sampler's, ``sampled``.

    Raises:
        RuntimeError: it is above the limit (``within``).
    """
    gaps = [
        gap
        for example in examples
        for s in example.sequences
        for gap in np.abs(s.arrays["old_logprobs"] - s.arrays["sampler_logprobs"])[s.loss_mask].tolist()
    ]
    return within(math.fsum(gaps) / max(len(gaps), 1), limit)


def within(gap: float, limit: float, how: str = "on average") -> float:
    """The gap between sampler and trainer, nats a token; ``how`` says what was made of those of all tokens.

    Raises:
        RuntimeError: it is above the limit, or not a number: what would be learned is not what was sampled.
    """
    if not gap <= limit:
        raise RuntimeError(
            f"the sampler's and the trainer's log-probabilities differ by {gap:.2g} a token {how} (limit "
            f"{limit:g}): what is learned would not be what was sampled; if this is expected, raise "
            "method.max_sampler_mismatch"
        )
    return gap


def with_arrays(examples: list[Example], **arrays: Tensor) -> list[Example]:
    """Examples of one sequence each with these (N, T) arrays, and no others, cut to each one's length."""
    rows = {name: x.double().numpy() for name, x in arrays.items()}
    made = []
    for i, (sequence,) in enumerate(example.sequences for example in examples):
        mine = {name: row[i, : len(sequence)] for name, row in rows.items()}
        made.append(Example((dataclasses.replace(sequence, arrays=mine),)))
    return made


def value_metrics(returns: Tensor, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Means of returns and values, and the share of the returns' variance that is explained, over learned tokens."""
    returns, values = returns[mask], values[mask]
    variance = returns.var(correction=0)
    explained = 1 - (returns - values).var(correction=0) / variance if variance > 0 else torch.zeros(())
    return {
        "returns": returns.mean().item(),
        "values": values.mean().item(),
        "explained_variance": explained.item(),
    }
