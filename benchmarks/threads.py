"""One thread, a thread for each core, and a process for each core: tokens per second of SmolLM2-135M, wall time.

    python benchmarks/threads.py --repeats 3

The runs are those of ``precision.py``; all take the same rows and the same steps. Run it on a machine on which nothing
else runs.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import precision
import run

from burnish import machine

CASES = ("sft 30", "sft 500", "ppo 24")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    cores = machine.cores()
    ways = {"one": (1, 1), "threads": (cores, 1), "processes": (1, cores)}
    cases: list[dict[str, Any]] = []
    for case in options.cases:
        for name in precision.PRECISIONS:
            runs = [
                {way: precision.measured(case, name, options.steps, *numbers) for way, numbers in ways.items()}
                for _ in range(options.repeats)
            ]
            found: dict[str, Any] = {"case": case, "precision": name, "runs": runs}
            for way in ("threads", "processes"):
                gains = sorted(one["one"]["wall"] / one[way]["wall"] for one in runs)
                found[way] = [gains[0], median(gains), gains[-1]]
            cases.append(found)
            print(
                f"{case:8} {name:9} threads {found['threads'][1]:.2f}, processes {found['processes'][1]:.2f}", end=" "
            )
            print([one["losses"][-1] for one in runs[0].values()], flush=True)
    run.write("threads", {"machine": run.machine(), "cases": cases})


if __name__ == "__main__":
    main()
