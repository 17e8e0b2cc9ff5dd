"""Solutions of searched trees, as rows that train a policy and its step values (Chen et al., "AlphaMath", 2024).

``balance(prefer(usable(distinct(paths(trees)))))`` gives the rows of one question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from burnish.search.tree import Code, Node, S, Tree


@dataclass(frozen=True, slots=True)
class Solution:
    """A path from a question to an end: ``Solution((("3 * 4 = 12", 0.8), ("2 + 12 = 14", 1.0)), 1.0, ("ok",))``."""

    steps: tuple[tuple[str, float], ...]
    """The text and the label Q of each step. The last label is the outcome."""
    outcome: float
    """1.0 (correct) or -1.0."""
    codes: tuple[Code, ...] = ()
    """How the code of each step that has any went."""
    outputs: tuple[str, ...] = ()
    """The output of each step's code, empty for steps without code; () if no step has any."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the steps."""
        return tuple(text for text, _ in self.steps)

    def rows(self) -> list[dict[str, str | float]]:
        """The steps as in rows: ``[{"step": "<code>3*4</code>", "output": "<output>12</output>", "Q": 0.8}]``."""
        outputs = self.outputs or ("",) * len(self.steps)
        return [
            {"step": text, **({"output": output} if output else {}), "Q": q}
            for (text, q), output in zip(self.steps, outputs, strict=True)
        ]


def paths(trees: Iterable[Tree[S]]) -> list[Solution]:
    """All solutions with a known outcome that the trees of one question visited, failures included.

    The first of every tree comes before the second of any, so that a few of them come from many trees. An empty last
    step ends the step before it, which takes its label; a solution without any text is left out.
    """
    each = [[solution for node in tree.nodes() if (solution := _solution(node)) is not None] for tree in trees]
    return [solution for turn in zip_longest(*each) for solution in turn if solution is not None]


def _solution(node: Node[S]) -> Solution | None:
    if node.outcome is None or not node.visits:
        return None
    nodes = [each for each in node.lineage() if each.step.text]
    if not nodes:
        return None
    steps = [(each.step.text, each.q) for each in nodes]
    steps[-1] = steps[-1][0], node.outcome
    outputs = tuple(each.step.output for each in nodes)
    codes: tuple[Code, ...] = tuple(each.step.code for each in nodes if each.step.code)
    return Solution(tuple(steps), node.outcome, codes, outputs if any(outputs) else ())


def distinct(solutions: Iterable[Solution]) -> list[Solution]:
    """One of all solutions with the same texts: the first correct one, or else the first.

    Their outcomes differ if one ended the model's turn and the other was cut off.
    """
    chosen: dict[tuple[str, ...], Solution] = {}
    for solution in solutions:
        if chosen.setdefault(solution.texts, solution).outcome < solution.outcome:
            chosen[solution.texts] = solution
    return list(chosen.values())


def usable(solutions: Iterable[Solution]) -> list[Solution]:
    """The solutions but those with code that always failed."""
    return [solution for solution in solutions if set(solution.codes) != {"error"}]


def prefer(solutions: Iterable[Solution]) -> list[Solution]:
    """Solutions whose code printed the answer, then those whose code never failed, then the rest."""

    def rank(solution: Solution) -> int:
        if "answer" in solution.codes:
            return 0
        return 2 if "error" in solution.codes else 1

    return sorted(solutions, key=rank)


def balance(solutions: Sequence[Solution], correct: int = 4, incorrect: int = 4) -> list[Solution]:
    """The first correct solutions, then as many incorrect ones, up to the limits.

    If there are none of one kind, one of the other is kept. Without incorrect ones (``incorrect`` is 0), all correct
    ones up to the limit are kept.
    """
    right = [solution for solution in solutions if solution.outcome > 0][:correct]
    wrong = [solution for solution in solutions if solution.outcome < 0][:incorrect]
    count = max(1, min(len(right), len(wrong))) if incorrect else correct
    return right[:count] + wrong[:count]
