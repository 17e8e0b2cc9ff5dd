"""Prompts to scored trajectories: completions are scored while others are still being sampled."""

from __future__ import annotations

from typing import Any

from burnish.generate.protocol import Completion, Generator, Request, request_seed
from burnish.generate.sampling import Sampling
from burnish.protocols import Engine, Run
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import Scorer, Scores
from burnish.rl.trajectory import begin, with_scores, with_turn
from burnish.types import Prompt, Trajectory

SCORED_TOGETHER = 64
"""Trajectories of one call of a reward, rounded up to whole prompts: few enough to start early, enough for a batch."""

POLL = 0.05
"""Seconds of sampling between two looks at coroutines that wait for a reward."""


def collect(
    rows: list[Prompt],
    prompts: list[tuple[int, ...]],
    indices: list[int],
    iteration: int,
    sampling: Sampling,
    rewards: list[NamedReward],
    engine: Engine,
    run: Run,
    generator: Generator,
) -> list[Trajectory]:
    """Sample ``sampling.samples`` completions of each chosen prompt and score them.

    Each completion has a seed of its own from (run seed, prompt, sample, iteration), and each call of a reward one from
    (run seed, iteration, process, group, name). Processes share the prompts and all get the whole list, in the order of
    ``indices`` and then of samples.
    """
    samples = range(sampling.samples)
    mine = [i for i in indices[engine.rank :: engine.world_size] for _ in samples]
    stop_ids = frozenset(eos_ids(engine.network.policy, run.tokenizer))
    requests = [
        Request(prompts[i], request_seed(run.seed, i, k % len(samples), iteration), sampling, stop_ids)
        for k, i in enumerate(mine)
    ]
    generator.update_weights(iteration, engine.weights())
    trajectories = sample_and_score(
        [rows[i] for i in mine],
        requests,
        rewards,
        generator,
        run.tokenizer,
        version=iteration,
        seed=(run.seed, iteration, engine.rank),
    )
    generator.drop_cache()
    parts = engine.gather(trajectories)
    return [
        parts[k % engine.world_size][k // engine.world_size * len(samples) + g]
        for k in range(len(indices))
        for g in samples
    ]


def sample_and_score(
    rows: list[Prompt],
    requests: list[Request],
    rewards: list[NamedReward],
    generator: Generator,
    tokenizer: Any,
    *,
    version: int = 0,
    seed: tuple[int, ...] = (),
) -> list[Trajectory]:
    """One scored trajectory for each request, in their order.

    A group of prompts is scored as soon as all of its completions are there; coroutines of rewards continue between two
    polls of the generator. Which trajectories form a group depends on the requests only, so that equal requests give
    equal bytes whatever is done first.

    Args:
        rows: the row of each request; the samples of a prompt stand side by side.
        requests: all with the same ``sampling``.
        rewards: each is called once for each group.
        generator: with nothing else in flight.
        tokenizer: decodes the completions.
        version: of the generator's weights.
        seed: of the random numbers that rewards draw, with the group and the reward's name.
    """
    size = _group_size(requests[0].sampling.samples) if requests else 1
    missing = {start // size: len(requests[start : start + size]) for start in range(0, len(requests), size)}
    trajectories: list[Any] = [None] * len(requests)
    places = {handle: k for k, handle in enumerate(generator.submit(requests, version))}
    with Scorer(rewards, seed) as scorer:
        while places:
            for handle, completion in generator.poll(POLL if scorer.tasks else None):
                k = places.pop(handle)
                text = _text(tokenizer, completion)
                trajectories[k] = with_turn(begin(rows[k], requests[k].tokens), completion, text)
                group = k // size
                missing[group] -= 1
                if not missing[group]:
                    scorer.add(group, trajectories[group * size : (group + 1) * size])
            scorer.advance()
        scores = scorer.finish()
    return [t for group in sorted(scores) for t in _scored(scorer.groups[group], scores[group])]


def _group_size(samples: int) -> int:
    return -(-SCORED_TOGETHER // samples) * samples


def _text(tokenizer: Any, completion: Completion) -> str:
    return tokenizer.decode(completion.tokens, skip_special_tokens=True).strip()


def _scored(trajectories: list[Trajectory], scores: Scores) -> list[Trajectory]:
    """Trajectories with their scores."""
    return [
        with_scores(
            trajectory,
            scores.totals[k],
            {name: values[k] for name, values in scores.by_name.items()},
            None if scores.tokens is None else scores.tokens[k],
        )
        for k, trajectory in enumerate(trajectories)
    ]


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return {i for i in ids if i is not None}
