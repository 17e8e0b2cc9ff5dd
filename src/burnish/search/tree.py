"""Trees of reasoning steps: what a model must offer to grow them, and trees as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

S = TypeVar("S")
"""The model side's state: such as token ids and the state of an environment. It is opaque here."""

Finish = Literal["", "answer", "unparsable", "depth", "tools", "context", "length"]
"""Why a solution ended: it gave an answer, or it failed. Empty while it goes on."""
Code = Literal["", "error", "ok", "answer"]
"""How a step's code went: it has none, it failed, it ran, it ran and printed the known answer."""
Stopped = Literal["", "exhausted", "budget", "tokens", "seconds"]
"""Why a search ended: no solution goes on, simulations or depth are spent, or a limit was reached."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """A sampled reasoning step: ``Step(state, "3 * 4 = 12", prior=0.8, tokens=9)``."""

    state: S
    """The state after the step."""
    text: str
    """What the model wrote in this step, stripped. Empty if it ended the solution at once."""
    prior: float
    """exp(mean log-probability of its tokens), in (0, 1]."""
    tokens: int
    """Number of tokens that were sampled."""
    finish: Finish = ""
    code: Code = ""
    estimate: float | None = None
    """The model's V of this state, if it was read when the step was sampled."""
    output: str = ""
    """What the step's code returned, as the model sees it behind the text."""


@dataclass(eq=False, slots=True)
class Node(Generic[S]):
    """The state that a step reaches, with its statistics: ``Node(step, parent, index=2, depth=1)``."""

    step: Step[S]
    parent: Node[S] | None = field(default=None, repr=False)
    index: int = 0
    """Its place among its parent's children."""
    depth: int = 0
    children: tuple[Node[S], ...] = field(default=(), repr=False)
    visits: int = 0
    """N: number of values backed up through this node, its own included."""
    total: float = 0.0
    """W: their sum."""
    value: float | None = None
    """Its own value in [-1, 1], once it is evaluated: its outcome if known, else the model's estimate."""
    outcome: float | None = None
    """1.0 (correct) or -1.0 at an evaluated end of a solution, if it is known."""
    exhausted: bool = False
    """Nothing below it is left to visit."""

    @property
    def q(self) -> float:
        """Q = W / N, the mean of the values backed up; 0 before the first visit."""
        return self.total / self.visits if self.visits else 0.0

    @property
    def finished(self) -> bool:
        """Whether the solution ends here."""
        return self.step.finish != ""

    @property
    def answered(self) -> bool:
        """Whether the solution ends here with an answer."""
        return self.step.finish == "answer"

    def lineage(self) -> list[Node[S]]:
        """The nodes from the root's child to this one. Their steps are the solution so far; the root has none."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path(self) -> tuple[int, ...]:
        """The child indices that lead here from the root, which itself has the path ``()``."""
        return tuple(node.index for node in self.lineage())

    def add(self, steps: Sequence[Step[S]]) -> list[Node[S]]:
        """Add children, and return them. Of steps with equal text and finish only the first is added."""
        first: dict[tuple[str, str], Step[S]] = {}
        for step in steps:
            first.setdefault((step.text, step.finish), step)
        nodes = [
            Node(step, self, index, self.depth + 1) for index, step in enumerate(first.values(), len(self.children))
        ]
        self.children += tuple(nodes)
        return nodes


@dataclass(eq=False, slots=True)
class Tree(Generic[S]):
    """A question and what was sampled for it: ``Tree.start("gsm8k.jsonl:7", state)``."""

    question: int | str
    root: Node[S]
    tokens: int = 0
    """Number of tokens sampled, those of merged duplicates included."""
    simulations: int = 0
    stopped: Stopped = ""

    @classmethod
    def start(cls, question: int | str, state: S) -> Tree[S]:
        """A tree that holds only its root, the state of the bare question."""
        return cls(question, Node(Step(state, "", prior=1.0, tokens=0)))

    def nodes(self) -> Iterator[Node[S]]:
        """All nodes, depth first: a node before its children, these in order."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


class StepModel(Protocol[S]):
    """Samples and judges steps. Each method serves all trees at once.

    A result must depend only on its node, for example with draws seeded by the question and ``node.path()``. Then a
    tree does not depend on the trees that grow beside it.
    """

    def expand(self, asks: Sequence[tuple[Node[S], int]], /) -> Sequence[Sequence[Step[S]]]:
        """For each node, so many sampled next steps: in the order of draws, with duplicates."""
        ...

    def evaluate(self, nodes: Sequence[Node[S]], /) -> Sequence[float]:
        """For each node, the estimate V of its outcome, in [-1, 1]."""
        ...

    def outcomes(self, nodes: Sequence[Node[S]], /) -> Sequence[float | None]:
        """For each end of a solution 1.0 or -1.0, or None if it is unknown, as answers are at inference."""
        ...


