"""Solves questions by search over reasoning steps, when their answers are not known.

Known answers are read only to check solutions that are final.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator

from burnish import progress
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Handle, Request
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.math.statistics import FEWEST_ROWS, bootstrap, wilson
from burnish.models.forward import backbone
from burnish.models.limits import check_room, context_window
from burnish.models.loaded import Loaded
from burnish.render.renderer import Renderer
from burnish.render.solutions import check_delimiter
from burnish.search import mcts
from burnish.search.answers import Answers
from burnish.search.beam import beam_search, best_of, chains
from burnish.search.settings import AnswerSettings, StepSettings
from burnish.search.steps import Partial, StepSampler, open_sandbox
from burnish.search.tree import Clock, Node, Step, Tree
from burnish.types import Config, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METHODS = ("greedy", "majority", "best-of-n", "sbs", "dvts", "mcts")
READ: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "majority": ("samples",),
    "best-of-n": ("samples",),
    "sbs": ("beams", "children"),
    "dvts": ("beams", "children"),
    "mcts": ("simulations", "children", "exploration", "by"),
}
"""The settings that each method reads. The numbers in its label are the first two of them."""


class Strategy(Config, use_attribute_docstrings=True):
    """How to solve questions: ``Strategy(method="sbs", beams=3, children=5)``. Settings of other methods are errors."""

    method: Literal["greedy", "majority", "best-of-n", "sbs", "dvts", "mcts"]
    """greedy: one solution at temperature 0; majority: the most frequent answer of independent samples; best-of-n: the
    sample with the highest value; sbs: step-level beam search; dvts: one such search for each beam, independent of the
    others; mcts: Monte Carlo tree search, then a walk to the best child at each node."""
    beams: Annotated[int, Field(ge=1)] = 3
    """sbs, dvts: number of solutions that are kept (B1)."""
    children: Annotated[int, Field(ge=1)] = 5
    """sbs, dvts, mcts: number of next steps that are sampled for each solution (B2)."""
    simulations: Annotated[int, Field(ge=1)] = 40
    """mcts: maximum number of simulations."""
    exploration: Annotated[float, Field(ge=0)] = 1.25
    """mcts: weight of rarely visited steps against those with a high Q."""
    by: Literal["value", "visits"] = "value"
    """mcts: whether the child with the highest Q or the one with the most visits is the best."""
    samples: Annotated[int, Field(ge=1)] = 5
    """majority, best-of-n: number of samples."""

    @model_validator(mode="after")
    def _reads_all(self) -> Self:
        for name in sorted(self.model_fields_set - {"method", *READ[self.method]}):
            users = [method for method in METHODS if name in READ[method]]
            raise ValueError(f"{name}: {self.method} does not read it: it applies to {', '.join(users)}")
        return self

    @property
    def label(self) -> str:
        """The method and its settings: ``sbs(3, 5)``."""
        settings = [f"{getattr(self, name)}" for name in READ[self.method][:2]]
        settings += [
            f"{name}={getattr(self, name)}"
            for name in READ[self.method][2:]
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        return f"{self.method}({', '.join(settings)})" if settings else self.method

    @property
    def draws(self) -> int:
        """The number of steps that are sampled for the bare question."""
        if self.method in ("sbs", "dvts"):
            return self.beams * self.children
        return {"mcts": self.children, "greedy": 1}.get(self.method, self.samples)

    @property
    def ranks(self) -> bool:
        """Whether the method compares values."""
        return self.method == "mcts" or (self.method not in ("greedy", "majority") and self.draws > 1)


class InferenceSettings(Config, use_attribute_docstrings=True):
    """What all methods share: ``InferenceSettings(sampling=Sampling(max_new_tokens=64), tokens=5000)``."""

    step: StepSettings = StepSettings()
    """What a step is. A delimiter that is not set is that of the model's value head."""
    answer: AnswerSettings = AnswerSettings()
    """How answers are found, compared in a vote, and checked."""
    sampling: Sampling = Sampling(max_new_tokens=256)
    """How steps are sampled. ``max_new_tokens`` is the limit of a step. greedy sets the temperature to 0."""
    seed: int = 0
    """Seed of all samples. Those of a question also depend on its own tokens, not on the other questions."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of sampled tokens of a question. The steps that reach it are the last."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Maximum time of a question. Questions that are searched together share it. The steps that reach it are the
    last."""
    together: Annotated[int, Field(ge=1)] = 64
    """Number of questions that are searched together."""
    slots: Annotated[int, Field(ge=1)] = 256
    """Maximum number of steps that are sampled together. More slots need more memory."""

    @model_validator(mode="after")
    def _samples_steps(self) -> Self:
        for name in ("samples", "stop", "length_range", "min_new_tokens"):
            if name in self.sampling.model_fields_set:
                raise ValueError(f"sampling.{name}: the search sets it: remove it")
        return self


