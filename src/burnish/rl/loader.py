"""Turns prompts into optimizer steps: samples and scores a batch, computes advantages, and splits it into mini-batches.

A method that learns from its own completions has a ``Sampler``. It passes two functions to ``RolloutLoader``: one that
computes log-probabilities and values of rollouts before the update, and the advantage estimator. The order of the steps
is in ``RolloutLoader._collect``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import permutation
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Generator, GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math.advantages import Moments, overlong_penalty, token_rewards, whiten
from burnish.math.kl import AdaptiveKL, estimate
from burnish.math.policy import correction_weights, effective_sample_size
from burnish.models.adapters import Reference
from burnish.models.forward import SamplingTransform, hidden_states, token_logprobs, unwrap
from burnish.protocols import Engine, Run, StepLoader
from burnish.render.encode import cache_key
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rl.ahead import Ahead, Plan, SampledBatch, Steps, finished
from burnish.rl.collect import collect, collecting, encode_prompts, with_tools
from burnish.rl.environment import Environments
from burnish.rl.metrics import evaluation, row_sums, sample_rows, summary, value_metrics
from burnish.rl.mismatch import limit_of, mean_sampler_mismatch, within
from burnish.rl.scores import final_scores
from burnish.rl.trajectory import from_plain, learned_arrays, shares, to_plain, with_learned_arrays
from burnish.types import Encoded, Example, MicroBatch, Prompt, Reward, Row, Trajectory

if TYPE_CHECKING:
    from burnish.methods.settings import PolicyGradientConfig


class Sampler:
    """Completes a method's prompts and scores the completions: ``Sampler(brevity, Sampling(max_new_tokens=64))``."""

    def __init__(
        self,
        reward: Reward | list[NamedReward],
        sampling: Sampling | None = None,
        generator: GeneratorFactory | None = None,
        environments: Environments | None = None,
    ) -> None:
        rewards = reward if isinstance(reward, list) else [NamedReward("reward", 1.0, reward)]
        self.rewards = rewards if environments is None else environments.rewards(rewards)
        self.environments = environments
        self.sampling = sampling or Sampling()
        self.factory: GeneratorFactory = generator or LocalGenerator
        self.generator: Generator | None = None
        self.ahead = Ahead()
        self.start_scores: dict[str, float] = {}

    @property
    def longest(self) -> int:
        """The maximum number of sampled tokens of a trajectory."""
        if self.environments is None:
            return self.sampling.longest
        limits, every = self.environments.limits, self.environments.limits.max_turns * self.sampling.longest
        return every if limits.max_tokens is None else min(every, limits.max_tokens)

    def bind(self, engine: Engine, run: Run) -> Generator:
        """Return the generator of the policy's completions, which is created on the first call."""
        if self.generator is None:
            self.generator = self.factory(engine.generation_model, run.tokenizer)
        return self.generator

    def close(self) -> None:
        """Cancel batches in flight, and close the generator, if it was created. This ends its processes."""
        self.ahead.close()
        if self.generator is not None:
            self.generator.close()
            self.generator = None

    def check_rewards(self) -> None:
        """Raise a UserError if there is no reward."""
        if not self.rewards:
            raise UserError(
                "prompts need a reward that scores their completions: set reward:, or give rows with text and reward"
            )

    def check_explores(self) -> None:
        """Raise a UserError if all completions of a prompt would be the same."""
        if self.sampling.temperature == 0:
            raise UserError(
                "generation.temperature: expected more than 0, got 0: greedy decoding gives the same completion every "
                "time, so there is nothing to compare"
            )

    @property
    def transform(self) -> SamplingTransform:
        """The temperature, top-k and top-p that define the sampling distribution."""
        return SamplingTransform(self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Encode prompts, leaving room for the completion. No token of a prompt is learned."""
        prompts = [row for row in rows if isinstance(row, Prompt)]
        shown: list[Row] = [*with_tools(prompts, self.environments, tokenizer)]
        return encode_prompts(shown, tokenizer, truncation, self.sampling.longest, cache_key(tokenizer, "prompts"))

    def logprobs(
        self, policy: nn.Module, batch: MicroBatch, transform: SamplingTransform, hidden: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities (B, T) of the learned tokens. ``hidden`` (B, T, H) avoids a second forward pass."""
        hidden = hidden_states(policy, batch) if hidden is None else hidden
        return token_logprobs(policy, hidden, batch, transform, "off")[0]

    def logprobs_of(
        self, policy: nn.Module, reference: Reference | None, use_sampler_logprobs: bool
    ) -> Callable[..., dict[str, Tensor]]:
        """Return a function that computes log-probabilities (B, T) of a micro-batch of rollouts.

        The function takes the micro-batch and, optionally, the policy's hidden states. It returns

        - ``old_logprobs``: the policy's, under the sampling distribution. Omitted with ``use_sampler_logprobs``.
        - ``ref_logprobs``: the reference's, at the sampling temperature but without top-k and top-p. Omitted without a
          reference.
        - ``kl_logprobs``: the policy's, under the same distribution as ``ref_logprobs``. Omitted if that is the
          sampling distribution. If policy and reference are equal, these are the reference's, so the KL is exactly 0.
        """
        # Under top-k or top-p, the reference could give probability 0 to a token that the policy sampled.
        full = SamplingTransform(self.sampling.temperature or 1.0)
        equal = reference is not None and reference.equals(policy)

        def of(batch: MicroBatch, hidden: Tensor | None = None) -> dict[str, Tensor]:
            arrays: dict[str, Tensor] = {}
            if not use_sampler_logprobs:
                arrays["old_logprobs"] = self.logprobs(policy, batch, self.transform, hidden)
            if reference is None:
                return arrays
            with reference.use(policy) as model:
                arrays["ref_logprobs"] = self.logprobs(model, batch, full)
            if equal:
                arrays["kl_logprobs"] = arrays["ref_logprobs"]
            elif full != self.transform:
                arrays["kl_logprobs"] = self.logprobs(policy, batch, full, hidden)
            return arrays

        return of

    def evaluate(
        self,
        examples: list[Example],
        engine: Engine,
        run: Run,
        reference: Reference | None,
        decoding: Literal["sampled", "greedy"] = "sampled",
    ) -> dict[str, float]:
        """Complete held-out prompts and measure score, rewards, KL, lengths, and win rate against the initial policy.

        Every evaluation uses the same seeds, so that only the policy differs. Batches in flight are finished first.
        """
        if not examples:
            raise UserError("there are no prompts to evaluate on: all of them are longer than data.max_length allows")
        rows, prompts = rows_and_tokens(examples)
        greedy = {"temperature": 0.0} if decoding == "greedy" else {}
        sampling = self.sampling.model_copy(update={"samples": 1, **greedy})
        indices = list(range(len(prompts)))
        self.ahead.finish()
        generator = self.bind(engine, run)
        trajectories = collect(
            rows,
            prompts,
            indices,
            -1,
            sampling,
            self.rewards,
            engine,
            run,
            generator,
            environments=self.environments,
        )
        rollouts = [Example(t.sequences) for t in trajectories]
        if reference is not None:
            measure = self.logprobs_of(engine.network.policy, reference, use_sampler_logprobs=decoding == "sampled")
            rollouts = engine.run(measure, rollouts)
        metrics = evaluation(trajectories, rollouts, self.start_scores)
        run.measured(row_sums(trajectories, rollouts))
        for t in trajectories:
            self.start_scores.setdefault(t.source, t.score)
        run.samples(sample_rows(trajectories, "eval", run.tokenizer))
        return metrics


def are_prompts(rows: list[Row]) -> bool:
    """Whether rows are prompts, as opposed to rows of another kind.

    Raises:
        UserError: if there are both.
    """
    other = next((row for row in rows if type(row) is not type(rows[0])), None)
    if other is not None:
        raise UserError(
            f"{rows[0].source} is a {type(rows[0]).__name__} row and {other.source} a {type(other).__name__} row: "
            "expected rows of one kind"
        )
    return bool(rows) and isinstance(rows[0], Prompt)


def rows_and_tokens(examples: list[Example]) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """The row and the token ids of each encoded prompt."""
    rows = [example.row for example in examples if example.row is not None]
    assert len(rows) == len(examples), "an encoded prompt keeps its row"
    return rows, [tuple(example.sequences[0].tokens.tolist()) for example in examples]


class RolloutLoader(StepLoader):
    """Optimizer steps of a method that learns from its own completions.

    Args:
        sampler: completes and scores prompts.
        settings: settings of the method.
        examples: encoded prompts.
        engine: holds the policy.
        run: the run that the steps belong to.
        measure: takes whether the sampler's log-probabilities are used as ``old_logprobs``. Returns a function that
            computes (B, T) arrays of a micro-batch of rollouts before the update: ``old_logprobs``, unless the
            sampler's are used, and ``values``, if there is a critic.
        estimator: computes advantages (N, L), and returns (N, L) or None, from rewards (N, L), mask (N, L), groups (N,)
            and values (N, L) or None. Each row is a trajectory, as in ``learned_arrays``.
        begin: called with the number of the iteration before each of its steps.
    """

    def __init__(
        self,
        sampler: Sampler,
        settings: PolicyGradientConfig,
        examples: list[Example],
        engine: Engine,
        run: Run,
        *,
        measure: Callable[[bool], Callable[[MicroBatch], Mapping[str, Tensor]]],
        estimator: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
        begin: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        s = self.settings = settings
        self.sampler, self.engine, self.run = sampler, engine, run
        self.measure, self.estimator, self.begin = measure, estimator, begin
        self.rows, self.prompts = rows_and_tokens(examples)
        self.batch = run.rows_per_step
        samples_each = sampler.sampling.samples
        if len(self.prompts) < self.batch:
            raise UserError(
                f"{len(self.prompts)} prompts do not fill one batch of {self.batch}: "
                "lower trainer.per_device_train_batch_size or add prompts"
            )
        for n in {self.batch, len(self.prompts) % self.batch or self.batch}:
            if n * samples_each % s.mini_batches:
                raise UserError(
                    f"method.mini_batches: a batch of {n} prompts x {samples_each} samples cannot be divided "
                    f"into {s.mini_batches} equal mini-batches"
                )
        self.kl = AdaptiveKL(s.kl_coef, s.kl_target or 1.0, s.kl_horizon)
        if s.kl_target is not None:
            self.kl.update(0.0, self.batch * samples_each)  # raises now, before sampling, if the horizon is too short
        self.epoch = self.position = self.iteration = self.update = 0
        self.stopped = self.use_sampler_logprobs = self.mismatch_checked = False
        self.moments = Moments()
        self.pending: list[Example] = []
        self.ahead = sampler.ahead
        self.ahead.in_rounds = s.dynamic_sampling > 0
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.correction: dict[str, Any] | None = None
        if s.max_staleness:
            engine.between = self.ahead.advance

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in which all prompts are sampled once."""
        return -(-len(self.prompts) // self.batch)

    @property
    def steps_per_iteration(self) -> int:
        """The number of optimizer steps that learn from a batch."""
        return self.settings.epochs * self.settings.mini_batches

    def __len__(self) -> int:
        return self.batches_per_epoch * self.steps_per_iteration

    def __iter__(self) -> Iterator[list[Example]]:
        epoch = self.epoch
        order = permutation(len(self.prompts), self.run.seed, epoch)
        while self.epoch == epoch:
            self.ahead.check()
            if not self.pending:
                self._collect(order[self.position : self.position + self.batch])
            self.begin(self.iteration)
            stopped = self._moved_too_far()
            if self.settings.target_kl is not None:
                self.run.log({"stopped_fraction": float(stopped)})
            examples = [] if stopped else self._mini_batch(self.update)
            self._advance()
            yield examples

    def _collect(self, indices: list[int]) -> None:
        """Prepare a batch for its update, from prompts to advantages."""
        # 1. Completions of the prompts, and their scores.
        (trajectories, metrics), staleness = self._sampled(indices)
        # 2. Log-probabilities of the policy and the reference, and values.
        examples, mismatch = self._measured([Example(t.sequences) for t in trajectories], staleness)
        metrics |= summary(trajectories) | {"sampler_mismatch": mismatch}
        mask, arrays = learned_arrays(examples)
        arrays.setdefault("old_logprobs", arrays["sampler_logprobs"])
        # 3. Token rewards: the score at the last token, minus the KL penalty.
        rewards = self._rewards(trajectories, mask, arrays, metrics)
        # 4. Advantages and returns, over the whole batch.
        learned = self._advantages(rewards, mask, arrays, metrics)
        if any(sum(s.loss_mask.any() for s in example.sequences) > 1 for example in examples):
            learned["share"] = shares(examples)
        self.pending = with_learned_arrays(examples, **learned)
        self.run.log(metrics)
        if self.iteration % self.settings.show_every == 0:
            self.run.samples(sample_rows(trajectories[:4], "train", self.run.tokenizer))

    def _sampled(self, indices: list[int]) -> tuple[SampledBatch, int]:
        """The rollouts of this iteration, and how many updates old the weights are that they were sampled with.

        With ``max_staleness``, the next batches are submitted first, with the current weights, and this one was
        submitted before. This depends on counts alone, never on time. No batch is submitted that training will not use.
        """
        ahead, k = self.settings.max_staleness, self.iteration
        if not ahead:
            return finished(self._sampling(Plan(k, k, tuple(indices)))), 0
        last = -(-self.run.steps // self.steps_per_iteration)
        for number in range(k + len(self.ahead), max(min(k + ahead + 1, last), k + 1)):
            if k not in self.weights:
                self.weights[k] = {n: w.detach().to("cpu", copy=True) for n, w in self.engine.weights()}
            plan = Plan(number, k, self._indices(number))
            self.ahead.submit(plan, self._sampling(plan))
        began = time.perf_counter()
        plan, sampled = self.ahead.take()
        waited = time.perf_counter() - began
        self.ahead.advance()  # the generator is idle: it begins the next batch
        assert (plan.iteration, plan.indices) == (k, tuple(indices)), "batches are taken in order"
        needed = {other.version for other, result in self.ahead.plans() if result is None}
        self.weights = {version: tensors for version, tensors in self.weights.items() if version in needed}
        own = {"staleness": float(k - plan.version), "waiting_seconds": waited}
        return sampled._replace(metrics=sampled.metrics | own), k - plan.version

    def _indices(self, number: int) -> tuple[int, ...]:
        """The prompts of a batch."""
        epoch, place = divmod(number, self.batches_per_epoch)
        order = permutation(len(self.prompts), self.run.seed, epoch)
        return tuple(order[place * self.batch : (place + 1) * self.batch])

    def _sampling(self, plan: Plan) -> Steps[SampledBatch]:
        """Complete and score prompts. Returns trajectories in the order of the plan, and metrics of sampling.

        With dynamic sampling, a prompt whose completions all have the same score is replaced by one from outside the
        batch. The order of replacements depends only on the seed and the iteration, and an interrupted iteration is
        sampled again, so a run resumes exactly.
        """
        began = time.perf_counter()
        groups = drawn = yield from self._completing(plan, list(plan.indices))
        replaced: list[int] = []
        if self.settings.dynamic_sampling:
            order = permutation(len(self.prompts), self.run.seed, plan.iteration, 2)
            others = [i for i in order if i not in set(plan.indices)]
            for sampling_round in range(1, self.settings.dynamic_sampling + 1):
                equal = [k for k, group in enumerate(groups) if len({t.score for t in group}) == 1]
                chosen = others[len(replaced) :][: len(equal)]
                if not chosen:
                    break
                fresh = yield from self._completing(plan, chosen, sampling_round)
                replaced, drawn = replaced + chosen, drawn + fresh
                by_place = dict(zip(equal, fresh, strict=False))  # there may be fewer prompts left than are needed
                groups = [by_place.get(k, group) for k, group in enumerate(groups)]
        seconds = time.perf_counter() - began
        tokens = sum(len(t.tokens) for group in drawn for t in group)
        metrics = {"generated_per_second": tokens / seconds, "generation_seconds": seconds}
        if self.settings.dynamic_sampling:
            scores = [t.score for group in drawn for t in group]
            metrics |= {"replaced_prompts": float(len(replaced)), "score_drawn": sum(scores) / len(scores)}
        return SampledBatch([t for group in groups for t in group], metrics)

    def _completing(self, plan: Plan, indices: list[int], sampling_round: int = 0) -> Steps[list[list[Trajectory]]]:
        """Complete and score prompts with the weights of a plan. Returns the trajectories of each prompt."""
        what = (self.rows, self.prompts, indices, plan.iteration, self.sampler.sampling, self.sampler.rewards)
        generator = self._generator()
        weights: Iterable[tuple[str, Tensor]] = self.engine.weights()
        if self.settings.max_staleness:
            weights = self.weights[plan.version].items()
        trajectories = yield from collecting(
            *what,
            self.engine,
            self.run,
            generator,
            sampling_round,
            self.sampler.environments,
            (plan.version, weights),
            self.ahead.patience,
        )
        each = self.sampler.sampling.samples
        return [trajectories[k : k + each] for k in range(0, len(trajectories), each)]

    def _generator(self) -> Generator:
        """The generator, which must work while the trainer computes if batches are sampled ahead.

        Raises:
            UserError: if it does not.
        """
        generator = self.sampler.bind(self.engine, self.run)
        if self.settings.max_staleness and not getattr(generator, "overlaps", False):
            raise UserError(
                f"method.max_staleness: {self.settings.max_staleness} needs a generator that samples while the policy "
                f"is updated, such as generator: {{name: process}}; {type(generator).__name__} samples in this process"
            )
        return generator

    def _measured(self, examples: list[Example], staleness: int) -> tuple[list[Example], float]:
        """Add log-probabilities and values to rollouts. Also returns the mismatch between sampler and trainer.

        First, the policy recomputes the log-probabilities of one rollout in eight, different ones in each iteration. If
        they differ from the sampler's only by rounding, the sampler's are used for the whole batch. Otherwise, or if
        ``correction`` needs both, the policy recomputes all of them. Rollouts of older weights are always corrected.
        Those of another program, and all in half precision, are corrected if they differ by more than rounding.
        The mismatch of older weights has no limit.
        """
        ahead, limit = self.settings.max_staleness, math.inf if staleness else self._limit
        mismatch, self.use_sampler_logprobs, self.mismatch_checked = 0.0, False, False
        if self.settings.correction is None and not ahead:
            own = self.sampler.logprobs_of(self.engine.network.policy, None, use_sampler_logprobs=False)
            first = self.iteration % min(CHECK_EVERY, len(examples))
            mismatch = mean_sampler_mismatch(self.engine.run(own, examples[first::CHECK_EVERY]), limit)
            self.use_sampler_logprobs = mismatch <= ROUNDING
        if self.settings.correction is not None:
            self.correction = self.settings.correction.model_dump()
        elif ahead or not (self.use_sampler_logprobs or self._samples_like_training()):
            self.correction = TRUNCATE
        else:
            self.correction = None
        examples = self.engine.run(self.measure(self.use_sampler_logprobs), examples)
        return examples, mismatch if self.use_sampler_logprobs else mean_sampler_mismatch(examples, limit)

    def _samples_like_training(self) -> bool:
        """Whether sampler and trainer differ by little more than rounding: similar code, weights of the same dtype.

        In half precision, even rounding differs too much.
        """
        generator = self.sampler.generator
        policy = unwrap(self.engine.network.policy)
        same = isinstance(generator, LocalGenerator) and unwrap(generator.model).dtype == policy.dtype
        return same and not self.engine.in_half

    @property
    def _limit(self) -> float:
        return limit_of(self.settings.max_sampler_mismatch, self.engine.in_half)

    def _rewards(
        self, trajectories: list[Trajectory], mask: Tensor, arrays: dict[str, Tensor], metrics: dict[str, float]
    ) -> Tensor:
        """Compute token rewards (N, L), and adapt the KL coefficient."""
        s = self.settings
        if s.score_normalize:
            self.moments = self.moments.update(torch.tensor([t.score for t in trajectories]))
        moments = self.moments if s.score_normalize else None
        rule = (s.missing_eos, s.missing_eos_penalty or 0.0)
        scores = final_scores(trajectories, s.score_scale, s.score_clip, *rule, moments)
        if s.overlong is not None:
            lengths = torch.tensor([len(t.tokens) for t in trajectories])
            penalties = s.overlong.penalty * overlong_penalty(lengths, self.sampler.sampling.longest, s.overlong.buffer)
            metrics["overlong"] = penalties.mean().item()
            scores = scores + penalties
        steps = arrays["step_rewards"] * s.score_scale if "step_rewards" in arrays else None
        if steps is not None and (s.score_normalize or s.score_clip is not None):
            raise UserError(
                "score_normalize and score_clip change the score of a completion but not the rewards of its tokens, "
                "so these would no longer add up to the score: remove both keys"
            )
        ours, theirs = (arrays.get(name, arrays["old_logprobs"]) for name in ("kl_logprobs", "ref_logprobs"))
        kl_coef = self.kl.coef if s.kl_in == "reward" else 0.0
        rewards = token_rewards(scores, estimate(ours, theirs, s.kl_estimate, mask), mask, kl_coef, steps)
        if "ref_logprobs" in arrays:
            kl = estimate(ours, theirs, "k1", mask).sum(1).mean().item()
            penalized = scores.mean().item() - self.kl.coef * kl
            metrics |= {"kl": kl, "kl_coef": self.kl.coef, "rlhf_reward": penalized}
        if s.kl_target is not None:
            self.kl = self.kl.update(metrics["kl"], len(trajectories))
        return whiten(rewards, mask, shift_mean=False) if s.whiten_rewards else rewards

    def _advantages(
        self, rewards: Tensor, mask: Tensor, arrays: dict[str, Tensor], metrics: dict[str, float]
    ) -> dict[str, Tensor]:
        """Compute the arrays (N, L) that the loss reads."""
        s, values = self.settings, arrays.get("values")
        groups = torch.arange(len(rewards)) // self.sampler.sampling.samples
        advantages, returns = self.estimator(rewards, mask, groups, values)
        learned = {"old_logprobs": arrays["old_logprobs"], "advantages": advantages}
        metrics["zero_advantage_fraction"] = (advantages == 0).all(1).double().mean().item()
        if values is not None:
            if returns is None:
                raise UserError(
                    f"method.critic: advantage {s.advantage.name} computes no returns, which a critic learns from"
                )
            learned |= {"values": values, "returns": returns}
            metrics |= value_metrics(returns, values, mask)
        if s.kl_coef and s.kl_in == "loss":
            learned["ref_logprobs"] = arrays["ref_logprobs"]
        if self.correction is not None:
            each = torch.ones_like(mask, dtype=torch.long)  # one trajectory per row
            weights, touched = correction_weights(
                arrays["old_logprobs"], arrays["sampler_logprobs"], mask, each, **self.correction
            )
            learned["correction"] = weights
            metrics |= {
                "correction_touched": touched[mask].double().mean().item(),
                "effective_sample_size": effective_sample_size(weights, mask).item(),
            }
        return learned

    def _mini_batch(self, update: int) -> list[Example]:
        """The examples of one optimizer step. Every pass over the batch has its own permutation."""
        passed, part = divmod(update, self.settings.mini_batches)
        order = permutation(len(self.pending), self.run.seed, self.iteration, passed, 1)
        size = len(self.pending) // self.settings.mini_batches
        return [self.pending[i] for i in order[part * size : (part + 1) * size]]

    def _advance(self) -> None:
        """Advance to the next step. Called before a step is yielded, so that a checkpoint right after it is correct."""
        self.update += 1
        if self.update == self.steps_per_iteration:
            self.pending, self.update, self.stopped = [], 0, False
            self.iteration += 1
            self.position += self.batch
            if self.position >= len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0

    def check(self) -> None:
        """Before the first step of an update, check on all of its tokens that sampler and trainer agree.

        This needs no extra pass: before the first step, ``approxkl`` is half the mean square of the differences. If the
        trainer recomputed the log-probabilities, all rollouts have already been checked.

        Raises:
            RuntimeError: if the root mean square, which is at least the mean, exceeds ``max_sampler_mismatch``.
        """
        if self.use_sampler_logprobs and not self.mismatch_checked:
            self.mismatch_checked = True
            root_mean_square = math.sqrt(2 * self.run.last().get("approxkl", 0.0))
            within(root_mean_square, self._limit, "in the first step (root mean square)")

    def _moved_too_far(self) -> bool:
        """Whether to skip the rest of the update because the last step moved the policy beyond ``target_kl``."""
        limit = self.settings.target_kl
        if limit is not None and self.update > 0 and not self.stopped:
            self.stopped = self.run.last().get("approxkl", 0.0) > 1.5 * limit
        return self.stopped

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts and the update, the pending rollouts, the KL coefficient and running moments.

        And the batches that are sampled ahead: the rollouts of those that are finished, and the weights of the others,
        which are sampled again.
        """
        queue = [
            plan._asdict()
            | {"sampled": result and ([to_plain(trajectory) for trajectory in result.trajectories], result.metrics)}
            for plan, result in self.ahead.plans()
        ]
        needed = {one["version"] for one in queue if one["sampled"] is None}
        return {name: getattr(self, name) for name in PLAIN_STATE} | {
            "kl_coef": self.kl.coef,
            "moments": asdict(self.moments),
            "start_scores": dict(self.sampler.start_scores),
            "pending": [example.to_plain() for example in self.pending],
            "queue": queue,
            "weights": {version: tensors for version, tensors in self.weights.items() if version in needed},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name in PLAIN_STATE:
            setattr(self, name, state[name])
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.moments = Moments(**state["moments"])
        self.sampler.start_scores.clear()
        self.sampler.start_scores.update(state["start_scores"])
        self.pending = [Example.from_plain(plain) for plain in state["pending"]]
        self.weights = state["weights"]
        by_source = {row.source: row for row in self.rows}
        for one in state["queue"] if self.settings.max_staleness else ():
            plan = Plan(one["iteration"], one["version"], tuple(one["indices"]))
            if one["sampled"] is None:
                self.ahead.submit(plan, self._sampling(plan))
                continue
            trajectories, metrics = one["sampled"]
            rollouts = [from_plain(plain, by_source[plain["sequences"][0]["source"]]) for plain in trajectories]
            self.ahead.restore(plan, SampledBatch(rollouts, metrics))


CHECK_EVERY = 8
"""One rollout in this many is checked for a mismatch between sampler and trainer."""
TRUNCATE = {"level": "token", "mode": "truncate", "cap": 2.0, "low": 0.5, "high": 2.0}
"""The correction where the settings have none but rollouts need one: a token's weight is min(p_old / p_sampler, 2)."""
ROUNDING = 1e-5
"""Largest mean mismatch, in nats per token, that counts as rounding. Above it, ratios would not start at 1."""
PLAIN_STATE = (
    "epoch",
    "position",
    "iteration",
    "update",
    "batch",
    "stopped",
    "use_sampler_logprobs",
    "mismatch_checked",
)
