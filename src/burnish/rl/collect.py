"""Samples and scores trajectories. Completions are scored while others are still being sampled."""

from __future__ import annotations

from typing import Any

from burnish import progress
from burnish.generate.protocol import Completion, Generator, Request, request_seed
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.models.limits import check_room
from burnish.protocols import Engine, Run
from burnish.render.renderer import Renderer
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import Scorer, Scores
from burnish.rl.trajectory import begin, with_scores, with_turn
from burnish.types import Prompt, Trajectory

SCORED_TOGETHER = 64
"""Number of trajectories per call of a reward, rounded up to whole prompts.

Small enough for scoring to start early, and large enough for a reward model's batch.
"""

POLL_SECONDS = 0.05
"""While coroutines of rewards are running, they continue after this much sampling time."""


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
    sampling_round: int = 0,
) -> list[Trajectory]:
    """Sample ``sampling.samples`` completions of each prompt in ``indices``, and score them.

    Processes share the work, and each returns all trajectories, in the order of ``indices`` and then of samples. Each
    completion has its own seed, derived from (run seed, prompt, sample, iteration), and each call of a reward from (run
    seed, iteration, sampling round, process, group, name). Dynamic sampling has several rounds in an iteration.
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
        seed=(run.seed, iteration, sampling_round, engine.rank),
    )
    generator.drop_cache()
    parts = engine.gather(trajectories)
    return [
        parts[k % engine.world_size][k // engine.world_size * len(samples) + g]
        for k in range(len(indices))
        for g in samples
    ]


def sample_prompts(
    prompts: list[Prompt],
    first: int,
    model: Any,
    tokenizer: Any,
    generator: Generator,
    sampling: Sampling,
    rewards: list[NamedReward],
    seed: int,
) -> tuple[list[Request], list[Trajectory]]:
    """Sample ``sampling.samples`` completions of each prompt, and score them.

    The seeds follow from the index of the first prompt, so that a chunk of prompts always gives the same completions,
    whether or not this process has sampled the chunks before it.

    Returns:
        The requests and their trajectories, in the order of prompts and then of samples.

    Raises:
        UserError: if a prompt leaves no room for a completion.
    """
    tokens = Renderer(tokenizer).prompts(prompts)
    check_room(model, prompts, tokens)
    ends = frozenset(eos_ids(model, tokenizer))
    requests = [
        Request(ids, request_seed(seed, first + i, g, 0), sampling, ends)
        for i, ids in enumerate(tokens)
        for g in range(sampling.samples)
    ]
    rows = [row for row in prompts for _ in range(sampling.samples)]
    trajectories = sample_and_score(rows, requests, rewards, generator, tokenizer, seed=(seed, first))
    generator.drop_cache()
    return requests, trajectories


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
    """Sample and score one trajectory per request. Returns them in the order of the requests.

    A group of trajectories is scored as soon as all of its completions are finished. Coroutines of rewards continue
    between two polls of the generator. Groups depend only on the requests, so equal requests give identical results, in
    whatever order completions finish.

    Args:
        rows: the row of each request. The samples of a prompt are adjacent.
        requests: requests that all have the same ``sampling``.
        rewards: rewards, each of which is called once per group.
        generator: a generator with nothing else in flight.
        tokenizer: decodes the completions.
        version: version of the generator's weights.
        seed: seeds the random numbers of rewards, together with the group and the reward's name.
    """
    size = _group_size(requests[0].sampling.samples) if requests else 1
    missing = {start // size: len(requests[start : start + size]) for start in range(0, len(requests), size)}
    trajectories: list[Any] = [None] * len(requests)
    places = {handle: k for k, handle in enumerate(generator.submit(requests, version))}
    with Scorer(rewards, seed) as scorer:
        while places:
            for handle, completion in generator.poll(POLL_SECONDS if scorer.tasks else None):
                k = places.pop(handle)
                progress.report("sampling", len(requests) - len(places), len(requests))
                text = _text(tokenizer, completion)
                trajectories[k] = with_turn(begin(rows[k], requests[k].tokens), completion, text)
                group = k // size
                missing[group] -= 1
                if not missing[group]:
                    scorer.add(group, trajectories[group * size : (group + 1) * size])
            scorer.advance()
        scores = scorer.finish()
    return [t for group in sorted(scores) for t in _with_scores(scorer.groups[group], scores[group])]


def scored(trajectories: list[Trajectory], rewards: list[NamedReward], seed: tuple[int, ...]) -> list[Trajectory]:
    """The trajectories with their scores, in order. A reward is called on at most ``SCORED_TOGETHER`` of them at once.

    ``seed`` seeds the random numbers of rewards, together with the group and the reward's name.
    """
    with Scorer(rewards, seed) as scorer:
        for group, start in enumerate(range(0, len(trajectories), SCORED_TOGETHER)):
            scorer.add(group, trajectories[start : start + SCORED_TOGETHER])
            scorer.advance()
        scores = scorer.finish()
    return [t for group in sorted(scores) for t in _with_scores(scorer.groups[group], scores[group])]


def _group_size(samples: int) -> int:
    return -(-SCORED_TOGETHER // samples) * samples


def _text(tokenizer: Any, completion: Completion) -> str:
    return tokenizer.decode(completion.tokens, skip_special_tokens=True).strip()


def _with_scores(trajectories: list[Trajectory], scores: Scores) -> list[Trajectory]:
    """The trajectories with their scores."""
    return [
        with_scores(
            trajectory,
            scores.totals[k],
            {name: values[k] for name, values in scores.by_name.items()},
            None if scores.tokens is None else scores.tokens[k],
        )
        for k, trajectory in enumerate(trajectories)
    ]