@dataclass(frozen=True)
class Solved:
    r"""A solution: ``Solved("q.jsonl:7", "3*4=12\n12+2=14", "14", "answer", 0.9, True, 2, 31, 40.5, 2.5, 0.1, tree)``.

    Questions of a chunk are searched together, so each is charged an equal part of the passes, calls and seconds of its
    chunk. ``tokens`` are its own.
    """

    source: str
    text: str
    """What the model wrote, with the output of its code."""
    answer: str | None
    """None if the solution has no answer."""
    finish: str
    """Why the solution ended: answer, or a failure (unparsable, depth, tools, context, length). If it did not end, why
    the search did: tokens, seconds or budget (its simulations)."""
    value: float | None
    """The value head's estimate for the whole solution; None if it was not computed."""
    correct: bool | None
    """None if the row has no known answer, or if it cannot be compared."""
    steps: int
    """Number of reasoning steps of the solution."""
    tokens: int
    """Number of sampled tokens, also of steps that were not kept."""
    passes: float
    """Number of forward passes of the model, over prompts and to decode."""
    calls: float
    """Number of batches of requests to the generator."""
    seconds: float
    tree: Tree[Any]
    """Everything that was sampled."""
    known: bool = False
    """Whether the row has a known answer."""


def solve(
    rows: Sequence[Prompt],
    loaded: Loaded,
    strategy: Strategy,
    settings: InferenceSettings | None = None,
    clock: Clock = time.monotonic,
) -> list[Solved]:
    """Solve questions: one solution for each row, in the order of the rows.

    Args:
        rows: the questions. A known answer is in ``columns``; it is read only to check a final solution.
        loaded: the model. All methods but greedy and majority need a value head.
        strategy: how to solve them.
        settings: what all strategies share.
        clock: tells the time in seconds.

    Raises:
        UserError: the model has no value head, or one for another delimiter; temperature 0 with several samples; or a
            question is too long.
    """
    chunks = solve_chunks(rows, loaded, strategy, settings or InferenceSettings(), clock=clock)
    return [solved for chunk in chunks for solved in chunk]


def solve_chunks(
    rows: Sequence[Prompt],
    loaded: Loaded,
    strategy: Strategy,
    settings: InferenceSettings,
    start: int = 0,
    clock: Clock = time.monotonic,
) -> Iterator[list[Solved]]:
    """Solve the questions from ``start`` on, ``settings.together`` at a time. See ``solve``."""
    step = check(loaded, strategy, settings)
    answers = Answers(settings.answer)
    tokens = Renderer(loaded.tokenizer).prompts(list(rows))
    check_room(loaded.model, list(rows), tokens)
    generator = _CountingGenerator(loaded, strategy, settings)
    sampler = _Sampler(generator, loaded, strategy, settings, step, answers)
    sampler.label = f"{strategy.label}: questions"
    try:
        for first in range(start, len(rows), settings.together):
            part = slice(first, first + settings.together)
            trees = [
                Tree.start(row.source, Partial(_key(ids), 0, ids))
                for row, ids in zip(rows[part], tokens[part], strict=True)
            ]
            sampler.searched = trees, first, len(rows)
            before, began = (generator.passes, generator.calls), clock()
            longest = step.depth + 1  # the last one may be empty and only end the turn
            nodes = _search(trees, sampler, strategy, settings, longest, answers, clock)
            spent = (generator.passes - before[0], generator.calls - before[1], clock() - began)
            generator.drop_cache()
            costs = _Costs(*(number / len(trees) for number in spent))
            yield [
                _solved(row, len(ids), tree, node, answers, loaded.tokenizer, costs)
                for row, ids, tree, node in zip(rows[part], tokens[part], trees, nodes, strict=True)
            ]
            progress.report(sampler.label, min(first + settings.together, len(rows)), len(rows))
    finally:
        generator.close()


