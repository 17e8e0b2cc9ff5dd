"""Reward models against TRL's RewardTrainer: the same weights, pairs and template, one step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from burnish import RewardModel

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:::trl")]

ANSWERS = [("yes", "no, never"), ("perhaps some day", "a"), ("it is 12", "12"), ("b", "cd")]
NEWLINE_AFTER_TURN = "{{- '\\n' -}}\n{%- endfor -%}"


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


PAIRS: list[Any] = [
    {"prompt": said("user", f"{i}?"), "chosen": said("assistant", a), "rejected": said("assistant", b)}
    for i, (a, b) in enumerate(ANSWERS)
]


@pytest.fixture
def classifier(tiny_llama: Any) -> Any:
    config = LlamaConfig.from_dict(tiny_llama().config.to_dict() | {"id2label": {0: "score"}, "label2id": {"score": 0}})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForSequenceClassification(config).eval()


def test_pairs(ours: Any, trl_step: Any, same: Any, classifier: Any) -> None:
    same("reward model", ours(RewardModel(), classifier, PAIRS), trl_step("Reward", classifier, PAIRS))


def test_margins_and_centering(ours: Any, trl_step: Any, same: Any, classifier: Any) -> None:
    rows = [row | {"margin": 0.5 * i} for i, row in enumerate(PAIRS)]
    theirs = trl_step("Reward", classifier, rows, config={"center_rewards_coefficient": 0.01})
    same("reward model, margins and centering", ours(RewardModel(centering=0.01), classifier, rows), theirs)


def test_the_end_is_not_scored_by_trl_where_it_is_also_the_padding(
    ours: Any, trl_step: Any, same: Any, classifier: Any, written: Any
) -> None:
    """TRL's score is that of the last token that is not the padding's id: of the last character, not of the end."""
    tokenizer = written(NEWLINE_AFTER_TURN, "{%- endfor -%}")
    apart = trl_step("Reward", classifier, PAIRS, tokenizer)
    same("reward model, end last", ours(RewardModel(), classifier, PAIRS, processing_class=tokenizer), apart)

    tokenizer.pad_token = tokenizer.eos_token
    pad_is_end = copy.deepcopy(classifier)
    pad_is_end.config.pad_token_id = tokenizer.eos_token_id
    theirs = trl_step("Reward", pad_is_end, PAIRS, tokenizer)
    found = ours(RewardModel(), pad_is_end, PAIRS, processing_class=tokenizer)
    assert found.loss == pytest.approx(apart.loss, rel=1e-5)

    @torch.no_grad()
    def score_of_last_character(row: Any, side: str) -> float:
        ids = tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=False)
        assert ids[-1] == tokenizer.eos_token_id
        return classifier.score(classifier.model(torch.tensor([ids])).last_hidden_state[0, -2]).item()

    margins = [score_of_last_character(row, "chosen") - score_of_last_character(row, "rejected") for row in PAIRS]
    assert theirs.loss == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / len(margins), rel=1e-5)
    assert abs(theirs.loss - found.loss) > 0.01
