"""Reasoning steps as tokens: samples the next steps of many solutions in one plan, runs their code, and reads values.

A solution is a growing list of token ids. What the model samples is kept as it is, and the output of its code is
appended to it, so no step is ever tokenized twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from burnish.generate.protocol import Completion, Generator, Request, complete, derived_seed
from burnish.generate.sampling import Sampling
from burnish.render.renderer import Renderer
from burnish.render.solutions import output_text
from burnish.rl.python import PythonConfig, shared_sandbox, shown
from burnish.rl.sandbox.types import Result
from burnish.search.settings import CodeSettings, StepSettings
from burnish.search.tree import Code, Finish, Node, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from burnish.rl.sandbox.client import Sandbox

FAILED = -1.0
"""The outcome of a solution that ended without an answer."""


@dataclass(frozen=True, eq=False)
class Partial:
    """A solution so far: ``Partial(17, 0, (1, 9, 8))``.

    ``question`` is the index of the question, and ``tree`` the number of its tree. ``tokens`` are the ids of the
    question and of all steps, and ``text`` is the text of the steps. ``rest`` is the beginning of the next step, if the
    last token has text after the delimiter. ``history`` are the snippets of code that have run, and ``errors`` is the
    number of steps with code that failed since the last one that did not. ``value`` is the value that was read when the
    last step was sampled, or None.
    """

    question: int
    tree: int
    tokens: tuple[int, ...]
    text: str = ""
    rest: str = ""
    history: tuple[str, ...] = ()
    errors: int = 0
    value: float | None = None


class StepSampler:
    """The model's side of a search: samples steps after partial solutions, and estimates the values of solutions.

    A step is the text up to the delimiter. A step with code ends where its code does, and the output of the code and
    the delimiter are appended. Empty steps, such as blank lines, belong to the step after them. A solution ends with a
    step that ends the model's turn, or that contains ``final``.

    Args:
        generator: a generator with nothing else in flight. With ``values``, it needs the step-value head.
        tokenizer: decodes steps.
        stop_ids: the ids that end the model's turn.
        settings: what a step is.
        sampling: temperature and so on. ``max_new_tokens`` is the maximum length of a step.
        seed: the seed of the run. The seed of each step also depends on its question, its path and its number.
        values: whether the generator returns values. Without them, all values are 0.
        context: the model's context window; None if it has no limit.
        answer: finds the answer in the text of a solution; None if there is none.
        outcome: in training, whether a finished solution is correct: 1, -1, or None if this cannot be told. Without
            it, answers are never checked.
        printed: in training, whether the last line that code printed is the known answer of this question.
        sandbox: runs the code of steps.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        settings: StepSettings,
        sampling: Sampling,
        seed: int,
        *,
        values: bool = True,
        context: int | None = None,
        answer: Callable[[str], str | None],
        outcome: Callable[[Partial], float | None] | None = None,
        printed: Callable[[int, str], bool] | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.generator, self.tokenizer, self.stop_ids, self.settings = generator, tokenizer, stop_ids, settings
        self.sampling, self.seed, self.values, self.context = sampling, seed, values, context
        self.answer, self.outcome, self.printed, self.sandbox = answer, outcome, printed, sandbox
        self.renderer = Renderer(tokenizer)

    def expand(self, asks: Sequence[tuple[Node[Partial], int]]) -> list[list[Step[Partial]]]:
        """Sample steps after partial solutions: for each node, that many."""
        drafts = [
            _Draft(node, node.step.state, self._seed(node, draw)) for node, count in asks for draw in range(count)
        ]
        waiting = drafts
        while waiting:
            completions = complete(self.generator, [self._request(draft) for draft in waiting])
            for draft, completion in zip(waiting, completions, strict=True):
                self._add(draft, completion)
                size = len(draft.parent.tokens) + len(draft.tokens)
                if not draft.reason and self.context is not None and size >= self.context:
                    draft.reason = "context"
            waiting = [draft for draft in waiting if not draft.reason]
        self._run_code([draft for draft in drafts if draft.code is not None])
        steps = iter([self._step(draft) for draft in drafts])
        return [[next(steps) for _ in range(count)] for _, count in asks]

    def evaluate(self, nodes: Sequence[Node[Partial]]) -> list[float]:
        """The estimates of the value head, in [-1, 1]; 0 without one."""
        if not self.values:
            return [0.0] * len(nodes)
        values = [node.step.state.value for node in nodes]
        if unknown := [k for k, value in enumerate(values) if value is None]:
            once = self.sampling.model_copy(update={"max_new_tokens": 1, "min_new_tokens": 0, "stop": []})
            requests = [
                Request(nodes[k].step.state.tokens, 0, once, self.stop_ids, return_values=True, keep_cache=True)
                for k in unknown
            ]
            for k, completion in zip(unknown, complete(self.generator, requests), strict=True):
                assert completion.values is not None
                values[k] = float(completion.values[0])
        return [value for value in values if value is not None]

    def outcomes(self, nodes: Sequence[Node[Partial]]) -> list[float | None]:
        """-1 for solutions that failed. Answers are checked only if the answers are known."""
        return [
            FAILED if not node.answered else None if self.outcome is None else self.outcome(node.step.state)
            for node in nodes
        ]

    # --- one step -------------------------------------------------------------------------------------------------

    def _seed(self, node: Node[Partial], draw: int) -> int:
        state = node.step.state
        return derived_seed(self.seed, state.question, state.tree, *node.path(), draw)

    def _request(self, draft: _Draft) -> Request:
        """The request for a step, or for the rest of one."""
        left = self.sampling.max_new_tokens - len(draft.tokens)
        least = max(0, self.sampling.min_new_tokens - len(draft.tokens))
        limits = {"stop": self.settings.stops, "max_new_tokens": left, "min_new_tokens": least}
        sampling = self.sampling.model_copy(update=limits)
        seed = derived_seed(draft.seed, draft.parts)
        return Request(
            (*draft.parent.tokens, *draft.tokens), seed, sampling, self.stop_ids, self.values, keep_cache=True
        )

    def _add(self, draft: _Draft, completion: Completion) -> None:
        """Add a completion to a step. Sets ``draft.reason`` if the step is complete."""
        draft.tokens += completion.tokens.tolist()
        draft.logprobs += completion.logprobs.tolist()
        draft.parts += 1
        written = draft.parent.rest + str(self.tokenizer.decode(draft.tokens, skip_special_tokens=True))
        draft.text, complete, draft.rest = self._text(written)
        ended = completion.finish_reason == "stop" and draft.tokens[-1] in self.stop_ids
        if ended and draft.rest.strip():
            draft.text += self.settings.delimiter + draft.rest.strip()
        if completion.finish_reason != "stop":
            draft.reason = "context" if completion.finish_reason == "context" else "length"
        elif ended:
            draft.reason = "turn"
        elif complete or self._code(draft.text) is not None:
            draft.reason, draft.code = "step", self._code(draft.text)
        elif len(draft.tokens) >= self.sampling.max_new_tokens:
            draft.reason = "length"
        if completion.values is not None and draft.reason in ("turn", "step"):
            # The head is trained at the ends of steps. What ends the model's turn comes after the last of them.
            draft.value = float(completion.values[-1]) if ended else completion.final_value

    def _text(self, written: str) -> tuple[str, bool, str]:
        """The text of a step, stripped, whether the delimiter follows it, and what follows that.

        Empty steps before the text are left out.
        """
        while True:
            text, delimiter, rest = written.partition(self.settings.delimiter)
            if text.strip() or not delimiter:
                return text.strip(), bool(delimiter), rest
            written = rest

    def _code(self, text: str) -> str | None:
        """The last code of a step, if it is complete."""
        code = self.settings.code
        if code is None or code.start not in text:
            return None
        inside, end, _ = text.rpartition(code.start)[2].partition(code.end)
        return inside if end else None

    def _run_code(self, drafts: Sequence[_Draft]) -> None:
        """Run the code of steps, and append its output. Equal code after equal code runs once."""
        code = self.settings.code
        if code is None or not drafts:
            return
        assert self.sandbox is not None
        runs = list(dict.fromkeys((draft.code or "", draft.parent.history) for draft in drafts))
        with ThreadPoolExecutor() as threads:
            try:
                results = dict(zip(runs, threads.map(self.sandbox.run, *zip(*runs, strict=True)), strict=True))
            except KeyboardInterrupt:
                self.sandbox.close()  # or else the threads would wait for the code that is running
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        outputs = []
        for draft in drafts:
            draft.result = results[draft.code or "", draft.parent.history]
            text = shown(draft.result)
            draft.printed = text.rpartition("\n")[2]
            draft.output = code.output.replace("{}", _cut(text, code.characters))
            outputs.append(output_text(draft.output, self.settings.delimiter))
        for draft, ids in zip(drafts, self.renderer.encode_text(outputs), strict=True):
            draft.appended = ids
            draft.value = None  # the one at the end of the code

    def _step(self, draft: _Draft) -> Step[Partial]:
        """The step of a complete draft."""
        parent, result = draft.parent, draft.result
        text = draft.text + draft.output
        state = Partial(
            parent.question,
            parent.tree,
            (*parent.tokens, *draft.tokens, *draft.appended),
            self.settings.delimiter.join(part for part in (parent.text, text) if part),
            draft.rest,
            parent.history if result is None else result.history,
            parent.errors if result is None else 0 if result.reason == "ok" else parent.errors + 1,
            draft.value,
        )
        return Step(
            state,
            draft.text,
            prior=math.exp(np.mean(draft.logprobs)),
            tokens=len(draft.tokens),
            finish=self._finish(draft, state),
            code=self._outcome_of_code(draft),
            output=draft.output,
            estimate=draft.value,
        )

    def _outcome_of_code(self, draft: _Draft) -> Code:
        if draft.result is None:
            return ""
        if draft.result.reason != "ok":
            return "error"
        known = self.printed is not None and self.printed(draft.parent.question, draft.printed)
        return "answer" if known else "ok"

    def _finish(self, draft: _Draft, state: Partial) -> Finish:
        """Why a solution ends with this step; an empty string if it does not."""
        settings = self.settings
        if draft.reason == "length" or draft.reason == "context":
            return draft.reason
        full = self.context is not None and len(state.tokens) >= self.context - 1
        if full and draft.appended:  # not even the value could be read
            return "context"
        # An empty last step only ends the turn, so it does not count.
        deep = bool(draft.text) and draft.node.depth + 1 > settings.depth
        if not deep and (draft.reason == "turn" or (settings.final is not None and settings.final in draft.text)):
            return "unparsable" if self.answer(state.text) is None else "answer"
        if settings.code is not None and state.errors >= settings.code.errors:
            return "tools"
        if full:
            return "context"
        return "depth" if deep else ""


@dataclass
class _Draft:
    """A step that is being sampled."""

    node: Node[Partial]
    parent: Partial
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    rest: str = ""
    parts: int = 0
    reason: Literal["", "step", "turn", "length", "context"] = ""
    """Why the step is complete: step, turn, length or context."""
    value: float | None = None
    code: str | None = None
    result: Result | None = None
    printed: str = ""
    output: str = ""
    appended: list[int] = field(default_factory=list)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}... [cut after {characters:,} characters]"


def open_sandbox(code: CodeSettings | None) -> Sandbox | None:
    """The sandbox for the code of steps, which ends with this process; None for steps without code."""
    if code is None:
        return None
    preload = {} if code.preload is None else {"preload": code.preload}
    return shared_sandbox(PythonConfig(**preload, seconds=code.seconds, sandbox=code.sandbox))
