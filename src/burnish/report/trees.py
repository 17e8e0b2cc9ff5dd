"""Searched trees in the report: some of them to look at, and how well V predicts outcomes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.errors import UserError
from burnish.math.statistics import wilson
from burnish.report.curves import Binned, calibration_panel
from burnish.report.metrics import SOLUTION_ENDS, counted

TREES_FILE = "data/trees.jsonl"
MOST_TREES = 2000
"""Trees of a stage that are read."""
MOST_NODES = 60
"""Nodes of a tree that are shown."""
BINS = 10
STOPPED = {
    "exhausted": "every solution was visited",
    "budget": "all simulations were used",
    "tokens": "the token limit was reached",
    "seconds": "the time limit was reached",
}
"""Why a search stopped."""

Tree = Mapping[str, Any]
"""A line of trees.jsonl."""
Line = Mapping[str, Any]
"""A node of such a line."""


@dataclass
class Shown:
    """A node of the page.

    ``Shown("3 * 4 = 12", "N 17 · Q 0.25", "p 0.98", "N 17 · Q 0.25 · p 0.98 · V 0.31", q=0.25)``
    """

    step: str
    """The text of the step; empty for the question, and for a step that only ends the solution."""
    brief: str
    prior: str
    facts: str
    q: float | None
    """Q; None before the first visit."""
    mark: str = ""
    """How the solution ended: correct, wrong, or a reason. Empty if it goes on or was not visited."""
    selected: bool = False
    children: list[Shown] = field(default_factory=list)
    left_out: int = 0
    """Children that are not shown."""
    output: str = ""
    """The output of the step's code."""

    @property
    def strength(self) -> int:
        """The strength of the color, in percent: |Q|."""
        return round(100 * min(1.0, abs(self.q or 0.0)))


@dataclass(frozen=True)
class Drawn:
    """A tree of the page."""

    title: str
    source: str
    question: str
    facts: list[str]
    root: Shown
    solution: list[str]
    """The steps of the solution that is selected first."""
    selected: Shown


def read(stage: Path) -> list[Tree]:
    """The first trees of a search stage; [] if it is not done.

    Raises:
        UserError: if a line is damaged. The message names it.
    """
    path = stage / TREES_FILE
    if not path.is_file():
        return []
    trees = []
    with path.open(encoding="utf-8") as file:
        for place, line in enumerate(itertools.islice(file, MOST_TREES), start=1):
            try:
                trees.append(json.loads(line))
            except ValueError:
                raise UserError(f"{path}:{place}: this line is damaged: expected a tree, got {line[:60]!r}") from None
    return trees


# --- trees to look at ---------------------------------------------------------------------------------------------


def chosen(trees: Sequence[Tree]) -> list[tuple[str, Tree]]:
    """A tree of a solved question and one of an unsolved one, each with its title.

    They are the first solved question with a tree that visited both a correct and a wrong solution, and the first
    question without a correct solution. Without such a question, the first solved one is taken.
    """
    questions: dict[Any, list[Tree]] = {}
    for tree in trees:
        questions.setdefault(tree["question"], []).append(tree)
    solved = [tree for tree in trees if 1.0 in _outcomes(tree)]
    solved = [tree for tree in solved if -1.0 in _outcomes(tree)] or solved
    unsolved = [group[0] for group in questions.values() if not any(1.0 in _outcomes(tree) for tree in group)]
    return [("Solved", tree) for tree in solved[:1]] + [("Not solved", tree) for tree in unsolved[:1]]


def _outcomes(tree: Tree) -> set[float]:
    return {node["outcome"] for node in tree["nodes"] if "outcome" in node}


def drawn(title: str, tree: Tree, values: bool) -> Drawn:
    """A tree for the page, with its most visited nodes. ``values``: whether the model has a value head.

    A correct solution is selected first, or else a wrong one.
    """
    nodes: Sequence[Line] = tree["nodes"]
    ends = sorted((node for node in nodes if "outcome" in node), key=lambda node: -node["outcome"])
    path = _lineage(nodes, ends[0] if ends else nodes[0])[:MOST_NODES]
    on_path = {node["id"] for node in path}
    # Of a node and its child, the node has more visits and the lower id. So no node comes without its parent.
    ranked = sorted(nodes, key=lambda node: (node["id"] not in on_path, -node.get("visits", 0), node["id"]))
    kept = sorted(ranked[:MOST_NODES], key=lambda node: node["id"])
    shown: dict[int, Shown] = {}
    for node in kept:
        shown[node["id"]] = _shown(node, values, selected=node is path[-1])
        if "parent" in node:
            shown[node["parent"]].children.append(shown[node["id"]])
    for node in nodes:
        if "parent" in node and node["id"] not in shown and node["parent"] in shown:
            shown[node["parent"]].left_out += 1
    facts = [
        counted(tree["simulations"], "simulation"),
        STOPPED.get(tree["stopped"], tree["stopped"]),
        counted(tree["tokens"], "sampled token"),
        counted(len(nodes), "node"),
    ]
    if len(nodes) > len(kept):
        facts[-1] += f", of which the {len(kept)} most visited are shown"
    solution = [text for node in path if (text := node.get("step", "") + node.get("output", ""))]
    root, selected = shown[nodes[0]["id"]], shown[path[-1]["id"]]
    prompt = tree.get("prompt", "")
    question = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return Drawn(title, tree.get("source", ""), question, facts, root, solution, selected)


