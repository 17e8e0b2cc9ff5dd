"""Beam search over steps and its relatives, against numbers worked out by hand and a naive implementation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.search.beam import beam_search, best_of, chains
from burnish.search.tree import Node, Step, Tree
from step_models import Asks, Scripted, Seeded, questions, statistics, step


def texts(nodes: Sequence[Node[str]]) -> list[str]:
    return [node.step.text for node in nodes]


# Two beams with two children: four first steps, a twice.
STEPS = {
    "": [step("a"), step("b"), step("a"), step("c")],
    "a": [step("a1", finish="answer"), step("a2")],
    "c": [step("c1"), step("c2", finish="answer")],
    "a2": [step("a21", finish="answer"), step("a22", finish="answer")],
    "c1": [step("c11"), step("c12")],
    "c11": [step("c111", finish="answer"), step("c112", finish="answer")],
}
VALUES = {"a": 0.5, "b": 0.0, "c": 0.25}


def search(values: dict[str, float], depth: int = 8, tokens: int | None = None) -> tuple[str, Tree[str], Scripted]:
    model, tree = Scripted(STEPS, VALUES | values), Tree.start(0, "")
    (found,) = beam_search([tree], model, 2, 2, depth, tokens=tokens)
    return found.step.text, tree, model


def test_a_finished_beam_leaves_and_the_other_goes_on_alone() -> None:
    # a and c stay. Of a1 .5, a2 .125, c1 .375, c2 .25 the best are a1, which has ended, and c1. c1 goes on alone.
    # Of c11 .125 and c12 0 the best is c11, and of c111 .625 and c112 .75 c112, which beats a1.
    values = {"a1": 0.5, "a2": 0.125, "c1": 0.375, "c2": 0.25, "c11": 0.125, "c12": 0.0, "c111": 0.625, "c112": 0.75}
    found, tree, model = search(values)
    assert (found, tree.stopped) == ("c112", "exhausted")
    assert model.expanded == [[("", 4)], [("a", 2), ("c", 2)], [("c1", 2)], [("c11", 2)]]
    assert model.evaluated == [["a", "b", "c"], ["a1", "a2", "c1", "c2"], ["c11", "c12"], ["c111", "c112"]]
    assert texts(tree.root.children) == ["a", "b", "c"] and tree.tokens == 12

    found, _, _ = search(values | {"c112": 0.0, "c111": 0.375})
    assert found == "a1"


def test_of_equal_values_a_solution_that_ends_is_kept_then_the_first() -> None:
    # c2 ends, and a2 is before c1
    values = {"a1": -1.0, "a2": 0.5, "c1": 0.5, "c2": 0.5}
    found, _, model = search(values | {"a21": 0.25, "a22": 0.25})
    assert model.expanded == [[("", 4)], [("a", 2), ("c", 2)], [("a2", 2)]] and found == "c2"


def test_without_an_answer_the_best_of_the_others_is_returned_marked() -> None:
    found, tree, model = search({}, depth=1)  # the two beams were ranked already
    assert (found, tree.stopped) == ("a", "budget") and len(model.evaluated) == 1
    model, tree = Scripted({"": [step("x"), step("y", finish="unparsable")]}, {"x": 0.5, "y": 0.75}), Tree.start(0, "")
    (node,) = beam_search([tree], model, 2, 1, depth=1)
    assert node.step.text == "y" and node.finished and not node.answered
    assert model.evaluated == [["y", "x"]]  # only at the end: both could be kept


def test_an_answer_comes_before_a_failure_of_higher_value() -> None:
    model = Scripted({"": [step("x", finish="answer"), step("y", finish="tools")]}, {"x": -0.5, "y": 0.75})
    assert texts(beam_search([Tree.start(0, "")], model, 2, 1, depth=4)) == ["x"]
    assert model.evaluated == []  # one answer needs no ranking


def test_limits_end_a_search_after_the_step_that_reaches_them() -> None:
    values = {"a1": 0.125, "a2": 0.5, "c1": 0.375, "c2": 0.25}
    found, tree, _ = search(values, tokens=5)  # 4 first steps, then 4
    assert (found, tree.stopped, tree.tokens) == ("a2", "tokens", 8)

    ticks = iter(range(100))
    tree = Tree.start(0, "")
    # the clock is read at the start (0) and before each further step (1, 2)
    (node,) = beam_search(
        [tree], Scripted(STEPS, VALUES | values), 2, 2, 8, seconds=2, clock=lambda: float(next(ticks))
    )
    assert (node.step.text, tree.stopped, tree.tokens) == ("a2", "seconds", 8)


@pytest.mark.parametrize("seed", range(10))
def test_one_beam_with_one_child_is_one_chain_and_estimates_nothing(seed: int) -> None:
    beams, chain, model = questions(range(5)), questions(range(5)), Seeded(seed)
    found = beam_search(beams, model, 1, 1, depth=8)
    assert "evaluate" not in model.calls
    assert [node.path() for node in found] == [(0,) * node.depth for node in found]
    (ends,) = zip(*chains(chain, Seeded(seed), 1, depth=8), strict=True)
    assert [node.step for node in ends] == [node.step for node in found]
    assert [statistics(tree) for tree in beams] == [statistics(tree) for tree in chain]


def test_one_beam_with_five_children_makes_at_most_twice_the_calls_of_greedy() -> None:
    greedy, wide = Seeded(ending=0.0, words=8), Seeded(ending=0.0, words=8)
    beam_search(questions(range(5)), greedy, 1, 1, depth=6)
    beam_search(questions(range(5)), wide, 1, 5, depth=6)
    assert greedy.calls == ["expand"] * 6
    assert len(wide.calls) <= 2 * len(greedy.calls) and wide.calls.count("expand") == 6


widths = st.integers(1, 4)
models = st.builds(
    Seeded,
    st.integers(0, 10_000),
    words=st.integers(1, 8),
    ending=st.sampled_from([0.0, 0.2, 0.5]),
    depth=st.integers(2, 6),
)


@given(models, widths, widths, st.integers(1, 5), st.booleans())
def test_a_search_samples_at_most_beams_times_children_times_depth(
    model: Seeded, beams: int, children: int, depth: int, diverse: bool
) -> None:
    class Counting(Seeded):
        sampled: dict[str, int]

        def expand(self, asks: Asks) -> list[list[Step[str]]]:
            for node, count in asks:
                name = node.step.state.partition("|")[0]
                self.sampled[name] = self.sampled.get(name, 0) + count
            return super().expand(asks)

    counting = Counting(model.seed, model.words, model.ending, model.depth)
    counting.sampled = {}
    trees = questions(range(3))
    found = beam_search(trees, counting, beams, children, depth, diverse=diverse)
    assert max(counting.sampled.values()) <= beams * children * depth
    assert all(node.depth <= depth for node in found)
    assert all(tree.stopped in ("exhausted", "budget") for tree in trees)


def naive(model: Seeded, question: int, beams: int, children: int, depth: int) -> Node[str]:
    """The search with a value for every candidate."""

    def rank(node: Node[str]) -> tuple[float, bool, tuple[int, ...]]:
        return -model.evaluate([node])[0], not node.answered, node.path()

    front = [Tree.start(question, str(question)).root]
    finished: list[Node[str]] = []
    for level in range(depth):
        candidates: list[Node[str]] = []
        for node in front:
            (steps,) = model.expand([(node, children * (beams if level == 0 else 1))])
            candidates += node.add(steps)
        kept = sorted(candidates, key=rank)[: beams - len(finished)]
        kept.sort(key=lambda node: node.path())  # the order of draws, as the nodes have one depth
        finished += [node for node in kept if node.finished]
        front = [node for node in kept if not node.finished]
    ends = finished + front
    answers = [node for node in ends if node.answered] or ends
    return max(answers, key=lambda node: model.evaluate([node])[0])  # the first of equals


@given(models, widths, widths, st.integers(1, 5))
def test_a_search_is_the_naive_one(model: Seeded, beams: int, children: int, depth: int) -> None:
    model.labeled = False
    for question, node in enumerate(beam_search(questions(range(3)), model, beams, children, depth)):
        assert node.path() == naive(model, question, beams, children, depth).path()


@given(models, widths, widths, st.booleans())
def test_a_known_outcome_keeps_a_correct_solution_that_was_sampled(
    model: Seeded, beams: int, children: int, diverse: bool
) -> None:
    trees = questions(range(3))
    for tree, node in zip(trees, beam_search(trees, model, beams, children, 8, diverse=diverse), strict=True):
        sampled = any(each.finished and model.outcome(each) == 1.0 for each in tree.nodes())
        assert (node.finished and model.outcome(node) == 1.0) == sampled


@given(models, widths, widths, st.booleans())
def test_a_search_does_not_depend_on_the_trees_beside_it(
    model: Seeded, beams: int, children: int, diverse: bool
) -> None:
    together, alone = questions(["a", "b", "c"]), questions(["c", "a", "b"])
    found = beam_search(together, model, beams, children, 5, diverse=diverse)
    single = [beam_search([tree], model, beams, children, 5, diverse=diverse)[0] for tree in alone]
    assert [node.path() for node in found] == [single[i].path() for i in (1, 2, 0)]
    # values are only computed where something is to be chosen, which is a matter of one tree too
    assert [statistics(tree) for tree in together] == [statistics(alone[i]) for i in (1, 2, 0)]


# --- diverse search and chains ------------------------------------------------------------------------------------


def test_a_diverse_search_keeps_one_solution_in_each_subtree() -> None:
    steps = {
        # the first search draws a and b, the second c and a
        "": [step("a"), step("b"), step("c"), step("a")],
        "a": [step("a1", finish="answer"), step("a2")],
        "c": [step("c1", finish="answer"), step("c1", finish="answer")],
    }
    # Ranked together, a and b would be kept. The second search keeps c, as c > a.
    values = {"a": 0.25, "b": 0.125, "c": 0.5, "a1": 0.375, "a2": 0.25, "c1": -0.5}
    model, tree = Scripted(steps, values), Tree.start(0, "")
    (found,) = beam_search([tree], model, 2, 2, 8, diverse=True)
    assert texts(tree.root.children) == ["a", "b", "c", "a"]
    assert model.expanded == [[("", 4)], [("a", 2), ("c", 2)]]
    # the only child c1 of c needs no rank until the end
    assert model.evaluated == [["a", "b", "c", "a"], ["a1", "a2"], ["c1"]]
    assert found.step.text == "a1"


@given(models, st.integers(1, 4), st.integers(1, 4))
def test_a_diverse_search_with_one_beam_is_the_plain_one(model: Seeded, children: int, depth: int) -> None:
    plain, diverse = questions(range(3)), questions(range(3))
    beam_search(plain, model, 1, children, depth)
    beam_search(diverse, model, 1, children, depth, diverse=True)
    assert [statistics(tree) for tree in plain] == [statistics(tree) for tree in diverse]


def test_chains_are_never_merged_and_share_calls() -> None:
    model = Seeded(ending=0.0, words=1)
    ends = chains(questions(range(3)), model, 4, depth=5)
    assert model.calls == ["expand"] * 5
    assert [[node.path() for node in nodes] for nodes in ends] == [[(i, 0, 0, 0, 0) for i in range(4)]] * 3
    assert {node.step.state for node in ends[2]} == {"2|a|a|a|a|a"}


@given(models, st.integers(1, 5))
def test_all_chains_run_to_their_ends(model: Seeded, count: int) -> None:
    trees = questions(range(3))
    for tree, nodes in zip(trees, chains(trees, model, count, depth=8), strict=True):
        assert len(nodes) == count and all(node.finished for node in nodes) and tree.stopped == "exhausted"
        assert {node.path()[0] for node in nodes} == set(range(count))
        assert sum(1 for _ in tree.nodes()) == 1 + sum(node.depth for node in nodes)


def test_the_best_of_n_is_the_answer_with_the_highest_value() -> None:
    ends = {"": [step(text, finish="answer") for text in "xyz"] + [step("w", finish="length")]}
    model = Scripted(ends, {"x": 0.25, "y": 0.5, "z": 0.5, "w": 0.75})
    assert texts(best_of(model, chains([Tree.start(0, "")], model, 4, depth=1))) == ["y"]
    assert model.evaluated == [["x", "y", "z"]]


def test_a_tree_cannot_be_searched_twice() -> None:
    trees = questions([0])
    chains(trees, Seeded(), 1, depth=1)
    with pytest.raises(AssertionError, match="has grown already"):
        beam_search(trees, Seeded(), 1, 1, depth=1)
