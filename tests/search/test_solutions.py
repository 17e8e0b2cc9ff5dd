"""Rows from trees: labels, failures, merged ends, and which of many are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.search.beam import chains
from burnish.search.mcts import Settings, grow
from burnish.search.solutions import Solution, balance, distinct, paths, prefer, usable
from burnish.search.tree import Code, Node, Step, Tree
from step_models import Scripted, Seeded, questions, step


def visit(node: Node[str], visits: int, total: float, outcome: float | None = None) -> Node[str]:
    node.visits, node.total, node.outcome = visits, total, outcome
    return node


def coded(text: str, code: Code) -> Step[str]:
    return Step(text, text, 0.5, 1, "", code)


def test_labels_are_q_and_the_last_is_the_outcome() -> None:
    tree = Tree.start(0, "")
    a, b, c = tree.root.add([coded("a", "error"), step("b", finish="tools"), step("c", finish="answer")])
    visit(a, 4, 1.0)
    a1, a2 = a.add([step("a1", finish="answer"), coded("a2", "answer")])
    visit(a1, 1, -1.0, -1.0)
    visit(a2, 2, 1.5)
    visit(a2.add([step("a21", finish="answer")])[0], 1, 1.0, 1.0)
    visit(b, 1, -1.0, -1.0)
    c.outcome = 1.0  # never visited
    assert paths([tree]) == [
        Solution((("a", 0.25), ("a1", -1.0)), -1.0, ("error",)),
        Solution((("a", 0.25), ("a2", 0.75), ("a21", 1.0)), 1.0, ("error", "answer")),
        Solution((("b", -1.0),), -1.0),
    ]


def test_an_empty_last_step_is_merged_into_the_step_before_it() -> None:
    tree = Tree.start(0, "")
    a, nothing = tree.root.add([step("a"), step("", finish="unparsable")])
    visit(a, 3, 0.75)
    visit(a.add([step("", finish="answer")])[0], 1, 1.0, 1.0)
    visit(nothing, 1, -1.0, -1.0)  # no text at all
    assert paths([tree]) == [Solution((("a", 1.0),), 1.0)]


def test_an_unknown_outcome_gives_no_row() -> None:
    trees = questions(range(3))
    grow(trees, Seeded(labeled=False), Settings(30))
    assert any(node.visits and node.finished for tree in trees for node in tree.nodes())
    assert paths(trees) == []


def test_solutions_of_many_trees_alternate() -> None:
    trees = questions([1, 1, 1])
    for tree, names in zip(trees, ("abc", "", "de"), strict=True):
        for node in tree.root.add([step(name, finish="answer") for name in names]):
            visit(node, 1, 1.0, 1.0)
    assert [solution.texts for solution in paths(trees)] == [("a",), ("d",), ("b",), ("e",), ("c",)]


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_every_visited_end_is_one_row_with_exact_labels(seed: int, simulations: int) -> None:
    model, (tree,) = Seeded(seed), questions([0])
    grow([tree], model, Settings(simulations, children=3))
    ends = [node for node in tree.nodes() if node.finished and node.visits]
    solutions = paths([tree])
    assert len(solutions) == len(ends)
    for node, solution in zip(ends, solutions, strict=True):
        assert solution.texts == tuple(each.step.text for each in node.lineage())
        assert solution.steps[-1][1] == solution.outcome == model.outcome(node)
        assert [q for _, q in solution.steps[:-1]] == [each.q for each in node.lineage()[:-1]]
        assert all(-1 <= q <= 1 for _, q in solution.steps)


def test_nodes_of_chains_are_not_visited() -> None:
    model = Scripted({"": [step("a", finish="answer")]}, {}, {"a": 1.0})
    trees = [Tree.start(0, "")]
    chains(trees, model, 1, depth=1)
    assert paths(trees) == []


# --- which are kept -----------------------------------------------------------------------------------------------


def made(text: str, *codes: Code, outcome: float = 1.0) -> Solution:
    return Solution(tuple((line, outcome) for line in text.split()), outcome, codes)


def test_equal_texts_are_kept_once() -> None:
    first = Solution((("a", 0.5), ("b", 1.0)), 1.0)
    again = Solution((("a", 0.25), ("b", 1.0)), 1.0)
    assert distinct([first, made("a"), again, made("b a")]) == [first, made("a"), made("b a")]


def test_a_correct_one_of_equal_texts_is_kept() -> None:
    cut = Solution((("a", -1.0),), -1.0)  # reached the limit of steps before it ended the model's turn
    ended = Solution((("a", 1.0),), 1.0)
    assert distinct([cut, ended, cut]) == [ended]


def test_code_that_always_failed_drops_a_solution() -> None:
    keep = [made("a"), made("b", "error", "ok"), made("c", "ok"), made("d", "answer", "error")]
    drop = [made("e", "error"), made("f", "error", "error")]
    assert usable([*drop, *keep]) == keep


def test_code_that_printed_the_answer_is_preferred_then_code_without_errors() -> None:
    solutions = [
        made("a", "ok", "error"),
        made("b"),
        made("c", "error", "answer"),
        made("d", "ok"),
        made("e", "answer"),
        made("f", "error"),
    ]
    assert [solution.texts[0] for solution in prefer(solutions)] == ["c", "e", "b", "d", "a", "f"]


@pytest.mark.parametrize(
    ("right", "wrong", "kept"),
    [
        (9, 9, (4, 4)),
        (2, 9, (2, 2)),
        (9, 1, (1, 1)),
        (9, 0, (1, 0)),
        (0, 9, (0, 1)),
        (0, 0, (0, 0)),
    ],
)
def test_a_question_keeps_as_many_of_each_kind(right: int, wrong: int, kept: tuple[int, int]) -> None:
    correct = [made(f"right{i}") for i in range(right)]
    incorrect = [made(f"wrong{i}", outcome=-1.0) for i in range(wrong)]
    result = balance([*incorrect, *correct])
    assert result == [*correct[: kept[0]], *incorrect[: kept[1]]]


def test_without_incorrect_solutions_all_correct_ones_are_kept() -> None:
    correct, wrong = [made("a"), made("b"), made("c")], made("d", outcome=-1.0)
    assert balance([*correct, wrong], correct=2, incorrect=0) == correct[:2]
    assert balance([wrong], correct=2, incorrect=0) == []


def test_the_lower_limit_holds_for_both_kinds() -> None:
    correct, incorrect = [made("a"), made("b"), made("c")], [made("d", outcome=-1.0), made("e", outcome=-1.0)]
    assert balance([*correct, *incorrect], correct=1, incorrect=4) == [correct[0], incorrect[0]]
