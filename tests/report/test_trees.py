"""Searched trees in the report: which are shown, what is left out, and how V is compared with outcomes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.math.statistics import wilson
from burnish.report import page as report
from burnish.report import trees
from burnish.report.metrics import SOLUTION_ENDS, describe
from burnish.report.trees import Prediction, Shown, bins, calibration, chosen, drawn, error, predictions, spread
from burnish.search.mcts import Settings, grow
from burnish.search.tree import Finish, to_json
from report.test_page import Page
from step_models import Seeded, questions


def node(number: int, parent: int | None, step: str = "", visits: int = 0, **values: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"id": number}
    if parent is not None:
        line |= {"parent": parent, "step": step, "prior": 0.5, "tokens": 3}
    if visits:
        line |= {"visits": visits, "q": values.pop("q", 0.0), "total": 0.0}
    return line | values


def end(outcome: float, **values: Any) -> dict[str, Any]:
    return {"value": outcome, "q": outcome, "finish": "answer", "outcome": outcome, **values}


def tree(question: int, *nodes: dict[str, Any]) -> dict[str, Any]:
    about = {"source": f"q.jsonl:{question + 1}", "prompt": f"question <{question}>", "question": question}
    return about | {"stopped": "budget", "simulations": 4, "tokens": 30, "nodes": list(nodes)}


BOTH = tree(
    0,
    node(0, None, visits=5, value=0.0),
    node(1, 0, "3 * 4 = <b>12</b>", visits=3, q=0.1667, value=0.5),
    node(2, 1, "", visits=1, **end(1.0, estimate=0.6)),
    node(3, 1, "12 + 1 = 14", visits=1, **end(-1.0, estimate=0.2)),
    node(4, 0, "4 + 3 = 7", visits=1, q=-0.4, value=-0.4),
    node(5, 4, "7 + 2 = 9"),
)
RIGHT = tree(1, node(0, None, visits=2, value=0.0), node(1, 0, "8", visits=1, **end(1.0)))
WRONG = tree(2, node(0, None, visits=2, value=0.0), node(1, 0, "9", visits=1, **end(-1.0)))
RIGHT_LATER = tree(2, node(0, None, visits=2, value=0.0), node(1, 0, "8", visits=1, **end(1.0)))


def nodes_of(root: Shown) -> Iterator[Shown]:
    yield root
    for child in root.children:
        yield from nodes_of(child)


# --- trees to look at ---------------------------------------------------------------------------------------------


def test_a_solved_tree_with_both_outcomes_and_an_unsolved_question_are_chosen() -> None:
    assert chosen([RIGHT, BOTH, WRONG]) == [("Solved", BOTH), ("Not solved", WRONG)]
    assert chosen([RIGHT]) == [("Solved", RIGHT)]
    assert chosen([WRONG]) == [("Not solved", WRONG)]
    assert chosen([]) == []


def test_a_question_that_a_later_tree_solves_is_not_unsolved() -> None:
    assert chosen([WRONG, RIGHT_LATER]) == [("Solved", RIGHT_LATER)]


def test_a_node_tells_its_visits_q_prior_v_and_outcome() -> None:
    found = drawn("Solved", BOTH, values=True)
    root, first, correct, wrong, other, unvisited = nodes_of(found.root)
    assert root.facts == "N 5 · Q 0.00"
    assert first.facts == "N 3 · Q 0.17 · p 0.50 · V 0.50" and first.strength == 17
    assert correct.facts.startswith("N 1 · Q 1.00 · p 0.50 · V 0.60 · ended: answer")
    assert wrong.facts.endswith("outcome: wrong") and wrong.mark == "wrong" and wrong.q == -1.0
    assert other.brief == "N 1 · Q \N{MINUS SIGN}0.40"
    assert unvisited.brief == "not visited" and unvisited.q is None and unvisited.mark == ""
    assert found.selected is correct and found.solution == ["3 * 4 = <b>12</b>"]
    assert "V" not in next(nodes_of(drawn("Solved", BOTH, values=False).root)).facts


def test_the_text_of_a_selected_step_has_the_output_of_its_code(tmp_path: Path) -> None:
    coded = tree(0, node(0, None, visits=2), node(1, 0, "<code>3*4</code>", 1, output="<output>12</output>"))
    manifest = {"name": "run", "state": "done", "stages": [search_stage(tmp_path, "search", coded)]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    html = report.write(tmp_path).read_text("utf-8")
    assert 'data-step="&lt;code&gt;3*4&lt;/code&gt;&lt;output&gt;12&lt;/output&gt;"' in html


def test_a_failed_solution_is_marked_with_its_reason() -> None:
    failed = tree(0, node(0, None, visits=2), node(1, 0, "", visits=1, **end(-1.0, finish="tools")))
    found = drawn("Not solved", failed, values=True)
    assert found.selected.mark == "tools"
    assert "ended: tools (code failed too many times in a row)" in found.selected.facts


def test_of_a_large_tree_the_most_visited_nodes_are_shown_and_the_others_counted() -> None:
    # 80 children: number k has k visits, but the solution is the one with the fewest.
    children = [node(k, 0, f"step {k}", visits=k, value=0.0) for k in range(2, 81)]
    large = tree(0, node(0, None, visits=3241), node(1, 0, "solved", visits=1, **end(1.0)), *children)
    found = drawn("Solved", large, values=True)
    # the root, the solution, and the 58 children 23 to 80
    assert [child.step for child in found.root.children] == ["solved", *(f"step {k}" for k in range(23, 81))]
    assert found.root.left_out == 21
    assert found.facts[-1] == "81 nodes, of which the 60 most visited are shown"


def test_of_a_long_solution_the_first_nodes_are_shown() -> None:
    steps = [node(k, k - 1, f"step {k}", visits=100 - k, value=0.0) for k in range(1, 80)]
    found = drawn(
        "Solved", tree(0, node(0, None, visits=100), *steps, node(80, 79, "", visits=1, **end(1.0))), values=True
    )
    assert found.selected.step == found.solution[-1] == "step 59"  # the 60th node, after the root
    assert found.selected.left_out == 1


@given(seed=st.integers(0, 10_000), simulations=st.integers(0, 80))
def test_shown_nodes_are_a_tree(seed: int, simulations: int) -> None:
    grown = questions([7])
    grow(grown, Seeded(seed), Settings(simulations, children=4))
    data = json.loads(json.dumps(to_json(grown[0])))
    found = drawn("Solved", data, values=True)
    shown = list(nodes_of(found.root))
    assert len(shown) == min(len(data["nodes"]), trees.MOST_NODES)
    assert sum(one.selected for one in shown) == 1 and found.selected in shown
    if len(data["nodes"]) <= trees.MOST_NODES:
        assert [one.step for one in shown] == [line.get("step", "") for line in data["nodes"]]
        assert not any(one.left_out for one in shown)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    assert trees.read(tmp_path) == []
    (tmp_path / "data").mkdir()
    (tmp_path / trees.TREES_FILE).write_text(json.dumps(RIGHT) + "\n{damaged\n")
    with pytest.raises(UserError, match=r"trees\.jsonl:2: this line is damaged"):
        trees.read(tmp_path)


# --- calibration --------------------------------------------------------------------------------------------------


def test_v_is_compared_with_outcomes_at_ends_and_with_their_mean_before() -> None:
    ends, earlier = predictions([BOTH])
    assert ends == [Prediction(0.2, -1.0, 0), Prediction(0.6, 1.0, 0)]
    # Below node 1 are a correct and a wrong solution. Below node 4 nothing is finished, and the root has no V.
    assert earlier == [Prediction(0.5, 0.0, 0)]
    assert error(ends) == pytest.approx((1.2**2 + 0.4**2) / 2)
    assert spread(ends) == 1.0
    assert (error(earlier), spread(earlier)) == (0.25, 0.0)


def test_an_end_without_the_estimate_of_the_model_is_left_out() -> None:
    # Its value is its outcome, which says nothing about the model.
    assert predictions([RIGHT]) == ([], [])


def test_intervals_count_questions() -> None:
    # V = 0.30 and 0.34 are in the bin from 0.2 to 0.4; 1.0 is in the last bin, and -1.0 in the first.
    found = [Prediction(0.30, 1.0, 1), Prediction(0.34, -1.0, 1), Prediction(1.0, 1.0, 1), Prediction(-1.0, -1.0, 2)]
    first, middle, last = bins(found)
    assert (middle.predicted, middle.outcome, middle.count) == (pytest.approx(0.32), 0.0, 2)
    assert [one.middle for one in (first, middle, last)] == pytest.approx([-0.9, 0.3, 0.9])
    # One question: of a share of 1/2 in one trial, the interval is 1/2 +- 1.96 / (1 + 1.96²) sqrt(1/4 + 1.96²/4).
    half = 1.959964 / (1 + 1.959964**2) * math.sqrt(1 / 4 + 1.959964**2 / 4)
    assert middle.interval == pytest.approx((-2 * half, 2 * half))
    assert last.interval == pytest.approx((2 * wilson(1.0, 1)[0] - 1, 1.0))
    (together,) = bins([Prediction(0.3, 1.0, 1), Prediction(0.3, -1.0, 2)])
    assert together.interval[1] < middle.interval[1]


def test_without_a_value_head_nothing_is_drawn() -> None:
    untrained = json.loads(json.dumps(BOTH))
    for line in untrained["nodes"]:
        line.pop("estimate", None)
        line["value"] = line.get("outcome", 0.0)
    assert calibration("x", [untrained]) is None
    panel = calibration("x", [BOTH])
    assert panel is not None
    assert [line["name"] for line in panel["key"]] == [
        "Ends of solutions: error 0.80 (constant: 1.00)",
        "Earlier states: error 0.25 (constant: 0.00)",
    ]
    assert panel["svg"].startswith("<svg") and "#0" not in panel["svg"]


# --- the page -----------------------------------------------------------------------------------------------------


def search_stage(folder: Path, name: str, *trees: dict[str, Any]) -> dict[str, Any]:
    data = folder / name / "data"
    data.mkdir(parents=True)
    (data / "trees.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trees or (BOTH, WRONG)))
    measured = {"solved": 0.5, "value_error": 0.8, "nodes": 4.0, "ended_answer": 0.75, "ended_tools": 0.0}
    after = {f"eval_{key}": value for key, value in measured.items()}
    return {"name": name, "method": "search", "state": "done", "seconds": 1.0, "results": {"after": after}}


def rendered(folder: Path, *names: str) -> tuple[str, Page]:
    manifest = {"name": "run", "state": "done", "stages": [search_stage(folder, name) for name in names]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    html = report.write(folder).read_text("utf-8")
    return html, Page(html)


def test_the_page_of_a_search(tmp_path: Path) -> None:
    html, page = rendered(tmp_path, "search")
    assert page.open == [] and page.outside == [] and len(page.ids) == len(set(page.ids))
    assert html.count('class="searched"') == 2 and html.count("<script>") == 1 and "src=" not in html
    assert "3 * 4 = &lt;b&gt;12&lt;/b&gt;" in html and "<b>12</b>" not in html and "question &lt;0&gt;" in html
    text = str(page)
    assert "Solved q.jsonl:1 · 4 simulations · all simulations were used · 30 sampled tokens · 6 nodes" in text
    assert "Not solved q.jsonl:3" in text
    assert "Is V right?" in text and "Ends of solutions: error 0.80 (constant: 1.00)" in text
    assert "How solutions end" in text and "Ended: answer" in text and "Ended: tools" not in text


def test_a_loop_shows_the_calibration_of_its_rounds_side_by_side(tmp_path: Path) -> None:
    html, page = rendered(tmp_path, "loop/1/search", "loop/2/search")
    assert html.count('class="searched"') == 4 and html.count('class="calibration"') == 2
    assert str(page).count("Is V right?") == 1 and len(page.ids) == len(set(page.ids))
    assert "Solved" in str(page) and "Value error" in str(page)


def test_every_reason_for_which_a_solution_ends_is_described() -> None:
    assert {*SOLUTION_ENDS, ""} == set(get_args(Finish))
    assert describe("ended_depth").label == "Ended: depth" and describe("ended_depth").share
