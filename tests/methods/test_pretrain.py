"""Continued pre-training: which tokens are targets, how documents are cut, and that the loss is their mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from burnish import Pretrain, UserError
from burnish.data.streaming import RowStream, Source
from burnish.render.truncate import Truncation
from burnish.types import Row, Sequence, Text, total_counts

EOS = 2
WORDS = "it was a bright cold day in april, and the clocks were striking thirteen"


def documents(*lengths: int) -> list[Row]:
    """Texts of so many characters, a token each; with EOS, documents of one token more."""
    return [Text((WORDS * 9)[:n], f"books:{i}") for i, n in enumerate(lengths)]


def sequences(method: Pretrain, rows: list[Row], tokenizer: Any, **length: Any) -> list[Sequence]:
    return [e.sequences[0] for e in method.examples(rows, tokenizer, Truncation(**length)).examples]


@pytest.mark.parametrize("max_length", [2, 3, 7, 8, 9, 20, 21, 22, 64, None])
def test_targets_are_every_token_but_the_first_of_each_document(max_length: int | None, tiny_tokenizer: Any) -> None:
    lengths = (20, 1, 7, 63)
    rows = documents(*lengths)
    made = sequences(Pretrain(), rows, tiny_tokenizer, max_length=max_length)
    assert sum(sum(s.loss_mask) for s in made) == sum(n + 1 - 1 for n in lengths)
    encoded = Pretrain().examples(rows, tiny_tokenizer, Truncation(max_length=max_length))
    assert total_counts(encoded.examples)["tokens"] == 91.0
    assert max(len(s.tokens) for s in made) <= (max_length or 64)
    for row in rows:  # what is learned of a document, in its order, is all of it but its first character
        learned = [t for s in made if s.source == row.source for t, on in zip(s.tokens, s.loss_mask, strict=True) if on]
        assert tiny_tokenizer.decode(learned[:-1]) == row.text[1:]  # type: ignore[union-attr]
        assert learned[-1] == EOS


def test_a_document_that_is_cut_is_named(tiny_tokenizer: Any) -> None:
    encoded = Pretrain().examples(documents(4, 20), tiny_tokenizer, Truncation(max_length=8))
    assert [tuple(change) for change in encoded.changed] == [
        ("books:1", "split: 21 tokens, max_length 8, now 3 sequences")
    ]
    with pytest.raises(UserError, match="books:1: 21 tokens, max_length 8"):
        Pretrain().examples(documents(4, 20), tiny_tokenizer, Truncation(max_length=8, too_long="error"))


def test_without_a_length_pieces_are_what_the_tokenizer_says_and_2048_at_most(tiny_tokenizer: Any) -> None:
    row = Text("a" * 5000, "books:1")
    assert [len(s.tokens) for s in sequences(Pretrain(), [row], tiny_tokenizer)] == [2048, 2048, 907]
    tiny_tokenizer.model_max_length = 3000
    assert len(sequences(Pretrain(), [row], tiny_tokenizer)[0].tokens) == 2048
    tiny_tokenizer.model_max_length = 1000
    assert {len(s.tokens) for s in sequences(Pretrain(), [row], tiny_tokenizer)[:-1]} == {1000}


def test_chopped_documents_are_joined_and_cut(tiny_tokenizer: Any) -> None:
    method = Pretrain(packing="chop", chop_length=6)
    encoded = method.examples(documents(4, 8, 2), tiny_tokenizer, Truncation())
    made = [e.sequences[0] for e in encoded.examples]
    assert [tiny_tokenizer.decode(s.tokens) for s in made] == ["it w<|im_end|>i", "t was ", "a<|im_end|>it<|im_end|>"]
    assert [tuple(s.loss_mask) for s in made] == [(False,) + (True,) * (n - 1) for n in (6, 6, 5)]
    assert [s.source for s in made] == ["books:0", "books:1", "books:1"]
    (told,) = encoded.changed
    assert told.source == "books:0"
    assert "3 documents" in told.reason and "3 pieces of 6" in told.reason and "crosses documents" in told.reason
    assert "left out" not in told.reason


def test_a_single_token_that_is_left_of_chopping_is_dropped_and_told(tiny_tokenizer: Any) -> None:
    encoded = Pretrain(packing="chop", chop_length=6).examples(documents(6), tiny_tokenizer, Truncation())
    assert [len(e.sequences[0].tokens) for e in encoded.examples] == [6]
    assert "the last token of all is left out" in encoded.changed[0].reason


def test_chopping_refuses_a_length_that_it_would_ignore(tiny_tokenizer: Any) -> None:
    for length in (Truncation(max_length=8), Truncation(too_long="split")):
        with pytest.raises(UserError, match="chop cuts to chop_length tokens"):
            Pretrain(packing="chop").examples(documents(6), tiny_tokenizer, length)


@pytest.mark.parametrize("steps", [None, 7])
def test_a_chopped_epoch_is_its_pieces_and_the_schedule_ends_with_the_run(
    steps: int | None, make_trainer: Any, tiny_llama: Any
) -> None:
    """75 tokens are 8 pieces of 10 at most and 3 steps of 3, twice over, or until max_steps."""
    trainer = make_trainer(
        Pretrain(packing="chop", chop_length=10),
        tiny_llama(),
        documents(40, 30, 2),
        batch=3,
        lr_scheduler_type="linear",
        num_train_epochs=2,
        **({} if steps is None else {"max_steps": steps}),
    )
    trainer.train()
    assert len(trainer.get_train_dataloader()) == 3
    assert trainer.state.global_step == (steps or 6)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates[-1] == pytest.approx(1e-3 / (steps or 6))  # the last step's; the next would be 0
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-12)
    tokens = [line["tokens"] for line in trainer.state.log_history if "loss" in line]
    assert sum(tokens[:3]) == sum(tokens[3:6]) == 75


@torch.no_grad()
def mean_nll(model: Any, made: list[Sequence]) -> float:
    """By transformers alone, one sequence at a time, from every token to the next."""
    losses = []
    for s in made:
        tokens = torch.tensor([s.tokens.tolist()])
        losses += model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return -math.fsum(losses) / len(losses)


@pytest.mark.parametrize("own", [{}, {"token_budget": 60}, {"packed": True, "token_budget": 60}], ids=str)
def test_the_loss_is_the_mean_over_the_targets(
    own: dict, make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    rows, truncation = documents(20, 30, 8, 50), Truncation(max_length=16)
    model = tiny_llama()
    trainer = make_trainer(
        Pretrain(), model, rows, batch=100, lr=0.0, own={"eval_dataset": rows, "truncation": truncation, **own}
    )
    expected = mean_nll(model, sequences(Pretrain(), rows, tiny_tokenizer, max_length=16))
    found = trainer.evaluate()
    assert found["eval_nll"] == pytest.approx(expected, abs=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    trainer.train()
    assert trainer.state.log_history[0]["nll"] == pytest.approx(expected, abs=1e-5)


def test_held_out_text_is_chopped_to_its_own_length(make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model, rows = tiny_llama(), documents(20, 30)
    method = Pretrain(packing="chop", chop_length=40, eval_chop_length=16)
    trainer = make_trainer(method, model, rows, own={"eval_dataset": rows})
    by_eval_length = Pretrain(packing="chop", chop_length=16)
    expected = mean_nll(model, sequences(by_eval_length, rows, tiny_tokenizer))
    assert trainer.evaluate()["eval_nll"] == pytest.approx(expected, abs=1e-5)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(make_trainer: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    found = make_trainer(Pretrain(), model, documents(9), own={"eval_dataset": documents(9, 12)}).evaluate()
    assert found["eval_nll"] == pytest.approx(math.log(105), abs=1e-5)
    assert found["eval_perplexity"] == pytest.approx(105, rel=1e-5)


def test_text_is_learned(make_trainer: Any, tiny_llama: Any) -> None:
    rows = documents(60, 70, 80)
    trainer = make_trainer(Pretrain(), tiny_llama(), rows, lr=1e-2, num_train_epochs=40, own={"eval_dataset": rows})
    before = trainer.evaluate()["eval_perplexity"]
    trainer.train()
    assert trainer.evaluate()["eval_perplexity"] < 0.1 * before


# --- streams -------------------------------------------------------------------------------------------------------


def stream(*, shuffle_buffer: int = 3) -> RowStream:
    found = documents(20, 33, 8, 50, 14)
    return RowStream([Source("books", lambda: iter(found))], shuffle_buffer)


def test_a_stream_that_was_interrupted_ends_with_the_same_bytes(
    make_trainer: Any, tiny_llama: Any, weights: Any, tmp_path: Any
) -> None:
    def train(folder: str, start: str | None = None) -> bytes:
        trainer = make_trainer(
            Pretrain(),
            tiny_llama(),
            stream(),
            max_steps=7,
            neftune_noise_alpha=5,
            save_strategy="steps",
            save_steps=1,
            output_dir=str(tmp_path / folder),
            own={"truncation": Truncation(max_length=16)},
        )
        trainer.train(resume_from_checkpoint=start)
        assert trainer.state.global_step == 7
        assert trainer.lr_scheduler.last_epoch == 7
        return weights(trainer.network)

    straight = train("straight")
    assert straight != weights(tiny_llama())
    for step in (1, 3, 6):
        assert train(f"again {step}", str(tmp_path / "straight" / f"checkpoint-{step}")) == straight


def test_a_stream_learns_what_rows_in_memory_would(make_trainer: Any, tiny_llama: Any) -> None:
    """Five documents of 130 tokens, in one step of all their pieces: the order in it does not matter."""
    pieces = 2 + 3 + 1 + 4 + 1  # of 21, 34, 9, 51 and 15 tokens, where 16 less the one that overlaps go into each
    losses = []
    for rows, more in ((documents(20, 33, 8, 50, 14), {}), (stream(shuffle_buffer=5), {"max_steps": 1})):
        trainer = make_trainer(
            Pretrain(), tiny_llama(), rows, batch=pieces, own={"truncation": Truncation(max_length=16)}, **more
        )
        trainer.train()
        losses.append(trainer.state.log_history[0])
    assert losses[0]["tokens"] == losses[1]["tokens"] == 130 + pieces - 5
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], abs=1e-6)


def test_a_stream_without_an_end_is_refused(make_trainer: Any, tiny_llama: Any) -> None:
    with pytest.raises(UserError, match=r"a stream has no end: set trainer\.max_steps"):
        make_trainer(Pretrain(), tiny_llama(), stream())
