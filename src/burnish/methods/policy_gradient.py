"""Policy gradient: PPO, REINFORCE, RLOO and GRPO as presets of one method.

An advantage estimator, a policy loss, a critic and a reduction are chosen independently (``methods/settings.py``, where
the presets are too). Those that recipes call by name are in ``POLICY_LOSSES``, ``ADVANTAGES`` and ``REDUCTIONS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, get_args

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish import user_functions
from burnish.errors import UserError, did_you_mean
from burnish.generate.protocol import GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math import advantages, policy, reductions
from burnish.math.choices import Baseline
from burnish.math.kl import estimate
from burnish.math.reductions import reduce
from burnish.math.tensors import learned
from burnish.math.value import clipped_value, value_clipfrac
from burnish.methods import METHODS
from burnish.methods.reinforce import ScoredReinforce
from burnish.methods.settings import Critic, FixedLength, OwnFunction, PolicyGradientConfig, ReinforceConfig
from burnish.models.adapters import Reference
from burnish.models.forward import SamplingTransform, hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, SharedCritic, disable_dropout, separate_critic
from burnish.protocols import Engine, Method, Run, StepLoader
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rewards.ray import RayReward
from burnish.rl.environment import Environments
from burnish.rl.loader import RolloutLoader, Sampler, are_prompts
from burnish.types import Config, Encoded, Example, MicroBatch, Prompt, Reward, Row, Term, Terms
from burnish.user_code import user_code

F = TypeVar("F")

# Estimators that compare the completions of a prompt. They need at least two of each.
GROUPS = ("rloo", "group_mean", "group_std", "reinforce++-baseline")


PolicyLossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""``(logprobs, old_logprobs, advantages, mask, segments, *, settings) -> (losses, metrics)``.

Losses (B, T) of tokens, and metrics (B, T) by name, whose means over learned tokens are logged. ``math/policy.py``
describes the tensors. The settings are the other keys of ``policy_loss`` in a recipe.
"""

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor | None]]
"""``(rewards, mask, groups, values, *, settings) -> (advantages, returns)``, for all N rollouts of a batch.

``rewards`` (N, T) are token rewards: the score at the last token, and minus the KL at every token with ``kl_in:
reward``. ``mask`` (N, T) is True for tokens that the policy sampled. ``groups`` (N,) are equal for completions of the
same prompt. ``values`` (N, T) come from the critic, None without one. ``returns`` (N, T) are the targets of the critic,
None if the estimator does not use one. The settings are the other keys of ``advantage`` in a recipe.
"""

ReductionFunction = Callable[..., Term]
"""``(losses, mask, segments, *, settings) -> Term(total, unit)``.

``losses`` (B, T) are those of tokens, 0 where ``mask`` is False; ``math/reductions.py`` describes the tensors. The
trainer divides the total by the number of units in the whole optimizer step: ``tokens`` counts learned tokens, and
``sequences`` counts sequences with a learned token. The settings are the other keys of ``reduction`` in a recipe.
"""


def gae(
    rewards: Tensor, mask: Tensor, groups: Tensor, values: Tensor | None, *, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor | None]:
    """Generalized advantage estimation. Returns are computed from the advantages before whitening."""
    assert values is not None
    estimates, returns = advantages.gae(rewards, values, mask, gamma, lam)
    return advantages.whiten(estimates, mask) if whiten else estimates, returns


def compared(
    rewards: Tensor, mask: Tensor, groups: Tensor, values: Tensor | None, *, kind: Baseline
) -> tuple[Tensor, Tensor | None]:
    """Advantages from comparing completions with each other (``math.advantages.compute_advantages``)."""
    return advantages.compute_advantages(rewards, mask, groups, kind), None


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "reinforce": policy.reinforce,
    "clip": policy.clip,
    "gspo": policy.gspo,
    "gspo_token": policy.gspo_token,
    "cispo": policy.cispo,
    "sapo": policy.sapo,
}
ADVANTAGES: dict[str, AdvantageEstimator] = {
    "gae": gae,
    **{kind: partial(compared, kind=kind) for kind in get_args(Baseline)},
}
REDUCTIONS: dict[str, ReductionFunction] = {
    "token_mean": reductions.token_mean,
    "sequence_mean": reductions.sequence_mean,
    "sequence_sum": reductions.sequence_sum,
    "fixed_length": reductions.fixed_length,
}