def check(loaded: Loaded, strategy: Strategy, settings: InferenceSettings) -> StepSettings:
    """Check that a model suits a strategy, and return what a step is.

    Raises:
        UserError: see ``solve``.
    """
    head, step = loaded.value_head, settings.step
    if loaded.is_reward_model:
        raise UserError(f"{loaded.reference}: a reward model cannot solve questions: name a language model")
    if strategy.ranks and head is None:
        raise UserError(
            f"{loaded.reference}: {strategy.label} compares values, and this model has no value head: train one with "
            "method: {name: step_value}, or use greedy or majority"
        )
    if strategy.method != "greedy" and strategy.draws > 1 and settings.sampling.temperature == 0:
        raise UserError(
            f"{strategy.label}: all {strategy.draws} samples are the same at temperature 0: set a higher temperature"
        )
    if head is not None and "delimiter" in step.model_fields_set and step.delimiter != head.delimiter:
        raise UserError(
            f"{loaded.reference}: its value head judges steps that end with {head.delimiter!r}, but the delimiter is "
            f"set to {step.delimiter!r}: leave it out"
        )
    if head is not None:
        step = step.model_copy(update={"delimiter": head.delimiter})
    check_delimiter(loaded.tokenizer, step.delimiter)
    return step


class _CountingGenerator(LocalGenerator):
    """A generator that counts the forward passes of its model, and its calls."""

    def __init__(self, loaded: Loaded, strategy: Strategy, settings: InferenceSettings) -> None:
        slots = min(settings.slots, settings.together * strategy.draws)
        super().__init__(loaded.model, loaded.tokenizer, loaded.value_head, slots, frozen=True)
        self.passes = self.calls = 0
        self._hook = backbone(loaded.model).register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def submit(self, requests: Sequence[Request], version: int) -> list[Handle]:
        """Queue a plan of requests."""
        self.calls += 1
        return super().submit(requests, version)

    def close(self) -> None:
        """Release all resources."""
        self._hook.remove()
        super().close()


class _Sampler(StepSampler):
    """A sampler without known answers, which reports progress before each call."""

    label = ""
    searched: tuple[list[Tree[Partial]], int, int]
    """The trees of the chunk, the number of questions before it, and the number of all questions."""

    def __init__(
        self,
        generator: _CountingGenerator,
        loaded: Loaded,
        strategy: Strategy,
        settings: InferenceSettings,
        step: StepSettings,
        answers: Answers,
    ) -> None:
        sampling, self.simulations = settings.sampling, strategy.simulations
        if strategy.method == "greedy":
            sampling = sampling.model_copy(update={"temperature": 0.0, "top_k": None, "top_p": None})
        super().__init__(
            generator,
            loaded.tokenizer,
            frozenset(eos_ids(loaded.model, loaded.tokenizer)),
            step,
            sampling,
            settings.seed,
            values=strategy.ranks,
            context=context_window(loaded.model),
            answer=answers.find,
            sandbox=open_sandbox(step.code),
        )

    def expand(self, asks: Sequence[tuple[Node[Partial], int]]) -> list[list[Step[Partial]]]:
        trees, before, total = self.searched
        done = before + int(sum(1 if tree.stopped else tree.simulations / self.simulations for tree in trees))
        progress.report(self.label, min(done, total - 1), total)
        return super().expand(asks)


def _key(tokens: tuple[int, ...]) -> int:
    """A number for a question, by which its samples are seeded."""
    return int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=8).digest(), "big")


def _search(
    trees: list[Tree[Partial]],
    sampler: StepSampler,
    strategy: Strategy,
    settings: InferenceSettings,
    depth: int,
    answers: Answers,
    clock: Clock,
) -> list[Node[Partial]]:
    """The end of the solution of each tree."""
    tokens, seconds = settings.tokens, settings.seconds
    if strategy.method == "mcts":
        budget = mcts.Settings(strategy.simulations, strategy.children, strategy.exploration, tokens, seconds)
        mcts.grow(trees, sampler, budget, clock)
        return [mcts.best(tree, strategy.by) for tree in trees]
    if strategy.method in ("sbs", "dvts"):
        return beam_search(
            trees,
            sampler,
            strategy.beams,
            strategy.children,
            depth,
            diverse=strategy.method == "dvts",
            tokens=tokens,
            seconds=seconds,
            clock=clock,
        )
    ends = chains(trees, sampler, strategy.draws, depth, tokens=tokens, seconds=seconds, clock=clock)
    if strategy.method == "best-of-n":
        return best_of(sampler, ends)
    return [vote(nodes, answers) for nodes in ends]


