"""Proximal policy optimisation with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.data import chat
from burnish.data.batching import collate, permutation
from burnish.math import advantages as adv
from burnish.math import losses
from burnish.math.kl import AdaptiveKL, estimate
from burnish.models.adapters import Reference
from burnish.models.forward import Warp, hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, SharedCritic, disable_dropout, separate_critic
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rollout.collect import (
    collect,
    evaluation,
    final_scores,
    mean_gap,
    samples,
    summary,
    value_metrics,
    with_arrays,
)
from burnish.rollout.generate import Local, Sampling
from burnish.types import (
    Config,
    Context,
    Encoded,
    Example,
    MicroBatch,
    Prompt,
    Reward,
    Row,
    Sequence,
    Terms,
    UserError,
)


class PPOConfig(Config):
    """Settings of PPO. A batch is ``per_device_train_batch_size`` prompts; each mini-batch is one optimizer step."""

    epochs: int = Field(4, ge=1, description="passes over a batch of rollouts")
    mini_batches: int = Field(1, ge=1, description="optimizer steps a pass; must divide the rollouts of a batch")
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1, description="bound on the loss of negative advantages")
    reduction: losses.Reduction = Field("token_mean", description="how the losses of tokens become one number")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    whiten_advantages: bool = Field(True, description="to mean 0 and variance 1 over the batch")
    whiten_rewards: bool = Field(False, description="to variance 1 over the batch; the mean stays")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy, which is maximised")
    kl_coef: float = Field(0.05, ge=0, description="weight of the KL to the reference in the reward; 0 needs none")
    kl_estimate: Literal["k1", "k2", "k3"] = Field("k1", description="estimate of a token's KL")
    kl_target: float | None = Field(None, gt=0, description="adapt kl_coef to this KL, nats a completion")
    kl_horizon: float = Field(10000, gt=0, description="rollouts over which the adaptive coefficient moves")
    reference: bool = Field(True, description="keep the starting policy as the reference")
    target_kl: float | None = Field(None, gt=0, description="end the update when the policy moved 1.5 x this far")
    critic: Literal["separate", "shared"] = Field("separate", description="own network, or a head on the policy")
    critic_start: Literal["auto", "policy"] = Field("auto", description="auto: a causal reward model, else the policy")
    critic_frozen: bool = Field(False, description="never update the critic")
    critic_learning_rate: float | None = Field(None, gt=0, description="default: the policy's")
    critic_warmup: int = Field(0, ge=0, description="iterations in which only the critic learns")
    value_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    value_clip: float | None = Field(None, gt=0, description="free move of a value in an update, in units of score")
    missing_eos: Literal["none", "subtract", "replace"] = Field("none", description="score of completions cut off")
    missing_eos_penalty: float | None = Field(None, description="what is subtracted, or put in its place")
    score_clip: float | None = Field(None, gt=0, description="scores are clipped to +- this")
    score_scale: float = Field(1.0, gt=0, description="scores are multiplied by this, before clipping")
    max_gap: float = Field(
        0.05, gt=0, description="mean gap of log-probabilities between sampler and trainer that stops the run"
    )
    show_every: int = Field(5, ge=1, description="iterations between tables of samples")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kl_coef and not self.reference:
            raise ValueError(f"kl_coef {self.kl_coef} needs a reference: set kl_coef to 0 or reference to true")
        if self.kl_target and not self.kl_coef:
            raise ValueError("kl_target moves kl_coef by factors, so that 0 stays 0: set kl_coef above 0")
        if self.critic_warmup and (self.critic_frozen or not self.value_coef):
            raise ValueError(f"critic_warmup {self.critic_warmup}: nothing learns while critic_frozen or value_coef 0")
        if self.missing_eos != "none" and self.missing_eos_penalty is None:
            raise ValueError(f"missing_eos: {self.missing_eos} what? set missing_eos_penalty")
        return self


class PPO:
    """max(-A ratio, -A clip(ratio)) + value_coef * value loss, on completions of the policy scored by rewards."""

    name = "ppo"
    kinds = (Prompt,)
    task = "CAUSAL_LM"
    config = PPOConfig

    def __init__(
        self,
        reward: Reward | list[NamedReward],
        sampling: Sampling | None = None,
        generator: Local | None = None,
        **settings: Any,
    ) -> None:
        self.settings = PPOConfig(**settings)
        self.rewards = reward if isinstance(reward, list) else [NamedReward("reward", 1.0, reward)]
        self.sampling = sampling or Sampling()
        self.generator = generator or Local()
        self.reference: Reference | None = None
        self.warming_up = False
        self.start_scores: dict[str, float] = {}
        if self.sampling.temperature == 0:
            raise UserError("generation.temperature: PPO explores by sampling: expected more than 0, got 0")

    @property
    def weights(self) -> dict[str, float]:
        """The policy's and the critic's loss, as far as they learn."""
        s = self.settings
        parts = {
            "policy": 0.0 if self.warming_up else 1.0,
            "value": 0.0 if s.critic_frozen else s.value_coef,
            "entropy": 0.0 if self.warming_up else -s.entropy_coef,
        }
        return {name: weight for name, weight in parts.items() if weight}

    @property
    def learning_rates(self) -> dict[str, float]:
        """Of the parts of the network that have one of their own."""
        rate = self.settings.critic_learning_rate
        return {"critic": rate} if rate else {}

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """Policy and critic without dropout, and the reference kept aside."""
        disable_dropout(model)
        self.reference = Reference(model) if self.settings.reference else None
        if self.settings.critic == "shared":
            critic: nn.Module = SharedCritic(model.config.get_text_config().hidden_size, model.dtype)  # type: ignore
        else:
            critic = self._separate_critic(model, tokenizer)
        if self.settings.critic_frozen:
            critic.requires_grad_(False)
        return Network(model, critic)

    def _separate_critic(self, policy: Any, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
        """Started from a causal reward model that reads the policy's tokens, at the scale of its part of the score."""
        for reward in self.rewards if self.settings.critic_start == "auto" else []:
            scorer = reward.function
            if not isinstance(scorer, ModelReward) or scorer.tokenizer.get_vocab() != tokenizer.get_vocab():
                continue
            if hasattr(scorer.model, "score") and type(unwrap(scorer.model).config) is type(policy.config):
                scale = reward.weight * self.settings.score_scale / scorer.std
                return separate_critic(policy, scorer.model, scale, -scorer.mean * scale)
        return separate_critic(policy)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, length: chat.Length) -> Encoded:
        """Prompts, of which nothing is learned, with room for the completion."""

        def encode(row: Any) -> Example:
            tokens = chat.prompt(tokenizer, row)
            return Example((Sequence(tokens, (False,) * len(tokens), row.source),))

        if length.max_length is not None:
            room = length.max_length - self.sampling.longest
            if room < 1:
                raise UserError(
                    f"data.max_length: {length.max_length} leaves no room for a prompt beside a completion "
                    f"of {self.sampling.longest} tokens"
                )
            length = length.model_copy(update={"max_length": room})
        return chat.encode(rows, encode, length, chat.cache_key(tokenizer, self.name))

    def prompts(self, rows: list[Row], context: Context) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        """The prompts that fit and their tokens, one to one."""
        examples = self.examples(rows, context.tokenizer, context.length).examples
        kept = {example.source for example in examples}
        fitting = [row for row in rows if isinstance(row, Prompt) and row.source in kept]
        assert len(fitting) == len(examples), "every prompt has a source of its own"
        return fitting, [example.sequences[0].tokens for example in examples]

    def loader(self, rows: list[Row], context: Context) -> PPOLoader:
        """Batches of prompts, sampled, scored, and cut into mini-batches."""
        return PPOLoader(self, rows, context)

    def counts(self, examples: list[Example]) -> dict[str, float]:
        """Learned tokens, or sequences, as the reduction says."""
        tokens = float(sum(sum(e.sequences[0].trained) for e in examples))
        sequences = float(sum(any(e.sequences[0].trained) for e in examples))
        policy = tokens if self.settings.reduction == "token_mean" else sequences
        return {"policy": policy, "value": tokens, "entropy": tokens}

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """Policy and value terms; as metrics entropy, approxkl, clip fractions and the ratio."""
        s, mask, old = self.settings, batch.trained, batch.arrays
        hidden = hidden_states(network.policy, batch)
        how = "learned" if s.entropy_coef else "measured"
        logprobs, entropy = token_logprobs(network.policy, hidden, batch, mask, self.warp, how)
        values = network.values(batch, hidden.detach() if self.warming_up else hidden)
        clips = (s.clip_low, s.clip_high)
        fixed = self.sampling.longest if s.reduction == "fixed_length" else None
        weights = losses.reduction_weights(mask, s.reduction, fixed, batch.segments, logprobs.dtype)
        moved = logprobs.detach(), old["logprobs"], mask
        return {
            "policy": losses.clipped_policy(
                logprobs, old["logprobs"], old["advantages"], mask, *clips, s.dual_clip, weights
            ),
            "value": losses.clipped_value(values, old["values"], old["returns"], mask, s.value_clip),
            "entropy": losses.reduce(entropy, mask),
            "approxkl": losses.approxkl(*moved),
            "clipfrac": losses.clipfrac(logprobs.detach(), old["logprobs"], old["advantages"], mask, *clips),
            "value_clipfrac": losses.value_clipfrac(values.detach(), old["values"], old["returns"], mask, s.value_clip),
            "ratio": losses.ratio(*moved),
        }

    @property
    def warp(self) -> Warp:
        """The distribution that is sampled from."""
        return Warp(self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)

    def experience(self, network: Network, batch: MicroBatch) -> dict[str, Tensor]:
        """What the update needs of a rollout: the trainer's and the reference's log-probabilities, and the values."""
        hidden = hidden_states(network.policy, batch)

        def logprobs(model: nn.Module, hidden: Tensor, how: Warp) -> Tensor:
            return token_logprobs(model, hidden, batch, batch.trained, how, "off")[0]

        arrays = {"logprobs": logprobs(network.policy, hidden, self.warp), "values": network.values(batch, hidden)}
        if self.reference is not None:
            # without top-k and top-p, which may leave out of the reference what the policy sampled
            whole = Warp(self.sampling.temperature)
            same = whole == self.warp
            arrays["kl_logprobs"] = arrays["logprobs"] if same else logprobs(network.policy, hidden, whole)
            with self.reference.use(network.policy) as reference:
                arrays["ref_logprobs"] = logprobs(reference, hidden_states(reference, batch), whole)
        return arrays

    def evaluate(self, rows: list[Row], context: Context) -> dict[str, float]:
        """Completions of held-out prompts: score, every reward, KL to the reference, lengths, win rate over the start.

        The seeds are the same at every evaluation, so that only the policy differs.
        """
        prompts, tokens = self.prompts(rows, context)
        if not prompts:
            raise UserError("there is nothing to evaluate on: no prompt is short enough")
        sampling = self.sampling.model_copy(update={"samples": 1})
        rollouts = collect(
            prompts, tokens, list(range(len(prompts))), -1, sampling, self.rewards, context, self.generator
        )
        examples = context.annotate(
            lambda batch: self.experience(context.network, batch), [Example((r.sequence,)) for r in rollouts]
        )
        metrics = evaluation(rollouts, examples, self.start_scores)
        self.start_scores = {r.answer.source: r.score for r in rollouts} | self.start_scores
        context.samples(samples(rollouts, "eval"))
        return metrics


