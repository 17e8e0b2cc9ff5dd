"""Distillation: a student learns the distributions of a larger model with the same tokenizer (Agarwal et al. 2024)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.errors import UserError
from burnish.generate.protocol import GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math.reductions import reduce
from burnish.math.statistics import interval_of_rows
from burnish.methods import METHODS
from burnish.methods.settings import DistillConfig
from burnish.models import loaded
from burnish.models.distillation import Teacher
from burnish.models.heads import Network, disable_dropout
from burnish.models.loaded import Loaded
from burnish.models.settings import ModelSource
from burnish.protocols import Engine, Method, Run
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rl.collect import collect
from burnish.rl.loader import CHECK_EVERY, Sampler, are_prompts, rows_and_tokens
from burnish.rl.metrics import evaluation, row_sums, sample_rows, summary
from burnish.rl.mismatch import limit_of, mean_sampler_mismatch
from burnish.types import Conversation, Encoded, Example, MicroBatch, Prompt, Row, Terms, Trajectory

T = TypeVar("T")

OF_PROMPTS = ("max_sampler_mismatch", "show_every")
"""Settings that conversations do not use."""
OF_SCORES = ("score", "score_low", "score_high", "score_std", "ties")
"""What completions have for methods that learn from rewards."""


class Distill(Method):
    """L = sum_t D(teacher, student)_t / number of learned tokens, with a divergence D over the whole vocabulary.

    Prompts are on-policy: in each optimizer step, the student completes a batch of them, and learns from the teacher's
    distributions at every token of its own completions. Conversations are off-policy: it learns them at the tokens of
    the assistant. Rewards of completions are measured, but not learned from.

    Args:
        reward: rewards to measure, with weight 0.
        sampling: how prompts are completed.
        generator: makes the generator of completions.
        load: loads the teacher that the settings name. By default, that must be a folder or a hub id.
        settings: of ``DistillConfig``.
    """

    spec = METHODS["distill"]

    def __init__(
        self,
        reward: list[NamedReward] | None = None,
        sampling: Sampling | None = None,
        generator: GeneratorFactory | None = None,
        load: Callable[[ModelSource], Loaded] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = DistillConfig(**settings)
        self.sampler = Sampler(reward or [], sampling, generator)
        self.load = load or _load
        self._teacher: Teacher | None = None
        if weighted := [one.name for one in self.sampler.rewards if one.weight]:
            raise UserError(
                f"reward {weighted[0]}: distill learns from the teacher alone: set weight: 0 to measure the reward"
            )
        self._check_sampling()

    def _check_sampling(self) -> None:
        sampling, s = self.sampler.sampling, self.settings
        if sampling.temperature == 0 and sampling.samples > 1:
            raise UserError(
                f"generation.samples: greedy decoding gives the same completion every time, got {sampling.samples}: "
                "set generation.temperature above 0, or samples to 1"
            )
        if s.divergence != "sampled":
            return
        if sampling.top_k is not None or sampling.top_p is not None:
            raise UserError(
                "method.divergence: sampled estimates the KL of the whole distribution, but generation.top_k and "
                "generation.top_p sample from a part of it: remove them, or set divergence: reverse"
            )
        if sampling.temperature != s.temperature:
            raise UserError(
                f"method.temperature: divergence sampled needs the temperature of the sampled tokens, which is "
                f"generation.temperature {sampling.temperature:g}, got {s.temperature:g}"
            )

    @property
    def teacher(self) -> Teacher:
        """The teacher, which ``prepare`` loads."""
        assert self._teacher is not None
        return self._teacher

    @property
    def weights(self) -> dict[str, float]:
        """The divergence alone."""
        return {"divergence": 1.0}

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """Load the teacher. The student is trained without dropout."""
        self._teacher = Teacher(self.load(self.settings.teacher), model, tokenizer)
        return Network(disable_dropout(model), frozen=(self.teacher.model,))

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Encode prompts with room for a completion, or conversations with the turns of the assistant as in SFT."""
        if are_prompts(rows):
            return self.sampler.examples(rows, tokenizer, truncation)
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Conversation]) -> list[Example]:
            return [Example(sequences) for sequences in renderer.learned_turns(rows, None, True)]

        return encode(rows, to_examples, truncation, cache_key(tokenizer, self.spec.name))

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Rows in a seeded order. Each step of prompts is completed by the student."""
        if not _encoded_prompts(examples):
            self._check_conversations(examples)
            return RowLoader(examples, run.rows_per_step, run.seed)
        rows, prompts = rows_and_tokens(examples)
        kept = {"iteration": 0.0}
        places = {id(example): i for i, example in enumerate(examples)}

        def complete(step: list[Example]) -> list[Example]:
            iteration = int(kept["iteration"])
            kept["iteration"] += 1
            began = time.perf_counter()
            indices = [places[id(example)] for example in step]
            trajectories = self._complete(rows, prompts, indices, iteration, engine, run)
            seconds = time.perf_counter() - began
            rollouts = [Example(t.sequences) for t in trajectories]
            self.teacher.check(s for rollout in rollouts for s in rollout.sequences)
            own = self.sampler.logprobs_of(engine.network.policy, None, use_sampler_logprobs=False)
            some = engine.run(own, rollouts[iteration % min(CHECK_EVERY, len(rollouts)) :: CHECK_EVERY])
            tokens = sum(len(t.tokens) for t in trajectories)
            speed = {"generated_per_second": tokens / seconds, "generation_seconds": seconds}
            limit = limit_of(self.settings.max_sampler_mismatch, engine.in_half)
            mismatch = mean_sampler_mismatch(some, limit)
            run.log(_without_score(summary(trajectories)) | speed | {"sampler_mismatch": mismatch})
            if iteration % self.settings.show_every == 0:
                run.samples([_without_score(row) for row in sample_rows(trajectories[:4], "train", run.tokenizer)])
            return rollouts

        return RowLoader(examples, run.rows_per_step, run.seed, complete, kept)

    def _complete(
        self,
        rows: list[Prompt],
        prompts: list[tuple[int, ...]],
        indices: list[int],
        iteration: int,
        engine: Engine,
        run: Run,
        **changes: Any,
    ) -> list[Trajectory]:
        """The student's completions of prompts, with their rewards. ``changes`` are to the sampling settings."""
        sampling = self.sampler.sampling.model_copy(update=changes)
        generator = self.sampler.bind(engine, run)
        return collect(rows, prompts, indices, iteration, sampling, self.sampler.rewards, engine, run, generator)

    def _check_conversations(self, examples: list[Example]) -> None:
        s = self.settings
        if s.divergence == "sampled":
            raise UserError(
                "method.divergence: sampled learns from tokens that the student sampled, but the rows are "
                "conversations: set forward, reverse or jensen_shannon, or give prompts"
            )
        if ignored := [name for name in OF_PROMPTS if name in s.model_fields_set]:
            raise UserError(f"method.{ignored[0]} belongs to prompts, but the rows are conversations: remove this key")
        self.teacher.check(s for example in examples for s in example.sequences)

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The divergence as a mean over learned tokens and, as metrics, the KL divergence in both directions."""
        s = self.settings
        found = self.teacher.divergences(network.policy, batch, s.divergence, s.beta, s.temperature)
        return {
            "divergence": reduce(found.loss, batch.loss_mask).over("tokens"),
            "forward_kl": reduce(found.forward_kl, batch.loss_mask),
            "reverse_kl": reduce(found.reverse_kl, batch.loss_mask),
        }

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """The divergences with their intervals: of conversations, or of the student's completions of prompts.

        Every evaluation completes prompts with the same seeds. Then lengths and rewards are measured too.
        """
        others, rows_of_others = {}, {}
        if _encoded_prompts(examples):
            rows, prompts = rows_and_tokens(examples)
            trajectories = self._complete(rows, prompts, list(range(len(rows))), -1, engine, run, samples=1)
            examples = [Example(t.sequences) for t in trajectories]
            others = _without_score(evaluation(trajectories, examples, {}))
            rows_of_others = _without_score(row_sums(trajectories, examples))
            run.samples([_without_score(row) for row in sample_rows(trajectories, "eval", run.tokenizer)])
        self.teacher.check(s for example in examples for s in example.sequences)
        metrics, measured = engine.evaluate(self, examples)
        run.measured(measured | rows_of_others)
        for name in ("forward_kl", "reverse_kl"):
            if (ends := interval_of_rows(measured[name])) is not None:
                metrics |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
        return metrics | others

    def close(self) -> None:
        """Close the generator."""
        self.sampler.close()


def _load(source: ModelSource) -> Loaded:
    if not isinstance(source, str):
        raise UserError(
            f"method.teacher: only a recipe has stages and packages: expected a folder or a hub id: {source}"
        )
    return loaded.load(source)


def _without_score(values: dict[str, T]) -> dict[str, T]:
    return {name: value for name, value in values.items() if name not in OF_SCORES}


def _encoded_prompts(examples: list[Example]) -> bool:
    return bool(examples) and examples[0].row is not None
