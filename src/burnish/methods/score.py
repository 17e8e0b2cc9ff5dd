"""Scores existing completions as ``sample`` scores new ones, such as the original data of ReST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.data.formats import other_columns
from burnish.errors import UserError
from burnish.methods import ROW_METHODS
from burnish.methods.settings import ScoreConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.render.renderer import Renderer
from burnish.rl.collect import scored
from burnish.rl.metrics import completed_row, sample_rows
from burnish.types import Columns, Conversation, Row, Sequence, Trajectory, Turn

SHOWN = 4
"""Number of rows of a chunk that a person can read in the report."""


class Score(RowMethod):
    """Writes ``scored.jsonl``, the same conversations with a score and every reward, as in the samples of ``sample``.

    If a conversation has no completion, its last message is the completion. The rewards get its tokens, by the model's
    tokenizer, and the row's other columns, which are written to ``meta``. The weights of the model are not loaded.
    """

    spec = ROW_METHODS["score"]

    def __init__(self, **settings: Any) -> None:
        self.settings = ScoreConfig(**settings)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Score a chunk of conversations."""
        conversations = [_with_completion(row) for row in rows if isinstance(row, Conversation)]
        sequences = Renderer(run.tokenizer).completions(conversations)
        given = [
            _trajectory(row, record, sequence)
            for row, record, sequence in zip(conversations, records, sequences, strict=True)
        ]
        trajectories = scored(given, run.rewards, seed=(run.seed, first))
        measured = {"score": [t.score for t in trajectories]}
        for name in trajectories[0].rewards:
            measured[f"reward_{name}"] = [t.rewards[name] for t in trajectories]
        files = {"scored.jsonl": [completed_row(trajectory) for trajectory in trajectories]}
        shown = sample_rows(trajectories[:SHOWN], "train", run.tokenizer)
        return Made(files, {"made": len(trajectories)}, measured, shown)


def _with_completion(row: Conversation) -> Conversation:
    """The row with one message as its completion."""
    start = len(row.messages) - 1 if row.completion_start is None else row.completion_start
    if start != len(row.messages) - 1:
        many = len(row.messages) - start
        raise UserError(f"{row.source}: the completion has {many} messages: expected one, whose text is scored")
    return replace(row, completion_start=start)


def _trajectory(row: Conversation, record: Mapping[str, Any], sequence: Sequence) -> Trajectory:
    """The completion of a row as if it had just been sampled."""
    reason = str(record.get("finish_reason") or "stop")
    columns = other_columns(record, Conversation)
    return Trajectory(
        row.messages[:-1],
        (Turn(row.messages[-1]["content"].strip(), reason),),
        (sequence.with_arrays(sampler_logprobs=np.zeros(len(sequence))),),
        reason,
        Columns(columns),
        row.source,
        tools=row.tools,
    )
