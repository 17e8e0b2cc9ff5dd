"""Solves questions by Monte Carlo tree search, and writes their solutions as rows (Chen et al., "AlphaMath", 2024)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any

from burnish.errors import UserError
from burnish.generate.stopping import eos_ids
from burnish.methods import ROW_METHODS
from burnish.methods.settings import SearchConfig
from burnish.models.limits import context_window
from burnish.models.loaded import Loaded
from burnish.protocols import Made, RowMethod, RowRun
from burnish.render.encode import outcome
from burnish.render.solutions import check_delimiter
from burnish.report.metrics import SOLUTION_ENDS
from burnish.rl.collect import prompts_of_chunk
from burnish.rl.metrics import text_or_messages
from burnish.search import mcts
from burnish.search.answers import Answers
from burnish.search.solutions import Solution, balance, distinct, paths, prefer, usable
from burnish.search.steps import Partial, StepSampler, open_sandbox
from burnish.search.tree import Tree, to_json
from burnish.types import Prompt, Row

SHOWN = 2
"""Number of questions of a chunk whose first solution a person can read in the report."""

OUTCOMES = {"skipped": "skipped: cannot be encoded", "dropped": "dropped: too long"}
"""What the counts call questions that are not searched."""


class Search(RowMethod):
    """Writes ``steps.jsonl``, ``solutions.jsonl`` and ``trees.jsonl``.

    ``steps.jsonl`` has the correct and incorrect solutions that are kept of each question, with the Q of each step, to
    train a step-level value model. ``solutions.jsonl`` has the same as conversations with their outcome as score.
    ``trees.jsonl`` has every tree, one in a line.
    """

    spec = ROW_METHODS["search"]

    def __init__(self, **settings: Any) -> None:
        self.settings = SearchConfig(**settings)
        self.answers = Answers(self.settings.answer)

    def check(self, rows: list[Row], keys: Collection[str], reward_model: bool | None) -> None:
        """Check that every question has an answer, unless a function of the user checks the solutions."""
        if ":" in self.settings.answer.check:
            return
        column = self.settings.answer.column
        for row in rows:
            known = row.columns.get(column) if isinstance(row, Prompt) else None
            if isinstance(known, list | dict):
                raise UserError(
                    f"{row.source}: {column}: expected text or a number, got {known}: name a function of yours in "
                    "method.answer.check to compare it"
                )
            if known is None or not str(known).strip():
                raise UserError(
                    f"{row.source}: no {column}: search checks solutions against the known answers, which are in the "
                    "column answer, or in the one that method.answer.column names"
                )

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Search a chunk of questions. All of its trees advance together."""
        s, loaded = self.settings, run.load()
        self._check_model(loaded)
        prompts = [row for row in rows if isinstance(row, Prompt)]
        kept, changed = prompts_of_chunk(prompts, first, loaded, run.truncation, run.sampling.longest)
        columns = {index: row.columns for index, row, _ in kept}

        def outcome_of(state: Partial) -> float | None:
            answer = self.answers.find(state.text)
            verdict = None if answer is None else self.answers.check(answer, columns[state.question])
            return None if verdict is None else 1.0 if verdict else -1.0

        sampler = StepSampler(
            run.generator,
            run.tokenizer,
            frozenset(eos_ids(loaded.model, loaded.tokenizer)),
            s.step,
            run.sampling,
            run.seed,
            values=loaded.value_head is not None,
            context=context_window(loaded.model),
            answer=self.answers.find,
            outcome=outcome_of,
            printed=lambda question, line: self._is_answer(line, columns[question]),
            sandbox=open_sandbox(s.step.code),
        )
        grown: dict[int, list[Tree[Partial]]] = {one.index: [] for one in kept}
        settings = mcts.Settings(s.simulations, s.children, s.exploration, s.tokens)
        for number in range(s.trees):
            new = [
                Tree.start(index, Partial(index, number, tokens))
                for index, _, tokens in kept
                if self._wants_more(grown[index])
            ]
            mcts.grow(new, sampler, settings)
            for tree in new:
                grown[tree.root.step.state.question].append(tree)
        run.generator.drop_cache()
        counts = Counter(OUTCOMES[what] for what in (outcome(why) for _, why in changed) if what in OUTCOMES)
        return self._made([(row, grown[index]) for index, row, _ in kept], counts)

    def _is_answer(self, line: str, columns: Mapping[str, Any]) -> bool:
        """Whether a line that code printed has the known answer."""
        answer = self.answers.find(line)
        return answer is not None and self.answers.check(answer, columns) is True

    def _check_model(self, loaded: Loaded) -> None:
        """Check that the steps of the recipe are those of the value head.

        Raises:
            UserError: their delimiters differ, or the tokenizer does not give the delimiter back.
        """
        own, head = self.settings.step.delimiter, loaded.value_head
        if head is not None and head.delimiter != own:
            raise UserError(
                f"{loaded.reference}: its value head judges steps that end with {head.delimiter!r}, but the steps of "
                f"this search end with {own!r}: set step: {{delimiter: {json.dumps(head.delimiter)}}}"
            )
        check_delimiter(loaded.tokenizer, own)

    def _wants_more(self, trees: list[Tree[Partial]]) -> bool:
        """Whether another tree of a question is needed: there are not enough correct solutions yet."""
        found = distinct(paths(trees))
        return sum(solution.outcome > 0 for solution in found) < self.settings.correct

    def _made(self, grown: list[tuple[Prompt, list[Tree[Partial]]]], counts: Counter[str]) -> Made:
        """The rows and measures of trees."""
        files: dict[str, list[dict[str, Any]]] = {name: [] for name in self.spec.outputs}
        measured: dict[str, list[float]] = defaultdict(list)
        shown = []
        for row, trees in grown:
            found = distinct(paths(trees))
            kept = balance(prefer(usable(found)), self.settings.correct, self.settings.incorrect)
            question = text_or_messages(row.messages)
            for solution in kept:
                steps = solution.rows()
                text = self.settings.step.delimiter.join(f"{step['step']}{step.get('output', '')}" for step in steps)
                files["steps.jsonl"].append({"instruction": question, "output": steps})
                files["solutions.jsonl"].append({"prompt": question, "completion": text, "score": solution.outcome})
            files["trees.jsonl"] += [{"source": row.source, "prompt": question, **to_json(tree)} for tree in trees]
            if kept and len(shown) < SHOWN:
                shown.append(_sample(row, kept[0]))
            solved = any(solution.outcome > 0 for solution in found)
            counts["made" if kept else "failed: no solution"] += 1
            nodes = [node for tree in trees for node in tree.nodes()]
            measured["solved"].append(float(solved))
            measured["solutions"].append(float(len(kept)))
            measured["nodes"].append(float(len(nodes)))
            measured["depth"].append(float(max(node.depth for node in nodes)))
            measured["sampled_tokens"].append(float(sum(tree.tokens for tree in trees)))
            ends = [node for node in nodes if node.finished and node.visits]
            if errors := [
                (node.step.estimate - node.outcome) ** 2
                for node in ends
                if node.step.estimate is not None and node.outcome is not None
            ]:
                measured["value_error"].append(fmean(errors))
            for reason in SOLUTION_ENDS if ends else ():
                measured[f"ended_{reason}"].append(fmean(node.step.finish == reason for node in ends))
        return Made(files, counts, measured, shown)


def _sample(row: Prompt, solution: Solution) -> dict[str, Any]:
    """A row of samples.jsonl."""
    return {
        "kind": "train",
        "prompt": row.messages[-1]["content"],
        "completion": "\n".join(
            f"{step['step']}{step.get('output', '')}  (Q {step['Q']:.2f})" for step in solution.rows()
        ),
        "score": solution.outcome,
        "rewards": {},
        "finish_reason": "stop",
        "source": row.source,
    }
