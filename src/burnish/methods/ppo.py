"""Proximal policy optimization with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.generate.protocol import GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math import advantages as adv
from burnish.math import losses
from burnish.math.reductions import reduce, reduction_weights
from burnish.methods import METHODS
from burnish.methods.settings import PPOConfig
from burnish.models.adapters import Reference
from burnish.models.forward import hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, SharedCritic, disable_dropout, separate_critic
from burnish.protocols import Context
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rl.loader import Experience, RolloutLoader, Sampler
from burnish.rl.metrics import value_metrics
from burnish.types import Encoded, Example, MicroBatch, Reward, Row, Terms


class PPO:
    """max(-A ratio, -A clip(ratio)) + value_coef * value loss, on completions of the policy scored by rewards."""

    spec = METHODS["ppo"]

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

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Prompts, with room for the completion."""
        return self.sampler.examples(rows, tokenizer, truncation)

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
