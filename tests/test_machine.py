"""What Burnish finds out about a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from burnish import machine


def here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cores_are_those_of_the_container(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``expected`` is None where there is no limit, or one above the cores of this machine."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cores() == (here() if expected is None else expected)


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    whole = machine.memory_bytes()
    for text, expected in (("max", whole), ("1048576", 2**20)):
        (tmp_path / "memory.max").write_text(text + "\n")
        assert machine.memory_bytes() == expected


@pytest.mark.parametrize("chosen, expected", [(None, 1), ("3", 3)])
def test_torch_uses_no_more_threads_than_cores(
    chosen: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    try:
        torch.set_num_threads(3)
        machine.limit_threads()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"cpu_name": "AMD EPYC", "avx2": True, "avx512_f": True, "avx512_bf16": True}, "AMD EPYC, AVX512-BF16"),
        (
            {"cpu_name": "Intel(R) Xeon(R) Gold 6430 CPU @ 2.10GHz", "avx512_bf16": True, "amx_bf16": True},
            "Intel Xeon Gold 6430, AMX",
        ),
        ({"cpu_name": "Intel(R) Xeon(R) Processor", "avx512_bf16": False, "avx512_f": True}, "Intel Xeon, AVX-512"),
        ({"cpu_name": "Apple M2", "architecture": "arm64", "neon": True, "bf16": True}, "Apple M2, NEON-BF16"),
        ({"architecture": "aarch64", "neon": True, "sve_bf16": True}, "aarch64, SVE-BF16"),
        ({"cpu_name": "POWER10"}, "POWER10"),
    ],
)
def test_a_processor_is_named_with_its_fastest_instructions(
    capabilities: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(machine, "CPUINFO", Path("/no/such/file"))
    assert machine.processor() == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [("25", "AMD EPYC Zen 4, AVX-512"), ("26", "AMD EPYC Zen 5, AVX-512"), ("99", "AMD EPYC, AVX-512")],
)
def test_generations_of_amd_are_told_apart(
    family: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "AMD EPYC", "avx512_f": True})
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t\t: 17\n")
    assert machine.processor() == expected
