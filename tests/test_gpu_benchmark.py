"""benchmarks/gpu.py runs to its end on a CPU, where it measures nothing, and counts operations as torch does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("gpu", "run", "workload"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("gpu")


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_the_peak_is_that_of_the_gpu(name: str, teraflops: float, gpu: Any) -> None:
    assert gpu.peak_of(name) == pytest.approx(teraflops * 1e12)
    assert gpu.peak_of("NVIDIA L40S") is gpu.peak_of("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_operations_are_those_that_torch_counts(gpu: Any) -> None:
    shape, length = gpu.TINY, 64
    model = Qwen3ForCausalLM(Qwen3Config(**shape | {"attn_implementation": "eager"}))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    # torch counts the head on all tokens, and all of a causal mask
    head = 6 * shape["vocab_size"] * shape["hidden_size"] * length / 2
    attention = 6 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * length**2
    assert counter.get_total_flops() - head - attention == pytest.approx(gpu.operations(shape, 1, length), rel=1e-2)


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_says_what_it_skips(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "gpu.py"), "--tiny", "--steps", "1", "--out", str(out)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "BURNISH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text("utf-8"))
    assert result["device"] == "CPU, tiny: these numbers mean nothing" and result["device"] in done.stdout
    found = result["found"]
    for name in ("sft", "decoding, local", "decoding, continuous", "ppo"):
        assert all(number >= 0 for number in found[name].values()) and f"\n{name}  " in done.stdout
    assert found["sft"]["tokens_per_second"] > 0 and "mfu" not in found["sft"]
    parts = [found["ppo"][f"{part}_seconds"] for part in ("rollout", "scoring", "update")]
    assert all(part > 0 for part in parts) and sum(parts) <= found["ppo"]["iteration_seconds"]
    skipped = [name for name, numbers in found.items() if isinstance(numbers, str)]
    assert set(skipped) <= {"sft, TRL", "decoding, vLLM"}
    assert all("is not installed in this environment" in found[name] for name in skipped)


def test_without_a_gpu_it_asks_for_tiny(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="there is no GPU here; --tiny shows that the script works"):
        gpu.main()
