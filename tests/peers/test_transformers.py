"""SFT against transformers alone: ``model(input_ids, labels=labels).loss`` with -100 where nothing is learned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from burnish import SFT

ROWS: list[Any] = [
    {
        "messages": [
            {"role": "user", "content": f"{i}?"},
            {"role": "assistant", "content": "abcdefgh"[: i + 1]},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "xyz"[: 3 - i % 3]},
        ]
    }
    for i in range(6)
]


def batch(tokenizer: Any) -> dict[str, torch.Tensor]:
    """The rows, padded on the right; labels are what the template marks as the assistant's."""
    encoded = [
        tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        for row in ROWS
    ]
    width = max(len(x["input_ids"]) for x in encoded)
    ids = torch.full((len(ROWS), width), tokenizer.pad_token_id)
    attended, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, x in enumerate(encoded):
        row = torch.tensor(x["input_ids"])
        ids[i, : len(row)], attended[i, : len(row)] = row, 1
        labels[i, : len(row)] = torch.where(torch.tensor(x["assistant_masks"]) > 0, row, -100)
    return {"input_ids": ids, "attention_mask": attended, "labels": labels}


@pytest.mark.parametrize("layout", [{}, {"token_budget": 1}, {"packed": True}], ids=str)
def test_sft_is_the_loss_of_the_model(layout: Any, ours: Any, same: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    found = ours(SFT(), model, ROWS, **layout)
    plain = copy.deepcopy(model)
    loss = plain(**batch(tiny_tokenizer)).loss
    loss.backward()
    expected = type(found)(loss.item(), {name: p.grad for name, p in plain.named_parameters()})
    same(f"SFT, transformers alone, {layout or 'one batch'}", found, expected)
