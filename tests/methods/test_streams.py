"""Whatever a method learns from rows in memory it learns from the same rows as a stream."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf

from burnish import SFT, Pretrain, RewardModel
from burnish.data import readers as rows
from burnish.data.streaming import RowStream, Source
from burnish.methods.step_value import StepValue

TEXTS = [{"text": "abcdefgh"[: 2 + i]} for i in range(5)]
CHATS = [{"prompt": f"{i}?", "completion": "abcdefgh"[: 1 + i]} for i in range(5)]
PAIRS = [row | {"chosen": row["completion"], "rejected": "no"} for row in CHATS]
PAIRS = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in PAIRS]
SOLUTIONS = [
    {"instruction": f"{i}?", "output": [{"step": "so", "Q": 0.5}, {"step": str(i), "Q": (-1.0) ** i}]} for i in range(5)
]


def classifier(policy: Any) -> Any:
    labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    return hf.LlamaForSequenceClassification(hf.LlamaConfig.from_dict(policy.config.to_dict() | labels))


@pytest.mark.parametrize(
    ("method", "records"),
    [(Pretrain(), TEXTS), (SFT(), CHATS), (RewardModel(), PAIRS), (StepValue(), SOLUTIONS)],
    ids=lambda value: value.spec.name if hasattr(value, "spec") else "",
)
def test_a_step_of_a_stream_is_a_step_of_the_rows(
    method: Any, records: list[dict[str, Any]], make_trainer: Any, tiny_llama: Any
) -> None:
    """One step of all rows: their order in it does not matter."""
    losses = []
    for streamed in (False, True):
        hf.set_seed(0)
        model = classifier(tiny_llama()) if method.spec.name == "reward" else tiny_llama()
        data: Any = rows.load(records, method.spec.kinds)
        if streamed:
            data = RowStream([Source("rows", lambda: rows.read(records, method.spec.kinds))], shuffle_buffer=5)
        trainer = make_trainer(method, model, data, batch=5, max_steps=2)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][0] != losses[0][1]
