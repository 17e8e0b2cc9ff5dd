"""Monte Carlo tree search against numbers worked out by hand, a naive implementation, and its invariants."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.search.mcts import Settings, best, grow
from burnish.search.tree import Node, Step, Tree
from step_models import Asks, Scripted, Seeded, questions, statistics, step

# The question has the steps A and B, and some draws are equal.
STEPS = {
    "": [step("A", 0.5), step("B", 0.25), step("A", 0.125)],
    "A": [step("A1", 0.5, "answer"), step("A2", 0.25), step("A3", 0.125)],
    "A2": [step("A21", 0.5, "unparsable"), step("A21", 0.125, "unparsable"), step("A21", 0.25, "unparsable")],
    "A3": [step("A31", 0.5, "answer"), step("A31", 0.5, "answer"), step("A31", 0.5, "answer")],
    "B": [step("B1", 0.5, "answer"), step("B2", 0.25, "answer"), step("B1", 0.25, "answer")],
}
VALUES = {"A": 0.5, "A2": -0.5, "A3": 0.25, "B": -0.25}
OUTCOMES = {"A1": 1.0, "A21": -1.0, "A31": 1.0, "B1": -1.0, "B2": 1.0}


def search(simulations: int, **settings: float) -> tuple[Tree[str], Scripted]:
    model, tree = Scripted(STEPS, VALUES, OUTCOMES), Tree.start(0, "")
    grow([tree], model, Settings(simulations, children=3, exploration=1.0, **settings))  # type: ignore[arg-type]
    return tree, model


def sums(tree: Tree[str]) -> dict[str, tuple[int, float]]:
    return {node.step.text: (node.visits, node.total) for node in tree.nodes() if node.visits}


# The node that each simulation visits, the ends that it samples there and visits at once, and (N, W) of their ancestors
# after it. The score is Q + prior sqrt(N of the parent) / (1 + N).
#
# 1  A: 0.5 against B: 0.25
#    A = 0.5, A1 = 1                 A (2, 1.5)                    question (3, 1.5)
# 2  A: 0.75 + 0.5 sqrt(3)/3 = 1.04 against B: 0.25 sqrt(3) = 0.43; A2: 0.25 sqrt(2) against A3: 0.125 sqrt(2)
#    A2 = -0.5, A21 = -1             A2 (2, -1.5), A (4, 0)        question (5, 0)
# 3  A: 0 + 0.5 sqrt(5)/5 = 0.22 against B: 0.25 sqrt(5) = 0.56
#    B = -0.25, B1 = -1, B2 = 1      B (3, -0.25)                  question (8, -0.25)
# 4  nothing is left below B and A2
#    A3 = 0.25, A31 = 1              A3 (2, 1.25), A (6, 1.25)     question (10, 1)
#
# If simulation 2 did not visit A21, A would be (3, 1) after it. Then simulation 3 would go to A: 1/3 + 0.5 * 2/4 = 0.58
# against B: 0.25 * 2 = 0.5.
AFTER: dict[int, dict[str, tuple[int, float]]] = {
    0: {"": (1, 0.0)},
    1: {"": (3, 1.5), "A": (2, 1.5), "A1": (1, 1.0)},
    2: {"": (5, 0.0), "A": (4, 0.0), "A1": (1, 1.0), "A2": (2, -1.5), "A21": (1, -1.0)},
}
AFTER[3] = AFTER[2] | {"": (8, -0.25), "B": (3, -0.25), "B1": (1, -1.0), "B2": (1, 1.0)}
AFTER[4] = AFTER[3] | {"": (10, 1.0), "A": (6, 1.25), "A3": (2, 1.25), "A31": (1, 1.0)}


@pytest.mark.parametrize("simulations", AFTER)
def test_a_search_by_hand(simulations: int) -> None:
    tree, _ = search(simulations)
    assert sums(tree) == AFTER[simulations]
    assert tree.simulations == simulations
    assert tree.stopped == ("exhausted" if simulations == 4 else "budget")


def test_finished_children_of_one_node_do_not_end_the_search() -> None:
    tree, _ = search(100)
    assert sums(tree) == AFTER[4] and tree.stopped == "exhausted" and tree.simulations == 4
    assert all(node.exhausted for node in tree.nodes())


def test_a_simulation_expands_the_node_that_it_visits() -> None:
    _, model = search(2)
    assert model.expanded == [[("", 3)], [("A", 3)], [("A2", 3)]]
    assert model.evaluated == [["A"], ["A2"]]  # the others are ends with a known outcome
    assert model.checked == [["A1"], ["A21"]]


def test_an_unknown_outcome_is_estimated() -> None:
    model, tree = Scripted(STEPS, VALUES | {"A1": 0.125}), Tree.start(0, "")
    grow([tree], model, Settings(1, children=3, exploration=1.0))
    assert sums(tree) == {"": (3, 0.625), "A": (2, 0.625), "A1": (1, 0.125)}
    assert model.evaluated == [["A"], ["A1"]]
    assert all(node.outcome is None for node in tree.nodes())


def test_a_question_whose_first_steps_are_all_ends_is_exhausted_before_the_first_simulation() -> None:
    ends = [step("x", finish="answer"), step("y", finish="depth"), step("z", finish="answer")]
    model, tree = Scripted({"": ends}, {}, {"x": -1.0, "y": -1.0, "z": 1.0}), Tree.start(0, "")
    grow([tree], model, Settings(simulations=40, children=3, tokens=1))
    assert sums(tree) == {"": (4, -1.0), "x": (1, -1.0), "y": (1, -1.0), "z": (1, 1.0)}
    assert (tree.stopped, tree.simulations, tree.tokens) == ("exhausted", 0, 3)
    assert (model.expanded, model.evaluated, model.checked) == ([[("", 3)]], [], [["x", "y", "z"]])


class Endless(Scripted):
    """The same steps after every node."""

    def expand(self, asks: Asks) -> list[list[Step[str]]]:
        return [list(self.steps[""]) for _ in asks]


def first_visits(model: Endless, simulations: int, exploration: float) -> list[int]:
    tree = Tree.start(0, "")
    grow([tree], model, Settings(simulations, len(model.steps[""]), exploration))
    return [child.visits for child in tree.root.children]


@pytest.mark.parametrize(("value", "second"), [(0.22, [2, 0]), (0.205, [1, 1])])
def test_exploration_grows_with_the_root_of_the_visits_of_the_parent(value: float, second: list[int]) -> None:
    # a was visited once: value + 0.5 sqrt(2) / 2 against 0.4 sqrt(2) for b, so a is next above 0.15 sqrt(2) = 0.2121
    steps = [step("a", 0.5), step("b", 0.4)]
    assert first_visits(Endless({"": steps}, {"a": value, "b": 0.0}), 2, 1.0) == second


def test_without_exploration_the_search_is_greedy_on_q() -> None:
    steps = [step("a", 0.01), step("b", 0.98), step("c", 0.01)]
    # a is the first of equals and stays above 0; priors do not matter
    assert first_visits(Endless({"": steps}, {"a": 0.5, "b": 1.0, "c": 1.0}), 20, 0.0) == [20, 0, 0]
    # a and b fall below 0, where c is before its first visit
    assert first_visits(Endless({"": steps}, {"a": -0.5, "b": -0.75, "c": 0.25}), 20, 0.0) == [1, 1, 18]


def test_with_much_exploration_visits_are_in_proportion_to_priors() -> None:
    steps = [step("a", 0.6), step("b", 0.3), step("c", 0.1)]
    # The next visit goes to the highest prior / (1 + N), as seats of a parliament do (D'Hondt). The ten highest of
    # .6/1, .6/2, ..., .3/1, ..., .1/1 are the six to .6/6 = .1, the three to .3/3 = .1, and .1.
    assert first_visits(Endless({"": steps}, {"a": -1.0, "b": 0.0, "c": 1.0}), 10, 1e6) == [6, 3, 1]


def reference(
    model: Seeded, question: int, simulations: int, children: int, c: float
) -> tuple[int, list[tuple[object, ...]]]:
    """The search with nothing kept: all numbers are computed from the list of visited nodes and their values.

    Returns the number of simulations, and the path, N and W of every visited node, sorted by path.
    """
    visited: dict[tuple[int, ...], float] = {}  # the path and value of every visited node
    nodes: dict[tuple[int, ...], Node[str]] = {(): Tree.start(question, str(question)).root}

    def values(path: tuple[int, ...]) -> list[float]:
        return [value for other, value in visited.items() if other[: len(path)] == path]

    def below(path: tuple[int, ...]) -> list[Node[str]]:
        return list(nodes[path].children)

    def left(path: tuple[int, ...]) -> bool:
        return path not in visited or any(left(child.path()) for child in below(path))

    def visit(path: tuple[int, ...], value: float) -> None:
        visited[path] = value
        (steps,) = model.expand([(nodes[path], children)])
        for child in nodes[path].add(steps):
            nodes[child.path()] = child
            if child.finished:
                visited[child.path()] = model.outcome(child)

    visit((), 0.0)
    done = 0
    while done < simulations and left(()):
        path: tuple[int, ...] = ()
        while path in visited:
            scores = {}
            for child in below(path):
                if left(child.path()):
                    own = values(child.path())
                    q = sum(own) / len(own) if own else 0.0
                    scores[child.path()] = q + c * math.sqrt(len(values(path))) * child.step.prior / (1 + len(own))
            path = max(scores, key=lambda place: (scores[place], -place[-1]))
        visit(path, model.evaluate([nodes[path]])[0])
        done += 1
    return done, sorted((path, len(values(path)), sum(values(path))) for path in visited)


@given(seed=st.integers(0, 10_000), simulations=st.integers(1, 25), c=st.sampled_from([0.0, 0.5, 1.25, 8.0]))
def test_a_search_is_the_naive_one(seed: int, simulations: int, c: float) -> None:
    (tree,) = questions([seed])
    model = Seeded(seed, ending=0.4, depth=3)
    grow([tree], model, Settings(simulations, 3, c))
    visited = [(node.path(), node.visits, node.total) for node in tree.nodes() if node.visits]
    assert (tree.simulations, sorted(visited)) == reference(model, seed, simulations, 3, c)


seeds = st.integers(0, 10_000)
models = st.builds(
    Seeded, seeds, words=st.integers(1, 8), ending=st.sampled_from([0.0, 0.2, 0.5, 1.0]), depth=st.integers(1, 6)
)
settings = st.builds(Settings, st.integers(1, 60), st.integers(1, 5), st.sampled_from([0.0, 1.25, 5.0]))


@given(models, settings)
def test_visits_add_up_and_q_is_the_mean_of_what_was_backed_up(model: Seeded, settings: Settings) -> None:
    trees = questions(range(3))
    grow(trees, model, settings)
    for tree in trees:
        for node in tree.nodes():
            visited = [child for child in node.children if child.visits]
            assert (node.visits > 0) == (node.value is not None)
            if node.visits:  # values are multiples of 1/8, so these sums are exact
                assert node.visits == 1 + sum(child.visits for child in visited)
                assert node.value is not None
                assert node.total == node.value + sum(child.total for child in visited)
            assert abs(node.q) <= 1 and not (visited and not node.visits)
            if node.finished and node.visits:
                assert (node.visits, node.q, node.exhausted) == (1, node.outcome, True) and not node.children
        ends = sum(node.finished for node in tree.nodes())
        assert tree.root.visits == 1 + tree.simulations + ends and tree.root.value == 0.0


@given(models, settings)
def test_a_simulation_visits_one_node_and_all_ends_among_the_steps_sampled_there(
    model: Seeded, settings: Settings
) -> None:
    before: set[tuple[int, ...]] = set()
    last = 0
    for simulations in range(settings.simulations + 1):
        (tree,) = questions([0])
        grow([tree], model, replace(settings, simulations=simulations))
        visited = {node.path(): node for node in tree.nodes() if node.visits}
        if simulations and tree.simulations == last:  # it was exhausted before
            assert tree.stopped == "exhausted" and visited.keys() == before
            break
        new = [visited[path] for path in visited.keys() - before]
        (node,) = [node for node in new if not node.finished]
        assert {*new} == {node, *(child for child in node.children if child.finished)}
        before, last = {*visited}, tree.simulations
        assert last == simulations


@given(models, settings)
def test_the_budget_is_spent_or_the_tree_exhausted(model: Seeded, settings: Settings) -> None:
    trees = questions(range(3))
    grow(trees, model, settings)
    for tree in trees:
        if tree.stopped == "budget":
            assert tree.simulations == settings.simulations
        else:
            assert tree.stopped == "exhausted" and tree.simulations <= settings.simulations
            assert all(node.visits and (node.finished or node.children) for node in tree.nodes())
        for node in tree.nodes():
            below = bool(node.children) and all(child.exhausted for child in node.children)
            assert node.exhausted == (bool(node.visits) and (node.finished or below))


@given(models, settings)
def test_a_tree_does_not_depend_on_the_trees_beside_it(model: Seeded, settings: Settings) -> None:
    together = questions(["a", "b", "c"])
    grow(together, model, settings)
    alone = questions(["c", "a", "b"])
    for tree in alone:
        grow([tree], model, settings)
    assert [statistics(tree) for tree in together] == [statistics(alone[i]) for i in (1, 2, 0)]


def test_the_trees_of_a_wave_share_one_call() -> None:
    model = Scripted(STEPS, VALUES, OUTCOMES)
    grow(questions([""] * 20), model, Settings(4, children=3, exploration=1.0))
    assert model.expanded == [[(state, 3)] * 20 for state in ("", "A", "A2", "B", "A3")]
    assert model.evaluated == [[state] * 20 for state in ("A", "A2", "B", "A3")]
    assert model.checked == [["A1"] * 20, ["A21"] * 20, ["B1", "B2"] * 20, ["A31"] * 20]


def test_leaves_and_ends_without_a_known_outcome_are_one_call_each() -> None:
    model = Seeded(labeled=False)
    grow(questions(range(20)), model, Settings(10))
    assert model.calls == ["expand", "outcomes", "evaluate"] + ["evaluate", "expand", "outcomes", "evaluate"] * 10


def test_no_trees_need_no_model() -> None:
    model = Seeded()
    grow([], model, Settings(10))
    assert model.calls == []


@pytest.mark.parametrize(("limit", "simulations"), [(1, 0), (3, 0), (4, 1), (6, 1), (7, 2), (9, 2), (10, 3), (12, 3)])
def test_no_simulation_begins_once_the_limit_of_tokens_is_reached(limit: int, simulations: int) -> None:
    tree, _ = search(100, tokens=limit)
    # three tokens for the steps of the question, and three in each simulation
    assert (tree.stopped, tree.simulations, tree.tokens) == ("tokens", simulations, 3 + 3 * simulations)
    assert sums(tree) == AFTER[simulations]


def test_one_tree_may_reach_its_limit_before_another() -> None:
    class Lengthy(Endless):
        def expand(self, asks: Asks) -> list[list[Step[str]]]:
            return [[step("a", tokens=len(node.step.state)), step("b", tokens=0)] for node, _ in asks]

    trees = questions(["1", "22", "333"])
    # as many as the question has characters, then 1 in each simulation, after the step a
    grow(trees, Lengthy({}, {"a": 0.0, "b": 0.0}), Settings(4, children=2, exploration=0.0, tokens=4))
    assert [(tree.stopped, tree.simulations, tree.tokens) for tree in trees] == [
        ("tokens", 3, 4),
        ("tokens", 2, 4),
        ("tokens", 1, 4),
    ]


@pytest.mark.parametrize(("limit", "simulations"), [(2.0, 0), (5.0, 2), (6.0, 2), (6.5, 3)])
def test_no_simulation_begins_once_the_limit_of_seconds_is_reached(limit: float, simulations: int) -> None:
    now = [0.0]

    class Slow(Seeded):
        def expand(self, asks: Asks) -> list[list[Step[str]]]:
            now[0] += 2.0
            return super().expand(asks)

    trees = questions(range(2))
    # two seconds for the steps of the questions, and two for each wave of simulations
    grow(trees, Slow(ending=0.0), Settings(100, seconds=limit), clock=lambda: now[0])
    assert [(tree.stopped, tree.simulations) for tree in trees] == [("seconds", simulations)] * 2


def test_a_tree_cannot_grow_twice() -> None:
    trees = questions([0])
    grow(trees, Seeded(), Settings(1))
    with pytest.raises(AssertionError, match="the tree of 0 has grown already"):
        grow(trees, Seeded(), Settings(2))


# --- the solution of a tree ---------------------------------------------------------------------------------------


def visit(node: Node[str], visits: int, total: float) -> Node[str]:
    node.visits, node.total = visits, total
    return node


@pytest.fixture
def grown() -> Tree[str]:
    """The child a has the higher Q, b more visits; c has the highest Q and no answer; d is an unvisited answer."""
    tree = Tree.start(0, "")
    a, b, c, _ = tree.root.add([step("a"), step("b"), step("c"), step("d", finish="answer")])
    visit(a, 2, 1.0)  # 0.5
    visit(b, 4, 1.0)  # 0.25
    visit(c, 2, 2.0)  # 1.0
    for node, text in (a, "a1"), (b, "b1"):
        visit(node.add([step(text, finish="answer")])[0], 1, 0.5)
    visit(c.add([step("c1", finish="unparsable")])[0], 1, 1.0)
    return tree


def test_a_solution_by_value_or_by_visits(grown: Tree[str]) -> None:
    assert best(grown).step.text == "a1"
    assert best(grown, by="visits").step.text == "b1"


def test_the_first_of_equals_is_chosen(grown: Tree[str]) -> None:
    a, b, *_ = grown.root.children
    visit(a, 4, 1.0)
    assert best(grown).step.text == best(grown, by="visits").step.text == "a1"
    visit(b, 5, 1.25)
    assert best(grown).step.text == "a1" and best(grown, by="visits").step.text == "b1"


def test_a_tree_without_an_answer_gives_the_end_of_the_walk_marked() -> None:
    tree = Tree.start(0, "")
    assert best(tree) is tree.root and not best(tree).answered
    a, b = tree.root.add([step("a"), step("b")])
    visit(a, 1, 0.25)
    visit(b, 2, 1.0)
    visit(b.add([step("b1", finish="depth"), step("b2")])[0], 1, 0.5)
    found = best(tree)
    assert found.step.text == "b1" and found.finished and not found.answered


def test_a_tree_whose_limit_came_before_any_visit_gives_its_likeliest_step() -> None:
    tree = Tree.start(0, "")
    _, likely, _ = tree.root.add([step("a", prior=0.2), step("b", prior=0.7), step("c", prior=0.1)])
    assert best(tree) is likely


@given(seeds)
def test_a_tree_that_visited_an_answer_gives_an_answer(seed: int) -> None:
    trees = questions(range(4))
    grow(trees, Seeded(seed, labeled=False), Settings(15))
    for tree in trees:
        has_answer = any(node.visits and node.answered for node in tree.nodes())
        assert best(tree).answered == best(tree, "visits").answered == has_answer
        assert best(tree).visits


# --- cost ---------------------------------------------------------------------------------------------------------


class Instant:
    """Five steps after every node, which are made in no time."""

    steps = tuple(Step(None, text, 0.2, 1) for text in "abcde")

    def expand(self, asks: Sequence[tuple[Node[None], int]]) -> list[Sequence[Step[None]]]:
        return [self.steps] * len(asks)

    def evaluate(self, nodes: Sequence[Node[None]]) -> list[float]:
        return [0.25] * len(nodes)

    def outcomes(self, nodes: Sequence[Node[None]]) -> list[float | None]:
        return [None] * len(nodes)


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_simulation_takes_less_than_2_ms(count: int, record_property: Callable[[str, object], None]) -> None:
    trees = [Tree.start(question, None) for question in range(count)]
    start = time.perf_counter()
    grow(trees, Instant(), Settings(40))
    seconds = (time.perf_counter() - start) / (40 * count)
    record_property("microseconds a simulation", f"{seconds * 1e6:.1f}")
    assert seconds < 2e-3


def test_memory_is_linear_in_nodes(record_property: Callable[[str, object], None]) -> None:
    costs = []
    for simulations in (40, 400):
        tracemalloc.start()
        trees = [Tree.start(question, None) for question in range(5)]
        grow(trees, Instant(), Settings(simulations))
        nodes = sum(1 for tree in trees for _ in tree.nodes())
        costs.append(tracemalloc.get_traced_memory()[0] / nodes)
        tracemalloc.stop()
        assert nodes == 5 * (1 + 5 * (1 + simulations))
    record_property("bytes a node", f"{costs[0]:.0f}")
    assert costs[1] < 1.1 * costs[0] and costs[0] < 400
