"""Continued pre-training: maximize the log-probability of every token of plain text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.data.loader import RowLoader
from burnish.errors import UserError
from burnish.math.losses import nll
from burnish.math.statistics import perplexity
from burnish.methods import METHODS
from burnish.methods.settings import PretrainConfig
from burnish.models.forward import learned_logprobs
from burnish.models.heads import Network
from burnish.protocols import Engine, Method, Run
from burnish.render.encode import cache_key, encode
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Changed, Encoded, Example, MicroBatch, Row, Sequence, Terms, Text

LONGEST = 2048  # tokens of a piece where the recipe does not say


class Pretrain(Method):
    """L = -sum log p(token) over every token of the step but the first of each piece / their number.

    A document is its text and EOS. ``packing: documents`` makes sum(length - 1) targets of them, whatever
    ``max_length`` is; without ``max_length`` it is the tokenizer's ``model_max_length``, at most 2,048.

    ``packing: chop`` repeats recipes that packed by a ConstantLengthDataset: the documents of a file are joined in its
    order and cut every ``chop_length`` tokens. A token may see the documents before its own in the piece, the first
    token of every piece is no target, and the last piece is as long as what is left (a single token is dropped, which
    is told).
    """

    spec = METHODS["pretrain"]

    def __init__(self, **settings: Any) -> None:
        self.settings = PretrainConfig(**settings)

    @property
    def weights(self) -> dict[str, float]:
        """The negative log-likelihood alone."""
        return {"nll": 1.0}

    def prepare(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The model alone is trained."""
        return Network(model)

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Documents in pieces that fit, or joined and cut to ``chop_length``."""
        return self._examples(rows, tokenizer, truncation, self.settings.chop_length)

    def eval_examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """As ``examples``, but chopped to ``eval_chop_length``."""
        return self._examples(rows, tokenizer, truncation, self.settings.eval_chop_length)

    def _examples(
        self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation, chop_length: int
    ) -> Encoded:
        renderer = Renderer(tokenizer)

        def to_examples(rows: list[Text]) -> list[Example]:
            return [Example((sequence,)) for sequence in renderer.texts(rows)]

        key = cache_key(tokenizer, self.spec.name)
        if self.settings.packing == "documents":
            fallback = min(LONGEST, tokenizer.model_max_length)
            asked = {
                "max_length": truncation.max_length or fallback,
                "too_long": truncation.too_long or self.spec.too_long,
            }
            return encode(rows, to_examples, truncation.model_copy(update=asked), key)
        if truncation.max_length is not None or truncation.too_long is not None:
            raise UserError("packing: chop cuts to chop_length tokens: take data.max_length and data.too_long away")
        whole = encode(rows, to_examples, truncation, key)
        pieces, told = chop([example.sequences[0] for example in whole.examples], chop_length)
        return Encoded([Example((piece,)) for piece in pieces], [*whole.changed, *told])

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> RowLoader:
        """Pieces in a seeded order."""
        return RowLoader(examples, run.rows_per_step, run.seed)

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The negative log-likelihood of the learned tokens."""
        return {"nll": nll(learned_logprobs(network.policy, batch), batch.loss_mask).over("tokens")}

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Loss and perplexity, exp(nll)."""
        metrics, rows = engine.evaluate(self, examples)
        run.measured(rows | {"perplexity": replace(rows["nll"], exp=True)})
        return metrics | {"perplexity": perplexity(metrics["nll"])}


def chop(documents: list[Sequence], length: int) -> tuple[list[Sequence], list[Changed]]:
    """Documents joined and cut every ``length`` tokens, and what is to be told about it.

    Every token but the first of a piece is learned. A piece is named by the document that it begins in.
    """
    tokens = np.concatenate([document.tokens for document in documents]) if documents else np.zeros(0, np.int64)
    ends = np.cumsum([len(document) for document in documents])
    pieces = []
    for start in range(0, len(tokens), length):
        ids = tokens[start : start + length]
        if len(ids) > 1:
            first = documents[np.searchsorted(ends, start, side="right")]
            pieces.append(Sequence(ids, np.arange(len(ids)) > 0, first.source))
    told = []
    if documents:
        left = len(tokens) - sum(len(piece) for piece in pieces)
        reason = f"chop: {len(documents):,} documents from here on are joined and cut into {len(pieces):,} pieces of "
        reason += f"{length} tokens at most; attention crosses documents, the first token of a piece is not learned"
        told.append(Changed(documents[0].source, reason + (", and the last token of all is left out" if left else "")))
    return pieces, told
