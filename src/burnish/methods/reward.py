"""Reward models: a scalar score that prefers what people prefer (Bradley and Terry 1952; Ouyang et al. 2022)."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.math import losses
from burnish.math.statistics import wilson
from burnish.methods import METHODS
from burnish.methods.settings import RewardConfig
from burnish.models.forward import scores, unwrap
from burnish.models.heads import Network, disable_dropout
from burnish.protocols import Engine, Method, Run
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Encoded, Example, Metric, MicroBatch, Row, Terms, total_counts


class RewardModel(Method):
    """L = -log sig(r_chosen - r_rejected - margin), a mean over pairs; the K(K-1)/2 pairs of a ranking count as one."""

    spec = METHODS["reward"]

    def __init__(self, **settings: Any) -> None:
        self.settings = RewardConfig(**settings)

    @property
    def weights(self) -> dict[str, float]:
        """Preference, and centering where it is asked for."""
        centering = self.settings.centering
        return {"preference": 1.0} | ({"centering": centering} if centering else {})

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The classifier, without dropout; plain transformers finds the end of a row by the pad token in its config."""
        unwrap(model).config.pad_token_id = tokenizer.pad_token_id
        return Network(disable_dropout(model))

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """The compared answers of a row together, with their pairs."""
        return encode(rows, Renderer(tokenizer).comparisons, truncation, cache_key(tokenizer, self.spec.name))

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Rows in a seeded order."""
        return RowLoader(examples, run.rows_per_step, run.seed)

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The preference term and, as metrics, accuracy (a tie is one half), margin, and the two sides' scores."""
        score = scores(network.policy, batch)
        better, worse = score[batch.pairs[:, 0]], score[batch.pairs[:, 1]]
        weights, margins, p_better = (x.to(score.dtype) for x in (batch.pair_weights, batch.margins, batch.p_better))
        measured = {
            "margin": better - worse,
            "chosen": better,
            "rejected": worse,
            "squares": (better.square() + worse.square()) / 2,
        }
        return {
            "preference": losses.bradley_terry(better, worse, margins, p_better, weights).over("pairs"),
            "centering": losses.centering(better, worse, weights).over("pairs"),
            "accuracy": losses.pair_accuracy(better, worse, weights),
        } | {name: Metric.of(value.detach(), weights) for name, value in measured.items()}

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Loss, accuracy with its 95 % interval (Wilson), and the mean and spread of the scores."""
        metrics, rows = engine.evaluate(self, examples)
        run.measured(rows)
        low, high = wilson(metrics["accuracy"], total_counts(examples)["pairs"])
        mean = (metrics["chosen"] + metrics["rejected"]) / 2
        std = math.sqrt(max(0.0, metrics.pop("squares") - mean**2))
        return metrics | {"accuracy_low": low, "accuracy_high": high, "score_mean": mean, "score_std": std}
