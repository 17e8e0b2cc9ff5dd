"""A tokenizer of bytes that the tests of rows and sequences share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """One token a byte, and those merged; the end token is also the padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    vocab = {token: id for id, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # white space has no characters of its own
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """``byte_tokenizer(template, merges)``: one token a byte, which ChatML is the template of unless said otherwise."""
    return make
