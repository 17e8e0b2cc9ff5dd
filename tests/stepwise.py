"""A tiny model that writes steps of four tokens, such as ``c=7``: ``from stepwise import questions, stepwise``."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

from builders import character_tokenizer, llama
from burnish.models.heads import Network, StepValueHead
from burnish.models.loaded import Loaded
from burnish.types import Prompt

LETTERS = "abcdefgh"


def stepwise(values: bool = True, delimiter: str = "\n") -> Loaded:
    """A float64 Llama that writes a letter, =, a digit and a line break again and again, until it ends its turn.

    Embeddings are far apart, and the head only allows the tokens that may follow the last one. Attention, with random
    weights, chooses among them, so letters, digits and values depend on the whole text.
    """
    tokenizer: Any = character_tokenizer()
    model: Any = llama(0, torch.float64, hidden_size=112, num_hidden_layers=1, initializer_range=0.1)
    generator = torch.Generator().manual_seed(1)
    follows = {"\n": LETTERS, "=": string.digits, **dict.fromkeys(LETTERS, "="), **dict.fromkeys(string.digits, "\n")}
    ids = tokenizer.convert_tokens_to_ids
    vocabulary = model.config.vocab_size
    embeddings, head = torch.zeros(vocabulary, 112), torch.randn(vocabulary, 112, generator=generator) * 0.3
    embeddings[:, :vocabulary] = 20 * torch.eye(vocabulary)
    allowed = torch.full((vocabulary, vocabulary), -20.0)
    for last, following in follows.items():
        allowed[ids(list(following)), ids(last)] = 0.0
    allowed[tokenizer.eos_token_id, ids("\n")] = 0.15
    head[:, :vocabulary] += allowed
    known = ids(list(follows))
    head[:, known] = allowed[:, known]
    value_head = StepValueHead(112, torch.float64, delimiter)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(head)
        value_head.value.weight.copy_(torch.randn(1, 112, generator=generator))
        value_head.value.weight[0, ids("\n")] = 0.0
    return Loaded("stepwise", model, tokenizer, value_head=value_head if values else None)


def save(loaded: Loaded, folder: Path) -> Path:
    """Save a model with its value head and tokenizer."""
    Network(loaded.model, loaded.value_head).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def questions(count: int, answers: bool = True) -> list[Prompt]:
    """Questions whose answers are digits. The model is right by chance."""
    return [
        Prompt(
            ({"role": "user", "content": f"{i}+{i}="},), {"answer": str(2 * i % 10)} if answers else {}, f"q.jsonl:{i}"
        )
        for i in range(count)
    ]
