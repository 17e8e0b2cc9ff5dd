"""Runs a recipe, and prints the largest resident memory of its process, with what it takes before, as JSON.

``python measured_job.py RECIPE``. The kernel keeps the maximum, so nothing is sampled. With MALLOC_MMAP_THRESHOLD_ set,
memory that torch frees returns to the system, as the caching allocator of a GPU reuses it.
"""

import json
import re
import sys
from pathlib import Path

from burnish import kernels

kernels.set_environment()

from burnish.config import load  # noqa: E402
from burnish.config import run as pipeline  # noqa: E402
from burnish.methods import dpo, policy_gradient, reward, sft  # noqa: E402, F401
from burnish.training import trainer  # noqa: E402, F401


def resident(kind: str) -> int:
    """Bytes that are resident now (VmRSS), or were at most (VmHWM)."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    recipe = load(sys.argv[1])
    before = resident("VmRSS")
    pipeline.run(recipe)
    print(json.dumps({"before": before, "peak": resident("VmHWM")}))
