"""Step-level value models: a policy that also judges its own reasoning steps (Chen et al., "AlphaMath", 2024)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.math import losses
from burnish.math.reductions import reduce
from burnish.math.statistics import wilson
from burnish.math.value import step_value
from burnish.methods import METHODS
from burnish.methods.settings import StepValueConfig
from burnish.models.forward import hidden_states, token_logprobs, unwrap
from burnish.models.heads import Network, StepValueHead, disable_dropout
from burnish.protocols import Engine, Method, Run
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.solutions import check_delimiter, solutions
from burnish.render.truncate import Truncation
from burnish.types import Encoded, Example, Metric, MicroBatch, Row, Steps, Terms

DEPTHS = ("first", "middle", "last")


class StepValue(Method):
    """L = -sum log p over tokens of correct solutions / their number + alpha sum (V - Q)^2 over step ends / theirs.

    The two parts have counts of their own, over the whole step: one with nothing to count adds exactly 0.
    """

    spec = METHODS["step_value"]

    def __init__(self, **settings: Any) -> None:
        self.settings = StepValueConfig(**settings)

    @property
    def weights(self) -> dict[str, float]:
        """The negative log-likelihood, and alpha times the error of the values."""
        alpha = self.settings.alpha
        return {"nll": 1.0} | ({"value": alpha} if alpha else {})

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rate of the value head, if it has its own."""
        rate = self.settings.head_learning_rate
        return {} if rate is None else {"critic": rate}

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The model with a value head on its hidden states, without dropout."""
        policy = unwrap(model)
        head = StepValueHead(policy.config.get_text_config().hidden_size, policy.dtype, self.settings.delimiter)
        return Network(disable_dropout(model), head)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """One sequence a solution."""
        s = self.settings
        check_delimiter(tokenizer, s.delimiter)
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Steps]) -> list[Example]:
            sequences = solutions(renderer, rows, s.learn, s.learn_eos, s.delimiter, s.mask_output)
            return [Example((sequence,)) for sequence in sequences]

        key = cache_key(tokenizer, self.spec.name, s.learn, s.learn_eos, s.delimiter, s.mask_output)
        return encode(rows, to_examples, truncation, key)

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Rows in a seeded order."""
        return RowLoader(examples, run.rows_per_step, run.seed)

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The two parts; as metrics, the values' error by outcome and by depth, and whether their sign ends right."""
        hidden = hidden_states(network.policy, batch)
        logprobs, _ = token_logprobs(network.policy, hidden, batch, entropies="off")
        values = network.values(batch, hidden)
        targets, outcomes = batch.arrays["targets"], batch.arrays["outcomes"]
        return {
            "nll": losses.nll(logprobs, batch.loss_mask).over("tokens"),
            "value": step_value(values, targets, outcomes != 0).over("step_ends"),
        } | measured(values.detach(), targets, outcomes, batch.arrays["depths"])

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Both parts, errors by outcome and depth, and sign accuracy at the last step with its 95 % interval.

        ``explained_variance`` is 1 - mean (V - Q)^2 / variance of Q: 0 is no better than the best constant.
        """
        metrics, rows = engine.evaluate(self, examples)
        arrays = [example.sequences[0].arrays for example in examples]
        targets = np.concatenate([a["targets"][a["outcomes"] != 0] for a in arrays])
        if variance := float(targets.var()):
            metrics["explained_variance"] = 1 - metrics["value"] / variance
            rows["explained_variance"] = rows["value"] * (-1 / variance)  # the 1 cancels in differences
        run.measured(rows)
        whole = sum(bool((e.sequences[0].arrays["depths"] == 1).any()) for e in examples)
        if whole:
            low, high = wilson(metrics["sign_accuracy"], whole)
            metrics |= {"sign_accuracy_low": low, "sign_accuracy_high": high}
        return metrics


@torch.no_grad()
def measured(values: Tensor, targets: Tensor, outcomes: Tensor, depths: Tensor) -> dict[str, Metric]:
    """How good values (B, T) are, over step ends; targets, outcomes and depths (B, T) as in ``render.solutions``.

    value_correct, value_incorrect: squared error in solutions of that outcome. value_first, value_middle, value_last:
    squared error of the steps in each third of their solution, the last step of which always belongs to the last.
    sign_accuracy: share of solutions whose last value has the sign of the outcome; a value of 0 counts one half.
    """
    # depths are k / K in float32: a third of the way is in the first third
    third = (3 * depths - 1e-3).ceil()
    places = {"correct": outcomes > 0, "incorrect": outcomes < 0}
    places |= {name: third == i for i, name in enumerate(DEPTHS, start=1)}
    terms = {f"value_{name}": step_value(values, targets, where) for name, where in places.items()}
    right = (1 + (values * outcomes).sign()) / 2
    return terms | {"sign_accuracy": reduce(right, depths == 1)}
