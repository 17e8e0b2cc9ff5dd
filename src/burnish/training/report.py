"""A run as one HTML page that needs nothing else: results, curves, samples before and after, data, manifest."""

from __future__ import annotations

import difflib
import io
import itertools
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from burnish.training.metrics import (
    SAMPLES_FILE,
    Metric,
    describe,
    duration,
    headline,
    is_timing,
    number,
    order,
    read_lines,
    read_metrics,
)
from burnish.types import UserError

SHOWN_SAMPLES = 6
MOST_SAMPLES = 48
POINTS = 400
# Colours that matplotlib is given, and the page's colours that take their places, so that both themes work.
INK = {"#010101": "var(--muted)", "#020202": "var(--rule)", "#030303": "var(--train)", "#040404": "var(--eval)"}
TEXT, RULE, TRAIN, EVAL = INK

METHODS = {"sft": "supervised fine-tuning", "reward": "reward model", "ppo": "proximal policy optimization"}

Points = list[tuple[int, float]]


def write(run_folder: Path) -> Path:
    """Write ``report.html`` of a run, finished or not, and return its path.

    Raises:
        UserError: the folder holds no manifest.json.
    """
    from jinja2 import Environment, StrictUndefined

    folder = Path(run_folder)
    manifest = _manifest(folder)
    template = (files("burnish.training") / "templates" / "report.html.j2").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(_page(manifest, folder))
    path = folder / "report.html"
    aside = path.with_suffix(".html.tmp")
    aside.write_text(page, "utf-8")
    os.replace(aside, path)
    return path


