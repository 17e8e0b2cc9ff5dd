"""What a model can read: the longest sequence, and the token ids that it has embeddings for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.errors import UserError
from burnish.models.forward import unwrap
from burnish.render.truncate import ModelTruncation, Truncation
from burnish.types import Example, Prompt


class Limits(NamedTuple):
    """The limits of a model: ``Limits(longest=512, vocabulary=30522)``."""

    longest: int | None
    """Maximum number of tokens of a sequence; None if there is no limit."""
    vocabulary: int
    """Number of embeddings: every token id is smaller."""

    def default(self, truncation: Truncation, rows: Sequence[Any], too_long: str | None) -> ModelTruncation:
        """Add the limit of the model, and set ``max_length`` to it if that is not set.

        It stays as it is for prompts, whose completions end where the context window does, and for methods that split
        texts, whose pieces have a length of their own.
        """
        settings = {name: getattr(truncation, name) for name in Truncation.model_fields}
        if truncation.max_length is None and too_long != "split" and not (rows and isinstance(rows[0], Prompt)):
            settings["max_length"] = self.longest
        return ModelTruncation(**settings, model_limit=self.longest)

    def check(self, examples: Iterable[Example]) -> None:
        """Check that the model can read examples.

        Raises:
            UserError: a sequence is too long, or it has a token id without an embedding. The message names the row.
        """
        for sequence in (s for example in examples for s in example.sequences):
            if self.longest is not None and len(sequence) > self.longest:
                raise UserError(
                    f"{sequence.source}: {len(sequence):,} tokens, but the model reads at most {self.longest:,}: set "
                    f"data.max_length: {self.longest} and data.too_long"
                )
            check_ids(sequence.tokens, self.vocabulary, sequence.source)


def check_ids(tokens: Sequence[int] | np.ndarray, vocabulary: int, source: str) -> None:
    """Check that a model with ``vocabulary`` embeddings has one for each token id.

    Raises:
        UserError: it has not. The message names the source of the tokens.
    """
    largest = int(np.max(tokens, initial=0))
    if largest >= vocabulary:
        raise UserError(
            f"{source}: the token id {largest:,}, but the model has embeddings only for the {vocabulary:,} ids below: "
            "its tokenizer belongs to another model, or tokens were added to it without resizing the embeddings"
        )


def context_window(model: Any) -> int | None:
    """The number of tokens that a language model can read and write in all; None if it has no limit."""
    return getattr(unwrap(model).config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_room(model: Any, prompt_rows: list[Prompt], tokens: list[tuple[int, ...]]) -> None:
    """Check that a model can complete prompts.

    Raises:
        UserError: a prompt fills the context window, or has an id outside of the model's vocabulary.
    """
    config, context = unwrap(model).config.get_text_config(decoder=True), context_window(model)
    for row, ids in zip(prompt_rows, tokens, strict=True):
        if context is not None and len(ids) >= context:
            raise UserError(
                f"{row.source}: a prompt of {len(ids)} tokens leaves no room in the model's context window of "
                f"{context}: shorten the prompt or remove the row"
            )
        check_ids(ids, config.vocab_size, row.source)


OFFSET = 8
"""RoBERTa and its relatives count positions from 2 on: their tokenizers know that fewer tokens fit."""


def limits_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> Limits:
    """The limits of a model, from its config and its tokenizer."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "max_position_embeddings", None)
    if window is not None and window - OFFSET <= tokenizer.model_max_length < window:
        window = tokenizer.model_max_length
    return Limits(window, text.vocab_size)
