"""Critiques and revises answers by principles: the supervised stage of "Constitutional AI" (Bai et al. 2022)."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish import progress
from burnish.data.formats import other_columns
from burnish.errors import UserError
from burnish.generate.protocol import Request, complete, derived_seed, request_seed
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.judges.constitution import Principle
from burnish.methods import ROW_METHODS
from burnish.methods.settings import PLACE, ReviseConfig
from burnish.models.limits import context_window
from burnish.protocols import Made, RowMethod, RowRun
from burnish.render.encode import outcome
from burnish.render.truncate import Truncation
from burnish.report.metrics import UNREVISED
from burnish.rl.collect import prompts_of_chunk
from burnish.rl.metrics import text_or_messages
from burnish.types import Conversation, Message, Messages, Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 4
"""Number of rows of a chunk whose revisions a person can read in the report."""
OUTCOMES = {"skipped": "skipped: cannot be encoded", "dropped": "dropped: too long"}
"""What the counts call prompts that are not answered."""


class Revise(RowMethod):
    """Writes ``revised.jsonl``, ``pairs.jsonl`` and ``revisions.jsonl``.

    A row is a prompt, which the model answers first, or a conversation that ends with an answer. The model critiques
    the answer under a principle and rewrites it, for several principles in turn. ``revised.jsonl`` has the prompts with
    their last answers, for ``sft``. ``pairs.jsonl`` has the last answer as chosen and the first one as rejected, for a
    judge. ``revisions.jsonl`` has every principle, critique and revision, a line for each answer.

    An answer stays as it is if its critique or its revision is empty or cut off, or if the request has no room. A row
    is skipped if no complete answer is left.
    """

    spec = ROW_METHODS["revise"]

    def __init__(self, **settings: Any) -> None:
        self.settings = ReviseConfig(**settings)

    @cached_property
    def principles(self) -> tuple[Principle, ...]:
        """The principles, in the order of the constitution."""
        return self.settings.principles()

    def check(self, rows: list[Row], keys: Collection[str], reward_model: bool | None) -> None:
        """Check that every conversation ends with one answer, and that there are enough principles."""
        assert self.principles
        for row in rows:
            start = row.completion_start if isinstance(row, Conversation) else None
            if isinstance(row, Conversation) and start is not None and start != len(row.messages) - 1:
                many = len(row.messages) - start
                raise UserError(f"{row.source}: the completion has {many} messages: expected one, which is revised")

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Answer, critique and revise a chunk of rows. In each pass, the generator gets the requests of all rows."""
        s, writer, counts = self.settings, Writer(run), Counter[str]()
        every = [
            self._answers(row, record, index, run)
            for index, (row, record) in enumerate(zip(rows, records, strict=True), start=first)
            if isinstance(row, Prompt | Conversation)
        ]
        changed = writer.answer([group for group in every if isinstance(group[0].row, Prompt)])
        counts.update(OUTCOMES[what] for what in changed.values() if what in OUTCOMES)
        every = [group for group in every if changed.get(group[0].index) not in OUTCOMES]
        for_critiques = _limited(run.sampling, s.critique_tokens)
        for number in range(s.revisions):
            progress.report("revising answers", number, s.revisions)
            answers = [one for group in every for one in group if one.text]
            requests = [(one, self._critique(one, number)) for one in answers]
            critiques = writer.write(requests, for_critiques, 2 * number + 1, "critique")
            for one, critique in zip(answers, critiques, strict=True):
                one.critiqued(one.principles[number], critique)
            good = [(one, c.text) for one, c in zip(answers, critiques, strict=True) if not c.failure]
            requests = [(one, self._revision(one, number, critique)) for one, critique in good]
            revisions = writer.write(requests, run.sampling, 2 * number + 2, "revision")
            for (one, _), revision in zip(good, revisions, strict=True):
                one.revised(revision)
        progress.report("revising answers", s.revisions, s.revisions)
        run.generator.drop_cache()
        for group in every:
            shortened = ", for a shortened prompt" if group[0].index in changed else ""
            counts[_became(group) + shortened] += 1
        return _made(every, counts, run.tokenizer)

    def _answers(self, row: Prompt | Conversation, record: Mapping[str, Any], index: int, run: RowRun) -> list[Answer]:
        """The answers to revise of a row. Those of a prompt are still empty."""
        s, answers = self.settings, []
        for sample in range(run.sampling.samples):
            rng = random.Random(derived_seed(run.seed, index, sample, "principles"))
            principles = tuple(rng.sample(self.principles, s.revisions))
            if isinstance(row, Prompt):
                answers.append(Answer(row, row.messages, row.columns, index, sample, principles))
            else:
                columns = other_columns(record, Conversation)
                answers.append(Answer(row, row.messages[:-1], columns, index, sample, principles))
                answers[-1].begin(Written(row.messages[-1]["content"].strip(), ""))
        return answers

    def _critique(self, answer: Answer, number: int) -> Messages:
        """The request for a critique of an answer."""
        principle = answer.principles[number]
        request = self.settings.critique_request.replace(PLACE, principle.critique or "")
        return (*self._beginning(answer), _said("assistant", answer.text), _said("user", request))

    def _revision(self, answer: Answer, number: int, critique: str) -> Messages:
        """The request for a revision, after the critique."""
        principle = answer.principles[number]
        request = self.settings.revision_request.replace(PLACE, principle.revise or "")
        return (*self._critique(answer, number), _said("assistant", critique), _said("user", request))

    def _beginning(self, answer: Answer) -> Messages:
        """The prompt of an answer, with the examples after its system message."""
        examples = tuple(_said(message.role, message.content) for message in self.settings.examples)
        start = int(answer.prompt[0]["role"] == "system")
        return (*answer.prompt[:start], *examples, *answer.prompt[start:])


