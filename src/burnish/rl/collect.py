"""Prompts to scored trajectories: completions are scored while others are still being sampled."""

from __future__ import annotations

from typing import Any

from burnish.generate.local import LocalGenerator, Request, Sampling, request_seed
from burnish.protocols import Context
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import Scorer, Scores
from burnish.rl.trajectory import begin, with_scores, with_turn
from burnish.types import Completion, Prompt, Trajectory

SCORED_TOGETHER = 16
"""Trajectories of one call of a reward, rounded up to whole prompts: few enough to start early, enough for a batch."""


def collect(
    rows: list[Prompt],
    prompts: list[tuple[int, ...]],
    indices: list[int],
    iteration: int,
    sampling: Sampling,
    rewards: list[NamedReward],
    context: Context,
    generator: LocalGenerator,
) -> list[Trajectory]:
    """Sample ``sampling.samples`` completions of each chosen prompt and score them.

    Each completion has a seed of its own from (run seed, prompt, sample, iteration). A reward is called once for each
    group of prompts, whose number and members depend on the chosen prompts only, with a seed from (run seed, iteration,
    process, group, name). Processes share the prompts and all get the whole list, in the order of ``indices`` and then
    of samples.
    """
    mine, samples = indices[context.rank :: context.world_size], range(sampling.samples)
    requests = [Request(prompts[i], request_seed(context.seed, i, g, iteration)) for i in mine for g in samples]
    tokenizer = context.tokenizer
    completions = generator(
        context.network.policy,
        requests,
        sampling,
        eos_ids=eos_ids(context.network.policy, tokenizer),
        pad_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
    )
    chosen = [i for i in mine for _ in samples]
    trajectories = [
        with_turn(begin(rows[i], prompts[i]), completion, _text(tokenizer, completion))
        for i, completion in zip(chosen, completions, strict=True)
    ]
    size = -(-SCORED_TOGETHER // len(samples)) * len(samples)
    groups = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
    with Scorer(rewards, (context.seed, iteration, context.rank)) as scorer:
        for number, group in enumerate(groups):
            scorer.add(number, group)
            scorer.advance()
        scores = scorer.finish()
    scored = [t for number, group in enumerate(groups) for t in _scored(group, scores[number])]
    parts = context.gather(scored)
    return [
        parts[k % context.world_size][k // context.world_size * len(samples) + g]
        for k in range(len(indices))
        for g in samples
    ]


def _text(tokenizer: Any, completion: Completion) -> str:
    return tokenizer.decode(completion.tokens, skip_special_tokens=True).strip()


def _scored(trajectories: list[Trajectory], scores: Scores) -> list[Trajectory]:
    """Trajectories with their scores."""
    return [
        with_scores(
            trajectory,
            total,
            {name: values[k] for name, values in scores.by_name.items()},
            None if scores.tokens is None else scores.tokens[k],
        )
        for k, (trajectory, total) in enumerate(zip(trajectories, scores.totals, strict=True))
    ]


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return {i for i in ids if i is not None}
