"""Tokenizers and random models for the recipes that generate their own data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def character_tokenizer(characters: str, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and pad, BOS, EOS and unknown tokens. Its maximum length is 64."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos, unk = "<pad>", "<bos>", "<eos>", "<unk>"
    vocabulary = {token: number for number, token in enumerate((pad, bos, eos, unk, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        chat_template=template,
        model_max_length=64,
    )


def random_llama(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: Any) -> LlamaForCausalLM:
    """A Llama with four attention heads and random weights. ``sizes`` are options of ``LlamaConfig``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    special: Any = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        **special,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
