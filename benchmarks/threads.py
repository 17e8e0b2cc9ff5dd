"""One thread, a thread for each core, and a process for each core: tokens per second of SmolLM2-135M, wall time.

    python benchmarks/threads.py --repeats 3

The runs are those of ``precision.py``; all take the same rows and the same steps. The ceiling is how much more work the
machine does in total if every core computes the same matrix products in a process of its own: cores that share a
cache, the memory, or a clock limit stay below their number. Run it on a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import precision
import run

from burnish import machine

CASES = ("sft 30", "sft 500", "ppo 24")
SECONDS = 4.0
"""How long the ceiling's products are repeated."""


def products(name: str) -> int:
    """The number of products of SmolLM2-135M's largest layer with 512 tokens that one thread computes."""
    import torch

    dtype = getattr(torch, name)
    x, weight = torch.randn(512, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    done, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        done += 1
    return done


def ceiling(name: str, cores: int) -> float:
    """Products of all cores at the same time over those of one."""
    command = [sys.executable, __file__, "--products", name]
    environment = os.environ | run.THREADS

    def total(processes: int) -> int:
        runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(processes)]
        return sum(int(one.communicate()[0]) for one in runs)

    return total(cores) / total(1)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--products", choices=precision.PRECISIONS, help="count products and print their number")
    options = parser.parse_args()
    if options.products:
        print(products(options.products))
        return
    cores = machine.cores()
    ceilings = {}
    for name in precision.PRECISIONS:
        found = sorted(ceiling(name, cores) for _ in range(options.repeats))
        ceilings[name] = [found[0], median(found), found[-1]]
        print(f"ceiling  {name:9} {ceilings[name][1]:.2f}", flush=True)
    ways = {"one": (1, 1), "threads": (cores, 1), "processes": (1, cores)}
    cases: list[dict[str, Any]] = []
    for case in options.cases:
        for name in precision.PRECISIONS:
            runs = [
                {way: precision.measured(case, name, options.steps, *numbers) for way, numbers in ways.items()}
                for _ in range(options.repeats)
            ]
            entry: dict[str, Any] = {"case": case, "precision": name, "runs": runs}
            for way in ("threads", "processes"):
                gains = sorted(one["one"]["wall"] / one[way]["wall"] for one in runs)
                entry[way] = [gains[0], median(gains), gains[-1]]
            cases.append(entry)
            print(
                f"{case:8} {name:9} threads {entry['threads'][1]:.2f}, processes {entry['processes'][1]:.2f}", end=" "
            )
            print([one["losses"][-1] for one in runs[0].values()], flush=True)
    kept = [one for one in run.read("threads").get("cases", []) if one["case"] not in options.cases]
    cases = sorted([*kept, *cases], key=lambda one: CASES.index(one["case"]))
    run.write("threads", {"machine": run.machine(), "ceilings": ceilings, "cases": cases})


if __name__ == "__main__":
    main()
