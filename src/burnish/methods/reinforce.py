"""REINFORCE: raise or lower the log-probability of what was written by how good it was (Williams 1992)."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.data import chat
from burnish.data.batching import RowLoader, collate
from burnish.math import advantages as adv
from burnish.math import losses
from burnish.math.kl import estimate
from burnish.models.adapters import Reference
from burnish.models.forward import hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, disable_dropout
from burnish.rollout.collect import with_arrays
from burnish.types import Config, Context, Conversation, Encoded, Example, MicroBatch, Row, Scored, Terms


class ReinforceConfig(Config):
    """Settings of REINFORCE."""

    learn_eos: bool = Field(True, description="learn the token that ends a turn too, not its content alone")
    baseline: adv.Baseline = Field("none", description="what rewards are compared with")
    reduction: losses.Reduction = Field("sequence_sum", description="how the losses of tokens become one number")
    floor: float | None = Field(None, lt=0, description="tokens of bad rows are not pushed below this log-probability")
    unlikelihood: bool = Field(False, description="-log(1 - p) in the place of log p where the reward is negative")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the starting policy")
    kl_estimate: Literal["k2", "k3"] = Field("k2", description="estimate of a token's KL")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.floor is not None and self.unlikelihood:
            raise ValueError("floor and unlikelihood both bound what negative rewards do: choose one")
        return self


class Reinforce:
    """L = -sum_t r l_t of the assistant's tokens of a row, a mean over rows."""

    name = "reinforce"
    kinds = (Scored,)
    task = "CAUSAL_LM"
    config = ReinforceConfig

    def __init__(self, **settings: Any) -> None:
        self.settings = ReinforceConfig(**settings)
        self.reference: Reference | None = None
        self.warned = False

    @property
    def weights(self) -> dict[str, float]:
        """The policy's loss, and the KL to the reference where it is asked for."""
        kl_coef = self.settings.kl_coef
        return {"policy": 1.0} | ({"kl_loss": kl_coef} if kl_coef else {})

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The model without dropout, and the reference kept aside where there is one."""
        disable_dropout(model)
        self.reference = Reference(model) if self.settings.kl_coef else None
        return Network(model)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, length: chat.Length) -> Encoded:
        """One sequence a conversation, with its reward at every token."""

        def encode(row: Any) -> Example:
            conversation = Conversation(row.messages, None, row.source)
            sequence = chat.conversation(tokenizer, conversation, "all", self.settings.learn_eos)
            return Example((sequence.with_arrays(advantages=(row.reward,) * len(sequence.tokens)),))

        return chat.encode(rows, encode, length)

    def loader(self, rows: list[Row], context: Context) -> RowLoader:
        """Rows in a seeded order, less the baseline of their step."""
        _check_rewards([row for row in rows if isinstance(row, Scored)])
        examples = self._compared(self.examples(rows, context.tokenizer, context.length).examples, context)
        punished = any(example.sequences[0].arrays["advantages"][0] < 0 for example in examples)

        def finish(step: list[Example]) -> list[Example]:
            if punished and not self.warned:
                self._watch(context)
            return step if self.settings.baseline == "none" else self._less_baseline(step)

        return RowLoader(examples, context.rows_per_step, context.seed, finish)

    def _compared(self, examples: list[Example], context: Context) -> list[Example]:
        """Examples with the reference's log-probabilities, which never change."""
        reference = self.reference
        if reference is None:
            return examples

        def logprobs(batch: MicroBatch) -> dict[str, torch.Tensor]:
            with reference.use(context.network.policy) as model:
                hidden = hidden_states(model, batch)
                return {"ref_logprobs": token_logprobs(model, hidden, batch, batch.trained, entropies="off")[0]}

        return context.annotate(logprobs, examples)

    def _less_baseline(self, step: list[Example]) -> list[Example]:
        """The rows of a step are the group that they are compared in."""
        batch = collate(step, 0)
        scores = torch.tensor([example.sequences[0].arrays["advantages"][0] for example in step], dtype=torch.float64)
        rewards = adv.kl_rewards(scores, torch.zeros(batch.trained.shape), batch.trained, 0.0)
        groups = torch.zeros(len(step), dtype=torch.long)
        found = adv.less_baseline(rewards, batch.trained, groups, self.settings.baseline)
        return with_arrays(step, **(dict(batch.arrays) | {"advantages": found}))

    def _watch(self, context: Context) -> None:
        """Warn once when rows with negative rewards have become far less likely than chance."""
        chance = -math.log(unwrap(context.network.policy).config.get_text_config().vocab_size)
        now = context.last().get("logprob_punished", 0.0)
        if now < 2 * chance:
            self.warned = True
            warnings.warn(
                f"tokens with a negative reward have a mean log-probability of {now:.1f} (chance is {chance:.1f}): "
                "nothing bounds it from below, and what it pushes up instead is unknown; set method.floor or "
                "method.unlikelihood, or a lower learning rate",
                stacklevel=2,
            )

    def counts(self, examples: list[Example]) -> dict[str, float]:
        """Learned tokens, or sequences, as the reduction says."""
        learned = [sum(s.trained) for e in examples for s in e.sequences]
        count = float(sum(learned) if self.settings.reduction == "token_mean" else sum(n > 0 for n in learned))
        return {"policy": count, "kl_loss": count}

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The policy's term and the KL; as metrics the mean log-probability of what is pushed up and of what down."""
        s, mask, arrays = self.settings, batch.trained, batch.arrays
        hidden = hidden_states(network.policy, batch)
        logprobs, _ = token_logprobs(network.policy, hidden, batch, mask, entropies="off")
        weights = losses.reduction_weights(mask, s.reduction, None, batch.segments, logprobs.dtype)
        advantages = arrays["advantages"]
        terms = {"policy": losses.reinforce(logprobs, mask, advantages, weights, s.floor, s.unlikelihood)}
        if "ref_logprobs" in arrays:
            terms["kl_loss"] = losses.reduce(estimate(logprobs, arrays["ref_logprobs"], s.kl_estimate), mask, weights)
        return terms | {
            "logprob_rewarded": losses.reduce(logprobs.detach(), mask & (advantages > 0)),
            "logprob_punished": losses.reduce(logprobs.detach(), mask & (advantages < 0)),
        }

    def evaluate(self, rows: list[Row], context: Context) -> dict[str, float]:
        """The loss on held-out rows, with no baseline."""
        examples = self.examples(rows, context.tokenizer, context.length).examples
        return context.evaluate(self._compared(examples, context))


def _check_rewards(rows: list[Scored]) -> None:
    """Warn of rewards that are not in [-1, 1], as a large one moves the model as far as that many rows."""
    outside = [row for row in rows if not -1 <= row.reward <= 1]
    if outside:
        warnings.warn(
            f"{len(outside)} of {len(rows)} rewards are not in [-1, 1], the first is {outside[0].reward:g} of "
            f"{outside[0].source}: a row counts as much as its reward is large",
            stacklevel=2,
        )