def _limited(sampling: Sampling, tokens: int | None) -> Sampling:
    """Sampling settings with another maximum number of tokens, unless it is None."""
    if tokens is None:
        return sampling
    others = sampling.model_dump(exclude={"max_new_tokens", "length_range"})
    return Sampling(max_new_tokens=tokens, **others)


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class Written(NamedTuple):
    """A sampled text, and why it is not used: ``Written("The", "critique_cut_off")``; ``Written("Blue.", "")`` is.

    ``failure`` is a key of ``UNREVISED``.
    """

    text: str
    failure: str


@dataclass
class Answer:
    """An answer that is being revised. ``steps`` has the principles, critiques and revisions so far.

    ``text`` is the last answer. It is empty until a prompt is answered, and ``complete`` says that it is not cut off.
    ``first`` is the first answer, and ``made`` the number of revisions.
    """

    row: Prompt | Conversation
    prompt: Messages
    columns: Mapping[str, Any]
    index: int
    sample: int
    principles: tuple[Principle, ...]
    text: str = ""
    complete: bool = True
    first: Written = field(default_factory=lambda: Written("", ""))
    made: int = 0
    steps: list[dict[str, str]] = field(default_factory=list)

    def begin(self, first: Written) -> None:
        """Set the first answer. One that was cut off can still be revised."""
        self.first, self.text, self.complete = first, first.text, not first.failure

    def critiqued(self, principle: Principle, critique: Written) -> None:
        """Add a critique."""
        failure = {"failure": critique.failure} if critique.failure else {}
        self.steps.append({"principle": principle.name, "critique": critique.text, **failure})

    def revised(self, revision: Written) -> None:
        """Add the revision after the last critique. A good one is the new answer."""
        self.steps[-1]["revision"] = revision.text
        if revision.failure:
            self.steps[-1]["failure"] = revision.failure
        else:
            self.text, self.complete = revision.text, True
            self.made += 1


