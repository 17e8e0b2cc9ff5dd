"""Supervised fine-tuning: maximize the log-probability of the assistant's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.math.losses import nll
from burnish.math.statistics import perplexity
from burnish.methods import METHODS
from burnish.methods.settings import SFTConfig
from burnish.models.forward import learned_logprobs
from burnish.models.heads import Network
from burnish.protocols import Engine, Method, Run
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Encoded, Example, MicroBatch, Row, Terms


class SFT(Method):
    """L = -sum log p(token) over learned tokens of the step / their number."""

    spec = METHODS["sft"]

    def __init__(self, **settings: Any) -> None:
        self.settings = SFTConfig(**settings)

    @property
    def weights(self) -> dict[str, float]:
        """The negative log-likelihood alone."""
        return {"nll": 1.0}

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The model alone is trained."""
        return Network(model)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """One sequence per conversation, or per turn if the template rewrites earlier turns."""
        learn, learn_eos = self.settings.learn, self.settings.learn_eos
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Conversation]) -> list[Example]:
            return [Example(sequences) for sequences in renderer.learned_turns(rows, learn, learn_eos)]

        return encode(rows, to_examples, truncation, cache_key(tokenizer, self.spec.name, learn, learn_eos))

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Rows in a seeded order."""
        return RowLoader(examples, run.rows_per_step, run.seed)

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The negative log-likelihood of the learned tokens."""
        return {"nll": nll(learned_logprobs(network.policy, batch), batch.loss_mask).over("tokens")}

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Loss and perplexity."""
        metrics, rows = engine.evaluate(self, examples)
        run.measured(rows | {"perplexity": replace(rows["nll"], exp=True)})
        return metrics | {"perplexity": perplexity(metrics["nll"])}
