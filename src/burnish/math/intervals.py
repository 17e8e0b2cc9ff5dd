"""Intervals of what was measured on a sample."""

from __future__ import annotations

import math


def wilson(share: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share of ``n`` independent trials (Wilson 1927); (0, 1) of none."""
    center = (share * n + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(share * (1 - share) * n + z * z / 4)
    return center - half, center + half
