"""Proximal policy optimization with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.generate.protocol import GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math import advantages as adv
from burnish.math import losses
from burnish.math.reductions import Reduction, reduce, reduction_weights
from burnish.models.adapters import Reference
from burnish.models.forward import hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, SharedCritic, disable_dropout, separate_critic
from burnish.protocols import Context
from burnish.render import chat
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rl.loader import Experience, RolloutConfig, RolloutLoader, Sampler
from burnish.rl.metrics import value_metrics
from burnish.types import Encoded, Example, MicroBatch, Prompt, Reward, Row, Terms


class PPOConfig(RolloutConfig):
    """Settings of PPO."""

    epochs: int = Field(4, ge=1, description="passes over a batch of rollouts")
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1, description="bound on the loss of negative advantages")
    reduction: Reduction = Field("token_mean", description="how the losses of tokens become one number")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    whiten_advantages: bool = Field(True, description="to mean 0 and variance 1 over the batch")
    whiten_rewards: bool = Field(False, description="to variance 1 over the batch; the mean stays")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy, which is maximized")
    kl_coef: float = Field(0.05, ge=0, description="weight of the KL to the reference in the reward; 0 needs none")
    reference: bool = Field(True, description="keep the starting policy as the reference")
    critic: Literal["separate", "shared"] = Field("separate", description="own network, or a head on the policy")
    critic_start: Literal["auto", "policy"] = Field("auto", description="auto: a causal reward model, else the policy")
    critic_frozen: bool = Field(False, description="never update the critic")
    critic_learning_rate: float | None = Field(None, gt=0, description="default: the policy's")
    critic_warmup: int = Field(0, ge=0, description="iterations in which only the critic learns")
    value_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    value_clip: float | None = Field(None, gt=0, description="free move of a value in an update, in units of score")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kl_coef and not self.reference:
            raise ValueError(f"kl_coef {self.kl_coef} needs a reference: set kl_coef to 0 or reference to true")
        if self.critic_warmup and (self.critic_frozen or not self.value_coef):
            raise ValueError(f"critic_warmup {self.critic_warmup}: nothing learns while critic_frozen or value_coef 0")
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
        generator: GeneratorFactory | None = None,
        **settings: Any,
    ) -> None:
        self.settings = PPOConfig(**settings)
        self.sampler = Sampler(reward, sampling, generator)
        self.sampler.check_explores()
        self.reference: Reference | None = None
        self.warming_up = False

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
        for reward in self.sampler.rewards if self.settings.critic_start == "auto" else []:
            scorer = reward.function
            if not isinstance(scorer, ModelReward) or scorer.tokenizer.get_vocab() != tokenizer.get_vocab():
                continue
            if hasattr(scorer.model, "score") and type(unwrap(scorer.model).config) is type(policy.config):
                scale = reward.weight * self.settings.score_scale / scorer.std
                return separate_critic(policy, scorer.model, scale, -scorer.mean * scale)
        return separate_critic(policy)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, length: chat.Truncation) -> Encoded:
        """Prompts, with room for the completion."""
        return self.sampler.examples(rows, tokenizer, length)

    def loader(self, rows: list[Row], context: Context) -> RolloutLoader:
        """Batches of prompts, sampled, scored, and cut into mini-batches."""

        def begin(iteration: int) -> None:
            self.warming_up = iteration < self.settings.critic_warmup

        return RolloutLoader(
            self.sampler,
            self.settings,
            rows,
            context,
            experience=lambda sampled: self.experience(context.network, sampled),
            advantages=self.advantages,
            begin=begin,
        )

    def counts(self, examples: list[Example]) -> dict[str, float]:
        """Learned tokens, or sequences, as the reduction says."""
        tokens = float(sum(e.sequences[0].loss_mask.sum() for e in examples))
        sequences = float(sum(e.sequences[0].loss_mask.any() for e in examples))
        policy = tokens if self.settings.reduction == "token_mean" else sequences
        return {"policy": policy, "value": tokens, "entropy": tokens}

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """Policy and value terms; as metrics entropy, approxkl, clip fractions and the ratio."""
        s, mask, old = self.settings, batch.loss_mask, batch.arrays
        hidden = hidden_states(network.policy, batch)
        how = "learned" if s.entropy_coef else "measured"
        logprobs, entropy = token_logprobs(network.policy, hidden, batch, mask, self.sampler.warp, how)
        values = network.values(batch, hidden.detach() if self.warming_up else hidden)
        clips = (s.clip_low, s.clip_high)
        fixed = self.sampler.sampling.longest if s.reduction == "fixed_length" else None
        weights = reduction_weights(mask, s.reduction, fixed, batch.segments, logprobs.dtype)
        moved = logprobs.detach(), old["old_logprobs"], mask
        return {
            "policy": losses.clipped_policy(
                logprobs, old["old_logprobs"], old["advantages"], mask, *clips, s.dual_clip, weights
            ),
            "value": losses.clipped_value(values, old["values"], old["returns"], mask, s.value_clip),
            "entropy": reduce(entropy, mask),
            "approxkl": losses.approxkl(*moved),
            "clipfrac": losses.clipfrac(logprobs.detach(), old["old_logprobs"], old["advantages"], mask, *clips),
            "value_clipfrac": losses.value_clipfrac(values.detach(), old["values"], old["returns"], mask, s.value_clip),
            "ratio": losses.ratio(*moved),
        }

    def experience(self, network: Network, sampled: bool) -> Callable[[MicroBatch], dict[str, Tensor]]:
        """What the update needs of rollouts: values, and log-probabilities as in ``Sampler.experience``."""
        logprobs = self.sampler.experience(network.policy, self.reference, sampled)
        of_policy = not sampled or isinstance(network.critic, SharedCritic)

        def of(batch: MicroBatch) -> dict[str, Tensor]:
            hidden = hidden_states(network.policy, batch) if of_policy else None
            return logprobs(batch, hidden) | {"values": network.values(batch, hidden)}

        return of

    def advantages(self, found: Experience) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Generalised advantages of scores less the KL, and the returns that the critic should predict."""
        s, mask, values = self.settings, found.mask, found.arrays["values"]
        rewards = adv.token_rewards(found.scores, found.kl, mask, found.kl_coef, found.steps)
        if s.whiten_rewards:
            rewards = adv.whiten(rewards, mask, shift_mean=False)
        advantages, returns = adv.gae(rewards, values, mask, s.gamma, s.lam)
        metrics = value_metrics(returns, values, mask)
        if s.whiten_advantages:
            advantages = adv.whiten(advantages, mask)
        learned = {
            "old_logprobs": found.arrays["old_logprobs"],
            "values": values,
            "advantages": advantages,
            "returns": returns,
        }
        return learned, metrics

    def evaluate(self, rows: list[Row], context: Context) -> dict[str, float]:
        """Completions of held-out prompts, scored; see ``Sampler.evaluate``."""
        return self.sampler.evaluate(rows, context, self.reference, self.settings.evaluation)
