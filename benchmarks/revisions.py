"""Speed and memory of one checkout of Burnish against those of another: alternating runs, ratios and their interval.

``python benchmarks/revisions.py ../burnish-before sft ppo --repeats 7``. Each run is a process of its own with one
thread. A ratio is tokens per CPU second of this checkout over those of the other, so that it is above 1 where this one
is faster. The interval is the 95 % one of their geometric mean over the pairs (Student's t). Memory is the ratio of the
processes' peaks, as a median over the pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from run import METHODS, ROOT, THREADS, machine, models

# 97.5 % points of Student's t by degrees of freedom
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def measure(checkout: Path, method: str, folder: Path, *arguments: Any) -> tuple[float, float]:
    """Tokens per CPU second and peak memory of one run of a checkout, by its own benchmark: names may differ."""
    script = checkout / "benchmarks" / "side.py"
    command = [sys.executable, script, "burnish", method, "--folder", folder, *arguments]
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(checkout / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(map(str, command))}\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result["tokens"] / result["cpu"], result["peak"]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean of at least 2 ratios and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    half = STUDENT[len(logs) - 1] * stdev(logs) / math.sqrt(len(logs))
    mean = fmean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--repeats", type=int, choices=range(2, 12), default=7)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(machine()))
    checkouts = [ROOT, options.other.resolve()]
    with models(options.vocabulary) as folder:
        for method in options.methods:
            speeds, memories = [], []
            arguments = ("--vocabulary", options.vocabulary, "--steps", options.steps)
            for repeat in range(options.repeats):
                results = {}
                for checkout in checkouts if repeat % 2 else checkouts[::-1]:
                    results[checkout] = measure(checkout, method, folder, *arguments)
                (speed, memory), (other_speed, other_memory) = (results[checkout] for checkout in checkouts)
                speeds.append(speed / other_speed)
                memories.append(memory / other_memory)
                print(f"{method} pair {repeat + 1}: speed {speeds[-1]:.3f}, memory {memories[-1]:.3f}", flush=True)
            mean, low, high = interval(speeds)
            print(
                f"{method} V={options.vocabulary}: speed {mean:.3f} [{low:.3f}, {high:.3f}], "
                f"memory {median(memories):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
