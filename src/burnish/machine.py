"""Facts about this machine: cores, memory, GPU, measured speed; and advice about it."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from burnish.kernels import linear

PACKAGES = ("burnish", "torch", "transformers", "accelerate", "peft", "datasets")
OPTIONAL = {"bitsandbytes": "4-bit bases on a GPU", "ray": "rollouts, rewards and processes on other machines"}
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")

INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512_f": "AVX-512",
    "avx2": "AVX2",
    "sve_bf16": "SVE-BF16",
    "bf16": "NEON-BF16",
    "neon": "NEON",
}
"""Instructions for matrix products, the fastest first, by their names in ``torch.cpu.get_capabilities()``."""


ZEN = {"25": "Zen 4", "26": "Zen 5"}
"""Generations of AMD's processors with AVX-512, by their family. In a virtual machine, all are called AMD EPYC."""


def has_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16 matrix products that PyTorch uses and that were measured."""
    known = torch.cpu.get_capabilities()
    return linear.has_onednn() and any(known.get(name) for name in ("amx_bf16", "avx512_bf16"))


def processor() -> str:
    """The name of the processor and its fastest instructions for matrix products: ``AMD EPYC Zen 4, AVX512-BF16``."""
    known = torch.cpu.get_capabilities()
    name = re.sub(r"\((R|TM)\)|\b(Processor|CPU)\b|@.*", " ", str(known.get("cpu_name") or platform.machine()))
    fastest = [label for key, label in INSTRUCTIONS.items() if known.get(key)][:1]
    if "AMD" in name and known.get("avx512_f") and CPUINFO.is_file():
        family = re.search(r"^cpu family\s*: (\d+)$", CPUINFO.read_text(), re.MULTILINE)
        name += " " + ZEN.get(family[1] if family else "", "")
    return ", ".join([" ".join(name.split()), *fastest])


def matmul_rate(dtype: torch.dtype, size: int = 1024, seconds: float = 0.2) -> float:
    """Measure the floating-point operations per second of (size, size) matrix products; the best of several.

    The products are those of Burnish's linear layers: in float32 on a CPU, oneDNN's where they are available.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(size, size, device=device).to(dtype)
    product = linear.product if device == "cpu" and dtype == torch.float32 and linear.has_onednn() else torch.matmul
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds or best == float("inf"):
        start = time.perf_counter()
        product(a, a)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def memory_bytes() -> int:
    """Memory in bytes that this process may use: the machine's memory, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_words(name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([total, *(int(limit[0]) for limit in limits if limit and limit[0].isdigit())])


def cores() -> int:
    """The number of cores that this process may use: those it may run on, or the quota of its container, rounded up."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # microseconds of CPU time in each period: of version 2 in one file, of version 1 in two
    for limit in (_words("cpu.max"), _words("cpu/cpu.cfs_quota_us") + _words("cpu/cpu.cfs_period_us")):
        if len(limit) == 2 and limit[0].isdigit() and int(limit[0]) > 0:  # not "max" or -1, which mean no limit
            found = min(found, math.ceil(int(limit[0]) / int(limit[1])))
    return found


def _words(name: str) -> list[str]:
    """The words of a file about the container's limits; none if there is no such file."""
    file = CGROUP / name
    return file.read_text().split() if file.is_file() else []


def limit_threads() -> None:
    """Make torch use at most one thread per core, unless OMP_NUM_THREADS is set.

    torch does not know the quota of a container. With more threads than that, all wait for those that were stopped.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores()))


def use_one_gpu() -> str | None:
    """Hide all visible GPUs but the first, and return advice to use all of them; None if there is at most one.

    It has to be called before CUDA is used.
    """
    if (gpus := torch.cuda.device_count()) < 2:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = first
    return (
        f"{gpus} GPUs are visible, and this run uses one of them ({first}): to use all, set parallel.processes={gpus}"
    )


def examine() -> dict[str, str]:
    """Facts by name. This takes about a second, most of it for measuring matrix products."""
    facts = {"python": f"{platform.python_version()} on {platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    facts["processor"] = processor()
    facts["cores"] = f"{cores()} of {os.cpu_count()}"
    facts["threads"] = str(torch.get_num_threads())
    facts["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "not set")
    facts["memory"] = f"{memory_bytes() / 2**30:.1f} GiB"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts["GPU"] = f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    else:
        facts["GPU"] = "none"
    rates = {dtype: matmul_rate(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, rate in rates.items():
        facts[f"matrix product, {str(dtype).removeprefix('torch.')}"] = f"{rate / 1e9:.0f} GFLOP/s"
    facts["bfloat16"] = f"{rates[torch.bfloat16] / rates[torch.float32]:.2f} times as fast as float32"
    for name, purpose in OPTIONAL.items():
        facts[name] = version(name) if importlib.util.find_spec(name) else f"not installed (optional: {purpose})"
    return facts


def advice(facts: dict[str, str]) -> list[str]:
    """Advice on how to run faster or more safely on this machine, in full sentences."""
    lines = []
    if facts["OMP_WAIT_POLICY"].upper() != "PASSIVE":
        lines.append(
            "set OMP_WAIT_POLICY=PASSIVE and GOMP_SPINCOUNT=10000: waiting threads then sleep and do not slow down"
            " others."
        )
    usable = int(facts["cores"].split()[0])
    if int(facts["threads"]) > usable:
        lines.append(
            f"{facts['threads']} threads share {usable} cores: set OMP_NUM_THREADS={usable}, as burnish run does."
        )
    faster = float(facts["bfloat16"].split()[0])
    if faster >= 1.5 and facts["GPU"] == "none":
        chosen = "auto chooses it for models with a hidden size of at least 384." if has_bf16() else "auto is float32."
        lines.append(
            f"matrix products are {faster:.1f} times as fast in bfloat16: precision: bf16 makes training and sampling"
            f" faster. Results differ by rounding. precision: {chosen}"
        )
    if faster < 1.2:
        lines.append(
            "keep float32: bfloat16 is hardly faster on this machine, or slower, and less exact. It still halves the"
            " memory of frozen weights (precision: bf16 with an adapter)."
        )
    if float(facts["memory"].split()[0]) < 4:
        lines.append("less than 4 GiB of memory: set a small token_budget: in the recipe.")
    return lines
