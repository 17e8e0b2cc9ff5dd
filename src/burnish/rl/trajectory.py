"""Builds trajectories turn by turn, and converts between their sampled tokens and padded tensors.

Sampled tokens are never decoded and tokenized again. A trajectory only grows, by tokens that the policy sampled or by
tokens of its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.generate.protocol import Completion
from burnish.types import Example, Prompt, Sequence, Trajectory, Turn

Ids = npt.ArrayLike


def begin(row: Prompt, tokens: Ids) -> Trajectory:
    """A trajectory with the tokens of its prompt and no turns yet."""
    start = _context(tokens, row.source)
    return Trajectory(row.messages, (), (start,), "", row.columns, row.source, tools=row.tools)


def with_turn(trajectory: Trajectory, completion: Completion, turn: Turn) -> Trajectory:
    """The trajectory with one more turn of the policy."""
    sequence = _grown(trajectory.sequences[-1], completion.tokens, True, completion.logprobs)
    return replace(
        trajectory,
        turns=(*trajectory.turns, turn),
        sequences=(*trajectory.sequences[:-1], sequence),
        finish_reason=completion.finish_reason,
    )


def with_context(trajectory: Trajectory, tokens: Ids) -> Trajectory:
    """The trajectory with more context: tokens of an environment, or of the template between two turns."""
    sequence = _grown(trajectory.sequences[-1], tokens, False, np.zeros(np.shape(tokens)))
    return replace(trajectory, sequences=(*trajectory.sequences[:-1], sequence))


def with_rewritten_history(trajectory: Trajectory, tokens: Ids) -> Trajectory:
    """The trajectory with a new sequence that starts with ``tokens``, the whole context so far.

    Needed for templates that rewrite earlier turns, for example by removing their reasoning.
    """
    return replace(trajectory, sequences=(*trajectory.sequences, _context(tokens, trajectory.source)))


def _context(tokens: Ids, source: str) -> Sequence:
    size = np.shape(tokens)
    return Sequence(tokens, np.zeros(size, bool), source, {"sampler_logprobs": np.zeros(size)})


def _grown(sequence: Sequence, tokens: Ids, sampled: bool, logprobs: npt.ArrayLike) -> Sequence:
    return Sequence(
        np.concatenate([sequence.tokens, np.asarray(tokens, np.int64)]),
        np.concatenate([sequence.loss_mask, np.full(np.shape(tokens), sampled)]),
        sequence.source,
        {"sampler_logprobs": np.concatenate([sequence.arrays["sampler_logprobs"], logprobs])},
    )


def with_scores(
    trajectory: Trajectory, score: float, rewards: Mapping[str, float], of_tokens: npt.ArrayLike | None
) -> Trajectory:
    """The trajectory with its scores. ``of_tokens`` is the part of the score on each sampled token, or None."""
    sequences = trajectory.sequences
    if of_tokens is not None:
        sequences = tuple(
            sequence.with_arrays(step_rewards=_scattered(sequence, numbers))
            for sequence, numbers in zip(sequences, _split(sequences, np.asarray(of_tokens)), strict=True)
        )
    return replace(trajectory, sequences=sequences, score=score, rewards=dict(rewards))


def to_plain(trajectory: Trajectory) -> dict[str, Any]:
    """A scored trajectory as dicts and lists, for a checkpoint, without the columns of its row."""
    return {
        "prompt": trajectory.prompt,
        "turns": [turn._asdict() | {"reward": float(turn.reward)} for turn in trajectory.turns],
        "sequences": Example(trajectory.sequences).to_plain()["sequences"],
        "finish_reason": trajectory.finish_reason,
        "score": trajectory.score,
        "rewards": dict(trajectory.rewards),
        "environment_reward": trajectory.environment_reward,
    }


def from_plain(plain: Mapping[str, Any], row: Prompt) -> Trajectory:
    """The inverse of ``to_plain``, with the columns of the row."""
    turns = tuple(Turn(**turn) for turn in plain["turns"])
    sequences = Example.from_plain({"sequences": plain["sequences"], "pairs": ()}).sequences
    others = {"columns": row.columns, "source": row.source, "tools": row.tools}
    return Trajectory(**(dict(plain) | others | {"turns": turns, "sequences": sequences}))


# --- sampled tokens as tensors ------------------------------------------------------------------------------------


def learned_arrays(examples: list[Example]) -> tuple[Tensor, dict[str, Tensor]]:
    """Collect the learned tokens of each example in one row: a mask (N, L), and per-token arrays (N, L) in float64.

    A row holds the learned tokens of all sequences of an example, in order. Other tokens, such as prompts and
    observations, are left out. L is the largest number of learned tokens in an example. After the last learned token of
    a row, the mask is False and the arrays are 0.
    """
    counts = [sum(int(s.loss_mask.sum()) for s in example.sequences) for example in examples]
    mask = np.arange(max(counts, default=0)) < np.array(counts)[:, None]
    names = examples[0].sequences[0].arrays if examples else ()
    arrays = {name: np.zeros(mask.shape) for name in names}
    for name, rows in arrays.items():
        rows[mask] = np.concatenate([s.arrays[name][s.loss_mask] for e in examples for s in e.sequences])
    return torch.from_numpy(mask), {name: torch.from_numpy(rows) for name, rows in arrays.items()}


def with_learned_arrays(examples: list[Example], **arrays: Tensor) -> list[Example]:
    """Replace the arrays of the examples by these arrays (N, L), which are laid out as in ``learned_arrays``.

    Tokens that are not learned get 0.
    """
    rows = {name: values.double().numpy() for name, values in arrays.items()}
    made = []
    for i, example in enumerate(examples):
        parts = {name: _split(example.sequences, values[i]) for name, values in rows.items()}
        made.append(
            replace(
                example,
                sequences=tuple(
                    replace(s, arrays={name: _scattered(s, part[k]) for name, part in parts.items()})
                    for k, s in enumerate(example.sequences)
                ),
            )
        )
    return made


def shares(examples: list[Example]) -> Tensor:
    """For each learned token (N, L), the share of the example's learned tokens that are in the same sequence."""
    learned = [np.array([int(s.loss_mask.sum()) for s in example.sequences]) for example in examples]
    values = np.zeros((len(examples), max((sizes.sum() for sizes in learned), default=0)))
    for row, sizes in zip(values, learned, strict=True):
        row[: sizes.sum()] = np.repeat(sizes / max(sizes.sum(), 1), sizes)
    return torch.from_numpy(values)


def _split(sequences: tuple[Sequence, ...], numbers: npt.NDArray) -> list[npt.NDArray]:
    """Split numbers of the learned tokens of all sequences into those of each sequence."""
    ends = list(accumulate(int(sequence.loss_mask.sum()) for sequence in sequences))
    return np.split(numbers[: ends[-1]], ends[:-1])


def _scattered(sequence: Sequence, numbers: npt.NDArray) -> npt.NDArray:
    """An array over all tokens, with the numbers at the learned tokens and 0 elsewhere."""
    array = np.zeros(len(sequence))
    array[sequence.loss_mask] = numbers
    return array
