"""REINFORCE: raise or lower the log-probability of what was written by how good it was (Williams 1992).

Scored conversations are learned as they are; prompts are completed by the policy, and the completions scored. RLOO,
GRPO and REINFORCE++ are settings of the second form.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.data.batching import RowLoader
from burnish.errors import UserError
from burnish.generate.protocol import GeneratorFactory
from burnish.generate.sampling import Sampling
from burnish.math import advantages as adv
from burnish.math import losses
from burnish.math.kl import estimate
from burnish.math.reductions import reduce, reduction_weights
from burnish.methods import METHODS
from burnish.methods.settings import ReinforceConfig, RolloutConfig
from burnish.models.adapters import Reference
from burnish.models.forward import PLAIN, SamplingTransform, hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, disable_dropout
from burnish.models.reference import compared
from burnish.protocols import Context, StepLoader
from burnish.render.encode import encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rewards.functions import NamedReward
from burnish.rl.loader import Experience, RolloutLoader, Sampler
from burnish.rl.trajectory import learned_arrays, with_learned_arrays
from burnish.types import Conversation, Encoded, Example, MicroBatch, Prompt, Reward, Row, Scored, Terms

# Of scored rows nothing is sampled, so that these would be ignored.
OF_PROMPTS = {*RolloutConfig.model_fields, "clip_low", "clip_high"} - {"kl_coef", "kl_estimate", "evaluation"}


class Reinforce:
    """L = -sum_t A_t l_t of what the assistant wrote, a mean over rows; A is the reward less a baseline."""

    spec = METHODS["reinforce"]

    def __init__(
        self,
        reward: Reward | list[NamedReward] | None = None,
        sampling: Sampling | None = None,
        generator: GeneratorFactory | None = None,
        **settings: Any,
    ) -> None:
        self.settings = ReinforceConfig(**settings)
        self.sampler = Sampler(reward or [], sampling, generator)
        self.reference: Reference | None = None
        self.warned = False

    @property
    def weights(self) -> dict[str, float]:
        """The policy's loss, and the KL to the reference where it is part of the loss."""
        s = self.settings
        return {"policy": 1.0} | ({"kl_loss": s.kl_coef} if s.kl_coef and s.kl_in == "loss" else {})

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The model without dropout, and the reference kept aside where there is one."""
        disable_dropout(model)
        self.reference = Reference(model) if self.settings.kl_coef or self.settings.reference else None
        return Network(model)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Prompts with room for the completion; or scored conversations, with the reward at every token."""
        if _are_prompts(rows):
            return self.sampler.examples(rows, tokenizer, truncation)
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Scored]) -> list[Example]:
            conversations = [Conversation(row.messages, None, row.source) for row in rows]
            sequences = renderer.conversations(conversations, "all", self.settings.learn_eos)
            return [
                Example((sequence.with_arrays(advantages=np.full(len(sequence), row.reward)),))
                for row, sequence in zip(rows, sequences, strict=True)
            ]

        return encode(rows, to_examples, truncation)

    def loader(self, rows: list[Row], context: Context) -> StepLoader:
        """Batches of prompts, sampled, scored, and cut into mini-batches; or scored rows in a seeded order."""
        if not _are_prompts(rows):
            return self._scored(rows, context)
        s, samples = self.settings, self.sampler.sampling.samples
        self._check_reward()
        self.sampler.check_explores()
        if s.baseline in ("rloo", "group_mean", "group_std") and samples < 2:
            raise UserError(
                f"generation.samples: baseline {s.baseline} compares completions of a prompt: got {samples}"
            )
        if "learn_eos" in s.model_fields_set:
            raise UserError("method.learn_eos belongs to scored rows: of a completion every token is learned")
        return RolloutLoader(
            self.sampler,
            s,
            rows,
            context,
            experience=lambda sampled: self.sampler.experience(context.network.policy, self.reference, sampled),
            advantages=self.advantages,
        )

    def _check_reward(self) -> None:
        if not self.sampler.rewards:
            raise UserError(
                "prompts need a reward that scores their completions: set reward:, or give rows with text and reward"
            )

    # --- scored rows ----------------------------------------------------------------------------------------------

    def _scored(self, rows: list[Row], context: Context) -> RowLoader:
        s = self.settings
        if ignored := sorted(OF_PROMPTS & s.model_fields_set):
            raise UserError(f"method.{ignored[0]} belongs to prompts; of scored rows nothing is sampled: take it away")
        if s.kl_coef and s.kl_in == "reward":
            raise UserError("method.kl_in: of scored rows the KL can only be in the loss: set kl_in: loss")
        if s.reduction == "fixed_length":
            raise UserError("method.reduction: fixed_length divides by max_new_tokens, which scored rows do not have")
        _check_rewards([row for row in rows if isinstance(row, Scored)])
        examples = self._compared(self.examples(rows, context.tokenizer, context.length).examples, context)
        if s.baseline != "none" and (len(examples) % context.rows_per_step or context.rows_per_step) == 1:
            raise UserError(
                f"{len(examples)} rows in steps of {context.rows_per_step} leave a step of one, which baseline "
                f"{s.baseline} has nothing to compare with: change trainer.per_device_train_batch_size"
            )
        negative_advantage = s.baseline != "none" or any(row.reward < 0 for row in rows if isinstance(row, Scored))

        def finish(step: list[Example]) -> list[Example]:
            if negative_advantage and not self.warned:
                self._watch(context)
            return step if s.baseline == "none" else self._compute_advantages(step)

        return RowLoader(examples, context.rows_per_step, context.seed, finish, self.sampler.start_scores)

    def _compared(self, examples: list[Example], context: Context) -> list[Example]:
        """Examples with the reference's log-probabilities, which never change."""
        if self.reference is None or "kl_loss" not in self.weights:
            return examples
        return compared(self.reference, context, examples)

    def _compute_advantages(self, step: list[Example]) -> list[Example]:
        """The rows of a step are the group that they are compared in."""
        mask, arrays = learned_arrays(step)
        scores = torch.tensor([example.sequences[0].arrays["advantages"][0] for example in step], dtype=torch.float64)
        rewards = adv.token_rewards(scores, torch.zeros(mask.shape), mask, 0.0)
        groups = torch.zeros(len(step), dtype=torch.long)
        advantages = adv.compute_advantages(rewards, mask, groups, self.settings.baseline)
        return with_learned_arrays(step, **(arrays | {"advantages": advantages}))

    def _watch(self, context: Context) -> None:
        """Warn once when rows with negative rewards have become far less likely than chance."""
        chance = -math.log(unwrap(context.network.policy).config.get_text_config().vocab_size)
        now = context.last().get("logprob_negative_advantage", 0.0)
        if now < 2 * chance:
            self.warned = True
            warnings.warn(
                f"tokens with a negative reward have a mean log-probability of {now:.1f} (chance is {chance:.1f}): "
                "nothing bounds it from below, and what it pushes up instead is unknown; set method.floor or "
                "method.unlikelihood, or a lower learning rate",
                stacklevel=2,
            )

    # --- completions of prompts -----------------------------------------------------------------------------------

    def advantages(self, found: Experience) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Scores less the KL, where it counts in the reward, less the baseline."""
        s, arrays = self.settings, found.arrays
        kl_coef = found.kl_coef if s.kl_in == "reward" else 0.0
        rewards = adv.token_rewards(found.scores, found.kl, found.mask, kl_coef, found.steps)
        advantages = adv.compute_advantages(rewards, found.mask, found.groups, s.baseline)
        learned = {"old_logprobs": arrays["old_logprobs"], "advantages": advantages}
        if "kl_loss" in self.weights:
            learned["ref_logprobs"] = arrays["ref_logprobs"]
        silent = (advantages == 0).all(1).double().mean().item()
        return learned, {"zero_advantage_fraction": silent}

    # --- the update -----------------------------------------------------------------------------------------------

    def counts(self, examples: list[Example]) -> dict[str, float]:
        """Learned tokens, or sequences, as the reduction says."""
        learned = [int(s.loss_mask.sum()) for e in examples for s in e.sequences]
        count = float(sum(learned) if self.settings.reduction == "token_mean" else sum(n > 0 for n in learned))
        return {"policy": count, "kl_loss": count}

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The policy's term and the KL; as metrics the log-probability of what is pushed up and of what is pushed down.

        Of completions also entropy, approxkl, clip fraction and ratio.
        """
        s, mask, arrays = self.settings, batch.loss_mask, batch.arrays
        sampled = "old_logprobs" in arrays
        how = self.sampler.warp if sampled else PLAIN
        hidden = hidden_states(network.policy, batch)
        logprobs, entropy = token_logprobs(network.policy, hidden, batch, mask, how, "measured" if sampled else "off")
        fixed = self.sampler.sampling.longest if s.reduction == "fixed_length" else None
        weights = reduction_weights(mask, s.reduction, fixed, batch.segments, logprobs.dtype)
        advantages, now = arrays["advantages"], logprobs.detach()
        terms = {
            "logprob_positive_advantage": reduce(now, mask & (advantages > 0)),
            "logprob_negative_advantage": reduce(now, mask & (advantages < 0)),
        }
        if s.clip_low is None or s.clip_high is None:
            terms["policy"] = losses.reinforce(logprobs, mask, advantages, weights, s.floor, s.unlikelihood)
        else:
            clips = (s.clip_low, s.clip_high)
            old = arrays["old_logprobs"]
            terms["policy"] = losses.clipped_policy(logprobs, old, advantages, mask, *clips, weights=weights)
            terms["clipfrac"] = losses.clipfrac(now, old, advantages, mask, *clips)
        if "kl_loss" in self.weights:
            whole = SamplingTransform(how.temperature)
            ours = logprobs if how == whole else token_logprobs(network.policy, hidden, batch, mask, whole, "off")[0]
            terms["kl_loss"] = reduce(estimate(ours, arrays["ref_logprobs"], s.kl_estimate, mask), mask, weights)
        if sampled:
            terms["entropy"] = reduce(entropy, mask)
            terms["approxkl"] = losses.approxkl(now, arrays["old_logprobs"], mask)
            terms["ratio"] = losses.ratio(now, arrays["old_logprobs"], mask)
        return terms

    def evaluate(self, rows: list[Row], context: Context) -> dict[str, float]:
        """Completions of held-out prompts, scored (``Sampler.evaluate``); or the loss on scored rows, with no baseline.

        Prompts may evaluate what is trained on scored rows.
        """
        if _are_prompts(rows):
            self._check_reward()
            return self.sampler.evaluate(rows, context, self.reference, self.settings.evaluation)
        examples = self.examples(rows, context.tokenizer, context.length).examples
        return context.evaluate(self._compared(examples, context))


def _are_prompts(rows: list[Row]) -> bool:
    """Whether rows are prompts; else they are scored.

    Raises:
        UserError: they are mixed.
    """
    other = next((row for row in rows if type(row) is not type(rows[0])), None)
    if other is not None:
        raise UserError(
            f"{rows[0].source} is a {type(rows[0]).__name__} row and {other.source} a {type(other).__name__} row: "
            "expected prompts alone, or scored rows alone"
        )
    return bool(rows) and isinstance(rows[0], Prompt)


def _check_rewards(rows: list[Scored]) -> None:
    """Warn of rewards that are not in [-1, 1], as a large one moves the model as far as that many rows."""
    outside = [row for row in rows if not -1 <= row.reward <= 1]
    if outside:
        warnings.warn(
            f"{len(outside)} of {len(rows)} rewards are not in [-1, 1], the first is {outside[0].reward:g} of "
            f"{outside[0].source}: a row counts as much as its reward is large",
            stacklevel=2,
        )
