"""The text of parts of a token sequence, for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from burnish.types import Sequence


def part_texts(tokens: list[int], sizes: Iterable[int], tokenizer: Any) -> Iterator[str]:
    """The texts of the parts of a sequence that have these numbers of tokens.

    The text of a part is what it adds to the decoded text before it, so that no space is lost.
    """
    # The text of a token may depend on the one before it, but not on those before the part before.
    before, start = 0, 0
    for size in sizes:
        known = _decode(tokenizer, tokens[before:start])
        yield _decode(tokenizer, tokens[before : start + size])[len(known) :]
        before, start = start, start + size


def learned_spans(sequence: Sequence, tokenizer: Any) -> list[dict[str, Any]]:
    """A sequence as text: ``[{"text": "2+2=", "learned": False}, {"text": "4", "learned": True}]``."""
    runs = [(learned, len(list(group))) for learned, group in groupby(sequence.loss_mask.tolist())]
    texts = part_texts(sequence.tokens.tolist(), (size for _, size in runs), tokenizer)
    return [{"text": text, "learned": learned} for (learned, _), text in zip(runs, texts, strict=True)]


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
