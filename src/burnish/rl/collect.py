"""Samples and scores trajectories. Completions are scored while others are still being sampled."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish import progress
from burnish.errors import UserError
from burnish.generate.protocol import Generator, Request, request_seed
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.models.limits import check_room, context_window
from burnish.models.loaded import Loaded
from burnish.protocols import Engine, Run
from burnish.render.encode import AllSkippedError, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import Scorer, Scores
from burnish.rl.ahead import Progress, Steps, finished
from burnish.rl.environment import Environments
from burnish.rl.episodes import POLL_SECONDS, Patience, Rollouts
from burnish.rl.trajectory import with_scores
from burnish.types import Changed, Encoded, Example, Prompt, Row, Sequence, Trajectory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SCORED_TOGETHER = 64
"""Number of trajectories per call of a reward, rounded up to whole prompts.

Small enough for scoring to start early, and large enough for a reward model's batch.
"""


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
    environments: Environments | None = None,
) -> list[Trajectory]:
    """Sample ``sampling.samples`` completions of each prompt in ``indices`` with the current weights, and score them.

    Processes share the work, and each returns all trajectories, in the order of ``indices`` and then of samples. Each
    completion has its own seed, derived from (run seed, prompt, sample, iteration), and each call of a reward from (run
    seed, iteration, sampling round, process, group, name). Dynamic sampling has several rounds in an iteration.
    """
    what = rows, prompts, indices, iteration, sampling, rewards, engine, run, generator, sampling_round, environments
    return finished(collecting(*what))


def collecting(
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
    environments: Environments | None = None,
    weights: tuple[int, Iterable[tuple[str, Tensor]]] | None = None,
    patience: Patience = lambda: None,
) -> Steps[list[Trajectory]]:
    """As ``collect``, in steps. ``weights`` are those to sample with, and their version; by default the current ones.

    ``patience`` returns the number of seconds that the next step may wait.
    """
    samples = range(sampling.samples)
    mine = [i for i in indices[engine.rank :: engine.world_size] for _ in samples]
    stop_ids = frozenset(eos_ids(engine.network.policy, run.tokenizer))
    requests = [
        Request(prompts[i], request_seed(run.seed, i, k % len(samples), iteration), sampling, stop_ids)
        for k, i in enumerate(mine)
    ]
    version, tensors = weights or (iteration, engine.weights())
    generator.update_weights(version, tensors)
    trajectories = yield from sampling_and_scoring(
        [rows[i] for i in mine],
        requests,
        rewards,
        generator,
        run.tokenizer,
        environments,
        version=version,
        context=context_window(engine.network.policy),
        seed=(run.seed, iteration, sampling_round, engine.rank),
        patience=patience,
    )
    generator.drop_cache()
    if engine.world_size > 1:
        yield Progress.TOGETHER
    parts = engine.gather(trajectories)
    return [
        parts[k % engine.world_size][k // engine.world_size * len(samples) + g]
        for k in range(len(indices))
        for g in samples
    ]


class Sampled(NamedTuple):
    """The completions of a prompt: ``Sampled(17, requests, trajectories)``, with the index of its row."""

    index: int
    requests: list[Request]
    trajectories: list[Trajectory]


def sample_prompts(
    prompts: list[Prompt],
    first: int,
    loaded: Loaded,
    generator: Generator,
    sampling: Sampling,
    truncation: Truncation,
    rewards: list[NamedReward],
    seed: int,
    environments: Environments | None = None,
) -> tuple[list[Sampled], list[Changed]]:
    """Sample ``sampling.samples`` completions of each prompt, and score them.

    The seeds follow from the index of the first prompt, so that a chunk of prompts always gives the same completions,
    whether or not this process has sampled the chunks before it.

    Returns:
        The completions of each prompt, in order, and the prompts that were skipped, dropped or shortened.

    Raises:
        UserError: if a prompt leaves no room for a completion.
    """
    prompts = with_tools(prompts, environments, loaded.tokenizer)
    kept, changed = prompts_of_chunk(prompts, first, loaded, truncation, sampling.longest)
    ends, requests = frozenset(eos_ids(loaded.model, loaded.tokenizer)), []
    for index, _, tokens in kept:
        seeds = [request_seed(seed, index, g, 0) for g in range(sampling.samples)]
        requests.append([Request(tokens, one, sampling, ends) for one in seeds])
    flat = [request for group in requests for request in group]
    rows = [row for _, row, _ in kept for _ in range(sampling.samples)]
    trajectories = sample_and_score(
        rows,
        flat,
        rewards,
        generator,
        loaded.tokenizer,
        environments,
        context=context_window(loaded.model),
        seed=(seed, first),
    )
    generator.drop_cache()
    groups = [trajectories[k : k + sampling.samples] for k in range(0, len(trajectories), sampling.samples)]
    indices = [index for index, _, _ in kept]
    return [Sampled(*one) for one in zip(indices, requests, groups, strict=True)], changed


class Encodable(NamedTuple):
    """A prompt that the model can complete: ``Encodable(17, row, (1, 9, 8))``, with the index of its row."""

    index: int
    row: Prompt
    tokens: tuple[int, ...]


def prompts_of_chunk(
    prompts: list[Prompt], first: int, loaded: Loaded, truncation: Truncation, completion: int
) -> tuple[list[Encodable], list[Changed]]:
    """Encode a chunk of prompts, the first of which has the index ``first``, leaving room for a completion.

    Returns:
        The prompts that can be completed, and those that were skipped, dropped or shortened.

    Raises:
        UserError: if a prompt leaves no room for a completion.
    """
    try:
        examples, changed = encode_prompts(list(prompts), loaded.tokenizer, truncation, completion)
    except AllSkippedError as error:  # other chunks may have prompts that can be encoded
        examples, changed = [], error.changed
    kept, at = [], 0
    for example in examples:
        while prompts[at] is not example.row:  # it was left out
            at += 1
        kept.append(Encodable(first + at, prompts[at], tuple(example.sequences[0].tokens.tolist())))
        at += 1
    check_room(loaded.model, [row for _, row, _ in kept], [tokens for _, _, tokens in kept])
    return kept, changed


def encode_prompts(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation, completion: int, key: str | None = None
) -> Encoded:
    """Encode prompts, leaving room for a completion of this many tokens. No token of a prompt is learned.

    ``key`` is that of the cache of encoded rows; None disables it.

    Raises:
        UserError: as in ``encode``; or no room is left for a prompt.
    """
    renderer = Renderer(tokenizer)

    def to_examples(rows: list[Prompt]) -> list[Example]:
        prompts = zip(rows, renderer.prompts(rows), strict=True)
        return [Example((Sequence(tokens, (False,) * len(tokens), row.source),)) for row, tokens in prompts]

    if truncation.max_length is not None and truncation.max_length <= completion:
        raise UserError(
            f"data.max_length: {truncation.max_length} leaves no room for a prompt before a completion "
            f"of {completion} tokens"
        )
    return encode(rows, to_examples, truncation, key, completion)


def with_tools(
    prompts: list[Prompt], environments: Environments | None, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The prompts with the tools of their environments, if the chat template shows tools.

    Raises:
        UserError: as in ``Environments.tools_of``.
    """
    if environments is None or environments.turns:
        return prompts
    if Renderer(tokenizer).template.reads("tools"):
        return [replace(prompt, tools=environments.tools_of(prompt)) for prompt in prompts]
    logger.warning(
        "the chat template does not show tools: describe them in the prompts; the model calls one as "
        "<tool>name(arguments)</tool>, and its result is a message of the user"
    )
    return prompts


