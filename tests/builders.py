"""Builders of tiny models and tokenizers, for all tests: ``from builders import SIZES, llama, word_tokenizer``."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
"""Sizes of a small model, with the names that most configs use."""

CHATML = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + eos_token -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    """A Llama with random weights that fits ``character_tokenizer``."""
    settings: dict[str, Any] = SIZES | {
        "vocab_size": 105,
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    return model.to(dtype=dtype).eval()


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, with different pad, BOS and EOS tokens, and ChatML with generation marks."""
    special = ["<|pad|>", "<|bos|>", "<|im_end|>", "<|unk|>", "<|im_start|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def byte_tokenizer(
    template: str | None = PLAIN_CHATML,
    merges: tuple[tuple[str, str], ...] = (),
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    **names: str,
) -> Any:
    """One token for each byte, special token and merge; ``names`` are its eos_token and so on.

    The first special token is bos and the last one eos and padding, unless ``names`` says otherwise.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    vocabulary = {token: id for id, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # offsets then do not include white space
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    names = names or {"bos_token": special[0], "eos_token": special[-1], "pad_token": special[-1]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def word_tokenizer(*words: str, normalizer: Any = None, **names: str) -> Any:
    """One token for each word between spaces, numbered in order; ``names`` are its eos_token and so on."""
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=names["unk_token"]))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)
