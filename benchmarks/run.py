"""Burnish against TRL: alternating runs in processes of their own, equal losses, ratios of tokens a second and memory.

``python benchmarks/run.py sft dpo --vocabularies 4096 --repeats 5`` writes to ``benchmarks/results.json``. It fails
where the two sides do not compute the same. With ``--precision bf16``, Burnish computes in bfloat16, and TRL in float32
and in bfloat16, of which the faster one counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from burnish.machine import cores, processor

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
METHODS = ("sft", "dpo", "reward", "grpo", "rloo", "ppo")
ONLINE = ("grpo", "rloo", "ppo")
TOLERANCE = {"float32": 1e-4, "bf16": 0.05}
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def python(side: str, method: str) -> Path:
    """The environment of a side: the last PPO of TRL's is that of an older version."""
    folder = ".venv" if side == "burnish" else ".venv-peers-ppo" if method == "ppo" else ".venv-peers"
    return ROOT / folder / "bin" / "python"


def call(side: str, method: str, script: str, *arguments: Any) -> dict[str, Any]:
    """Run a script of this folder in a process of its own; its last line is what it found."""
    command = [python(side, method), ROOT / "benchmarks" / script, *arguments]
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def side(name: str, method: str, folder: Path, vocabulary: int, *arguments: Any) -> dict[str, Any]:
    """One run of a side (``side.py``)."""
    return call(name, method, "side.py", name, method, "--folder", folder, "--vocabulary", vocabulary, *arguments)


@contextmanager
def models(vocabulary: int) -> Iterator[Path]:
    """A folder with the models of the workload."""
    with tempfile.TemporaryDirectory() as folder:
        call("burnish", "sft", "workload.py", folder, "--vocabulary", vocabulary)
        yield Path(folder)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def read(name: str) -> dict[str, Any]:
    """The results of this kind of processor under a name; empty if there are none."""
    return _results().get(processor(), {}).get(name, {})


def write(name: str, found: dict[str, Any]) -> None:
    """Keep results under this kind of processor and a name, beside those that were there."""
    results = _results()
    results.setdefault(processor(), {})[name] = found
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def _results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def peak() -> int:
    """The peak resident memory of this process in bytes, since ``reset_peak`` where the system can forget."""
    status = Path("/proc/self/status")
    if status.exists():
        (kib,) = re.findall(r"VmHWM:\s+(\d+)", status.read_text("ascii"))
        return int(kib) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Let the peak start again at what is in use now (Linux)."""
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5", "ascii")


def check(method: str, ours: dict[str, Any], theirs: dict[str, Any], precision: str) -> list[dict[str, Any]]:
    """Losses and norms of gradients of every step of both sides; the end of the run where they differ."""
    steps, tolerance = [], TOLERANCE[precision]
    for what in ("losses", "gradients"):
        for step, (a, b) in enumerate(zip(ours[what], theirs[what], strict=True)):
            steps.append({"step": step + 1, "what": what, "burnish": a, "trl": b})
            # RLOO's loss is -mean(A log p) here and -mean(A ratio) there, with the same gradient
            compared = (method, what) != ("rloo", "losses")
            if compared and not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance):
                sys.exit(f"{method}: {what} of step {step + 1} differ: {a} here, {b} in TRL")
    return steps


def ratios(pairs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Least, median and greatest ratio over the repeats, above 1 where Burnish is better."""
    found = {
        "speed": [p["burnish"]["tokens"] / p["burnish"]["cpu"] / p["trl"]["tokens"] * p["trl"]["cpu"] for p in pairs],
        "memory": [p["trl"]["peak"] / p["burnish"]["peak"] for p in pairs],
    }
    return {name: [min(values), median(values), max(values)] for name, values in found.items()}


def compare(
    method: str, vocabulary: int, folder: Path, repeats: int, precision: str, *arguments: Any
) -> dict[str, Any]:
    """Alternating runs of both sides, after a check that they compute the same."""
    pairs, steps = [], []
    half = ["--bf16"] if precision == "bf16" else []
    if method in ONLINE:
        given = {name: side(name, method, folder, vocabulary, "--given", *half) for name in ("burnish", "trl")}
        steps = check(method, given["burnish"], given["trl"], precision)
    for _ in range(repeats):
        how = half or ["--rate"]
        pair: dict[str, Any] = {
            name: side(name, method, folder, vocabulary, *how, *arguments) for name in ("burnish", "trl")
        }
        if method not in ONLINE:
            steps = check(method, pair["burnish"], pair["trl"], precision)
        if half:
            pair["trl_precision"] = "bf16"
            in_float32 = side("trl", method, folder, vocabulary, *arguments)
            if in_float32["tokens"] / in_float32["cpu"] > pair["trl"]["tokens"] / pair["trl"]["cpu"]:
                pair |= {"trl": in_float32, "trl_precision": "float32"}
        pairs.append(pair)
    where = machine() | {"threads": 1, "trl": "1.12.0" if method == "ppo" else "1.16.0"}
    found = {"method": method, "vocabulary": vocabulary, "precision": precision, "machine": where}
    return found | {"arguments": list(arguments), "ratios": ratios(pairs), "equal": steps, "repeats": pairs}


def main() -> None:
    """Read the command line, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 49152])
    parser.add_argument("--precision", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    end = "-bf16" if options.precision == "bf16" else ""
    for vocabulary in options.vocabularies:
        with models(vocabulary) as folder:
            for method in options.methods:
                found = compare(
                    method, vocabulary, folder, options.repeats, options.precision, "--steps", options.steps
                )
                write(f"trl-{method}-{vocabulary}{end}", found)
                for name, (low, middle, high) in found["ratios"].items():
                    print(
                        f"{method:7} V={vocabulary:6} {name:7} {middle:5.2f} x  ({low:.2f} to {high:.2f})", flush=True
                    )


if __name__ == "__main__":
    main()