# --- results ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval where there is one: ``Estimate(1.43, 1.31, 1.55)``."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Change:
    """One metric before and after a stage; either may be missing."""

    key: str
    before: Estimate | None
    after: Estimate | None

    @property
    def metric(self) -> Metric:
        """The metric's name and meaning."""
        return describe(self.key)

    @property
    def overlap(self) -> bool | None:
        """Whether the two intervals overlap; None where either is missing."""
        ends = [e and e.low is not None and e.high is not None and (e.low, e.high) for e in (self.before, self.after)]
        if not ends[0] or not ends[1]:
            return None
        (low, high), (other_low, other_high) = ends[0], ends[1]
        return low <= other_high and other_low <= high

    @property
    def direction(self) -> str:
        """``better``, ``worse``, ``higher``, ``lower``, ``same``, or nothing where there is no comparison."""
        if self.before is None or self.after is None:
            return ""
        difference = self.after.value - self.before.value
        if difference == 0 or not math.isfinite(difference):
            return "same" if difference == 0 else ""
        way = "higher" if difference > 0 else "lower"
        return way if self.metric.better is None else "better" if way == self.metric.better else "worse"

    @property
    def tone(self) -> str:
        """``better`` or ``worse`` where that is more than chance or chance was not measured, else nothing."""
        return self.direction if self.direction in ("better", "worse") and not self.overlap else ""

    @property
    def difference(self) -> str:
        """The change with its sign: ``+0.4200``, ``+12.0 points`` for a share."""
        if not self.direction or self.before is None or self.after is None:
            return ""
        difference = self.after.value - self.before.value
        if self.metric.share:
            return f"{difference * 100:+.1f} points".replace("-", "\N{MINUS SIGN}")
        sign = "+" if difference > 0 else "\N{MINUS SIGN}" if difference < 0 else "\N{PLUS-MINUS SIGN}"
        return sign + number(abs(difference))

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        if not self.direction:
            return ""
        word = {"same": "Unchanged"}.get(self.direction, self.direction.capitalize())
        if self.overlap is None:
            return word
        return f"{word}, but the intervals overlap" if self.overlap else f"{word}, the intervals do not overlap"

    @property
    def whiskers(self) -> list[dict[str, Any]]:
        """Both estimates as places in per cent of a common line, for the drawing; none where intervals lack."""
        if self.overlap is None or self.before is None or self.after is None:
            return []
        places = [(e.value, e.low, e.high) for e in (self.before, self.after)]
        ends = [x for place in places for x in place if x is not None and math.isfinite(x)]
        if len(ends) < 6 or min(ends) == max(ends):
            return []
        low, span = min(ends), max(ends) - min(ends)
        scaled = [[round(4 + 92 * (x - low) / span, 2) for x in place if x is not None] for place in places]
        return [
            {"name": name, "value": value, "low": start, "high": end}
            for name, (value, start, end) in zip(("before", "after"), scaled, strict=True)
        ]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every metric of two evaluations, in reading order; an interval comes as X_low and X_high."""
    first, last = _estimates(before), _estimates(after)
    for key in last:
        start = describe(key).start
        if start is not None and key not in first:
            first[key] = Estimate(start, start, start)
    return [Change(key, first.get(key), last.get(key)) for key in sorted({**first, **last}, key=order)]


def _estimates(values: Mapping[str, Any]) -> dict[str, Estimate]:
    plain = {key.removeprefix("eval_"): value for key, value in values.items()}
    return {key: Estimate(float(plain[key]), *_interval(plain, key)) for key in plain if _is_curve(plain, key)}


def _interval(values: Mapping[str, Any], key: str) -> tuple[float, float] | tuple[()]:
    low, high = values.get(f"{key}_low"), values.get(f"{key}_high")
    if low is None or high is None or not (math.isfinite(float(low)) and math.isfinite(float(high))):
        return ()
    return float(low), float(high)


def _is_curve(values: Mapping[str, Any], key: str) -> bool:
    base = re.sub("_(low|high)$", "", key)
    if key.removeprefix("eval_") in ("step", "epoch") or is_timing(key) or (base != key and base in values):
        return False
    return values[key] in ("NaN", "Infinity", "-Infinity") or isinstance(values[key], int | float)


# --- curves -------------------------------------------------------------------------------------------------------


def binned(points: Points, most: int = POINTS) -> tuple[Points, int]:
    """At most ``most`` points, each the mean of ``width`` neighbours in x and y; also that width."""
    width = math.ceil(len(points) / most) if points else 1
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(round(_mean(x for x, _ in group)), _mean(y for _, y in group)) for group in groups], width


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over a window of a tenth of the values around each, shorter at both ends."""
    half = len(values) // 20
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _noisy(values: Sequence[float]) -> bool:
    """Whether the values go up and down more than along: their steps sum to more than three times their range."""
    steps = math.fsum(abs(b - a) for a, b in itertools.pairwise(values))
    return steps > 3 * (max(values) - min(values))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _curves(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Panels of the metrics that matter and of all others, steps a point, and what was not finite (name -> steps)."""
    train: dict[str, Points] = defaultdict(list)
    evals: dict[str, list[tuple[int, Estimate]]] = defaultdict(list)
    lost: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        for key in (key for key in line if _is_curve(line, key)):
            name = key.removeprefix("eval_")
            if not math.isfinite(line[key]):
                lost[describe(name).label].append(line["step"])
            elif name == key:
                train[name].append((line["step"], line[key]))
            else:
                evals[name].append((line["step"], Estimate(line[key], *_interval(line, key))))
    names = sorted({**train, **evals}, key=order)
    first = [name for name in headline(dict.fromkeys(names)) if name != "learning_rate"]
    panels = {name: _panel(name, train[name], evals[name]) for name in names}
    return {
        "curves": [panels[name] for name in first],
        "other_curves": [panels[name] for name in names if name not in first],
        "steps_a_point": max((binned(points)[1] for points in train.values()), default=1),
        "lost": lost,
    }


def _panel(name: str, train: Points, evals: list[tuple[int, Estimate]]) -> dict[str, Any]:
    from markupsafe import Markup

    ends = [number(y) for y in [y for _, y in train] or [e.value for _, e in evals]]
    svg = _draw(name, binned(train)[0], evals)
    return {"metric": describe(name), "summary": f"from {ends[0]} to {ends[-1]}", "svg": Markup(svg)}


def _draw(name: str, train: Points, evals: list[tuple[int, Estimate]]) -> str:
    """Both kinds of points of one metric over steps, as an SVG element whose colours are the page's."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.formatter.limits": (-3, 5)}
    with rc_context(settings):
        figure = Figure(figsize=(4.2, 2.3), layout="constrained")
        axes = figure.add_subplot()
        if train:
            x, y = zip(*train, strict=True)
            noisy = len(train) > 40 and _noisy(y)
            axes.plot(x, y, color=TRAIN, linewidth=1 if noisy else 2, alpha=0.35 if noisy else 1)
            if noisy:
                axes.plot(x, smoothed(y), color=TRAIN, linewidth=2)
        if evals:
            x, y = [step for step, _ in evals], [e.value for _, e in evals]
            axes.plot(x, y, "o-", color=EVAL, markersize=4.5, linewidth=1, markeredgewidth=0)
            whiskers = [(step, e.low, e.high) for step, e in evals if e.low is not None]
            for step, low, high in whiskers:
                axes.plot([step, step], [low, high], color=EVAL, linewidth=1.4)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(RULE)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=TEXT, labelcolor=TEXT)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.get_offset_text().set_color(TEXT)
        axes.margins(x=0.03, y=0.08)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    # Ids that nothing refers to would clash between the figures of a page.
    svg = re.sub(r' id="[a-z_A-Z0-9]*_\d+"', "", svg)
    svg = re.sub(r' d="[^"]+"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    return re.sub("|".join(INK), lambda match: INK[match[0]], svg)


# --- samples ------------------------------------------------------------------------------------------------------


def pairs(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Samples of the first and of the last evaluation side by side, and the steps of these evaluations.

    Matched by source (several samples of a source in their order); ``{"prompt", "source", "before", "after"}``, where
    before and after are rows or None. With one evaluation there is no before. Without any, the last samples of
    training stand for it.
    """
    kind = "eval" if any(row.get("kind") == "eval" for row in rows) else "train"
    rows = [row for row in rows if row.get("kind", kind) == kind]
    steps = sorted({row["step"] for row in rows})[0 if kind == "eval" else -1 :]
    if not steps:
        return [], []
    after = _numbered([row for row in rows if row["step"] == steps[-1]])
    before = _numbered([row for row in rows if row["step"] == steps[0]]) if len(steps) > 1 else {}
    joined = []
    for place in {**before, **after}:
        either = after.get(place) or before[place]
        row = {"prompt": either.get("prompt", ""), "source": either.get("source", "")}
        joined.append({**row, "before": before.get(place), "after": after.get(place)})
    return joined, sorted({steps[0], steps[-1]})


def _numbered(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    seen: dict[str, int] = defaultdict(int)
    places = {}
    for row in rows:
        source = row.get("source", row.get("prompt", ""))
        score = float(row["score"]) if row.get("score") is not None else None
        rewards = [f"{name} {number(float(value), digits=2)}" for name, value in row.get("rewards", {}).items()]
        places[source, seen[source]] = {**row, "score": score, "rewards": rewards if len(rewards) > 1 else []}
        seen[source] += 1
    return places


# --- the page -----------------------------------------------------------------------------------------------------


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if path.is_file():
        return json.loads(path.read_text("utf-8"))
    runs = [p.parent.name for p in sorted(folder.parent.glob("*/manifest.json"))] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, runs, 1, 0.4) or runs[:1]
    hint = f"; did you mean {folder.parent / near[0]}?" if near else "; expected a run's folder, such as runs/my-run"
    raise UserError(f"{path}: no such file{hint}")


def _page(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    import yaml

    stages = [_stage(entry, folder / entry["name"]) for entry in manifest.get("stages", [])]
    seconds = sum(entry.get("seconds") or 0 for entry in manifest.get("stages", []))
    machine = manifest.get("machine", {})
    hashes = {
        entry["name"]: {kind: entry[kind] for kind in ("model", "data", "files") if entry.get(kind)}
        for entry in manifest.get("stages", [])
    }

    def as_yaml(value: Any) -> str:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100) if value else ""

    return {
        "name": manifest.get("name", folder.name),
        "state": manifest.get("state", "unknown"),
        "time": duration(seconds) if seconds else "",
        "machine": " · ".join(value if isinstance(value, str) else f"{value} {key}" for key, value in machine.items()),
        "stages": stages,
        "recipe": as_yaml(manifest.get("recipe")),
        "versions": manifest.get("versions", {}),
        "hashes": as_yaml({name: kinds for name, kinds in hashes.items() if kinds}),
        "number": lambda *values: number(*values).replace("-", "\N{MINUS SIGN}"),
        "shown_samples": SHOWN_SAMPLES,
        "most_samples": MOST_SAMPLES,
    }


def _stage(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    lines = read_metrics(folder)
    evaluations = [line for line in lines if any(key.startswith("eval_") for key in line)]
    training = [line for line in lines if line not in evaluations]
    results = entry.get("results") or {}
    before = results.get("before") or (evaluations[0] if evaluations else {})
    after = results.get("after") or (evaluations[-1] if evaluations else {})
    compared = changes({} if before.get("step", -1) == after.get("step", -2) else before, after)
    matter = headline({change.key: None for change in compared}) or [change.key for change in compared]
    samples, steps = pairs(read_lines(folder / SAMPLES_FILE))
    method = entry.get("method") or ""
    return {
        "name": entry["name"],
        "state": entry.get("state", "unknown"),
        "facts": ([METHODS.get(method, method)] if method else []) + _facts(entry, training),
        "so_far": not results and bool(evaluations),
        "changes": [change for change in compared if change.key in matter],
        "other_changes": [change for change in compared if change.key not in matter],
        "card": next((change for change in compared if change.direction), compared[0] if compared else None),
        **_curves(lines),
        "samples": samples[:MOST_SAMPLES],
        "sample_count": len(samples),
        "sample_steps": steps,
        "rows": _rows(entry.get("rows") or {}),
        "data": entry.get("data") or ({} if method else entry.get("files") or {}),
    }


def _facts(entry: dict[str, Any], training: list[dict[str, Any]]) -> list[str]:
    """How long a stage was: steps, time, tokens, and tokens a second of training."""
    paced = [line for line in training if "tokens" in line and line.get("seconds")]
    spent = sum(line["seconds"] for line in paced)
    tokens = sum(line["tokens"] for line in paced)
    facts = [f"{training[-1]['step']:,} steps"] if training else []
    facts += [duration(entry.get("seconds") or spent)] if entry.get("seconds") or spent else []
    return facts + ([f"{number(round(tokens))} tokens", f"{number(round(tokens / spent))} tokens/s"] if tokens else [])


def _rows(splits: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each split its rows, and which rows were skipped and cut: lists of ``"train.jsonl:17: no answer"``."""
    return [{"split": split, "rows": 0, "skipped": [], "cut": [], **counts} for split, counts in splits.items()]
