"""Runs a recipe, and prints the largest resident memory of its process in bytes.

``python measured_job.py RECIPE``. The kernel keeps this maximum, so nothing is sampled. With MALLOC_MMAP_THRESHOLD_,
memory that torch frees returns to the system.
"""

import re
import sys
from pathlib import Path

from burnish import kernels

kernels.set_environment()  # before torch is imported

from burnish.config import load  # noqa: E402
from burnish.config import run as pipeline  # noqa: E402

if __name__ == "__main__":
    pipeline.run(load(sys.argv[1]))
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    print(1024 * int(found[1]))
