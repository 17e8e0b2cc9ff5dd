"""SFT through the trainer: which tokens are learned, and that the loss is their mean, however a step is cut."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from burnish import SFT, UserError
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.render.templates import set_template
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Metric, Row, Sequence

END, NEWLINE = 2, 101


def chat(*turns: str, source: str = "chat:1", start: int | None = None) -> Conversation:
    """A conversation in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(turns)
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, turns, strict=False))
    return Conversation(messages, start, source)  # type: ignore[arg-type]


def rows(n: int) -> list[Row]:
    return [chat(f"{i}?", "abcdefgh"[: i % 7 + 1], source=f"chat:{i}") for i in range(n)]


def learned(sequence: Sequence, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, learn in zip(sequence.tokens, sequence.loss_mask, strict=True) if learn])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "one<|im_end|>three<|im_end|>"),
        ({"learn": "all"}, "one<|im_end|>three<|im_end|>"),
        ({"learn": "last"}, "three<|im_end|>"),
        ({"learn": "all", "learn_eos": False}, "onethree"),
        ({"learn": "last", "learn_eos": False}, "three"),
    ],
)
def test_learned_tokens_are_the_content_and_one_end_a_turn(settings: dict, expected: str, tiny_tokenizer: Any) -> None:
    row = chat("a", "one", "b", "three")
    (example,) = SFT(**settings).examples([row], tiny_tokenizer, Truncation()).examples
    assert learned(example.sequences[0], tiny_tokenizer) == expected
    learned_tokens = len(expected.replace("<|im_end|>", "."))  # a character each
    assert example.counts["tokens"] == learned_tokens


SYSTEM = ({"role": "system", "content": "Be brief."},)
PROMPTED = Conversation(
    (*SYSTEM, *chat("a", "one", "b", "three").messages),  # type: ignore[arg-type]
    completion_start=4,
    source="chat:1",
)
PLAIN = "System: Be brief.\n\nQuestion: a\n\nAnswer: one<|im_end|>\n\nQuestion: b\n\nAnswer: three<|im_end|>"


@pytest.mark.parametrize(
    ("learn", "learn_eos", "expected"),
    [
        (None, True, " three<|im_end|>"),
        ("completion", True, " three<|im_end|>"),
        ("completion", False, " three"),
        ("last", True, " three<|im_end|>"),
        ("all", True, " one<|im_end|> three<|im_end|>"),
        ("all", False, " one three"),
        # all but the first token, and the white space after an end
        ("everything", True, PLAIN[1:].replace("<|im_end|>\n\n", "<|im_end|>")),
        ("everything", False, PLAIN[1:].replace("<|im_end|>\n\n", "").replace("<|im_end|>", "")),
    ],
)
def test_a_plain_template_with_a_system_prompt(learn: Any, learn_eos: bool, expected: str, tiny_tokenizer: Any) -> None:
    set_template(tiny_tokenizer, "question_answer")
    method = SFT(learn=learn, learn_eos=learn_eos)
    (example,) = method.examples([PROMPTED], tiny_tokenizer, Truncation()).examples
    assert tiny_tokenizer.decode(example.sequences[0].tokens) == PLAIN
    assert learned(example.sequences[0], tiny_tokenizer) == expected


@pytest.mark.parametrize(
    ("learn", "expected"),
    [("completion", "three<|im_end|>"), ("last", "three<|im_end|>"), ("all", "one<|im_end|>three<|im_end|>")],
)
def test_a_system_prompt_is_seen_and_not_learned(learn: Any, expected: str, tiny_tokenizer: Any) -> None:
    (example,) = SFT(learn=learn).examples([PROMPTED], tiny_tokenizer, Truncation()).examples
    text = tiny_tokenizer.decode(example.sequences[0].tokens)
    assert text.startswith("<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")
    assert learned(example.sequences[0], tiny_tokenizer) == expected


def test_the_last_turn_is_among_all_of_them(tiny_tokenizer: Any) -> None:
    row = chat("a", "one", "b", "three", "c", "five")
    last, every = (
        SFT(learn=learn).examples([row], tiny_tokenizer, Truncation()).examples[0].sequences[0]
        for learn in ("last", "all")
    )
    assert tuple(last.tokens) == tuple(every.tokens)
    assert {i for i, t in enumerate(last.loss_mask) if t} < {i for i, t in enumerate(every.loss_mask) if t}


def test_a_completion_is_learned_alone_where_the_row_has_one(tiny_tokenizer: Any) -> None:
    row = chat("a", "one", "b", "three", start=3)
    (example,) = SFT().examples([row], tiny_tokenizer, Truncation()).examples
    assert learned(example.sequences[0], tiny_tokenizer) == "three<|im_end|>"


def test_everything_is_every_token_but_the_first_and_space_after_ends(tiny_tokenizer: Any) -> None:
    (example,) = SFT(learn="everything").examples([chat("a", "one", "b", "c")], tiny_tokenizer, Truncation()).examples
    tokens = example.sequences[0].tokens
    blank = [i for i in range(1, len(tokens)) if tokens[i - 1] == END and tokens[i] == NEWLINE]
    assert tuple(example.sequences[0].loss_mask) == tuple(i > 0 and i not in blank for i in range(len(tokens)))
    assert len(blank) == 4


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(make_trainer: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    trainer = make_trainer(SFT(), model, rows(4), own={"eval_dataset": rows(9)})
    found = trainer.evaluate()
    assert found["eval_nll"] == found["eval_loss"] == pytest.approx(math.log(105), abs=1e-5)
    assert found["eval_perplexity"] == pytest.approx(105, rel=1e-5)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(105), abs=1e-3)


