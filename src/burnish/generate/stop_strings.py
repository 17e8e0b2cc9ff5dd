"""Stop strings: which completions have just completed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def completes_stop(tokenizer: Any, rows: Sequence[Sequence[int]], stop: Sequence[str]) -> list[bool]:
    """Which rows of tokens end in a text with a stop string in it."""
    # A token is at least one byte of text, so that so many tokens hold the longest string and a cut character.
    span = max(len(text.encode()) for text in stop) + 4
    ends = [row[-span:] for row in rows]
    texts = tokenizer.batch_decode(ends, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [any(text in end for text in stop) for end in texts]
