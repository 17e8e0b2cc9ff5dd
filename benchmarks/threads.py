"""How much faster training is with one thread per core than with one thread: tokens per second of SmolLM2-135M.

    python benchmarks/threads.py --repeats 3

The runs are those of ``precision.py``, and alternate between one thread and all cores. Run it on a machine on which
nothing else runs.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

import precision
import run

CASES = ("sft 30", "sft 500", "ppo 24")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    cases: list[dict[str, Any]] = []
    for case in CASES:
        for name in precision.PRECISIONS:
            pairs = [
                [precision.measured(case, name, options.steps, threads) for threads in (1, cores)]
                for _ in range(options.repeats)
            ]
            speeds = [median(pair[i]["tokens"] / pair[i]["wall"] for pair in pairs) for i in range(2)]
            gains = sorted(one["wall"] / all_["wall"] for one, all_ in pairs)
            gain = [gains[0], median(gains), gains[-1]]
            cases.append({"case": case, "precision": name, "speeds": speeds, "gain": gain})
            print(f"{case:8} {name:9} {speeds[0]:6.0f} {speeds[1]:6.0f} tokens/s, {gain[1]:.2f} times", flush=True)
    where = run.machine()
    run.write(f"threads-{where['cpu']}", {"machine": where | {"threads": cores}, "cases": cases})


if __name__ == "__main__":
    main()