@torch.no_grad()
def mean_nll(model: Any, sequences: list[Sequence]) -> float:
    """By transformers alone, one sequence at a time."""
    losses = []
    for s in sequences:
        tokens = torch.tensor([s.tokens.tolist()])
        logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        losses += logprobs[torch.tensor(s.loss_mask[1:].tolist())].tolist()
    return -math.fsum(losses) / len(losses)


@pytest.mark.parametrize("own", [{}, {"token_budget": 60}, {"packed": True}, {"padding_side": "left"}], ids=str)
def test_the_loss_is_the_mean_over_the_tokens_of_the_step(
    own: dict, make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    model = tiny_llama()
    start = copy.deepcopy(model)
    trainer = make_trainer(SFT(), model, rows(6), batch=6, lr=0.0, own={"eval_dataset": rows(9), **own})
    sequences = [e.sequences[0] for e in SFT().examples(rows(9), tiny_tokenizer, Truncation()).examples]
    assert trainer.evaluate()["eval_nll"] == pytest.approx(mean_nll(start, sequences), abs=1e-5)
    trainer.train()
    assert trainer.state.log_history[0]["nll"] == pytest.approx(mean_nll(start, sequences[:6]), abs=1e-5)
    assert trainer.state.log_history[0]["tokens"] == sum(len(s.tokens) for s in sequences[:6])


def test_accumulated_rows_are_one_step_of_all_their_tokens(make_trainer: Any, tiny_llama: Any) -> None:
    models = []
    for batch, accumulated, budget in ((4, 1, None), (1, 4, None), (2, 2, 40)):
        trainer = make_trainer(
            SFT(),
            tiny_llama(),
            rows(10),
            batch=batch,
            gradient_accumulation_steps=accumulated,
            own={"token_budget": budget},
        )
        trainer.train()
        assert trainer.state.global_step == 3  # of 4, 4 and 2 rows
        models.append(torch.cat([p.detach().flatten() for p in trainer.network.parameters()]))
    assert torch.equal(models[1], models[0])
    assert torch.allclose(models[2], models[0], atol=1e-4)
    assert not torch.allclose(torch.cat([p.flatten() for p in tiny_llama().parameters()]), models[0], atol=1e-4)


def test_nothing_learned_is_exactly_zero(make_trainer: Any, tiny_llama: Any) -> None:
    trainer = make_trainer(SFT(), tiny_llama(), rows(4))
    silent = [Example((Sequence((5, 6, 7), (False,) * 3, "silent"),))]
    terms = trainer.method.loss(trainer.network, trainer.engine.layout.collate(silent))
    nll = Metric(terms["nll"].total, terms["nll"].count)
    assert [x.item() for x in (nll.total, nll.count, nll.mean)] == [0.0, 0.0, 0.0]
    terms["nll"].total.backward()
    assert all(p.grad is None or not p.grad.any() for p in trainer.network.parameters())


def test_answers_are_learned(make_trainer: Any, tiny_llama: Any) -> None:
    trainer = make_trainer(SFT(), tiny_llama(), rows(16), lr=1e-2, num_train_epochs=8, own={"eval_dataset": rows(7)})
    before = trainer.evaluate()["eval_nll"]
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_nll"] < 0.3 * before
    assert after["eval_perplexity"] == pytest.approx(math.exp(after["eval_nll"]))


@pytest.mark.parametrize("lora", [False, True])
def test_noise_on_embeddings_is_of_training_alone(lora: bool, make_trainer: Any, tiny_llama: Any) -> None:
    """NEFTune (Jain et al. 2023) adds uniform noise within alpha / sqrt(tokens x width) to every embedding."""

    def train(alpha: float | None) -> tuple[float, float, float, float]:
        model: Any = tiny_llama()
        if lora:
            model = add_adapter(model, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM")
        own = {"eval_dataset": rows(7)}
        trainer = make_trainer(SFT(), model, rows(4), lr=0.0, own=own, neftune_noise_alpha=alpha, max_steps=2)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        first, second = (line["loss"] for line in trainer.state.log_history if "loss" in line)
        return before, first, second, trainer.evaluate()["eval_loss"]

    plain, noisy = train(None), train(50.0)
    assert plain[0] == noisy[0] == plain[3] == noisy[3]
    assert plain[1] == pytest.approx(plain[2], abs=1e-6)
    assert abs(noisy[1] - plain[1]) > 1e-3
    assert abs(noisy[2] - noisy[1]) > 1e-4  # drawn anew in every step


def test_mistakes_are_told(make_trainer: Any, tiny_llama: Any) -> None:
    with pytest.raises(UserError, match="learn"):
        SFT(learn="first")
    with pytest.raises(UserError, match=r"chat:1: learn: completion: the row has no prompt and completion"):
        make_trainer(SFT(learn="completion"), tiny_llama(), [chat("a", "b")]).train()
    dropping = {"truncation": Truncation(max_length=4, too_long="drop"), "eval_dataset": rows(2)}
    with pytest.raises(UserError, match="nothing to train on"):
        make_trainer(SFT(), tiny_llama(), rows(2), own=dropping).train()
    with pytest.raises(UserError, match="nothing to evaluate on"):
        make_trainer(SFT(), tiny_llama(), rows(2), own=dropping).evaluate()
