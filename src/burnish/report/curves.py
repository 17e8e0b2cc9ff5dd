"""Draws the curves of a run's metrics as SVG in the colors of the page, and extracts the estimates they show."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burnish.report.metrics import NOT_FINITE, Metric, describe, headline, is_timing, number, order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 400
# Placeholder colors for matplotlib, and the CSS variables that replace them, so that light and dark themes work.
INK = {
    "#010101": "var(--muted)",
    "#020202": "var(--rule)",
    "#030303": "var(--train)",
    "#040404": "var(--eval)",
    "#050505": "var(--third)",
    "#060606": "var(--fourth)",
}
TEXT, RULE, *COLORS = INK
TRAIN, EVAL = COLORS[:2]
MARKERS = {
    "o": "\N{BLACK CIRCLE}",
    "s": "\N{BLACK SQUARE}",
    "^": "\N{BLACK UP-POINTING TRIANGLE}",
    "D": "\N{BLACK DIAMOND}",
}
FLAT = 0.08
"""A line looks flat if it covers less than this part of the axis."""

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, if there is one: ``Estimate(1.43, (1.31, 1.55))``."""

    value: float
    interval: tuple[float, float] | None = None


def estimates(values: Mapping[str, Any]) -> dict[str, Estimate]:
    """The metrics of one line or evaluation, without ``eval_``, times, step and epoch, each with its interval.

    ``{"step": 8, "eval_score": 1.4, "eval_score_low": 1.3, "eval_score_high": 1.5}`` gives
    ``{"score": Estimate(1.4, (1.3, 1.5))}``. An infinite interval is left out, and so is the interval of a change.
    """
    plain = {key.removeprefix("eval_"): float(value) for key, value in values.items() if _is_number(value)}
    result = {}
    for key, value in plain.items():
        base = re.sub("(_change)?_(low|high)$", "", key)
        if key in ("step", "epoch") or is_timing(key) or (base != key and base in plain):
            continue
        low, high = plain.get(f"{key}_low", math.inf), plain.get(f"{key}_high", math.inf)
        result[key] = Estimate(value, (low, high) if math.isfinite(low) and math.isfinite(high) else None)
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value in NOT_FINITE)


def binned(points: Points, most: int = POINTS) -> tuple[Points, int]:
    """At most ``most`` points, each the mean of ``width`` neighbors in x and y, and that width."""
    width = math.ceil(len(points) / most) if points else 1
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(round(_mean(x for x, _ in group)), _mean(y for _, y in group)) for group in groups], width


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over a window of a tenth of the values, centered on each and shorter at both ends."""
    half = len(values) // 20
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _noisy(values: Sequence[float]) -> bool:
    """Whether the values mostly go up and down: their changes add up to more than three times their range."""
    changes = math.fsum(abs(b - a) for a, b in itertools.pairwise(values))
    return changes > 3 * (max(values) - min(values))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def panels(stage: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Panels of headline metrics and of all others, steps per point, and the steps where a metric was not finite."""
    train: dict[str, Points] = defaultdict(list)
    evals: dict[str, list[tuple[int, Estimate]]] = defaultdict(list)
    not_finite: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        is_eval = any(key.startswith("eval_") for key in line)
        for name, estimate in estimates(line).items():
            if not math.isfinite(estimate.value):
                not_finite[describe(name).label].append(line["step"])
            elif is_eval:
                if (start := describe(name).start) is not None and not evals[name] and line["step"]:
                    evals[name].append((0, Estimate(start)))
                evals[name].append((line["step"], estimate))
            else:
                train[name].append((line["step"], estimate.value))
    names = sorted({**train, **evals}, key=order)
    last = {name: train[name][-1][1] if train[name] else evals[name][-1][1].value for name in names}
    first = [name for name in headline(last) if name != "learning_rate"]
    drawn = {name: _panel(stage, name, train[name], evals[name]) for name in names}
    return {
        "curves": [drawn[name] for name in first],
        "other_curves": [drawn[name] for name in names if name not in first],
        "steps_per_point": max((binned(points)[1] for points in train.values()), default=1),
        "not_finite": not_finite,
    }


def _panel(stage: str, name: str, train: Points, evals: list[tuple[int, Estimate]]) -> dict[str, Any]:
    from markupsafe import Markup

    share = describe(name).share
    ends = [number(y, share) for y in [y for _, y in train] or [e.value for _, e in evals]]
    svg = _draw(f"{stage}/{name}", binned(train)[0], evals, share)
    return {"metric": describe(name), "summary": f"from {ends[0]} to {ends[-1]}", "svg": Markup(svg)}


def _draw(salt: str, train: Points, evals: list[tuple[int, Estimate]], share: bool) -> str:
    """One metric over optimizer steps, in training and in evaluations. A ``share`` is shown as a percentage."""

    def draw(figure: Figure) -> None:
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
            for step, estimate in evals:
                if estimate.interval:
                    axes.plot([step, step], estimate.interval, color=EVAL, linewidth=1.4)
        _style(axes, share)

    return _svg(salt, draw)


# --- rounds of a loop ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A metric by round: ``Line("held-out", [(1, Estimate(0.6, (0.5, 0.7))), (2, Estimate(0.8, (0.7, 0.9)))])``."""

    name: str
    points: list[tuple[int, Estimate]]


