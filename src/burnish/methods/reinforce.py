"""REINFORCE on scored conversations: each reward raises or lowers the log-probability of the assistant's tokens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.errors import UserError
from burnish.math import advantages as adv
from burnish.math.kl import estimate
from burnish.math.reductions import reduce
from burnish.math.tensors import learned
from burnish.methods.settings import Compared, FixedLength, OwnFunction, ReinforceConfig, ReinforceLoss
from burnish.models.adapters import Reference
from burnish.models.forward import hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network
from burnish.models.reference import compared
from burnish.protocols import Engine, Run
from burnish.render.encode import encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rl.trajectory import learned_arrays, with_learned_arrays
from burnish.types import Conversation, Encoded, Example, MicroBatch, Row, Scored, Term, Terms

# The settings that apply to scored rows. Nothing is sampled from them, so the other settings would be ignored.
READ = {
    "policy_loss",
    "advantage",
    "reduction",
    "kl_coef",
    "kl_in",
    "kl_estimate",
    "reference",
    "evaluation",
    "learn_eos",
}


class ScoredReinforce:
    """L = -sum_t A_t l_t over the assistant's tokens, averaged over rows. A is the reward, minus an optional baseline.

    Args:
        settings: of ``reinforce``.
        policy_loss: the losses of tokens; the ratio of every token is 1.
        reduction: how they become one number.
        start_scores: scores of held-out prompts before training, saved with the loader's state.
    """

    def __init__(
        self,
        settings: ReinforceConfig,
        policy_loss: Callable[..., Any],
        reduction: Callable[..., Term],
        start_scores: dict[str, float],
    ) -> None:
        self.settings, self.policy_loss, self.reduction = settings, policy_loss, reduction
        self.start_scores = start_scores
        self.reference: Reference | None = None
        self.warned = False

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Encode scored conversations, with the reward at every token."""
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Scored]) -> list[Example]:
            conversations = [Conversation(row.messages, None, row.source, row.tools) for row in rows]
            turns = renderer.learned_turns(conversations, "all", self.settings.learn_eos)
            return [
                Example(tuple(one.with_arrays(advantages=np.full(len(one), row.reward)) for one in sequences))
                for row, sequences in zip(rows, turns, strict=True)
            ]

        return encode(rows, to_examples, truncation)

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Shuffle rows by the seed."""
        if examples:  # an empty list may be prompts that were all too long: RowLoader says so
            self._check()
            _check_rewards(examples)
        examples = self.with_reference(examples, engine)
        baseline = self.settings.advantage.name
        if baseline != "none" and (len(examples) % run.rows_per_step or run.rows_per_step) == 1:
            raise UserError(
                f"{len(examples)} rows in steps of {run.rows_per_step} leave a step of one, which advantage "
                f"{baseline} has nothing to compare with: change trainer.per_device_train_batch_size"
            )
        negative_advantage = baseline != "none" or any(_reward(example) < 0 for example in examples)

        def finish(step: list[Example]) -> list[Example]:
            if negative_advantage and not self.warned:
                self._watch(engine, run)
            return step if baseline == "none" else self._compute_advantages(step)

        return RowLoader(examples, run.rows_per_step, run.seed, finish, self.start_scores)

    def _check(self) -> None:
        s = self.settings
        if ignored := sorted(s.model_fields_set - READ):
            raise UserError(f"method.{ignored[0]} belongs to prompts; of scored rows nothing is sampled: take it away")
        if not isinstance(s.policy_loss, ReinforceLoss | OwnFunction):
            raise UserError(
                f"method.policy_loss: {s.policy_loss.name} clips the ratio to the policy that sampled; of scored rows "
                "nothing is sampled: expected reinforce"
            )
        if not isinstance(s.advantage, Compared):
            raise UserError(
                f"method.advantage: {s.advantage.name} is for completions of prompts; scored rows are compared within "
                "their step: expected none, mean, rloo, group_std or batch_whitened"
            )
        if s.kl_coef and s.kl_in == "reward":
            raise UserError("method.kl_in: of scored rows the KL can only be in the loss: set kl_in: loss")
        if isinstance(s.reduction, FixedLength) and s.reduction.length is None:
            raise UserError(
                "method.reduction: fixed_length divides by max_new_tokens, which scored rows do not have: set "
                "reduction: {name: fixed_length, length: ...}"
            )

    def with_reference(self, examples: list[Example], engine: Engine) -> list[Example]:
        """Add the reference model's log-probabilities. They never change, so they are computed once."""
        if self.reference is None or not self.settings.kl_coef or self.settings.kl_in != "loss":
            return examples
        return compared(self.reference, engine, examples)

    def _compute_advantages(self, step: list[Example]) -> list[Example]:
        """Compute advantages by comparing the rows of an optimizer step with each other."""
        assert isinstance(self.settings.advantage, Compared)
        mask, arrays = learned_arrays(step)
        scores = torch.tensor([_reward(example) for example in step], dtype=torch.float64)
        rewards = adv.token_rewards(scores, torch.zeros(mask.shape), mask, 0.0)
        groups = torch.zeros(len(step), dtype=torch.long)
        advantages = adv.compute_advantages(rewards, mask, groups, self.settings.advantage.name)
        return with_learned_arrays(step, **(arrays | {"advantages": advantages}))

    def _watch(self, engine: Engine, run: Run) -> None:
        """Warn once if tokens with negative rewards have become far less likely than chance."""
        chance = -math.log(unwrap(engine.network.policy).config.get_text_config().vocab_size)
        now = run.last().get("logprob_negative_advantage", 0.0)
        if now < 2 * chance:
            self.warned = True
            warnings.warn(
                f"tokens with a negative reward have a mean log-probability of {now:.1f} (chance is {chance:.1f}): "
                "nothing bounds it from below, and what it pushes up instead is unknown; set method.policy_loss.floor "
                "or method.policy_loss.unlikelihood, or a lower learning rate",
                stacklevel=2,
            )

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """Terms for the policy and the KL, and the mean log-probabilities by the sign of the advantage."""
        s, mask, arrays = self.settings, batch.loss_mask, batch.arrays
        hidden = hidden_states(network.policy, batch)
        logprobs, _ = token_logprobs(network.policy, hidden, batch, entropies="off")
        advantages, now = arrays["advantages"], logprobs.detach()
        losses, metrics = self.policy_loss(logprobs, now, advantages, mask, batch.segments)
        (losses,) = learned(mask, losses=losses)  # a loss of the user may have other values there
        terms: Terms = {
            "policy": self.reduction(losses, mask, batch.segments),
            "logprob_positive_advantage": reduce(now, mask & (advantages > 0)),
            "logprob_negative_advantage": reduce(now, mask & (advantages < 0)),
        }
        terms |= {name: reduce(x.detach(), mask) for name, x in metrics.items()}
        if "ref_logprobs" in arrays:
            kl = estimate(logprobs, arrays["ref_logprobs"], s.kl_estimate, mask)
            terms["kl_loss"] = self.reduction(kl, mask, batch.segments)
        return terms


def _reward(example: Example) -> float:
    """The reward of an encoded row, which is stored at every token."""
    return float(example.sequences[0].arrays["advantages"][0])


def _check_rewards(examples: list[Example]) -> None:
    """Warn about rewards outside [-1, 1]: the weight of a row is proportional to its reward."""
    outside = [example for example in examples if not -1 <= _reward(example) <= 1]
    if outside:
        warnings.warn(
            f"{len(outside)} of {len(examples)} rewards are not in [-1, 1], the first is {_reward(outside[0]):g} of "
            f"{outside[0].source}: a row counts as much as its reward is large",
            stacklevel=2,
        )