def sample(model: StepModel[S], asks: Sequence[tuple[Tree[S], Node[S], int]]) -> Sequence[Sequence[Step[S]]]:
    """Sample steps for all asks (a tree, its node, a number of steps) in one call, and count their tokens.

    Raises:
        ValueError: the model returns another number of steps.
    """
    if not asks:
        return []
    drawn = model.expand([(node, count) for _, node, count in asks])
    for (tree, node, count), steps in zip(asks, drawn, strict=True):
        if len(steps) != count:
            raise ValueError(f"{tree.question}, node {node.path()}: got {len(steps)} steps, expected {count}")
        tree.tokens += sum(step.tokens for step in steps)
    return drawn


def evaluate(model: StepModel[S], nodes: Sequence[Node[S]]) -> None:
    """Set the value of each node: its outcome if it ends a solution and this is known, else the model's V.

    Raises:
        ValueError: a value is not in [-1, 1], or an outcome is not 1 or -1.
    """
    if ends := [node for node in nodes if node.finished]:
        for node, outcome in zip(ends, model.outcomes(ends), strict=True):
            if outcome not in (None, -1.0, 1.0):
                raise ValueError(f"node {node.path()}: got the outcome {outcome}, expected 1.0, -1.0 or None")
            node.value = node.outcome = outcome
    if unknown := [node for node in nodes if node.outcome is None]:
        for node, value in zip(unknown, model.evaluate(unknown), strict=True):
            if not -1 <= value <= 1:
                raise ValueError(
                    f"node {node.path()}: got the value {value}, expected a number in [-1, 1]: check the step-value "
                    "head and the weights of the model"
                )
            node.value = value


def stop(tree: Tree[S], *, exhausted: bool, spent: bool, tokens: int | None, late: bool) -> bool:
    """Whether a search of the tree ends here; ``stopped`` says why.

    Args:
        tree: a tree whose limits are checked before it grows further.
        exhausted: no solution goes on.
        spent: all simulations, or the whole depth, are spent.
        tokens: maximum number of sampled tokens. The wave of steps that reaches it is the last.
        late: the time is over.
    """
    if exhausted:
        tree.stopped = "exhausted"
    elif spent:
        tree.stopped = "budget"
    elif tokens is not None and tree.tokens >= tokens:
        tree.stopped = "tokens"
    elif late:
        tree.stopped = "seconds"
    return tree.stopped != ""


def to_json(tree: Tree[S]) -> dict[str, Any]:
    """A tree without its states, for one line of JSON.

    ``{"question": 7, "stopped": "budget", "simulations": 1, "tokens": 18, "nodes": [{"id": 0, "visits": 2, ...},
    {"id": 1, "parent": 0, "step": "3 * 4 = 12", "prior": 0.8, "visits": 1, "q": 0.5, "total": 0.5, ...}]}``

    Nodes are listed depth first. A key is left out where there is nothing to tell: no visits, no outcome, no code.
    ``q`` is ``total / visits``, for the reader. ``estimate`` is the model's V at an end whose ``value`` is its outcome.
    """
    numbers: dict[Node[S], int] = {}
    nodes: list[dict[str, Any]] = []
    for node in tree.nodes():
        numbers[node] = len(nodes)
        step = node.step
        line: dict[str, Any] = {"id": len(nodes)}
        if node.parent is not None:
            line |= {"parent": numbers[node.parent], "step": step.text, "prior": step.prior, "tokens": step.tokens}
        if node.visits:
            line |= {"visits": node.visits, "q": node.q, "total": node.total}
        optional = {"value": node.value, "finish": step.finish, "outcome": node.outcome, "code": step.code}
        if node.outcome is not None:
            optional["estimate"] = step.estimate
        optional["output"] = step.output
        line |= {key: entry for key, entry in optional.items() if entry not in (None, "")}
        if node.exhausted:
            line["exhausted"] = True
        nodes.append(line)
    return {
        "question": tree.question,
        "stopped": tree.stopped,
        "simulations": tree.simulations,
        "tokens": tree.tokens,
        "nodes": nodes,
    }


def from_json(data: Mapping[str, Any]) -> Tree[None]:
    """The tree that ``to_json`` wrote, with the same N, W and Q, and without states."""
    nodes: list[Node[None]] = []
    for line in data["nodes"]:
        step = Step(
            None,
            line.get("step", ""),
            line.get("prior", 1.0),
            line.get("tokens", 0),
            line.get("finish", ""),
            line.get("code", ""),
            line.get("estimate"),
            line.get("output", ""),
        )
        if "parent" in line:
            (node,) = nodes[line["parent"]].add([step])
        else:
            node = Node(step)
        node.visits, node.total = line.get("visits", 0), line.get("total", 0.0)
        node.value, node.outcome = line.get("value"), line.get("outcome")
        node.exhausted = line.get("exhausted", False)
        nodes.append(node)
    return Tree(data["question"], nodes[0], data["tokens"], data["simulations"], data["stopped"])
