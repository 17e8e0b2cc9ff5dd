"""How long until a user sees something: ``burnish --help``, a mistake in a recipe, and the first step of ``tiny``.

    python benchmarks/startup.py --repeats 5

Seconds by the clock. Before the first step, a stage writes rows and a model, the rows are encoded, and the model is
evaluated; it runs in a new folder with an empty cache. With 200 rows, this is the time of the program itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import run

BURNISH = run.ROOT / ".venv" / "bin" / "burnish"
LIMIT = 120.0  # seconds
FEW = [
    f"stages.prepare.with.{name}={count}"
    for name, count in {"rows": 200, "pairs": 200, "prompts": 200, "held_out": 32}.items()
]


def of_help() -> float:
    """Until ``burnish --help`` has ended."""
    began = time.perf_counter()
    subprocess.run([BURNISH, "--help"], check=True, capture_output=True)
    return time.perf_counter() - began


def of_mistake() -> float:
    """Until ``burnish run`` has reported a key that does not exist."""
    began = time.perf_counter()
    done = subprocess.run([BURNISH, "run", "tiny", "stages.sft.trainer.learnig_rate=1"], capture_output=True)
    assert done.returncode == 2, done.stderr
    return time.perf_counter() - began


def of_first_step(*overrides: str) -> float:
    """Until the first step of the first stage that trains is in its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "runs", "tiny", "sft", "metrics.jsonl")
        environment = os.environ | {"BURNISH_CACHE": f"{folder}/cache"}
        began = time.perf_counter()
        with subprocess.Popen(
            [BURNISH, "run", "tiny", *overrides],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        ) as running:
            try:
                while not metrics.exists() or '"step": 1,' not in metrics.read_text("utf-8"):
                    if running.poll() is not None or time.perf_counter() - began > LIMIT:
                        raise SystemExit(f"burnish run tiny took no step in {time.perf_counter() - began:.0f} s")
                    time.sleep(0.02)
                return time.perf_counter() - began
            finally:
                running.terminate()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found = {}
    measures = {
        "burnish --help": of_help,
        "a mistake in a recipe": of_mistake,
        "first step of tiny with 200 rows": partial(of_first_step, *FEW),
        "first step of tiny, 12,000 rows": of_first_step,
    }
    for what, measure in measures.items():
        seconds = sorted(measure() for _ in range(options.repeats))
        found[what] = [seconds[0], median(seconds), seconds[-1]]
        print(f"{what:32} {found[what][1]:5.2f} s  ({seconds[0]:.2f} to {seconds[-1]:.2f})", flush=True)
    run.write("startup", {"machine": run.machine(), "seconds": found})


if __name__ == "__main__":
    main()
