"""Encoders and causal models become reward models, and transformers alone computes the same scores."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import builders
from burnish import RewardModel
from burnish.models.loading import load_reward_model
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.rewards.model import ModelReward
from burnish.types import Conversation, Message, Trajectory

SIZES: dict[str, Any] = builders.SIZES | {"vocab_size": 105, "num_hidden_layers": 1, "max_position_embeddings": 128}
DEBERTA: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
FAMILIES = {
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt-neox without a pad token": lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**SIZES)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES)),
    "deberta": lambda: hf.DebertaV2Model(hf.DebertaV2Config(**SIZES, **DEBERTA)),
}
QUESTION: Any = ({"role": "user", "content": "How?"},)
PAIRS = [{"prompt": f"{i}?", "chosen": "abcdef"[: i % 5 + 1], "rejected": "xyzuvw"[: i % 3 + 1]} for i in range(8)]
TEXTS = ["yes", "no, not at all", "7"]


@pytest.fixture(params=FAMILIES)
def backbone(request, tmp_path) -> Path:
    torch.manual_seed(0)
    model = FAMILIES[request.param]()
    if "without" in request.param:
        model.config.pad_token_id = None
    model.save_pretrained(tmp_path / "backbone")
    return tmp_path / "backbone"


def test_it_learns_and_its_scores_equal_those_of_transformers_in_a_batch_and_alone(
    backbone, make_trainer, tiny_tokenizer, tmp_path
):
    model: Any = load_reward_model(str(backbone))
    trainer = make_trainer(RewardModel(), model, PAIRS, lr=5e-3, num_train_epochs=6)
    trainer.train()
    losses = [line["preference"] for line in trainer.state.log_history if "preference" in line]
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
    trainer.save_model(str(tmp_path / "saved"))
    trained = load_reward_model(str(tmp_path / "saved"), labels=None)
    reward = ModelReward(trained, tiny_tokenizer, length=Truncation(max_length=128))
    given = [Trajectory.from_text(text, QUESTION, source="x:1") for text in TEXTS]
    together, alone = reward(given), [reward([one])[0] for one in given]
    assert together == pytest.approx(alone, abs=1e-5) and len({round(score, 3) for score in alone}) == 3

    plain: Any = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(tmp_path / "saved")
    rows = [Conversation((*QUESTION, Message(role="assistant", content=text)), 1, "x:1") for text in TEXTS]
    ids = [answer.tokens.tolist() for answer in Renderer(tokenizer).answers(rows)]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        together = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
    assert together.tolist() == pytest.approx(alone, abs=1e-5)
