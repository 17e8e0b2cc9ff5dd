"""Curves of metrics: which points are drawn, and where."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from burnish.report.curves import Estimate, Line, binned, estimates, panels, round_panel, smoothed
from burnish.report.metrics import describe


def test_an_interval_belongs_to_its_value() -> None:
    line = {
        "step": 8,
        "epoch": 1.0,
        "eval_score": 1.4,
        "eval_score_low": 1.3,
        "eval_score_high": 1.5,
        "eval_seconds": 2,
    }
    assert estimates(line) == {"score": Estimate(1.4, (1.3, 1.5))}
    assert estimates({"a": "Infinity", "a_low": 0.0, "a_high": "Infinity"}) == {"a": Estimate(math.inf, None)}
    assert estimates({"very_low": 1}) == {"very_low": Estimate(1.0)}


def test_many_points_become_means_of_neighbors() -> None:
    points = [(step, float(step % 2)) for step in range(1, 9)]
    assert binned(points, most=4) == ([(2, 0.5), (4, 0.5), (6, 0.5), (8, 0.5)], 2)
    assert binned(points, most=8) == (points, 1)
    assert binned([]) == ([], 1)


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert smoothed([2.0] * 50) == [2.0] * 50
    assert smoothed([float(i) for i in range(60)])[30] == 30.0


def test_panels_show_finite_values_and_list_the_others() -> None:
    lines = [{"step": 1, "loss": 2.0, "own": 1.0}, {"step": 2, "loss": math.nan}, {"step": 2, "eval_loss": 1.5}]
    drawn = panels("sft", lines)
    assert [panel["metric"].label for panel in drawn["curves"]] == ["Loss"]
    assert [panel["metric"].label for panel in drawn["other_curves"]] == ["Own"]
    assert drawn["not_finite"] == {"Loss": [2]}
    assert drawn["curves"][0]["summary"] == "from 2.000 to 2.000"


def test_a_curve_is_drawn_at_its_values() -> None:
    svg = panels("sft", [{"step": step, "loss": float(step)} for step in (0, 5, 10)])["curves"][0]["svg"]
    path = next(d for d in re.findall(r'<path d="([^"]+)"[^>]*var\(--train\)', svg, re.DOTALL))
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point)) for point in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.02) and x1 > x0
    assert math.isclose(y0 - y1, y1 - y2, abs_tol=0.02) and y1 < y0  # SVG counts from the top
    assert "svg" in svg[:5] and 'id="figure' not in svg


def test_no_lines_have_no_panels() -> None:
    assert panels("sft", []) == {"curves": [], "other_curves": [], "steps_per_point": 1, "not_finite": {}}


# --- rounds of a loop ---------------------------------------------------------------------------------------------


def line(name: str, *values: float, half: float = 0.05) -> Line:
    points = [(k, Estimate(value, (value - half, value + half))) for k, value in enumerate(values, start=1)]
    return Line(name, points)


def marks(svg: str, color: str) -> list[tuple[float, float]]:
    """The places of the markers of a line, from left to right."""
    used = re.findall(rf'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="[^"]*fill: var\(--{color}\)', svg)
    return [(float(x), float(y)) for x, y in used]


def test_rounds_are_drawn_at_their_values_beside_one_another() -> None:
    panel = round_panel("loop/score", describe("score"), [line("grow", 0.2, 0.4, 0.6), line("held", 0.2, 0.3, 0.4)], 3)
    grow, held = marks(panel["svg"], "train"), marks(panel["svg"], "eval")
    assert len(grow) == len(held) == 3
    rise = [a[1] - b[1] for a, b in itertools.pairwise(grow)]
    assert math.isclose(rise[0], rise[1], abs_tol=0.02) and rise[0] > 0  # SVG counts from the top
    assert math.isclose(grow[0][1], held[0][1], abs_tol=0.02)  # equal values on one axis
    assert all(0 < b[0] - a[0] < 8 for a, b in zip(grow, held, strict=True))  # next to each other
    assert [(key["name"], key["color"]) for key in panel["key"]] == [("grow", "var(--train)"), ("held", "var(--eval)")]
    assert panel["summary"] == "grow from 0.2000 to 0.6000; held from 0.2000 to 0.4000"
    assert panel["svg"].count("<svg") == 1


@pytest.mark.parametrize(
    ("other", "axes"),
    [
        (line("gold", 0.3, 0.3, 0.3, half=0.0), 1),  # constant
        (line("gold", 0.3, 0.35, 0.4), 1),
        (line("gold", 30.0, 20.0, 10.0), 2),  # on its axis, the score would look flat
        (line("gold", 30.0, 30.0, 30.0, half=0.0), 2),
    ],
)
def test_lines_that_would_look_flat_have_an_axis_of_their_own(other: Line, axes: int) -> None:
    svg = round_panel("loop/rewards", describe("score"), [line("score", 0.2, 0.5, 0.8), other], 3)["svg"]
    assert svg.count('<clipPath id="') == axes


def test_values_that_are_not_finite_are_not_drawn() -> None:
    broken = Line("a", [(1, Estimate(1.0)), (2, Estimate(math.nan)), (3, Estimate(2.0))])
    panel = round_panel("loop/loss", describe("loss"), [broken, Line("b", [(1, Estimate(math.inf))])], 3)
    assert panel["summary"] == "a from 1.000 to 2.000" and len(marks(panel["svg"], "train")) == 2
