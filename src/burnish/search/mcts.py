"""Monte Carlo tree search over reasoning steps (Chen et al., "AlphaMath", 2024)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from burnish.search.tree import Clock, Node, S, StepModel, Tree, evaluate, sample, stop


@dataclass(frozen=True)
class Settings:
    """Settings of a search: ``Settings(simulations=40, tokens=10_000)``."""

    simulations: int = 40
    """Maximum number of simulations of a tree."""
    children: int = 5
    """Number of steps sampled at each node."""
    exploration: float = 1.25
    """c: how much priors weigh against Q."""
    tokens: int | None = None
    """Maximum number of sampled tokens of a tree. No simulation begins once it is reached."""
    seconds: float | None = None
    """Maximum time for all trees together. No simulation begins once it is reached."""


def grow(
    trees: Sequence[Tree[S]], model: StepModel[S], settings: Settings | None = None, clock: Clock = time.monotonic
) -> None:
    """Grow trees that hold only their root, by one simulation of each at a time.

    A simulation walks from the root to an unvisited node, takes its value v, and adds it to N += 1, W += v of this node
    and all its ancestors. Then it samples the node's children. Those that end a solution are visited at once in the
    same way, because their outcome costs nothing; the others wait. The walk goes to the child with the highest
    Q + c * prior * sqrt(N of the parent) / (1 + N), where Q is 0 before the first visit, and to the first of equals. It
    never goes where nothing is left to visit: a tree ends when its simulations or a limit are spent, or when all its
    solutions are finished.

    The bare question has N = 1, the value 0 and children from the start. So N = 1 + the sum of the children's N at
    every visited node, and Q is the mean of the values at and below it.

    Raises:
        ValueError: the model returns a wrong number of steps, or a value outside [-1, 1].
    """
    settings = settings or Settings()
    end = math.inf if settings.seconds is None else clock() + settings.seconds
    for tree in trees:
        assert not tree.root.visits, f"the tree of {tree.question} has grown already"
        tree.root.visits, tree.root.value = 1, 0.0
    paths = [(tree, [tree.root]) for tree in trees]
    while paths:
        _expand(paths, model, settings)
        late = clock() >= end
        paths = [(tree, select(tree, settings.exploration)) for tree, _ in paths if not _stop(tree, settings, late)]
        evaluate(model, [path[-1] for _, path in paths])
        for tree, path in paths:
            _back_up(path)
            tree.simulations += 1


def _expand(paths: Sequence[tuple[Tree[S], list[Node[S]]]], model: StepModel[S], settings: Settings) -> None:
    """Sample children of the last node of each path, and visit those that end a solution."""
    asks = [(tree, path[-1], settings.children) for tree, path in paths]
    ends: list[list[Node[S]]] = []
    for (_, path), steps in zip(paths, sample(model, asks), strict=True):
        ends += [[*path, child] for child in path[-1].add(steps) if child.finished]
    evaluate(model, [path[-1] for path in ends])
    for path in ends:
        _back_up(path)


def _stop(tree: Tree[S], settings: Settings, late: bool) -> bool:
    spent = tree.simulations >= settings.simulations
    return stop(tree, exhausted=tree.root.exhausted, spent=spent, tokens=settings.tokens, late=late)


def select(tree: Tree[S], exploration: float) -> list[Node[S]]:
    """The path from the root to the unvisited node that the next simulation visits."""
    node = tree.root
    path = [node]
    while node.visits:
        weight = exploration * math.sqrt(node.visits)
        best, highest = None, -math.inf
        for child in node.children:
            if child.exhausted:
                continue
            score = child.q + weight * child.step.prior / (1 + child.visits)
            if score > highest:
                best, highest = child, score
        assert best is not None, "a node with nothing left to visit must be exhausted"
        node = best
        path.append(node)
    return path


def _back_up(path: list[Node[S]]) -> None:
    """Add the value of the last node to all nodes of the path, and mark what is exhausted by it."""
    leaf = path[-1]
    assert leaf.value is not None
    for node in path:
        node.visits += 1
        node.total += leaf.value
    leaf.exhausted = leaf.finished
    for node in reversed(path[:-1]):
        if not all(child.exhausted for child in node.children):
            break
        node.exhausted = True


def best(tree: Tree[S], by: Literal["value", "visits"] = "value") -> Node[S]:
    """The end of the walk from the root to the child with the highest Q or the most visits; the first of equals.

    The walk takes only visited nodes, and of these only nodes that lead to an answer if the tree has one. So the result
    is ``answered``, or else the last node of the walk through solutions that go on or failed. If a limit ended the
    search before any step was visited, it is the step with the highest prior.
    """
    leads: set[Node[S]] = set()
    for node in tree.nodes():
        if node.visits and node.answered:
            leads.update([node, *node.lineage()])
    node = tree.root
    while choices := [child for child in node.children if (child in leads if leads else child.visits)]:
        node = max(choices, key=lambda child: child.q if by == "value" else child.visits)
    if node is tree.root and node.children:
        return max(node.children, key=lambda child: child.step.prior)
    return node
