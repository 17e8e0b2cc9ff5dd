"""Trees: merged children, checked models, and JSON that gives back what was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.search.beam import chains
from burnish.search.mcts import Settings, grow
from burnish.search.solutions import paths
from burnish.search.tree import Node, Step, Tree, evaluate, from_json, sample, to_json
from step_models import Scripted, Seeded, questions, step


def test_equal_children_are_merged_in_the_order_of_draws() -> None:
    root = Tree.start(0, "").root
    root.add([step("b", 0.5), step("a", 0.25), step("b", 0.125), step("b", 0.5, "answer"), step("a")])
    assert [(n.index, n.step.text, n.step.prior, n.step.finish) for n in root.children] == [
        (0, "b", 0.5, ""),
        (1, "a", 0.25, ""),
        (2, "b", 0.5, "answer"),
    ]


def test_steps_that_are_added_later_stay_apart_and_follow() -> None:
    root = Tree.start(0, "").root
    root.add([step("a")])
    (second,) = root.add([step("a")])
    assert root.children[1] is second and second.path() == (1,)


def test_a_path_names_child_indices_from_the_root() -> None:
    tree = Tree.start(0, "")
    _, b = tree.root.add([step("a"), step("b")])
    _, _, c = b.add([step("x"), step("y"), step("z")])
    assert (tree.root.path(), b.path(), c.path()) == ((), (1,), (1, 2))
    assert [node.step.text for node in c.lineage()] == ["b", "z"] and c.depth == 2
    assert [node.step.text for node in tree.nodes()] == ["", "a", "b", "x", "y", "z"]


def test_a_node_is_shown_without_its_tree() -> None:
    tree = Tree.start(0, "")
    node = tree.root
    for _ in range(2000):  # deeper than Python's stack
        (node,) = node.add([step("a")])
    assert len(repr(tree)) < 500 and "depth=2000" in repr(node)


def test_sampled_tokens_are_counted_with_duplicates() -> None:
    model = Scripted({"": [step("a", tokens=3), step("a", tokens=3), step("b", tokens=4)]})
    tree = Tree.start(0, "")
    sample(model, [(tree, tree.root, 3)])
    assert tree.tokens == 10


def test_a_model_that_returns_too_few_steps_is_refused() -> None:
    tree = Tree.start("q.jsonl:7", "")
    with pytest.raises(ValueError, match=r"q\.jsonl:7, node \(\): got 1 steps, expected 2"):
        sample(Scripted({"": [step("a")]}), [(tree, tree.root, 2)])


def test_only_nodes_without_a_known_outcome_are_estimated() -> None:
    ends = [step("x", finish="answer"), step("y", finish="unparsable"), step("z", finish="answer")]
    nodes = Tree.start(0, "").root.add([step("a"), *ends])
    model = Scripted({}, {"a": 0.25, "z": 0.5}, {"x": 1.0, "y": -1.0})
    evaluate(model, nodes)
    assert [node.value for node in nodes] == [0.25, 1.0, -1.0, 0.5]
    assert [node.outcome for node in nodes] == [None, 1.0, -1.0, None]
    assert model.evaluated == [["a", "z"]]


@pytest.mark.parametrize("value", [1.5, -1.0001, float("nan")])
def test_a_value_outside_its_range_is_refused(value: float) -> None:
    nodes = Tree.start(0, "").root.add([step("a")])
    with pytest.raises(ValueError, match=r"node \(0,\): got the value"):
        evaluate(Scripted({}, {"a": value}), nodes)


def test_an_outcome_is_1_or_minus_1() -> None:
    nodes = Tree.start(0, "").root.add([step("a", finish="answer")])
    with pytest.raises(ValueError, match=r"node \(0,\): got the outcome 0\.0"):
        evaluate(Scripted({}, {}, {"a": 0.0}), nodes)


def test_a_tree_as_json() -> None:
    first = [Step("s", "3 * 4 = 12", 0.5, 9, code="ok"), Step("t", "14", 0.25, 4, "answer")]
    second = [Step("u", "12 + 2 = 14", 0.75, 8), Step("u", "12 + 2 = 14", 0.75, 8)]
    model = Scripted({"": first, "s": second}, {"s": 0.5}, {"t": 1.0})
    tree = Tree.start("q.jsonl:7", "")
    # 14 is visited when it is sampled. Then the simulation visits 3 * 4 = 12, whose steps are merged.
    grow([tree], model, Settings(simulations=1, children=2))
    data = to_json(tree)
    assert data == {
        "question": "q.jsonl:7",
        "stopped": "budget",
        "simulations": 1,
        "tokens": 9 + 4 + 8 + 8,
        "nodes": [
            {"id": 0, "visits": 3, "q": 0.5, "total": 1.5, "value": 0.0},
            {
                "id": 1,
                "parent": 0,
                "step": "3 * 4 = 12",
                "prior": 0.5,
                "tokens": 9,
                "visits": 1,
                "q": 0.5,
                "total": 0.5,
                "value": 0.5,
                "code": "ok",
            },
            {"id": 2, "parent": 1, "step": "12 + 2 = 14", "prior": 0.75, "tokens": 8},
            {
                "id": 3,
                "parent": 0,
                "step": "14",
                "prior": 0.25,
                "tokens": 4,
                "visits": 1,
                "q": 1.0,
                "total": 1.0,
                "value": 1.0,
                "finish": "answer",
                "outcome": 1.0,
                "exhausted": True,
            },
        ],
    }


def test_the_estimate_of_an_end_is_kept_beside_its_outcome() -> None:
    tree = Tree.start(0, "")
    (known,) = tree.root.add([Step("a", "a", 0.5, 1, "answer", estimate=0.25)])
    (goes_on,) = tree.root.add([Step("b", "b", 0.5, 1, estimate=0.5)])
    evaluate(Scripted({}, {"b": 0.5}, {"a": -1.0}), [known, goes_on])
    _, first, second = to_json(tree)["nodes"]
    assert (first["value"], first["estimate"]) == (-1.0, 0.25)
    assert second["value"] == 0.5 and "estimate" not in second  # its value is the estimate
    assert to_json(from_json(to_json(tree))) == to_json(tree)


class Uneven(Seeded):
    """Values whose sums are rounded, so that a mean cannot be multiplied back."""

    def evaluate(self, nodes: Sequence[Node[str]]) -> list[float]:
        return [self.random(node.step.state, "value").uniform(-1, 1) for node in nodes]


def nodes_of(tree: Tree[str] | Tree[None]) -> list[tuple[object, ...]]:
    return [
        (replace(n.step, state=None), n.path(), n.depth, n.visits, n.total, n.q, n.value, n.outcome, n.exhausted)
        for n in tree.nodes()
    ]


@given(seed=st.integers(0, 10_000), simulations=st.integers(0, 60))
def test_a_tree_that_is_read_back_has_the_same_numbers_and_solutions(seed: int, simulations: int) -> None:
    trees = questions([7, "q.jsonl:8"])
    grow(trees, Uneven(seed), Settings(simulations, children=3))
    again = [from_json(json.loads(json.dumps(to_json(tree)))) for tree in trees]
    for tree, read in zip(trees, again, strict=True):
        assert nodes_of(tree) == nodes_of(read)
        assert (tree.question, tree.stopped, tree.tokens) == (read.question, read.stopped, read.tokens)
        assert to_json(tree) == to_json(read)
    assert paths(trees) == paths(again)


def test_equal_chains_are_still_apart_when_read_back() -> None:
    trees = questions([1])
    chains(trees, Seeded(words=1), 4, depth=3)
    assert len(trees[0].root.children) == 4
    assert nodes_of(from_json(to_json(trees[0]))) == nodes_of(trees[0])
