"""Reward models against the classifier's own forward pass on single unpadded rows."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from burnish.errors import UserError
from burnish.render.templates import set_template
from burnish.render.truncate import Truncation
from burnish.rewards.model import ModelReward
from burnish.types import Trajectory

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = {token: i for i, token in enumerate(["[PAD]", "[CLS]", "[SEP]", "[EOS]", "[UNK]", *LETTERS])}
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}


def letters(encoder: bool):
    """A tokenizer with one token a letter, under the plain template ``text``."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    special: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if encoder:
        around = [("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])]
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]", special_tokens=around
        )
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        special |= {"eos_token": "[EOS]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    set_template(tokenizer, "text")
    return tokenizer


def causal():
    torch.manual_seed(0)
    settings: dict[str, Any] = SHAPE | {"num_labels": 1, "pad_token_id": None}
    return LlamaForSequenceClassification(LlamaConfig(**settings)).eval()


def encoder():
    torch.manual_seed(0)
    labels: dict[str, Any] = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    return BertForSequenceClassification(BertConfig(**SHAPE, **labels))


def ids(text):
    return [VOCABULARY[letter] for letter in text]


def answers(*pairs):
    return [
        Trajectory.from_text(text, ({"role": "user", "content": prompt},), source=f"prompts.jsonl:{i + 1}")
        for i, (prompt, text) in enumerate(pairs)
    ]


PAIRS = [("ab", "cde"), ("a", "b"), ("hello", "worldly"), ("xyz", ""), ("ab", "cdf"), ("longest", "prompt")]


def logit(model, tokens, label=0):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0, label].item()


@pytest.mark.parametrize("budget", [8192, 20, 1])
def test_a_causal_reward_model_scores_the_prompt_the_answer_and_eos(budget):
    model = causal()
    reward = ModelReward(model, letters(encoder=False), token_budget=budget)
    expected = [logit(model, [*ids(prompt + text), VOCABULARY["[EOS]"]]) for prompt, text in PAIRS]
    assert reward(answers(*PAIRS)) == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in expected}) == len(PAIRS)


def test_a_reward_model_in_bfloat16_has_its_scores_in_float32():
    expected = ModelReward(causal(), letters(encoder=False))(answers(*PAIRS))
    model = causal().bfloat16()
    scores = ModelReward(model, letters(encoder=False))(answers(*PAIRS))
    assert model.dtype == torch.bfloat16 and model.score.weight.dtype == torch.float32
    assert scores == pytest.approx(expected, abs=0.05 * max(map(abs, expected)))
    assert any(torch.tensor(score).bfloat16().item() != score for score in scores)


def test_a_classifier_scores_by_the_raw_logit_of_the_named_label():
    model = encoder()
    expected = [
        logit(model.eval(), [VOCABULARY["[CLS]"], *ids(prompt + text), VOCABULARY["[SEP]"]], label=1)
        for prompt, text in PAIRS
    ]
    for label in ("POSITIVE", 1):
        reward = ModelReward(model.train(), letters(encoder=True), label=label, token_budget=30)
        assert reward(answers(*PAIRS)) == pytest.approx(expected, abs=1e-6)
    assert min(expected) < 0 or max(expected) > 1, "neither a sigmoid nor a softmax"


def test_too_long_inputs_are_truncated_in_the_prompt():
    model = causal()
    kept = ids("uvwxyz") + ids("answerthatislong") + [VOCABULARY["[EOS]"]]  # 23 of at most 24 tokens
    prompt = LETTERS[:20] + "uvwxyz"
    (by_window,) = ModelReward(model, letters(encoder=False))(answers((prompt, "answerthatislong")))
    assert by_window == pytest.approx(logit(model, [VOCABULARY["t"], *kept]), abs=1e-6)
    shorter = ModelReward(model, letters(encoder=False), length=Truncation(max_length=23, too_long="truncate_left"))
    assert shorter(answers((prompt, "answerthatislong"))) == pytest.approx([logit(model, kept)], abs=1e-6)
    with pytest.raises(
        UserError,
        match=r"prompts.jsonl:1: .* tokens, max_length 24: it does not fit even without its prompt: generate shorter",
    ):
        ModelReward(model, letters(encoder=False))(answers(("a", LETTERS)))


@pytest.mark.parametrize(
    "label, message",
    [
        (None, "has 2 labels: name one of 'NEGATIVE', 'POSITIVE'"),
        ("POSITVE", r"no label 'POSITVE' \(did you mean 'POSITIVE'\?\)"),
        (2, "no label 2; expected one of 'NEGATIVE', 'POSITIVE'"),
    ],
)
def test_an_unknown_label_is_refused(label, message):
    with pytest.raises(UserError, match=message):
        ModelReward(encoder(), letters(encoder=True), label=label)


def test_the_reward_model_is_frozen():
    model = causal().train()
    reward = ModelReward(model, letters(encoder=False))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert reward([]) == []


def test_scores_are_normalized_by_the_stored_mean_and_spread():
    model, tokenizer = causal(), letters(encoder=False)
    rows = answers(("ab", "cd"), ("e", "fgh"))
    plain = ModelReward(model, tokenizer)(rows)
    model.config.score_mean, model.config.score_std = 0.5, 2.0
    assert ModelReward(model, tokenizer, normalize=True)(rows) == pytest.approx([(x - 0.5) / 2 for x in plain])


def test_normalizing_without_a_stored_scale_is_refused():
    with pytest.raises(UserError, match="no stored score_mean and score_std"):
        ModelReward(causal(), letters(encoder=False), normalize=True)
