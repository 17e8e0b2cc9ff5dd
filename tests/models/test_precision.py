"""What the key ``precision`` means for weights and passes."""

from __future__ import annotations

import pytest
import torch

from burnish import machine
from burnish.models.precision import WIDE, autocast_dtype, resolve, weights_dtype
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
    assert weights_dtype(precision, 64, trained=True, gpu=gpu) == F32
    assert weights_dtype(precision, 64, gpu=gpu) == frozen
    assert autocast_dtype(resolve(precision, 64, gpu)) == passes


@pytest.mark.parametrize("width, fast, expected", [(WIDE, True, "bf16"), (WIDE - 1, True, "float32"),
                                                   (None, True, "float32"), (4096, False, "float32")])  # fmt: skip
def test_on_a_cpu_auto_is_bf16_for_wide_models_if_the_cpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, width: int | None, fast: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "has_bf16", lambda: fast)
    assert resolve("auto", width) == resolve("auto", width, gpu=False) == expected


def test_on_a_gpu_auto_does_not_ask_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_bf16", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for supported, expected in ((True, "bf16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert resolve("auto", 4096) == expected


def test_cpus_without_instructions_for_bf16_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ({}, {"avx512_f": True, "avx2": True}, {"bf16": True, "neon": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
        assert not machine.has_bf16()