def with_settings(registry: Mapping[str, F], chosen: Config, key: str) -> Callable[..., Any]:
    """A registered function or the user's own, bound to its settings.

    Raises:
        UserError: if there is no such function, or the user's function does not take these settings.
    """
    settings = chosen.model_dump()
    name = settings.pop("name")
    if not isinstance(chosen, OwnFunction):
        return partial(registry[name], **settings)  # type: ignore[call-overload]
    function = user_functions.load(name)
    takes = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for setting in settings:
        if setting not in takes:
            known = f"its settings are {', '.join(takes)}" if takes else "it has no keyword-only arguments"
            raise UserError(f"method.{key}.{setting}: {name} does not take it{did_you_mean(setting, takes)}; {known}")
    if lacking := [n for n, p in takes.items() if p.default is p.empty and n not in settings]:
        raise UserError(f"method.{key}.{lacking[0]}: {name} needs this setting")

    def checked(*tensors: Tensor | None) -> Any:
        with user_code(f"{key} {name}"):
            result = function(*tensors, **settings)
        assert tensors[0] is not None
        if key == "reduction":
            if not (isinstance(result, Term) and result.total.shape == () and result.unit in ("tokens", "sequences")):
                expected = "Term(total, unit) with a scalar total and unit tokens or sequences"
                raise UserError(f"{key} {name}: expected {expected}, got {result!r:.200}")
            return result
        shape = tuple(tensors[0].shape)
        if not (isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "shape", None) == shape):
            what = "(losses, metrics)" if key == "policy_loss" else "(advantages, returns or None)"
            raise UserError(f"{key} {name}: expected {what} with a first tensor of shape {shape}, got {result!r:.200}")
        return result

    return checked