class PPOLoader:
    """Optimizer steps of PPO: a batch of prompts is sampled and scored, then passed over in shuffled mini-batches."""

    def __init__(self, method: PPO, rows: list[Row], context: Context) -> None:
        s = method.settings
        self.method, self.context = method, context
        self.rows, self.prompts = method.prompts(rows, context)
        self.batch = context.rows_per_step
        samples_each = method.sampling.samples
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
        self.stopped = False
        self.pending: list[Example] = []

    def __len__(self) -> int:
        s = self.method.settings
        return -(-len(self.prompts) // self.batch) * s.epochs * s.mini_batches

    def __iter__(self) -> Iterator[list[Example]]:
        s = self.method.settings
        epoch = self.epoch
        order = permutation(len(self.prompts), self.context.seed, epoch)
        while self.epoch == epoch:
            if not self.pending:
                self._collect(order[self.position : self.position + self.batch])
            self.method.warming_up = self.iteration < s.critic_warmup
            examples = [] if self._moved_too_far() else self._mini_batch(self.update)
            self._advance()
            yield examples

    def _collect(self, indices: list[int]) -> None:
        """Sample a batch, score it, and work out what the update needs of it."""
        method, s = self.method, self.method.settings
        began = time.perf_counter()
        what = (self.rows, self.prompts, indices, self.iteration)
        rollouts = collect(*what, method.sampling, method.rewards, self.context, method.generator)
        generated = time.perf_counter()
        examples = self.context.annotate(
            lambda batch: method.experience(self.context.network, batch), [Example((r.sequence,)) for r in rollouts]
        )
        batch = collate(examples, 0)
        mask, arrays = batch.trained, {name: x.double() for name, x in batch.arrays.items()}
        gap = mean_gap(arrays["logprobs"], arrays["sampled"], mask, s.max_gap)
        ours, theirs = (arrays.get(name, arrays["logprobs"]) for name in ("kl_logprobs", "ref_logprobs"))
        kl = torch.where(mask, estimate(ours, theirs, "k1"), 0.0)
        scores = final_scores(rollouts, s.score_scale, s.score_clip, s.missing_eos, s.missing_eos_penalty or 0.0)
        penalty = torch.where(mask, estimate(ours, theirs, s.kl_estimate), 0.0)
        rewards = adv.kl_rewards(scores, penalty, mask, self.kl.coef)
        if s.whiten_rewards:
            rewards = adv.whiten(rewards, mask, shift_mean=False)
        advantages, returns = adv.gae(rewards, arrays["values"], mask, s.gamma, s.lam)
        metrics = value_metrics(returns, arrays["values"], mask) | {"gap": gap}
        if method.reference is not None:
            mean_kl = kl.sum(1).mean().item()
            penalised = scores.mean().item() - self.kl.coef * mean_kl
            metrics |= {"kl": mean_kl, "kl_coef": self.kl.coef, "rlhf_reward": penalised}
        if s.whiten_advantages:
            advantages = adv.whiten(advantages, mask)
        self.pending = with_arrays(
            examples, logprobs=arrays["logprobs"], values=arrays["values"], advantages=advantages, returns=returns
        )
        if s.kl_target is not None:
            self.kl = self.kl.update(metrics["kl"], len(rollouts))
        seconds = generated - began
        tokens = sum(len(r.answer.tokens) for r in rollouts)
        self.context.log(
            summary(rollouts) | metrics | {"generated_per_second": tokens / seconds, "generation_seconds": seconds}
        )
        if self.iteration % s.show_every == 0:
            self.context.samples(samples(rollouts[:4], "train"))

    def _mini_batch(self, update: int) -> list[Example]:
        """The examples of one optimizer step; every pass has a fresh permutation of the batch."""
        s = self.method.settings
        passed, part = divmod(update, s.mini_batches)
        order = permutation(len(self.pending), self.context.seed, self.iteration, passed, 1)
        size = len(self.pending) // s.mini_batches
        return [self.pending[i] for i in order[part * size : (part + 1) * size]]

    def _advance(self) -> None:
        """Move on before the step is handed out, for a checkpoint that is taken right after it."""
        s = self.method.settings
        self.update += 1
        if self.update == s.epochs * s.mini_batches:
            self.pending, self.update, self.stopped = [], 0, False
            self.iteration += 1
            self.position += self.batch
            if self.position >= len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0

    def _moved_too_far(self) -> bool:
        """Whether the rest of the update is left out, because the last step took the policy too far."""
        limit = self.method.settings.target_kl
        if limit is not None and self.update > 0 and not self.stopped:
            self.stopped = self.context.last()["approxkl"] > 1.5 * limit
        return self.stopped

    def state_dict(self) -> dict[str, Any]:
        """Place in the prompts and in the update, rollouts not yet used, the KL coefficient, the start's scores."""
        return {name: getattr(self, name) for name in PLACE} | {
            "kl_coef": self.kl.coef,
            "start_scores": self.method.start_scores,
            "pending": [asdict(example.sequences[0]) for example in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for name in PLACE:
            setattr(self, name, state[name])
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.method.start_scores = state["start_scores"]
        self.pending = [Example((Sequence(**sequence),)) for sequence in state["pending"]]


PLACE = ("epoch", "position", "iteration", "update", "batch", "stopped")
