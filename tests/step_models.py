"""Models of reasoning steps for tests of search: one written out by hand, and one drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from burnish.search.tree import Finish, Node, Step, Tree

Asks = Sequence[tuple[Node[str], int]]


def step(text: str, prior: float = 0.5, finish: Finish = "", tokens: int = 1) -> Step[str]:
    return Step(text, text, prior, tokens, finish)


@dataclass
class Scripted:
    """Writes the listed steps after each text ("" is the question), and values texts as listed."""

    steps: Mapping[str, Sequence[Step[str]]]
    values: Mapping[str, float] = field(default_factory=dict)
    known: Mapping[str, float] = field(default_factory=dict)
    """The outcomes of finished steps."""
    expanded: list[list[tuple[str, int]]] = field(default_factory=list)
    evaluated: list[list[str]] = field(default_factory=list)
    checked: list[list[str]] = field(default_factory=list)

    def expand(self, asks: Asks) -> list[list[Step[str]]]:
        self.expanded.append([(node.step.state, count) for node, count in asks])
        return [list(self.steps[node.step.state][:count]) for node, count in asks]

    def evaluate(self, nodes: Sequence[Node[str]]) -> list[float]:
        self.evaluated.append([node.step.state for node in nodes])
        return [self.values[node.step.state] for node in nodes]

    def outcomes(self, nodes: Sequence[Node[str]]) -> list[float | None]:
        self.checked.append([node.step.state for node in nodes])
        return [self.known.get(node.step.state) for node in nodes]


@dataclass
class Seeded:
    """Random steps, values and outcomes, which depend on the question and the path alone.

    The state is the text so far, behind the question. Priors and values are multiples of 1/8, so that sums are exact.
    """

    seed: int = 0
    words: int = 3
    """The number of different texts after each node."""
    ending: float = 0.3
    """The share of steps that end a solution."""
    depth: int = 6
    labeled: bool = True
    """Outcomes are known."""
    calls: list[str] = field(default_factory=list)

    def random(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, *key)))

    def step(self, node: Node[str], draw: int) -> Step[str]:
        rng = self.random(node.step.state.partition("|")[0], node.path(), draw)
        text = rng.choice("abcdefgh"[: self.words])
        state = f"{node.step.state}|{text}"
        finish: Finish = ""
        if self.random(state).random() < self.ending:
            finish = self.random(state, "finish").choice(["answer", "answer", "unparsable"])
        elif node.depth + 1 == self.depth:
            finish = "depth"
        return Step(state, text, rng.randint(1, 8) / 8, rng.randint(1, 9), finish)

    def expand(self, asks: Asks) -> list[list[Step[str]]]:
        self.calls.append("expand")
        return [[self.step(node, draw) for draw in range(count)] for node, count in asks]

    def evaluate(self, nodes: Sequence[Node[str]]) -> list[float]:
        self.calls.append("evaluate")
        return [self.random(node.step.state, "value").randint(-8, 8) / 8 for node in nodes]

    def outcome(self, node: Node[str]) -> float:
        return 1.0 if node.answered and self.random(node.step.state, "right").random() < 0.5 else -1.0

    def outcomes(self, nodes: Sequence[Node[str]]) -> list[float | None]:
        self.calls.append("outcomes")
        return [self.outcome(node) if self.labeled else None for node in nodes]


def questions(names: Iterable[int | str]) -> list[Tree[str]]:
    """Trees whose state is their question."""
    return [Tree.start(name, str(name)) for name in names]


Statistics = tuple[tuple[int, ...], Step[str], int, float, float | None, float | None, bool]


def statistics(tree: Tree[str]) -> tuple[int, int, str, list[Statistics]]:
    """Everything in a tree, to compare it with another."""
    nodes = [(n.path(), n.step, n.visits, n.total, n.value, n.outcome, n.exhausted) for n in tree.nodes()]
    return tree.tokens, tree.simulations, tree.stopped, nodes