class PolicyGradient(Method):
    """Learns from completions of prompts: policy loss + critic.coef * value loss - entropy_coef * entropy + KL.

    The settings decide which terms after the first are used. ``PPO``, ``RLOO``, ``GRPO`` and ``Reinforce`` are this
    method with the defaults of their presets.
    """

    spec = METHODS["ppo"]

    def __init__(
        self,
        reward: Reward | list[NamedReward] | None = None,
        sampling: Sampling | None = None,
        generator: GeneratorFactory | None = None,
        environments: Environments | None = None,
        **settings: Any,
    ) -> None:
        assert issubclass(self.spec.config, PolicyGradientConfig)
        self.settings = self.spec.config(**settings)
        self.policy_loss = with_settings(POLICY_LOSSES, self.settings.policy_loss, "policy_loss")
        self.estimator = with_settings(ADVANTAGES, self.settings.advantage, "advantage")
        self.sampler = Sampler(reward or [], sampling, generator, environments)
        reduction = self.settings.reduction
        if isinstance(reduction, FixedLength) and reduction.length is None:
            reduction = reduction.model_copy(update={"length": self.sampler.longest})
        self.reduction = with_settings(REDUCTIONS, reduction, "reduction")
        self.reference: Reference | None = None
        self.warming_up = False
        if self.spec.kinds == (Prompt,):
            self._check_samples()

    def _check_samples(self) -> None:
        """Raise a UserError if there would be nothing to learn from the completions of a prompt."""
        s, samples = self.settings, self.sampler.sampling.samples
        self.sampler.check_explores()
        if s.advantage.name in GROUPS and samples < 2:
            raise UserError(
                f"generation.samples: advantage {s.advantage.name} compares completions of a prompt: got {samples}"
            )
        if s.dynamic_sampling and samples < 2:
            raise UserError(
                "generation.samples: method.dynamic_sampling replaces prompts whose completions all have the same "
                "score, and one completion always has"
            )
        if s.overlong is not None and self.sampler.environments is not None:
            raise UserError(
                "method.overlong is for completions of one turn: remove it; environment.max_tokens limits episodes"
            )
        if s.overlong is not None and s.overlong.buffer > self.sampler.sampling.longest:
            raise UserError(
                f"method.overlong.buffer: expected at most the {self.sampler.sampling.longest} tokens of a completion, "
                f"got {s.overlong.buffer}"
            )

    @property
    def critic(self) -> Critic | None:
        """The settings of the critic; None without one."""
        return self.settings.critic if isinstance(self.settings.critic, Critic) else None

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term that trains something in this iteration."""
        s, warming_up = self.settings, self.warming_up
        parts = {
            "policy": 0.0 if warming_up else 1.0,
            "value": self.critic.coef if self.critic and not self.critic.frozen else 0.0,
            "entropy": 0.0 if warming_up else -s.entropy_coef,
            "kl_loss": s.kl_coef if s.kl_in == "loss" and not warming_up else 0.0,
        }
        return {name: weight for name, weight in parts.items() if weight}

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates of the parts of the network that have their own."""
        return {"critic": self.critic.learning_rate} if self.critic and self.critic.learning_rate else {}

    @property
    def steps_per_iteration(self) -> int:
        """``mini_batches`` optimizer steps in each of ``epochs`` passes over a batch of rollouts."""
        return self.settings.epochs * self.settings.mini_batches

    @property
    def iterations(self) -> int | None:
        """The number of batches of rollouts, if the settings limit it."""
        return self.settings.iterations

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """Create the critic, disable dropout, and keep a reference model if the settings need one."""
        disable_dropout(model)
        self.reference = Reference(model) if self.settings.kl_coef or self.settings.reference else None
        if self.critic is None:
            return Network(model)
        if self.critic.name == "shared":
            critic: nn.Module = SharedCritic(model.config.get_text_config().hidden_size, model.dtype)  # type: ignore
        else:
            critic = self._separate_critic(model, tokenizer)
        if self.critic.frozen:
            critic.requires_grad_(False)
        return Network(model, critic)

    def _separate_critic(self, policy: Any, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
        """A critic initialized from a reward model with the policy's tokenizer and architecture, or from the policy.

        A reward model's scores are scaled to its share of the total score.
        """
        for reward in self.sampler.rewards if self.critic and self.critic.start == "auto" else []:
            scorer = reward.function
            if isinstance(scorer, RayReward):  # the actors have it, and this process needs its weights once
                scorer = scorer.load("cpu").function
            if not isinstance(scorer, ModelReward) or scorer.tokenizer.get_vocab() != tokenizer.get_vocab():
                continue
            if hasattr(scorer.model, "score") and type(unwrap(scorer.model).config) is type(policy.config):
                scale = reward.weight * self.settings.score_scale / scorer.std
                return separate_critic(policy, scorer.model, scale, -scorer.mean * scale)
        return separate_critic(policy)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Prompts, with room for the completion."""
        return self.sampler.examples(rows, tokenizer, truncation)

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> StepLoader:
        """Sample and score batches of prompts, and split them into mini-batches."""
        self.sampler.check_rewards()

        def begin(iteration: int) -> None:
            self.warming_up = self.critic is not None and iteration < self.critic.warmup

        return RolloutLoader(
            self.sampler,
            self.settings,
            examples,
            engine,
            run,
            measure=lambda use_sampler_logprobs: self.measure(engine.network, use_sampler_logprobs),
            estimator=self.estimator,
            begin=begin,
        )

    def measure(self, network: Network, use_sampler_logprobs: bool) -> Callable[[MicroBatch], dict[str, Tensor]]:
        """What the update needs for each rollout: log-probabilities (``Sampler.logprobs_of``) and values."""
        logprobs = self.sampler.logprobs_of(network.policy, self.reference, use_sampler_logprobs)
        if network.critic is None:
            return logprobs
        reads_hidden = not use_sampler_logprobs or isinstance(network.critic, SharedCritic)

        def of(batch: MicroBatch) -> dict[str, Tensor]:
            hidden = hidden_states(network.policy, batch) if reads_hidden else None
            return logprobs(batch, hidden) | {"values": network.values(batch, hidden)}

        return of

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """Terms for the policy, the critic, the entropy and the KL, and metrics of the ratio and the policy loss."""
        s, mask, arrays, transform = self.settings, batch.loss_mask, batch.arrays, self.sampler.transform
        old_logprobs, advantages = arrays["old_logprobs"], arrays["advantages"]
        hidden = hidden_states(network.policy, batch)
        entropies = "learned" if s.entropy_coef else "measured"
        logprobs, entropy = token_logprobs(network.policy, hidden, batch, transform, entropies)
        losses, metrics = self.policy_loss(logprobs, old_logprobs, advantages, mask, batch.segments)
        (losses,) = learned(mask, losses=losses)  # a loss of the user may have other values there
        if "correction" in arrays:
            losses = losses * arrays["correction"]
        now = logprobs.detach()
        moved = policy.log_ratios(now, old_logprobs, mask)
        terms: Terms = {
            "policy": self._reduced(losses, batch),
            "entropy": reduce(entropy, mask).over("tokens"),
            "approxkl": reduce(moved.square() / 2, mask),
            "ratio": reduce(moved.exp(), mask),
            "logprob_positive_advantage": reduce(now, mask & (advantages > 0)),
            "logprob_negative_advantage": reduce(now, mask & (advantages < 0)),
        }
        terms |= {name: reduce(x.detach(), mask) for name, x in metrics.items()}
        if "ref_logprobs" in arrays:
            whole = SamplingTransform(transform.temperature)
            ours = logprobs
            if transform != whole:
                ours, _ = token_logprobs(network.policy, hidden, batch, whole, "off")
            kl = estimate(ours, arrays["ref_logprobs"], s.kl_estimate, mask)
            terms["kl_loss"] = self._reduced(kl, batch)
        if self.critic is not None:
            values = network.values(batch, hidden.detach() if self.warming_up else hidden)
            targets = arrays["values"], arrays["returns"], mask, self.critic.clip
            terms["value"] = clipped_value(values, *targets).over("tokens")
            terms["value_clipfrac"] = value_clipfrac(values.detach(), *targets)
        return terms

    def _reduced(self, losses: Tensor, batch: MicroBatch) -> Term:
        """The reduction of losses (B, T), in which every trajectory counts once.

        If a chat template rewrites history, a trajectory has several sequences. ``share`` (B, T) is then the share of
        the trajectory's learned tokens that are in the sequence.
        """
        share = batch.arrays.get("share")
        if share is not None and self.settings.reduction.name == "sequence_mean":
            losses = losses * share
        term = self.reduction(losses, batch.loss_mask, batch.segments)
        if share is not None and term.unit == "sequences":
            return term._replace(unit="trajectories", count=None)
        return term

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Complete and score held-out prompts (``Sampler.evaluate``)."""
        self.sampler.check_rewards()
        return self.sampler.evaluate(examples, engine, run, self.reference, self.settings.evaluation)

    def close(self) -> None:
        """Close the generator."""
        self.sampler.close()


class PPO(PolicyGradient):
    """Clipped ratios, generalized advantage estimation and a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

    spec = METHODS["ppo"]


class RLOO(PolicyGradient):
    """REINFORCE with the mean of a prompt's other completions as the baseline (Ahmadian et al. 2024)."""

    spec = METHODS["rloo"]


class GRPO(PolicyGradient):
    """Clipped ratios, with scores normalized over the completions of each prompt (Shao et al. 2024)."""

    spec = METHODS["grpo"]


class Reinforce(PolicyGradient):
    """REINFORCE (Williams 1992) on completions of prompts, or on scored rows (``ScoredReinforce``)."""

    spec = METHODS["reinforce"]

    def __init__(self, *sampled: Any, **settings: Any) -> None:
        super().__init__(*sampled, **settings)
        assert isinstance(self.settings, ReinforceConfig)
        self.scored = ScoredReinforce(self.settings, self.policy_loss, self.reduction, self.sampler.start_scores)

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """Disable dropout, and keep a reference model if the settings need one."""
        network = super().prepare(model, tokenizer)
        self.scored.reference = self.reference
        return network

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Encode prompts with room for a completion, or scored conversations with the reward at every token."""
        return (super() if are_prompts(rows) else self.scored).examples(rows, tokenizer, truncation)

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> StepLoader:
        """Sample and score batches of prompts, or shuffle scored rows."""
        if not _encoded_prompts(examples):
            return self.scored.loader(examples, engine, run)
        self._check_samples()
        if "learn_eos" in self.settings.model_fields_set:
            raise UserError("method.learn_eos belongs to scored rows: of a completion every token is learned")
        return super().loader(examples, engine, run)

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The loss on completions, which have old log-probabilities, or on scored rows."""
        return super().loss(network, batch) if "old_logprobs" in batch.arrays else self.scored.loss(network, batch)

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Complete and score held-out prompts, or compute the loss on scored rows.

        A model that is trained on scored rows may be evaluated on prompts.
        """
        if _encoded_prompts(examples):
            return super().evaluate(examples, engine, run)
        metrics, rows = engine.evaluate(self, self.scored.with_reference(examples, engine))
        run.measured(rows)
        return metrics


def _encoded_prompts(examples: list[Example]) -> bool:
    return bool(examples) and examples[0].row is not None
