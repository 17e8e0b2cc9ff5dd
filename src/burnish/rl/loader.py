"""Prompts to optimizer steps: a batch is sampled, scored and given advantages, then passed over in mini-batches.

A method that learns from its own completions has a ``Sampler``, and gives ``RolloutLoader`` two functions: what it
measures of a rollout before the update, and how that becomes advantages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.data.batching import permutation
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Generator, GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math.advantages import Moments
from burnish.math.kl import AdaptiveKL, estimate
from burnish.math.losses import truncated_importance
from burnish.models.adapters import Reference
from burnish.models.forward import SamplingTransform, hidden_states, token_logprobs
from burnish.protocols import Context
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rl.collect import collect
from burnish.rl.metrics import evaluation, sample_rows, summary
from burnish.rl.mismatch import mean_sampler_mismatch, within
from burnish.rl.scores import final_scores
from burnish.rl.trajectory import learned_arrays, with_learned_arrays
from burnish.types import Encoded, Example, MicroBatch, Prompt, Reward, Row, Sequence, Trajectory

if TYPE_CHECKING:
    from burnish.methods.settings import RolloutConfig


class Sampler:
    """How a method's prompts are completed and scored: ``Sampler(brevity, Sampling(max_new_tokens=64))``."""

    def __init__(
        self,
        reward: Reward | list[NamedReward],
        sampling: Sampling | None = None,
        generator: GeneratorFactory | None = None,
    ) -> None:
        self.rewards = reward if isinstance(reward, list) else [NamedReward("reward", 1.0, reward)]
        self.sampling = sampling or Sampling()
        self.factory: GeneratorFactory = generator or LocalGenerator
        self.generator: Generator | None = None
        self.start_scores: dict[str, float] = {}

    def bind(self, context: Context) -> Generator:
        """The generator of the policy's completions, which is made once."""
        if self.generator is None:
            self.generator = self.factory(context.network.policy, context.tokenizer)
        return self.generator

    def check_explores(self) -> None:
        """Raise a UserError where every completion of a prompt would be the same."""
        if self.sampling.temperature == 0:
            raise UserError("generation.temperature: what is learned from is sampled: expected more than 0, got 0")

    @property
    def warp(self) -> SamplingTransform:
        """The distribution that is sampled from."""
        return SamplingTransform(self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Prompts, of which nothing is learned, with room for the completion."""
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Prompt]) -> list[Example]:
            prompts = zip(rows, renderer.prompts(rows), strict=True)
            return [Example((Sequence(tokens, (False,) * len(tokens), row.source),)) for row, tokens in prompts]

        if truncation.max_length is not None:
            room = truncation.max_length - self.sampling.longest
            if room < 1:
                raise UserError(
                    f"data.max_length: {truncation.max_length} leaves no room for a prompt beside a completion "
                    f"of {self.sampling.longest} tokens"
                )
            truncation = truncation.model_copy(update={"max_length": room})
        return encode(rows, to_examples, truncation, cache_key(tokenizer, "prompts"))

    def prompts(self, rows: list[Row], context: Context) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        """The prompts that fit and their tokens, one to one."""
        examples = self.examples(rows, context.tokenizer, context.length).examples
        kept = {example.source for example in examples}
        fitting = [row for row in rows if isinstance(row, Prompt) and row.source in kept]
        assert len(fitting) == len(examples), "every prompt has a source of its own"
        return fitting, [tuple(example.sequences[0].tokens.tolist()) for example in examples]

    def logprobs(
        self, policy: nn.Module, batch: MicroBatch, how: SamplingTransform, hidden: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities (B, T) of the learned tokens; ``hidden`` (B, T, H) are the hidden states, where known."""
        hidden = hidden_states(policy, batch) if hidden is None else hidden
        return token_logprobs(policy, hidden, batch, batch.loss_mask, how, "off")[0]

    def experience(
        self, policy: nn.Module, reference: Reference | None, sampled: bool
    ) -> Callable[..., dict[str, Tensor]]:
        """A function of rollouts and, where known, the policy's hidden states: log-probabilities (B, T) of each token.

        Those of the policy where the sampler's do not serve for them: ``logprobs`` as tokens are sampled, unless
        ``sampled``. With a reference its own, ``ref_logprobs``, and ``kl_logprobs``, the policy's at the same
        temperature, unless they are those of sampling. A policy that is the reference still has the reference's, so
        that its KL is 0.
        """
        # without top-k and top-p, which may leave out of the reference what the policy sampled
        whole = SamplingTransform(self.sampling.temperature or 1.0)
        alike = reference is not None and reference.equals(policy)

        def of(batch: MicroBatch, hidden: Tensor | None = None) -> dict[str, Tensor]:
            arrays = {} if sampled else {"old_logprobs": self.logprobs(policy, batch, self.warp, hidden)}
            if reference is None:
                return arrays
            with reference.use(policy) as model:
                arrays["ref_logprobs"] = self.logprobs(model, batch, whole)
            if alike:
                arrays["kl_logprobs"] = arrays["ref_logprobs"]
            elif whole != self.warp:
                arrays["kl_logprobs"] = self.logprobs(policy, batch, whole, hidden)
            return arrays

        return of

    def evaluate(
        self,
        rows: list[Row],
        context: Context,
        reference: Reference | None,
        how: Literal["sampled", "greedy"] = "sampled",
    ) -> dict[str, float]:
        """Completions of held-out prompts: score, every reward, KL to the reference, lengths, win rate over the start.

        The seeds are the same at every evaluation, so that only the policy differs.
        """
        prompts, tokens = self.prompts(rows, context)
        if not prompts:
            raise UserError("there is nothing to evaluate on: no prompt is short enough")
        greedy = {"temperature": 0.0} if how == "greedy" else {}
        sampling = self.sampling.model_copy(update={"samples": 1, **greedy})
        indices = list(range(len(prompts)))
        trajectories = collect(prompts, tokens, indices, -1, sampling, self.rewards, context, self.bind(context))
        examples = [Example(t.sequences) for t in trajectories]
        if reference is not None:
            measure = self.experience(context.network.policy, reference, sampled=how == "sampled")
            examples = context.annotate(measure, examples)
        metrics = evaluation(trajectories, examples, self.start_scores)
        for t in trajectories:
            self.start_scores.setdefault(t.source, t.score)
        context.samples(sample_rows(trajectories, "eval"))
        return metrics


class Experience(NamedTuple):
    """A batch of N trajectories before its update, in float64: ``Experience(mask, {"old_logprobs": ...}, ...)``.

    ``mask``, every one of ``arrays``, and ``kl``, the estimate of each token's KL to the reference, are (N, L), laid
    out as by ``learned_arrays``: a row holds the sampled tokens of a trajectory and nothing else. ``scores``, as the
    settings scale and clip them, and ``groups``, equal for trajectories of one prompt, are (N,). ``steps`` (N, L) is
    the scaled part of the scores that lies on tokens; None where no reward scores tokens.
    """

    mask: Tensor
    arrays: dict[str, Tensor]
    scores: Tensor
    groups: Tensor
    kl: Tensor
    kl_coef: float
    steps: Tensor | None


class RolloutLoader:
    """Optimizer steps of a method that learns from its own completions.

    Args:
        sampler: completes and scores prompts.
        settings: of the method.
        rows: prompts.
        context: of the run.
        experience: told whether the sampler's log-probabilities serve, gives what measures rollouts before the update:
            (B, T) arrays, ``logprobs`` among them where the sampler's do not.
        advantages: the (N, T) arrays that the loss reads, ``advantages`` among them, and metrics.
        begin: told the number of the iteration before each of its steps.
    """

    def __init__(
        self,
        sampler: Sampler,
        settings: RolloutConfig,
        rows: list[Row],
        context: Context,
        *,
        experience: Callable[[bool], Callable[[MicroBatch], Mapping[str, Tensor]]],
        advantages: Callable[[Experience], tuple[dict[str, Tensor], dict[str, float]]],
        begin: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        s = self.settings = settings
        self.sampler, self.context = sampler, context
        self.experience, self.advantages, self.begin = experience, advantages, begin
        self.rows, self.prompts = sampler.prompts(rows, context)
        self.batch = context.rows_per_step
        samples_each = sampler.sampling.samples
        if len(self.prompts) < self.batch:
            raise UserError(
                f"{len(self.prompts)} prompts are less than one batch of {self.batch}: "
                "lower trainer.per_device_train_batch_size or add prompts"
            )
        for n in {self.batch, len(self.prompts) % self.batch or self.batch}:
            if n * samples_each % s.mini_batches:
                raise UserError(
                    f"method.mini_batches: a batch of {n} prompts x {samples_each} samples does not divide "
                    f"into {s.mini_batches} mini-batches"
                )
        self.kl = AdaptiveKL(s.kl_coef, s.kl_target or 1.0, s.kl_horizon)
        if s.kl_target is not None:
            self.kl.update(0.0, self.batch * samples_each)  # a horizon that is too short is told before sampling
        self.epoch = self.position = self.iteration = self.update = 0
        self.stopped = self.sampled = self.compared = False
        self.moments = Moments()
        self.pending: list[Example] = []

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.batch) * self.settings.epochs * self.settings.mini_batches

    def __iter__(self) -> Iterator[list[Example]]:
        epoch = self.epoch
        order = permutation(len(self.prompts), self.context.seed, epoch)
        while self.epoch == epoch:
            if not self.pending:
                self._collect(order[self.position : self.position + self.batch])
            self.begin(self.iteration)
            examples = [] if self._moved_too_far() else self._mini_batch(self.update)
            self._advance()
            yield examples

    def _collect(self, indices: list[int]) -> None:
        """Sample a batch, score it, and work out what the update needs of it."""
        began = time.perf_counter()
        what = (self.rows, self.prompts, indices, self.iteration, self.sampler.sampling, self.sampler.rewards)
        trajectories = collect(*what, self.context, self.sampler.bind(self.context))
        seconds = time.perf_counter() - began
        examples, gap = self._measured([Example(t.sequences) for t in trajectories])
        found, metrics = self._estimate(trajectories, examples)
        self.pending = with_learned_arrays(examples, **found)
        tokens = sum(len(t.tokens) for t in trajectories)
        self.context.log(
            summary(trajectories)
            | metrics
            | {"sampler_mismatch": gap, "generated_per_second": tokens / seconds, "generation_seconds": seconds}
        )
        if self.iteration % self.settings.show_every == 0:
            self.context.samples(sample_rows(trajectories[:4], "train"))

    def _measured(self, examples: list[Example]) -> tuple[list[Example], float]:
        """Rollouts with what the update needs of them, and the gap between sampler and trainer.

        The policy runs over one rollout in eight, others each time, to see whether the sampler's log-probabilities
        serve; over all of them where the gap is more than rounding, or tokens are weighed by it.
        """
        annotate, limit = self.context.annotate, self.settings.max_sampler_mismatch
        gap, self.sampled, self.compared = 0.0, False, False
        if self.settings.importance_cap is None:
            own = self.sampler.experience(self.context.network.policy, None, sampled=False)
            first = self.iteration % min(CHECKED, len(examples))
            gap = mean_sampler_mismatch(annotate(own, examples[first::CHECKED]), limit)
            self.sampled = gap <= ROUNDING
        examples = annotate(self.experience(self.sampled), examples)
        return examples, gap if self.sampled else mean_sampler_mismatch(examples, limit)

    def _estimate(
        self, trajectories: list[Trajectory], examples: list[Example]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The arrays that the loss reads, (N, L) each, and metrics; the KL coefficient moves on."""
        s = self.settings
        mask, arrays = learned_arrays(examples)
        arrays.setdefault("old_logprobs", arrays["sampler_logprobs"])
        ours, theirs = (arrays.get(name, arrays["old_logprobs"]) for name in ("kl_logprobs", "ref_logprobs"))
        if s.score_normalize:
            self.moments = self.moments.update(torch.tensor([t.score for t in trajectories]))
        moments = self.moments if s.score_normalize else None
        rule = (s.missing_eos, s.missing_eos_penalty or 0.0)
        scores = final_scores(trajectories, s.score_scale, s.score_clip, *rule, moments)
        groups = torch.arange(len(trajectories)) // self.sampler.sampling.samples
        kl = estimate(ours, theirs, s.kl_estimate, mask)
        steps = arrays["step_rewards"] * s.score_scale if "step_rewards" in arrays else None
        if steps is not None and (s.score_normalize or s.score_clip is not None):
            raise UserError(
                "score_normalize and score_clip change the score of a completion and not the rewards of its tokens, "
                "which then no longer add up to it: take them away"
            )
        found, metrics = self.advantages(Experience(mask, arrays, scores, groups, kl, self.kl.coef, steps))
        if s.importance_cap is not None:
            weights = truncated_importance(arrays["old_logprobs"], arrays["sampler_logprobs"], mask, s.importance_cap)
            found["advantages"] = found["advantages"] * weights
        if "ref_logprobs" in arrays:
            mean_kl = estimate(ours, theirs, "k1", mask).sum(1).mean().item()
            penalized = scores.mean().item() - self.kl.coef * mean_kl
            metrics |= {"kl": mean_kl, "kl_coef": self.kl.coef, "rlhf_reward": penalized}
        if s.kl_target is not None:
            self.kl = self.kl.update(metrics["kl"], len(trajectories))
        return found, metrics

    def _mini_batch(self, update: int) -> list[Example]:
        """The examples of one optimizer step; every pass has a fresh permutation of the batch."""
        passed, part = divmod(update, self.settings.mini_batches)
        order = permutation(len(self.pending), self.context.seed, self.iteration, passed, 1)
        size = len(self.pending) // self.settings.mini_batches
        return [self.pending[i] for i in order[part * size : (part + 1) * size]]

    def _advance(self) -> None:
        """Move on before the step is handed out, for a checkpoint that is taken right after it."""
        self.update += 1
        if self.update == self.settings.epochs * self.settings.mini_batches:
            self.pending, self.update, self.stopped = [], 0, False
            self.iteration += 1
            self.position += self.batch
            if self.position >= len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0

    def check(self) -> None:
        """Stop the run, before the first step of an update is taken, if its policy is not the one that sampled.

        The step has compared all tokens of its rollouts for nothing: approxkl is half the mean square of their gaps.
        Where the trainer's own log-probabilities are the old ones, all rollouts were compared before.

        Raises:
            RuntimeError: the root of the mean square, which no mean exceeds, is above the limit.
        """
        if self.sampled and not self.compared:
            self.compared = True
            gap = math.sqrt(2 * self.context.last().get("approxkl", 0.0))
            within(gap, self.settings.max_sampler_mismatch, "in the first step (root of the mean square)")

    def _moved_too_far(self) -> bool:
        """Whether the rest of the update is left out, because the last step took the policy too far."""
        limit = self.settings.target_kl
        if limit is not None and self.update > 0 and not self.stopped:
            self.stopped = self.context.last().get("approxkl", 0.0) > 1.5 * limit
        return self.stopped

    def state_dict(self) -> dict[str, Any]:
        """Place in the prompts and in the update, rollouts not yet used, the KL coefficient, the start's scores."""
        return {name: getattr(self, name) for name in PLACE} | {
            "kl_coef": self.kl.coef,
            "moments": asdict(self.moments),
            "start_scores": dict(self.sampler.start_scores),
            "pending": [example.to_plain() for example in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for name in PLACE:
            setattr(self, name, state[name])
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.moments = Moments(**state["moments"])
        self.sampler.start_scores.clear()
        self.sampler.start_scores.update(state["start_scores"])
        self.pending = [Example.from_plain(plain) for plain in state["pending"]]


CHECKED = 8  # one rollout in so many shows whether the sampler's log-probabilities are the trainer's
ROUNDING = 1e-5  # nats a token: with a larger gap the ratios of an update would not begin at 1
PLACE = ("epoch", "position", "iteration", "update", "batch", "stopped", "sampled", "compared")