class Writer:
    """Samples one message for each of many conversations."""

    def __init__(self, run: RowRun) -> None:
        self.run, self.loaded = run, run.load()
        self.stop_ids = frozenset(eos_ids(self.loaded.model, self.loaded.tokenizer))
        limits = [context_window(self.loaded.model), run.truncation.max_length]
        longest = min((limit for limit in limits if limit is not None), default=None)
        self.truncation = Truncation(max_length=longest, too_long="drop")

    def answer(self, groups: Sequence[list[Answer]]) -> dict[int, str]:
        """Sample the first answers of prompts, of each a group. Returns what became of the prompts that do not fit."""
        rows = [group[0].row for group in groups]
        prompts = [row for row in rows if isinstance(row, Prompt)]
        kept, changed = prompts_of_chunk(prompts, 0, self.loaded, self.run.truncation, self.run.sampling.longest)
        asked = [(one, tokens) for place, _, tokens in kept for one in groups[place]]
        for (one, _), written in zip(asked, self._sample(asked, self.run.sampling, 0, "answer"), strict=True):
            one.begin(written)
        reasons = dict(changed)
        return {
            group[0].index: outcome(reasons[group[0].row.source]) for group in groups if group[0].row.source in reasons
        }

    def write(
        self, asked: Sequence[tuple[Answer, Messages]], sampling: Sampling, number: int, what: str
    ) -> list[Written]:
        """Sample the next message of each conversation. ``number`` counts the messages of a row."""
        prompts = [Prompt(messages, {}, one.row.source, one.row.tools) for one, messages in asked]
        room = 1 if self.run.truncation.max_length is None else sampling.longest
        kept, _ = prompts_of_chunk(prompts, 0, self.loaded, self.truncation, room)
        written = self._sample([(asked[place][0], tokens) for place, _, tokens in kept], sampling, number, what)
        by_place = dict(zip((place for place, _, _ in kept), written, strict=True))
        return [by_place.get(place, Written("", "no_room")) for place in range(len(asked))]

    def _sample(
        self, asked: Sequence[tuple[Answer, tuple[int, ...]]], sampling: Sampling, number: int, what: str
    ) -> list[Written]:
        """Sample a completion of each prompt."""
        if not asked:
            return []
        requests = [
            Request(
                tokens,
                request_seed(self.run.seed, one.index, one.sample, number),
                sampling,
                self.stop_ids,
                keep_cache=what == "critique",  # the request for the revision begins with this text
            )
            for one, tokens in asked
        ]
        written = []
        for completion in complete(self.run.generator, requests):
            text = str(self.run.tokenizer.decode(completion.tokens, skip_special_tokens=True)).strip()
            cut = completion.finish_reason in ("length", "context")
            written.append(Written(text, f"{what}_cut_off" if cut else "" if text else f"{what}_empty"))
        return written


def _became(group: Sequence[Answer]) -> str:
    """What became of a row, for the counts."""
    if any(one.text and one.complete for one in group):
        return "made" if any(one.made for one in group) else "made, but not revised"
    if any(one.text for one in group):
        return "skipped: the first answer is cut off and was not revised"
    return "skipped: the first answer is empty"


def _made(every: Sequence[list[Answer]], counts: Mapping[str, int], tokenizer: PreTrainedTokenizerBase) -> Made:
    """The rows and measures of the answers of each row."""
    files: dict[str, list[dict[str, Any]]] = {name: [] for name in Revise.spec.outputs}
    measured: dict[str, list[float]] = defaultdict(list)
    shown: list[dict[str, Any]] = []
    for group in every:
        for one in group:
            tools = {"tools": list(one.row.tools)} if one.row.tools else {}
            prompt = {"prompt": text_or_messages(one.prompt), **tools}
            name = {"id": f"{one.index}-{one.sample}"}
            meta = {"meta": dict(one.columns)} if one.columns else {}
            texts = {"answer": one.first.text, "revisions": one.steps}
            files["revisions.jsonl"].append({**name, "source": one.row.source, **prompt, **texts})
            if one.text and one.complete:
                files["revised.jsonl"].append({**prompt, "completion": one.text, **name, **meta})
            if one.made and one.text != one.first.text and not one.first.failure:
                answers = {"chosen": one.text, "rejected": one.first.text}
                files["pairs.jsonl"].append({**prompt, **answers, **name, **meta})
        kept = [one for one in group if one.text and one.complete]
        if kept and len(shown) < SHOWN:
            shown.append(_sample_row(kept[0]))
        if kept:
            measured["length"].append(fmean(len(tokenizer.encode(one.text, add_special_tokens=False)) for one in kept))
            measured["changed"].append(fmean(one.text != one.first.text for one in kept))
            measured["revisions"].append(fmean(one.made for one in kept))
        tried = [step.get("failure") for one in group for step in one.steps]
        for failure in UNREVISED if tried else ():
            measured[f"unrevised_{failure}"].append(fmean(why == failure for why in tried))
    return Made(files, counts, measured, shown)


def _sample_row(one: Answer) -> dict[str, Any]:
    """A row of samples.jsonl: the first answer, and every critique and revision."""
    parts = [one.first.text]
    for step in one.steps:
        failure = step.get("failure")
        parts.append(f"[{step['principle']}] {step['critique']}")
        parts.append(f"[not revised: {UNREVISED[failure]}]" if failure else f"[revision] {step['revision']}")
    return {
        "kind": "train",
        "prompt": one.prompt[-1]["content"],
        "completion": "\n\n".join(parts),
        "score": None,
        "rewards": {},
        "finish_reason": "stop",
        "source": one.row.source,
    }
