"""Whether cost is linear: four times the rows, and the same tokens in sequences four times as long (SFT)."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import run

CASES = {
    "rows x 4": (["--steps", 2], ["--steps", 2, "--copies", 4]),
    "length x 4": (["--steps", 4, "--length", 128, "--batch", 16], ["--steps", 4, "--length", 512, "--batch", 4]),
}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = []
    with run.models(4096) as folder:
        for name, cases in CASES.items():
            pairs: list[tuple[dict[str, Any], ...]] = [
                tuple(run.side("burnish", "sft", folder, 4096, *case) for case in cases) for _ in range(options.repeats)
            ]
            time = median((b["cpu"] + b["preparation"]) / (a["cpu"] + a["preparation"]) for a, b in pairs)
            peak = median(b["peak"] / a["peak"] for a, b in pairs)
            found.append({"case": name, "time": time, "peak": peak})
            print(f"{name:12} time {time:5.2f} x  memory {peak:5.2f} x", flush=True)
    run.write("scaling-sft-4096", {"machine": run.machine(), "cases": found})


if __name__ == "__main__":
    main()
