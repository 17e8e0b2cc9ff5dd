"""Step-level beam search (Chen et al., "AlphaMath", 2024), diverse verifier tree search, and independent solutions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from burnish.search.tree import Clock, Node, S, StepModel, Tree, evaluate, sample, stop


def beam_search(
    trees: Sequence[Tree[S]],
    model: StepModel[S],
    beams: int,
    children: int,
    depth: int,
    *,
    diverse: bool = False,
    tokens: int | None = None,
    seconds: float | None = None,
    clock: Clock = time.monotonic,
) -> list[Node[S]]:
    """Search for the best solution of each tree with B1 beams and B2 children: the best that was kept.

    B1 * B2 first steps are sampled, and the best B1 by value kept; from each of these B2 next steps are sampled, and so
    on. A solution that ends while it is kept leaves the search, which goes on with one beam less. Values are computed
    only where something is to be chosen: with B1 = B2 = 1 and temperature 0 this is greedy decoding at its cost.

    Args:
        trees: trees that hold only their root; they keep what was sampled.
        model: samples and judges steps.
        beams: B1.
        children: B2.
        depth: maximum number of steps of a solution. At most B1 * B2 * depth steps are sampled for a tree.
        diverse: B1 searches with one beam each, independent of each other (diverse verifier tree search).
        tokens: maximum number of sampled tokens of a tree. The step that reaches it is the last.
        seconds: maximum time for all trees together. The step that reaches it is the last.
        clock: tells the time in seconds.

    Returns:
        For each tree, of the kept solutions with an answer the one of the highest value, of equals the first that
        ended. If none has an answer, the best of the others, which goes on or failed: see ``finish`` of its step.
    """
    searches, width = (beams, 1) if diverse else (1, beams)
    return best_of(model, _search(trees, model, searches, width, children, depth, tokens, seconds, clock))


def chains(
    trees: Sequence[Tree[S]],
    model: StepModel[S],
    count: int,
    depth: int,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    clock: Clock = time.monotonic,
) -> list[list[Node[S]]]:
    """Sample ``count`` independent solutions for each tree: the ends of all, in the order of draws.

    Equal ones stay apart, for majority votes. ``best_of`` chooses among them by value (best-of-n). The other arguments
    are those of ``beam_search``.
    """
    return _search(trees, model, count, 1, 1, depth, tokens, seconds, clock)


def best_of(model: StepModel[S], choices: Sequence[Sequence[Node[S]]]) -> list[Node[S]]:
    """Of each list of nodes the one with the highest value, the first of equals; one with an answer if there is any."""
    lists = [[node for node in nodes if node.answered] or list(nodes) for nodes in choices]
    evaluate(model, [node for nodes in lists if len(nodes) > 1 for node in nodes if node.value is None])
    return [_ranked(nodes)[0] if len(nodes) > 1 else nodes[0] for nodes in lists]


@dataclass(eq=False, slots=True)
class _Search(Generic[S]):
    """One beam search. A tree may hold several, independent of each other."""

    tree: Tree[S]
    width: int
    """Number of solutions to keep besides those that are finished."""
    candidates: list[Node[S]]
    front: list[Node[S]] = field(default_factory=list)
    """Kept solutions that go on."""
    finished: list[Node[S]] = field(default_factory=list)

    @property
    def contested(self) -> bool:
        """Whether not all candidates can be kept."""
        return len(self.candidates) > self.width

    def keep(self) -> None:
        """Keep the best candidates, in the order of draws."""
        kept = self.candidates
        if self.contested:
            ranked = _ranked(kept)[: self.width]
            kept = [node for node in kept if node in ranked]
        self.front = [node for node in kept if not node.finished]
        self.finished += [node for node in kept if node.finished]
        self.width -= len(kept) - len(self.front)


def _search(
    trees: Sequence[Tree[S]],
    model: StepModel[S],
    searches: int,
    width: int,
    children: int,
    depth: int,
    tokens: int | None,
    seconds: float | None,
    clock: Clock,
) -> list[list[Node[S]]]:
    """For each tree, the solutions that so many searches of this width keep."""
    end = math.inf if seconds is None else clock() + seconds
    assert not any(tree.root.children for tree in trees), "a tree has grown already"
    size = width * children
    everything: list[list[_Search[S]]] = []
    asks = [(tree, tree.root, searches * size) for tree in trees]
    for (tree, root, _), steps in zip(asks, sample(model, asks), strict=True):
        # equal first steps of different searches stay apart
        shares = [steps[start : start + size] for start in range(0, len(steps), size)]
        everything.append([_Search(tree, width, root.add(share)) for share in shares])
    _keep(model, everything)
    growing = everything
    for level in range(1, depth + 1):
        late = clock() >= end
        growing = [group for group in growing if not _stop(group, level >= depth, tokens, late)]
        asks = [(search.tree, node, children) for group in growing for search in group for node in search.front]
        drawn = iter(sample(model, asks))
        for group in growing:
            for search in group:
                search.candidates = [child for node in search.front for child in node.add(next(drawn))]
        _keep(model, growing)
    return [[node for search in group for node in (*search.finished, *search.front)] for group in everything]


def _keep(model: StepModel[S], groups: Sequence[Sequence[_Search[S]]]) -> None:
    searches = [search for group in groups for search in group]
    evaluate(model, [node for search in searches if search.contested for node in search.candidates])
    for search in searches:
        search.keep()


def _stop(group: Sequence[_Search[S]], spent: bool, tokens: int | None, late: bool) -> bool:
    exhausted = not any(search.front for search in group)
    return stop(group[0].tree, exhausted=exhausted, spent=spent, tokens=tokens, late=late)


def _ranked(nodes: Iterable[Node[S]]) -> list[Node[S]]:
    """Nodes by value, highest first; of equals those with an answer first, then in the order of draws."""
    return sorted(nodes, key=lambda node: (-_value(node), not node.answered))


def _value(node: Node[S]) -> float:
    assert node.value is not None
    return node.value
