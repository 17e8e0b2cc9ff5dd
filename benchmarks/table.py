"""Writes the tables of ``docs/speed.md`` from ``benchmarks/results.json``: a row for each kind of processor."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from run import METHODS, RESULTS, ROOT

START, END = "<!-- made by benchmarks/table.py -->", "<!-- end -->"


Found = list[tuple[str, dict[str, Any]]]
"""Results with the processors on which they were measured."""


def table(title: str, *rows: list[Any]) -> str:
    """A Markdown table, the first row its head; nothing if that is all."""
    if len(rows) < 2:
        return ""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([f"### {title}", "", head, "|---" * len(rows[0]) + "|", *body])


def of_three(values: list[float]) -> str:
    """The median with the least and the greatest."""
    low, middle, high = values
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


def middle(found: dict[str, Any], side: str, what: Any) -> float:
    """The median over the repeats."""
    return median(what(pair[side]) for pair in found["repeats"])


def compared(processor: str, found: dict[str, Any]) -> list[Any]:
    """A row of the table against TRL."""
    first = next(x for x in found["equal"] if x["what"] == ("gradients" if found["method"] == "rloo" else "losses"))
    speeds = [f"{middle(found, side, lambda x: x['tokens'] / x['cpu']):,.0f}" for side in ("burnish", "trl")]
    peaks = [f"{middle(found, side, lambda x: x['peak']) / 2**30:.2f}" for side in ("burnish", "trl")]
    return [
        found["method"],
        f"{found['vocabulary']:,}",
        processor,
        *speeds,
        of_three(found["ratios"]["speed"]),
        *peaks,
        of_three(found["ratios"]["memory"]),
        f"{first['burnish']:.6f}",
        f"{first['trl']:.6f}",
        len(found["repeats"]),
        found["machine"]["date"],
    ]


def compared_in_half(processor: str, found: dict[str, Any]) -> list[Any]:
    """A row of the table against TRL with bfloat16 on both sides."""
    chosen = [pair["trl_precision"] for pair in found["repeats"]]
    return [
        found["method"],
        processor,
        *(f"{middle(found, side, lambda x: x['tokens'] / x['cpu']):,.0f}" for side in ("burnish", "trl")),
        max(set(chosen), key=chosen.count),
        of_three(found["ratios"]["speed"]),
        of_three(found["ratios"]["memory"]),
        len(found["repeats"]),
        found["machine"]["date"],
    ]


def shares(processor: str, found: dict[str, Any]) -> list[Any]:
    """A row of the table against the machine."""
    units = (("mm_rate", 1e-9, "GFLOP/s"), ("mm_share", 100, "%"), ("fastest_rate", 1e-9, "GFLOP/s"),
             ("fastest_share", 100, "%"))  # fmt: skip
    numbers = [f"{middle(found, 'burnish', lambda x, k=k: x[k]) * scale:.0f} {unit}" for k, scale, unit in units]
    return [found["method"], f"{found['vocabulary']:,}", processor, *numbers]


def sampled(processor: str, found: dict[str, Any]) -> list[Any]:
    """A row of the table of generation."""
    sides = ("burnish", "transformers")
    speeds = [f"{median(x['tokens_per_cpu_second'] for x in found['runs'][side]):,.0f}" for side in sides]
    peaks = [f"{median(x['peak_mib'] for x in found['runs'][side]) / 1024:.2f}" for side in sides]
    ratios = found["ratios"]["cpu"]
    ratio = of_three([ratios[0], median(ratios), ratios[-1]])
    return [found["model"], found["precision"], processor, *speeds, ratio, *peaks, len(ratios)]


def in_two_precisions(processor: str, found: dict[str, Any]) -> list[Any]:
    """A row of the table of float32 and bfloat16."""
    sides = ("float32", "bfloat16")
    speeds = [f"{middle(found, side, lambda x: x['tokens'] / x['cpu']):,.0f}" for side in sides]
    peaks = [f"{middle(found, side, lambda x: x['peak']) / 2**30:.2f}" for side in sides]
    losses = [f"{losses[-1]:.4f}" if (losses := found["repeats"][0][side]["losses"]) else "" for side in sides]
    return [found["case"], processor, *speeds, of_three(found["speed"]), *peaks, *losses]


def expected(read: dict[str, dict[str, Any]]) -> str:
    """The first table: the most important ratios, a column for each kind of processor."""
    lines: dict[str, dict[str, str]] = {}

    def put(line: str, processor: str, ratio: float) -> None:
        lines.setdefault(line, {})[processor] = f"{ratio:.1f}"

    for processor, results in read.items():
        for method in METHODS:
            if found := results.get(f"trl-{method}-4096"):
                put(f"{method}, against TRL", processor, found["ratios"]["speed"][1])
        for method in METHODS:
            if found := results.get(f"trl-{method}-4096-bf16"):
                put(f"{method} in bf16, against TRL's faster precision", processor, found["ratios"]["speed"][1])
        for name, found in results.items():
            if name.startswith("generation-"):
                what = f"sampling, {found['model']}, {found['precision']}, against `generate`"
                put(what, processor, median(found["ratios"]["cpu"]))
        for case in results.get("precision", {}).get("cases", []):
            put(f"SmolLM2-135M, {case['case']}: bf16 against float32", processor, case["speed"][1])
        for case in results.get("threads", {}).get("cases", []):
            what = f"SmolLM2-135M, {case['case']}, {case['precision']}: a thread for each core against one"
            put(what, processor, case["threads"][1])
    rows = [[line, *(found.get(processor, "") for processor in read)] for line, found in lines.items()]
    return table("What to expect", ["times as fast", *read], *rows)


def main() -> None:
    """Put the tables where the page has its marks."""
    read: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))

    def named(prefix: str) -> Found:
        return [
            (processor, found)
            for processor, results in read.items()
            for name, found in results.items()
            if name.startswith(prefix)
        ]

    def by_method(every: Found) -> Found:
        return sorted(every, key=lambda x: (x[1]["vocabulary"], METHODS.index(x[1]["method"])))

    parts = [expected(read)]
    whole = by_method([x for x in named("trl-") if "repeats" in x[1]])
    pairs = [x for x in whole if x[1]["precision"] == "float32"]
    head = ["method", "V", "processor", "tokens / CPU s", "TRL's", "times as fast", "peak GiB", "TRL's"]
    head += ["times less memory", "step 1", "TRL's", "runs", "date"]
    parts.append(table("Against TRL", head, *(compared(*x) for x in pairs)))
    rows = [compared_in_half(*x) for x in whole if x[1]["precision"] == "bf16"]
    head = ["method", "processor", "tokens / CPU s", "TRL's", "TRL in", "times as fast", "times less memory"]
    parts.append(table("In bf16 against TRL", [*head, "runs", "date"], *rows))
    head = ["method", "V", "processor", "torch.mm", "share of it", "oneDNN", "share of it"]
    parts.append(table("Against the machine", head, *(shares(*x) for x in pairs)))
    rows = [
        [
            found["method"],
            f"{found['vocabulary']:,}",
            processor,
            x["without"],
            f"{x['speed']:.2f}",
            f"{x['memory']:.2f}",
        ]
        for processor, found in by_method(named("ablations-"))
        for x in found["ablations"]
    ]
    parts.append(table("One thing taken away", ["method", "V", "processor", "without", "speed", "peak memory"], *rows))
    rows = [
        [x["case"], processor, x["without"], f"{x['speed']:.2f}", f"{x['memory']:.2f}"]
        for processor, found in named("half-ablations")
        for x in found["ablations"]
    ]
    head = ["case", "processor", "without", "speed", "peak memory"]
    parts.append(table("One thing taken away in bfloat16, SmolLM2-135M", head, *rows))
    rows = [
        [
            x["case"],
            x["precision"],
            processor,
            x["without"],
            *(f"{speed:,.0f}" for speed in x["tokens_per_cpu_second"]),
            f"{x['speed']:.2f}",
            f"{x['memory']:.2f}",
        ]
        for processor, found in named("decoding-ablations")
        for x in found["ablations"]
    ]
    head = ["case", "precision", "processor", "without", "tokens / CPU s", "without it", "speed", "peak memory"]
    parts.append(table("One thing taken away of decoding, SmolLM2-135M", head, *rows))
    rows = [
        [x["case"], processor, f"{x['time']:.2f}", f"{x['peak']:.2f}"]
        for processor, found in named("scaling")
        for x in found["cases"]
    ]
    parts.append(table("Linear cost", ["case", "processor", "CPU time", "peak memory"], *rows))
    head = ["model", "precision", "processor", "tokens / CPU s", "generate's", "times as fast", "peak GiB"]
    rows = [sampled(*x) for x in named("generation-") if "runs" in x[1]]
    parts.append(table("Generation against transformers", [*head, "generate's", "runs"], *rows))
    head = ["case", "processor", "tokens / CPU s, float32", "bfloat16", "times as fast", "peak GiB, float32"]
    head += ["bfloat16", "last loss, float32", "bfloat16"]
    rows = [in_two_precisions(processor, x) for processor, found in named("precision") for x in found["cases"]]
    parts.append(table("bfloat16 on a CPU", head, *rows))
    rows = [
        [
            x["case"],
            x["precision"],
            processor,
            found["machine"]["cores"],
            of_three(x["threads"]),
            of_three(x["processes"]),
        ]
        for processor, found in named("threads")
        for x in found["cases"]
    ]
    head = ["case", "precision", "processor", "cores", "a thread for each, times as fast", "a process for each"]
    parts.append(table("All cores", head, *rows))
    rows = [
        [x["model"], x["base"], processor, f"{x['speed']:,.1f}"]
        + [f"{x[peak] / 2**30:.2f}" for peak in ("peak", "peak_in_training")]
        + [f"{x['losses'][-1]:.4f}"]
        for processor, found in named("quantized")
        for x in found["cases"]
    ]
    head = ["model", "base", "processor", "tokens / CPU s", "peak GiB", "after loading", "last loss"]
    parts.append(table("LoRA on quantized bases on a CPU", head, *rows))
    rows = [
        [name, processor, found["machine"]["cores"], f"{x['tokens']:.0f}", f"{x['ratio']:.1f}"]
        + [f"{x[key]:,.0f}" for key in ("rows_a_second", "rows_a_second_cached")]
        for processor, found in named("encoding")
        for name, x in found["templates"].items()
    ]
    head = ["rows, template", "processor", "cores", "tokens", "CPU time / encode_batch's", "rows / s"]
    parts.append(table("Encoding rows", [*head, "rows / s from the cache"], *rows))
    rows = [
        [what, processor, of_three(seconds)]
        for processor, found in named("startup")
        for what, seconds in found["seconds"].items()
    ]
    parts.append(table("Starting", ["until", "processor", "seconds"], *rows))
    page = ROOT / "docs" / "speed.md"
    before, rest = page.read_text("utf-8").split(START)
    after = rest.split(END)[1]
    page.write_text("\n\n".join([before + START, *filter(None, parts), END]) + after, "utf-8")


if __name__ == "__main__":
    main()