def vote(nodes: Sequence[Node[Partial]], answers: Answers) -> Node[Partial]:
    """The first solution with the most frequent answer. Of equally frequent answers, the one that came first wins.

    Solutions without an answer do not vote. If none has one, the first node is returned.
    """
    groups: list[tuple[str, list[Node[Partial]]]] = []
    for node in nodes:
        answer = answers.find(node.step.state.text) if node.answered else None
        if answer is None:
            continue
        for first, members in groups:
            if answers.same(answer, first):
                members.append(node)
                break
        else:
            groups.append((answer, [node]))
    return max((members for _, members in groups), key=len)[0] if groups else nodes[0]


class _Costs(NamedTuple):
    """What a question cost."""

    passes: float
    calls: float
    seconds: float


def _solved(
    row: Prompt,
    prompt: int,
    tree: Tree[Partial],
    node: Node[Partial],
    answers: Answers,
    tokenizer: PreTrainedTokenizerBase,
    costs: _Costs,
) -> Solved:
    """A final solution after a prompt of so many tokens, checked against the known answer if there is one."""
    state = node.step.state
    answer = answers.find(state.text) if node.answered else None
    column = row.columns.get(answers.settings.column)
    known = column is not None and str(column).strip() != ""
    return Solved(
        source=row.source,
        text=str(tokenizer.decode(list(state.tokens[prompt:]), skip_special_tokens=True)).strip(),
        answer=answer,
        finish=node.step.finish or tree.stopped,
        value=node.value if state.value is None else state.value,
        correct=None if not known else False if answer is None else answers.check(answer, row.columns),
        steps=sum(each.step.text != "" for each in node.lineage()),
        tokens=tree.tokens,
        **costs._asdict(),
        tree=tree,
        known=known,
    )


# --- comparison ---------------------------------------------------------------------------------------------------


def compare(solved: Mapping[str, Sequence[Solved]], resamples: int = 2000, seed: int = 0) -> dict[str, dict[str, Any]]:
    """What each method reached and cost, and its accuracy against that of the first method on the same rows.

    An accuracy is over the rows with a known answer, with its 95 % Wilson interval. A solution that cannot be compared
    with the known answer counts as incorrect there, and in ``undecided``. ``difference`` has a paired 95 % bootstrap
    interval; there is none for fewer than 8 rows.

    Returns:
        ``{"sbs(3, 5)": {"rows": 200, "known": 190, "undecided": 0, "accuracy": {"value": 0.9, "low": 0.87, "high":
        0.93}, "difference": {...}, "steps": 4.2, "passes": 12.5, "calls": 1.1, "tokens": 310.0, "seconds": 0.4,
        "finish": {"answer": 200}}}``. What follows ``difference`` are means over all rows, and counts of finish
        reasons. Without known answers there is no accuracy and no difference.
    """
    methods: dict[str, dict[str, Any]] = {}
    right = [[float(one.correct is True) for one in each if one.known] for each in solved.values()]
    differences = _differences(right, resamples, seed)
    for i, (label, each) in enumerate(solved.items()):
        known = len(right[i])
        line = methods[label] = {
            "rows": len(each),
            "known": known,
            "undecided": sum(one.known and one.correct is None for one in each),
        }
        if known:
            mean = sum(right[i]) / known
            low, high = wilson(mean, known)
            line["accuracy"] = {"value": mean, "low": max(0.0, low), "high": min(1.0, high)}
            if i > 0:
                line["difference"] = differences[i - 1]
        for name in ("steps", "passes", "calls", "tokens", "seconds"):
            line[name] = math.fsum(getattr(one, name) for one in each) / len(each)
        line["finish"] = dict(Counter(one.finish for one in each).most_common())
    return methods


def _differences(right: list[list[float]], resamples: int, seed: int) -> list[dict[str, float]]:
    """Each method's share of correct solutions minus that of the first one."""
    columns = torch.tensor(right, dtype=torch.float64).T
    if not len(columns):
        return []
    means = (columns.mean(0)[1:] - columns.mean(0)[0]).tolist()
    if len(columns) < FEWEST_ROWS or not means:
        return [{"value": mean} for mean in means]
    intervals = bootstrap(columns, lambda means: means[:, 1:] - means[:, :1], resamples, seed)
    return [{"value": mean, "low": low, "high": high} for mean, (low, high) in zip(means, intervals, strict=True)]
