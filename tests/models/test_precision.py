"""What the key ``precision`` means for weights and passes."""

from __future__ import annotations

import pytest
import torch

from burnish.models.precision import autocast_dtype, resolve, weights_dtype
from burnish.models.settings import Precision

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "precision, gpu, frozen, passes",
    [
        ("auto", False, F32, None),
        ("auto", True, BF16, BF16),
        ("float32", True, F32, None),
        ("bf16", False, BF16, BF16),
        ("fp16", True, F16, F16),
    ],
)
def test_trained_weights_stay_in_float32_and_the_rest_follows_the_key(
    precision: Precision, gpu: bool, frozen: torch.dtype, passes: torch.dtype | None
) -> None:
    assert weights_dtype(precision, trained=True, gpu=gpu) == F32
    assert weights_dtype(precision, gpu=gpu) == frozen
    assert autocast_dtype(precision, gpu) == passes


def test_auto_asks_this_machine() -> None:
    assert resolve("auto") == ("bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32")
