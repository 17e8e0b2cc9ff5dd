"""When a completion ends: the stop ids of a model, and the detection of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a completion: the tokenizer's EOS token and those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return {i for i in ids if i is not None}


def completes_stop(tokenizer: Any, rows: Sequence[Sequence[int]], stop: Sequence[str]) -> list[bool]:
    """Whether the text at the end of each row of tokens contains a stop string."""
    # A token is at least one byte of text, so this many tokens cover the longest string and one incomplete character.
    span = max(len(text.encode()) for text in stop) + 4
    ends = [row[-span:] for row in rows]
    texts = tokenizer.batch_decode(ends, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [any(text in end for text in stop) for end in texts]
