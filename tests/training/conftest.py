"""Makes trainers of tiny models."""

import dataclasses
from typing import Any

import pytest
from transformers import TrainingArguments

from burnish import SFT, Trainer
from tiny_runs import ROWS, arguments

ARGUMENTS = {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.fixture
def make(tiny_llama, tiny_tokenizer, tmp_path):
    """Makes a trainer: ``make(method, model, rows, token_budget=..., learning_rate=...)``."""

    def trainer(method: Any = None, model: Any = None, rows: Any = ROWS, **settings: Any) -> Trainer:
        folder = settings.pop("folder", tmp_path / "out")
        own = {name: settings.pop(name) for name in list(settings) if name not in ARGUMENTS}
        return Trainer(
            model=tiny_llama() if model is None else model,
            args=arguments(folder, **settings),
            method=method or SFT(),
            train_dataset=rows,
            processing_class=tiny_tokenizer,
            **own,
        )

    return trainer
