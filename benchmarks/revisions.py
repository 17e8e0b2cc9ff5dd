"""Speed and memory of one checkout of Burnish against those of another: pairs of runs, ratios and their interval.

``python benchmarks/revisions.py ../burnish-before sft ppo --repeats 7``. The two runs of a pair are processes with one
thread each. They take turns: while one takes an optimizer step the other waits, so that a machine whose speed changes
from second to second changes both alike. A ratio is tokens per CPU second of this checkout over those of the other, so
it is above 1 where this one is faster. The interval is the 95 % one of their geometric mean over the pairs (Student's
t). Memory is the ratio of the processes' peaks, as a median over the pairs.
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


# Runs a checkout's own side.py, as its names may differ; after each step it prints a line and waits for one.
TAKING_TURNS = """
import os, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import side
tick = side.Clock.tick
def wait(clock):
    tick(clock)
    print("step", file=sys.stderr, flush=True)
    sys.stdin.readline()
side.Clock.tick = wait
side.main()
"""


def start(checkout: Path, method: str, folder: Path, *arguments: Any) -> subprocess.Popen[str]:
    """A run of a checkout, which waits after each optimizer step for a line on its standard input."""
    script = checkout / "benchmarks" / "side.py"
    command = [sys.executable, "-c", TAKING_TURNS, script, "burnish", method, "--folder", folder, *arguments]
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(checkout / "src"), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), text=True, env=environment, **pipes)


def step(run: subprocess.Popen[str]) -> bool:
    """Let a run go on to the end of its next optimizer step, or to its own end; whether there was a step."""
    assert run.stdin and run.stderr
    told = []
    for line in run.stderr:
        if line == "step\n":
            return True
        told.append(line)
    if run.wait():
        sys.exit(f"{' '.join(map(str, run.args))}\n{''.join(told)[-4000:]}")  # type: ignore[arg-type]
    return False


def measure(checkouts: list[Path], method: str, folder: Path, *arguments: Any) -> list[tuple[float, float]]:
    """Tokens per CPU second and peak memory of each checkout; their runs take turns step by step."""
    runs = []
    for checkout in checkouts:  # one after the other up to the end of the first step
        runs.append(start(checkout, method, folder, *arguments))
        assert step(runs[-1])
    waiting = runs
    while waiting:
        waiting = waiting[::-1]
        for run in waiting:
            assert run.stdin
            run.stdin.write("go\n")
            run.stdin.flush()
            if not step(run):
                waiting = [one for one in waiting if one is not run]
    results = [json.loads(run.stdout.read().splitlines()[-1]) for run in runs if run.stdout]
    return [(result["tokens"] / result["cpu"], result["peak"]) for result in results]


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
                order = checkouts if repeat % 2 else checkouts[::-1]
                results = dict(zip(order, measure(order, method, folder, *arguments), strict=True))
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
