"""SFT against TRL's SFTTrainer: the same weights, rows and template, one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish import SFT, UserError
from burnish.render.truncate import Truncation

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:::trl")]

ANSWERS = ["yes", "no, never", "a", "perhaps some day", "it is 12"]
NEWLINE_AFTER_TURN = "{{- '\\n' -}}\n{%- endfor -%}"
TURN_MARKED_WITH_END = "{{- message['content'] + eos_token -}}{%- endgeneration -%}"
TURN_MARKED_WITHOUT_END = "{{- message['content'] -}}{%- endgeneration -%}{{- eos_token -}}"


def said(*turns: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


CONVERSATIONS: list[Any] = [{"messages": said(f"{i}?", text, "and?", text[::-1])} for i, text in enumerate(ANSWERS)]
COMPLETIONS: list[Any] = [
    {"prompt": said(f"{i}?"), "completion": [{"role": "assistant", "content": text}]} for i, text in enumerate(ANSWERS)
]


@torch.no_grad()
def nll_of(model: Any, tokenizer: Any, messages: list[Any], token: str) -> float:
    """-log p of every such token behind an assistant's opening, by transformers alone."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    ends = [t for t, id in enumerate(ids) if id == tokenizer.eos_token_id]
    wanted = ends[1::2] if token == tokenizer.eos_token else [t + 1 for t in ends[1::2]]
    assert {ids[t] for t in wanted} == {tokenizer.convert_tokens_to_ids(token)}
    return -sum(logprobs[t - 1, ids[t]].item() for t in wanted)


def test_assistant_turns(ours: Any, trl_step: Any, same: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    theirs = trl_step("SFT", model, CONVERSATIONS, config={"assistant_only_loss": True})
    same("SFT, assistant turns", ours(SFT(), model, CONVERSATIONS), theirs)


def test_completions(ours: Any, trl_step: Any, same: Any, tiny_llama: Any, written: Any) -> None:
    model, tokenizer = tiny_llama(), written(NEWLINE_AFTER_TURN, "{%- endfor -%}")
    theirs = trl_step("SFT", model, COMPLETIONS, tokenizer)
    same("SFT, completions", ours(SFT(), model, COMPLETIONS, processing_class=tokenizer), theirs)


def test_micro_batches(ours: Any, trl_step: Any, same: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    config = {"assistant_only_loss": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 5}
    theirs = trl_step("SFT", model, CONVERSATIONS, config=config)
    same("SFT, five micro-batches", ours(SFT(), model, CONVERSATIONS, token_budget=1), theirs)


def test_white_space_after_the_end_is_learned_by_trl(
    ours: Any, trl_step: Any, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    model = tiny_llama()
    learned = sum(len(text) + 1 for text in ANSWERS)  # a token a character, and the end
    newlines = sum(nll_of(model, tiny_tokenizer, row["prompt"] + row["completion"], "\n") for row in COMPLETIONS)
    expected = (ours(SFT(), model, COMPLETIONS).loss * learned + newlines) / (learned + len(ANSWERS))
    assert trl_step("SFT", model, COMPLETIONS).loss == pytest.approx(expected, rel=1e-5)


def test_an_end_outside_the_mark_is_not_learned_by_trl(
    ours: Any, trl_step: Any, same: Any, tiny_llama: Any, written: Any
) -> None:
    model, tokenizer = tiny_llama(), written(TURN_MARKED_WITH_END, TURN_MARKED_WITHOUT_END)
    theirs = trl_step("SFT", model, CONVERSATIONS, tokenizer, config={"assistant_only_loss": True})
    without = ours(SFT(learn_eos=False), model, CONVERSATIONS, processing_class=tokenizer)
    same("SFT, ends not learned", without, theirs)
    learned = sum(2 * len(text) for text in ANSWERS)
    ends = sum(nll_of(model, tokenizer, row["messages"], "<|im_end|>") for row in CONVERSATIONS)
    expected = (theirs.loss * learned + ends) / (learned + 2 * len(ANSWERS))
    assert ours(SFT(), model, CONVERSATIONS, processing_class=tokenizer).loss == pytest.approx(expected, rel=1e-5)


def test_long_rows_are_cut_and_left_out_by_trl_without_a_word(
    ours: Any, trl_step: Any, same: Any, tiny_llama: Any
) -> None:
    """TRL cuts at 1,024 tokens unless told otherwise, and leaves out rows in which nothing is then learned."""
    model, long = tiny_llama(), {"messages": said("a question of many characters?", "yes")}
    config = {"assistant_only_loss": True, "max_length": 30}
    theirs = trl_step("SFT", model, [*CONVERSATIONS, long], config=config)
    cut = ours(SFT(), model, CONVERSATIONS, truncation=Truncation(max_length=30, too_long="truncate_right"))
    same("SFT, rows cut", cut, theirs)
    for truncation in (Truncation(max_length=30), Truncation(max_length=30, too_long="truncate_right")):
        with pytest.raises(UserError, match="row"):
            ours(SFT(), model, [*CONVERSATIONS, long], truncation=truncation)


def test_packing(ours: Any, trl_step: Any, same: Any, tiny_llama: Any) -> None:
    model = tiny_llama(max_position_embeddings=512)
    config = {"assistant_only_loss": True, "packing": True, "max_length": 512}
    theirs = trl_step("SFT", model, CONVERSATIONS, config=config | {"packing_strategy": "bfd"})
    same("SFT, packed", ours(SFT(), model, CONVERSATIONS, packed=True), theirs)


def test_rows_see_each_other_in_wrapped_packing(ours: Any, trl_step: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    """TRL's loss is that of all rows as one text."""
    model = tiny_llama(max_position_embeddings=512)
    config = {"assistant_only_loss": True, "packing": True, "max_length": 512, "shuffle_dataset": False}
    theirs = trl_step("SFT", model, CONVERSATIONS, config=config | {"packing_strategy": "wrapped"})
    ids, labels = [], []
    for row in CONVERSATIONS:
        encoded = tiny_tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids += encoded["input_ids"]
        masks = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        labels += [id if learned else -100 for id, learned in masks]
    with torch.no_grad():
        whole = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
    assert theirs.loss == pytest.approx(whole, rel=1e-5)
    assert abs(whole - ours(SFT(), model, CONVERSATIONS, packed=True).loss) > 1e-3
