"""Writes the tables of ``docs/speed.md`` from ``benchmarks/results.json``."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from run import METHODS, RESULTS, ROOT

START, END = "<!-- made by benchmarks/table.py -->", "<!-- end -->"


def table(title: str, *rows: list[Any]) -> str:
    """A Markdown table, the first row its head."""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([f"### {title}", "", head, "|---" * len(rows[0]) + "|", *body])


def of_three(values: list[float]) -> str:
    """The median with the least and the greatest."""
    low, middle, high = values
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


def middle(found: dict[str, Any], side: str, what: Any) -> float:
    """The median over the repeats."""
    return median(what(pair[side]) for pair in found["repeats"])


def compared(found: dict[str, Any]) -> list[Any]:
    """A row of the table against TRL."""
    first = next(x for x in found["equal"] if x["what"] == ("gradients" if found["method"] == "rloo" else "losses"))
    speeds = [f"{middle(found, side, lambda x: x['tokens'] / x['cpu']):,.0f}" for side in ("burnish", "trl")]
    peaks = [f"{middle(found, side, lambda x: x['peak']) / 2**30:.2f}" for side in ("burnish", "trl")]
    return [
        found["method"],
        f"{found['vocabulary']:,}",
        *speeds,
        of_three(found["ratios"]["speed"]),
        *peaks,
        of_three(found["ratios"]["memory"]),
        f"{first['burnish']:.6f}",
        f"{first['trl']:.6f}",
        len(found["repeats"]),
        found["machine"]["cpu"],
        found["machine"]["date"],
    ]


def sampled(found: dict[str, Any]) -> list[Any]:
    """A row of the table of generation."""
    speeds, peaks = (
        [
            f"{median(one[what] for one in found['runs'][side]) / unit:,.{digits}f}"
            for side in ("burnish", "transformers")
        ]
        for what, unit, digits in (("tokens_per_cpu_second", 1, 0), ("peak_mib", 1024, 2))
    )
    ratios = found["ratios"]["cpu"]
    ratio = of_three([ratios[0], median(ratios), ratios[-1]])
    return [f"{found['vocabulary']:,}", *speeds, ratio, *peaks, len(ratios)]


def in_two_precisions(found: dict[str, Any]) -> list[Any]:
    """A row of the table of float32 and bfloat16."""
    sides = ("float32", "bfloat16")
    speeds = [f"{middle(found, side, lambda x: x['tokens'] / x['cpu']):,.0f}" for side in sides]
    peaks = [f"{middle(found, side, lambda x: x['peak']) / 2**30:.2f}" for side in sides]
    losses = [f"{losses[-1]:.4f}" if (losses := found["repeats"][0][side]["losses"]) else "" for side in sides]
    return [found["case"], *speeds, of_three(found["speed"]), *peaks, *losses]


def main() -> None:
    """Put the tables where the page has its marks."""
    read = json.loads(RESULTS.read_text("utf-8"))
    pairs = [read[name] for name in read if name.startswith("cpu-")]
    pairs.sort(key=lambda found: (found["vocabulary"], METHODS.index(found["method"])))
    head = ["method", "V", "tokens / CPU s", "TRL's", "times as fast", "peak GiB", "TRL's", "times less memory"]
    parts = [table("Against TRL", [*head, "step 1", "TRL's", "runs", "processor", "date"], *map(compared, pairs))]
    shares = [
        [f["method"], f"{f['vocabulary']:,}", *(f"{middle(f, 'burnish', lambda x, k=k: x[k]) * scale:.0f} {unit}"
        for k, scale, unit in (("mm_rate", 1e-9, "GFLOP/s"), ("mm_share", 100, "%"),
                               ("fastest_rate", 1e-9, "GFLOP/s"), ("fastest_share", 100, "%")))]
        for f in pairs
    ]  # fmt: skip
    parts.append(
        table("Against the machine", ["method", "V", "torch.mm", "share of it", "oneDNN", "share of it"], *shares)
    )
    ablated = [read[name] for name in read if name.startswith("ablations-")]
    ablated.sort(key=lambda found: (found["vocabulary"], METHODS.index(found["method"])))
    rows = [
        [found["method"], f"{found['vocabulary']:,}", x["without"], f"{x['speed']:.2f}", f"{x['memory']:.2f}"]
        for found in ablated
        for x in found["ablations"]
    ]
    parts.append(table("One thing taken away", ["method", "V", "without", "speed", "peak memory"], *rows))
    for name in [name for name in read if name.startswith("scaling")]:
        rows = [[x["case"], f"{x['time']:.2f}", f"{x['peak']:.2f}"] for x in read[name]["cases"]]
        parts.append(table("Linear cost", ["case", "CPU time", "peak memory"], *rows))
    if generated := [read[name] for name in read if name.startswith("generation-")]:
        head = ["V", "tokens / CPU s", "generate's", "times as fast", "peak GiB", "generate's", "runs"]
        parts.append(table("Generation against transformers", head, *map(sampled, generated)))
    for name in [name for name in read if name.startswith("precision-")]:
        head = ["case", "tokens / CPU s, float32", "bfloat16", "times as fast", "peak GiB, float32", "bfloat16"]
        head += ["last loss, float32", "bfloat16"]
        title = f"bfloat16 on a CPU ({read[name]['machine']['cpu']})"
        parts.append(table(title, head, *map(in_two_precisions, read[name]["cases"])))
    for name in [name for name in read if name.startswith("threads-")]:
        machine = read[name]["machine"]
        rows = [
            [x["case"], x["precision"], *(f"{speed:,.0f}" for speed in x["speeds"]), of_three(x["gain"])]
            for x in read[name]["cases"]
        ]
        head = ["case", "precision", "tokens / s, one thread", f"{machine['threads']} threads", "times as fast"]
        parts.append(table(f"Threads ({machine['cpu']})", head, *rows))
    if "encoding" in read:
        rows = [
            [name, f"{x['tokens']:.0f}", f"{x['ratio']:.1f}"]
            + [f"{x[key]:,.0f}" for key in ("rows_a_second", "rows_a_second_cached")]
            for name, x in read["encoding"]["templates"].items()
        ]
        head = ["rows, template", "tokens", "CPU time / encode_batch's", "rows / s", "rows / s from the cache"]
        machine = read["encoding"]["machine"]
        parts.append(table(f"Encoding rows ({machine['cpu']}, {machine['cores']} cores)", head, *rows))
    if "startup" in read:
        rows = [[what, of_three(seconds)] for what, seconds in read["startup"]["seconds"].items()]
        parts.append(table(f"Starting ({read['startup']['machine']['cpu']})", ["until", "seconds"], *rows))
    page = ROOT / "docs" / "speed.md"
    before, rest = page.read_text("utf-8").split(START)
    after = rest.split(END)[1]
    page.write_text("\n\n".join([before + START, *parts, END]) + after, "utf-8")


if __name__ == "__main__":
    main()
