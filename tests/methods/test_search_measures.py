"""What a search measures of a question."""

from __future__ import annotations

from collections import Counter

import pytest

from burnish.methods import ROW_METHODS
from burnish.methods.search import Search
from burnish.report.metrics import METRICS
from burnish.search.steps import Partial
from burnish.search.tree import Finish, Node, Step, Tree
from burnish.types import Prompt


def made(*ends: tuple[Finish, float | None, float | None, int]) -> dict[str, list[float]]:
    """The measures of a question with these ends: why, the outcome, V, and the visits."""
    tree = Tree.start(0, Partial(0, 0, (1,)))
    tree.tokens = 12
    steps = [
        Step(Partial(0, 0, (1,)), f"step {k}", 0.5, 3, finish, estimate=v) for k, (finish, _, v, _) in enumerate(ends)
    ]
    nodes: list[Node[Partial]] = tree.root.add(steps)
    for node, (_, outcome, _, visits) in zip(nodes, ends, strict=True):
        node.outcome, node.visits, node.total = outcome, visits, outcome or 0.0
    row = Prompt(({"role": "user", "content": "1+1=?"},), {"answer": "2"}, "q.jsonl:1")
    return dict(Search()._made([(row, [tree])], Counter()).measured)


def test_the_value_error_and_how_solutions_end() -> None:
    measured = made(
        ("answer", 1.0, 0.5, 1), ("depth", -1.0, 0.0, 1), ("context", -1.0, None, 1), ("answer", None, 0.9, 0)
    )
    # (0.5 - 1)² and (0 + 1)²; the third end has no V, and the last one was not visited.
    assert measured["value_error"] == [pytest.approx((0.25 + 1.0) / 2)]
    ended = {key: values for key, values in measured.items() if key.startswith("ended_")}
    assert ended == {
        "ended_answer": [pytest.approx(1 / 3)],
        "ended_depth": [pytest.approx(1 / 3)],
        "ended_context": [pytest.approx(1 / 3)],
        "ended_unparsable": [0.0],
        "ended_tools": [0.0],
        "ended_length": [0.0],
    }
    assert (measured["solved"], measured["sampled_tokens"], measured["nodes"]) == ([1.0], [12.0], [5.0])


def test_without_a_value_head_there_is_no_value_error() -> None:
    measured = made(("answer", -1.0, None, 1))
    assert "value_error" not in measured and measured["solved"] == [0.0]


def test_every_measure_is_described() -> None:
    assert set(ROW_METHODS["search"].measures) <= set(METRICS)
