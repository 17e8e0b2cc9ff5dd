"""Tokenizers and random models for the recipes that generate their own data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


# A conversation with a tool reads "<bos>[calculator]12*30=<tool>calculator(12*30)</tool><eos>>360=360<eos>": the names
# of the tools, the question, and the turns. The equals sign is the generation prompt, and ">" comes before a tool's
# result.
TURNS = """\
{{- bos_token -}}
{%- for tool in tools or [] -%}{{- '[' + tool.function.name + ']' -}}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '=' -}}
{%- generation -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool>' + call.function.name + '(' + call.function.arguments.values() | join(',') + ')</tool>' -}}
{%- endfor -%}
{{- eos_token -}}
{%- endgeneration -%}
{%- elif message.role == 'tool' -%}{{- '>' + message.content -}}
{%- else -%}{{- message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}"""

# A question and its solution in lines read "<bos>3+4-2=?\n3+4=7\n7-2=5\n<eos>".
LINES = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '\\n' -}}
{%- endif -%}
{%- endfor -%}"""


def character_tokenizer(
    characters: str, template: str, words: tuple[str, ...] = (), max_length: int = 64
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and pad, BOS, EOS and unknown tokens.

    Args:
        characters: the vocabulary.
        template: the chat template.
        words: strings that are one token each. Of two that begin alike, name the longer one first.
        max_length: the most tokens that a model reads.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos, unk = "<pad>", "<bos>", "<eos>", "<unk>"
    vocabulary = {token: number for number, token in enumerate((pad, bos, eos, unk, *characters, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join((*map(re.escape, words), "(?m)."))), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        chat_template=template,
        model_max_length=max_length,
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
