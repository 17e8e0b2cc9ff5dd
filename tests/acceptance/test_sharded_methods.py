"""Promise 1 for every method: two processes, with whole or with sharded weights, learn what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import layouts

CASES = [
    # the completions of a continuous batch depend on which process samples them
    *layouts.job.CASES.keys() - {"reward lora", "rloo odd", "rloo continuous"},
    # their first gradients are so small that Adam turns their rounding into about 1e-5 in float32
    "reward lora float64",
    "rloo odd float64",
    "sft lora float64",
    "dpo float64",
    "ppo separate float64",
]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes learned, by layout and case."""
    return layouts.launch("train", tmp_path_factory.mktemp("methods"), sorted(CASES))


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
@pytest.mark.parametrize("case", sorted(CASES))
def test_two_processes_learn_what_one_does(case: str, several: Any, tmp_path: Path) -> None:
    one = layouts.job.train(case, tmp_path)
    for layout in ("ddp", "fsdp2"):
        layouts.check(case, one, several[layout][case])
    layouts.check_saved(case, several["fsdp2"][case])
