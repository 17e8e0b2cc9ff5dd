"""Burnish against TRL: alternating runs in processes of their own, equal losses, ratios of tokens a second and memory.

``python benchmarks/run.py sft dpo --vocabularies 4096 --repeats 5`` writes to ``benchmarks/results.json``. It fails
where the two sides do not compute the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
METHODS = ("sft", "dpo", "reward", "grpo", "rloo", "ppo")
ONLINE = ("grpo", "rloo", "ppo")
TOLERANCE = 1e-4
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
    known = Path("/proc/cpuinfo")
    lines = known.read_text("utf-8").splitlines() if known.exists() else []
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def write(name: str, found: dict[str, Any]) -> None:
    """Keep results under a name, beside those that were there."""
    read = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(read | {name: found}, indent=1) + "\n", "utf-8")


def check(method: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses and norms of gradients of every step of both sides; the end of the run where they differ."""
    steps = []
    for what in ("losses", "gradients"):
        for step, (a, b) in enumerate(zip(ours[what], theirs[what], strict=True)):
            steps.append({"step": step + 1, "what": what, "burnish": a, "trl": b})
            # RLOO's loss is -mean(A log p) here and -mean(A ratio) there, with the same gradient
            compared = (method, what) != ("rloo", "losses")
            if compared and not math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                sys.exit(f"{method}: {what} of step {step + 1} differ: {a} here, {b} in TRL")
    return steps


def ratios(pairs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Least, median and greatest ratio over the repeats, above 1 where Burnish is better."""
    found = {
        "speed": [p["burnish"]["tokens"] / p["burnish"]["cpu"] / p["trl"]["tokens"] * p["trl"]["cpu"] for p in pairs],
        "memory": [p["trl"]["peak"] / p["burnish"]["peak"] for p in pairs],
    }
    return {name: [min(values), median(values), max(values)] for name, values in found.items()}


def compare(method: str, vocabulary: int, folder: Path, repeats: int, *arguments: Any) -> dict[str, Any]:
    """Alternating runs of both sides, after a check that they compute the same."""
    pairs, steps = [], []
    if method in ONLINE:
        given = {name: side(name, method, folder, vocabulary, "--given") for name in ("burnish", "trl")}
        steps = check(method, given["burnish"], given["trl"])
    for _ in range(repeats):
        pair = {name: side(name, method, folder, vocabulary, "--rate", *arguments) for name in ("burnish", "trl")}
        if method not in ONLINE:
            steps = check(method, pair["burnish"], pair["trl"])
        pairs.append(pair)
    where = machine() | {"threads": 1, "trl": "1.12.0" if method == "ppo" else "1.16.0"}
    found = {"method": method, "vocabulary": vocabulary, "machine": where, "arguments": list(arguments)}
    return found | {"ratios": ratios(pairs), "equal": steps, "repeats": pairs}


def main() -> None:
    """Read the command line, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 49152])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    for vocabulary in options.vocabularies:
        with models(vocabulary) as folder:
            for method in options.methods:
                found = compare(method, vocabulary, folder, options.repeats, "--steps", options.steps)
                write(f"cpu-{method}-{vocabulary}", found)
                for name, (low, middle, high) in found["ratios"].items():
                    print(
                        f"{method:7} V={vocabulary:6} {name:7} {middle:5.2f} x  ({low:.2f} to {high:.2f})", flush=True
                    )


if __name__ == "__main__":
    main()