def round_panel(salt: str, metric: Metric, lines: Sequence[Line], rounds: int) -> dict[str, Any]:
    """A panel with a line for each stage or reward over this many rounds of a loop, with 95 % intervals.

    The lines share an axis if none of them looks flat on it. Otherwise each has its own, one under the other.
    """
    from markupsafe import Markup

    drawn = [Line(line.name, [(x, e) for x, e in line.points if math.isfinite(e.value)]) for line in lines]
    drawn = [line for line in drawn if line.points]
    ends = [(line.name, *(number(line.points[i][1].value, metric.share) for i in (0, -1))) for line in drawn]
    key = [
        {"name": line.name, "marker": MARKERS[marker], "color": INK[color]}
        for line, color, marker in zip(drawn, itertools.cycle(COLORS), itertools.cycle(MARKERS))
    ]
    return {
        "metric": metric,
        "key": key,
        "summary": "; ".join(f"{name} from {first} to {last}" for name, first, last in ends),
        "svg": Markup(_draw_rounds(salt, drawn, rounds, metric.share)),
    }


def _draw_rounds(salt: str, lines: Sequence[Line], rounds: int, share: bool) -> str:
    together = _comparable(lines)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1 if together else len(lines), 1, sharex=True, squeeze=False)
        styles = zip(itertools.cycle(COLORS), itertools.cycle(MARKERS))
        for i, (line, (color, marker)) in enumerate(zip(lines, styles, strict=False)):
            axes = grid[0 if together else i][0]
            # Next to each other, so that no interval hides another one.
            shift = 0.05 * (i - (len(lines) - 1) / 2) if together else 0.0
            x, y = [number + shift for number, _ in line.points], [e.value for _, e in line.points]
            axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.6, markeredgewidth=0)
            for place, (_, estimate) in zip(x, line.points, strict=True):
                if estimate.interval:
                    axes.plot([place, place], estimate.interval, color=color, linewidth=1.4)
        for axes in grid[:, 0]:
            _style(axes, share)
            axes.set_xlim(1 - 0.03 * rounds, rounds + 0.03 * rounds)

    return _svg(salt, draw, height=2.3 if together else 0.5 + 1.25 * len(lines))


def _comparable(lines: Sequence[Line]) -> bool:
    """Whether no line, with its intervals, would look flat on an axis of all of them, unless it is constant."""
    ends = [[end for _, e in line.points for end in (e.value, *(e.interval or ()))] for line in lines]
    spans = [max(values) - min(values) for values in ends]
    whole = max(map(max, ends)) - min(map(min, ends)) if ends else 0.0
    return all(span == 0 or span >= FLAT * whole for span in spans)


# --- calibration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binned:
    """Predictions of a bin: ``Binned(0.7, 0.62, 0.5, (0.31, 0.66), 120)``."""

    middle: float
    """The middle of the bin."""
    predicted: float
    """The mean of the predictions."""
    outcome: float
    """The mean of what they should predict."""
    interval: tuple[float, float]
    count: int


def calibration_panel(salt: str, series: Mapping[str, Sequence[Binned]]) -> dict[str, Any]:
    """A panel with the mean outcome by prediction, both in [-1, 1], and below it the number of predictions."""
    from markupsafe import Markup

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        upper.plot([-1, 1], [-1, 1], color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
        width = 0.08
        for i, (bins, color, marker) in enumerate(zip(series.values(), COLORS, MARKERS, strict=False)):
            x, y = [one.predicted for one in bins], [one.outcome for one in bins]
            upper.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.2, markeredgewidth=0)
            for one in bins:
                upper.plot([one.predicted, one.predicted], one.interval, color=color, linewidth=1.4)
            shift = width * (i - (len(series) - 1) / 2)
            lower.bar([one.middle + shift for one in bins], [one.count for one in bins], width, color=color)
        for axes in (upper, lower):
            _style(axes, share=False)
            axes.set_xlim(-1.05, 1.05)
            axes.set_xticks([-1, -0.5, 0, 0.5, 1])
        upper.set_ylim(-1.05, 1.05)
        upper.set_yticks([-1, -0.5, 0, 0.5, 1])
        lower.yaxis.set_major_locator(MaxNLocator(2, integer=True))

    key = [
        {"name": name, "marker": MARKERS[marker], "color": INK[color]}
        for name, color, marker in zip(series, COLORS, MARKERS, strict=False)
    ]
    return {"key": key, "summary": "; ".join(series), "svg": Markup(_svg(salt, draw, height=3.4))}


# --- SVG ----------------------------------------------------------------------------------------------------------


def _style(axes: Axes, share: bool) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=TEXT, labelcolor=TEXT)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.get_offset_text().set_color(TEXT)
    axes.margins(x=0.03, y=0.08)


def _svg(salt: str, draw: Callable[[Figure], None], height: float = 2.3) -> str:
    """A figure as an SVG element in the page's colors.

    ``salt`` keeps the ids of the element different from those of other figures on the page.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.size": 9,
        "axes.formatter.limits": (-3, 5),
    }
    with rc_context(settings):
        figure = Figure(figsize=(4.2, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    # These ids are not referenced, and would clash between the figures of a page.
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    svg = re.sub(r' d="[^"]+"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    return re.sub("|".join(INK), lambda match: INK[match[0]], svg)
