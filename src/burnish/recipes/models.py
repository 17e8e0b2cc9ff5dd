"""Tokenizers and random models of the recipes that make their data on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def character_tokenizer(characters: str, template: str) -> PreTrainedTokenizerFast:
    """One token for each character, with pad, bos, eos and unknown tokens of their own; 64 tokens at most."""
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
    """A Llama of four heads for a tokenizer, its weights drawn by the seed; ``sizes`` as in ``LlamaConfig``."""
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