def _lineage(nodes: Sequence[Line], node: Line) -> list[Line]:
    path = [node]
    while "parent" in path[-1]:
        path.append(nodes[path[-1]["parent"]])
    return path[::-1]


def _shown(node: Line, values: bool, selected: bool) -> Shown:
    visits, finish = node.get("visits", 0), node.get("finish", "")
    q = node["q"] if visits else None
    v = estimate(node) if values else None
    outcome = node.get("outcome")
    brief = f"N {visits} · Q {_number(q)}" if q is not None else "not visited"
    prior = f"p {_number(node['prior'])}" if "parent" in node else ""
    facts = [brief, *filter(None, [prior, f"V {_number(v)}" if v is not None else ""])]
    facts += [f"code: {node['code']}"] if "code" in node else []
    facts += [f"ended: {finish} ({SOLUTION_ENDS.get(finish, finish)})"] if finish else []
    verdict = "" if outcome is None else "correct" if outcome > 0 else "wrong"
    facts += [f"outcome: {verdict}"] if verdict else []
    mark = verdict if finish == "answer" else finish if visits else ""
    text, output = node.get("step", ""), node.get("output", "")
    return Shown(text, brief, prior, " · ".join(facts), q, mark, selected, output=output)


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


# --- calibration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """V of a state, and what it should predict: ``Prediction(0.6, 1.0, question=7)``."""

    v: float
    outcome: float
    """The outcome of a finished solution, or the mean outcome of those below a state."""
    question: int | str


def estimate(node: Line) -> float | None:
    """V of a node: the model's own estimate, also at an end whose value is its outcome; None if it is not known.

    The value of the root, the bare question, is 0 by definition.
    """
    if "parent" not in node:
        return None
    return node.get("estimate") if "outcome" in node else node.get("value")


def has_values(trees: Sequence[Tree]) -> bool:
    """Whether the model has a value head. Without one, every V is 0."""
    return any(estimate(node) for tree in trees for node in tree["nodes"])


def predictions(trees: Sequence[Tree]) -> tuple[list[Prediction], list[Prediction]]:
    """V at the ends of solutions with their outcomes, and V of earlier states with the mean outcome below them.

    The mean is over the finished solutions below the state that the search visited, each counted once. A state without
    any is left out.
    """
    ends: list[Prediction] = []
    earlier: list[Prediction] = []
    for tree in trees:
        nodes: Sequence[Line] = tree["nodes"]
        below = [[0.0, 0] for _ in nodes]
        for node in reversed(nodes):  # children before their parents
            total, count = below[node["id"]]
            v = estimate(node)
            if "outcome" in node:
                total, count = node["outcome"], 1
            if v is not None and count:
                (ends if "outcome" in node else earlier).append(Prediction(v, total / count, tree["question"]))
            if "parent" in node:
                parent = below[node["parent"]]
                parent[0] += total
                parent[1] += count
    return ends, earlier


def error(found: Sequence[Prediction]) -> float:
    """The mean of (V - outcome)². For V = 2 p - 1 it is four times the Brier score of p."""
    return math.fsum((one.v - one.outcome) ** 2 for one in found) / len(found)


def spread(found: Sequence[Prediction]) -> float:
    """The error of the best constant: the variance of the outcomes."""
    mean = math.fsum(one.outcome for one in found) / len(found)
    return math.fsum((one.outcome - mean) ** 2 for one in found) / len(found)


def bins(found: Sequence[Prediction]) -> list[Binned]:
    """The predictions in bins of V of equal width over [-1, 1], without empty ones.

    The 95 % interval is that of Wilson, with as many trials as the bin has questions. States of one question depend on
    each other, so counting each of them would give too narrow intervals.
    """
    groups: dict[int, list[Prediction]] = {}
    for one in found:
        groups.setdefault(min(BINS - 1, int((one.v + 1) / 2 * BINS)), []).append(one)
    binned = []
    for place, group in sorted(groups.items()):
        v = math.fsum(one.v for one in group) / len(group)
        outcome = math.fsum(one.outcome for one in group) / len(group)
        low, high = wilson((1 + outcome) / 2, len({one.question for one in group}))
        binned.append(Binned((2 * place + 1) / BINS - 1, v, outcome, (2 * low - 1, 2 * high - 1), len(group)))
    return binned


def calibration(salt: str, trees: Sequence[Tree]) -> dict[str, Any] | None:
    """A panel with the mean outcome by V; None if the model has no value head, or no outcome is known."""
    if not has_values(trees):
        return None
    ends, earlier = predictions(trees)
    series = {
        f"{name}: error {error(found):.2f} (constant: {spread(found):.2f})": bins(found)
        for name, found in (("Ends of solutions", ends), ("Earlier states", earlier))
        if found
    }
    return calibration_panel(salt, series) if series else None


def searched(name: str, stage: Path) -> dict[str, Any]:
    """What the page shows of a search stage: ``trees`` and ``calibration``."""
    trees = read(stage)
    values = has_values(trees)
    return {
        "trees": [drawn(title, tree, values) for title, tree in chosen(trees)],
        "calibration": calibration(f"{name}/calibration", trees),
        "trees_read": len(trees) if len(trees) == MOST_TREES else 0,
    }