def sample_and_score(
    rows: list[Prompt],
    requests: list[Request],
    rewards: list[NamedReward],
    generator: Generator,
    tokenizer: Any,
    environments: Environments | None = None,
    *,
    version: int = 0,
    context: int | None = None,
    seed: tuple[int, ...] = (),
) -> list[Trajectory]:
    """Sample and score one trajectory per request. Returns them in the order of the requests.

    A group of trajectories is scored as soon as all of them have ended. Coroutines of rewards continue between two
    polls of the generator. Groups depend only on the requests, so equal requests give identical results, in whatever
    order completions finish.

    Args:
        rows: the row of each request. The samples of a prompt are adjacent.
        requests: requests that all have the same ``sampling``.
        rewards: rewards, each of which is called once per group. That of the environments is one of them.
        generator: a generator with nothing else in flight.
        tokenizer: decodes the completions.
        environments: answer the policy's turns; None for completions of one turn.
        version: version of the generator's weights.
        context: the model's context window; None if it has no limit.
        seed: seeds the random numbers of rewards, together with the group and the reward's name.
    """
    given = rows, requests, rewards, generator, tokenizer, environments
    return finished(sampling_and_scoring(*given, version=version, context=context, seed=seed))


def sampling_and_scoring(
    rows: list[Prompt],
    requests: list[Request],
    rewards: list[NamedReward],
    generator: Generator,
    tokenizer: Any,
    environments: Environments | None,
    *,
    version: int,
    context: int | None,
    seed: tuple[int, ...],
    patience: Patience = lambda: None,
) -> Steps[list[Trajectory]]:
    """As ``sample_and_score``, in steps. ``patience`` returns the number of seconds that the next step may wait."""
    size = _group_size(requests[0].sampling.samples) if requests else 1
    missing = {start // size: len(requests[start : start + size]) for start in range(0, len(requests), size)}
    trajectories: list[Any] = [None] * len(requests)
    ended = 0
    with Scorer(rewards, seed) as scorer:

        def until_next() -> float | None:
            seconds = patience()
            return POLL_SECONDS if scorer.tasks and seconds is None else seconds

        rollouts = Rollouts(rows, requests, generator, tokenizer, environments, version, context, until_next)
        for some in rollouts:
            for k, trajectory in some:
                ended += 1
                progress.report("sampling", ended, len(requests))
                trajectories[k] = trajectory
                group = k // size
                missing[group] -= 1
                if not missing[group]:
                    scorer.add(group, trajectories[group * size : (group + 1) * size])
            scorer.advance()
            yield Progress.WAITING if rollouts.waits else Progress.MADE
        while scorer.tasks:
            scorer.advance(wait=patience() != 0)
            yield Progress.WAITING
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
