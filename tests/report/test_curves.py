"""Curves of metrics: which points are drawn, and where."""

from __future__ import annotations

import math
import re

from burnish.report.curves import Estimate, binned, estimates, panels, smoothed


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
