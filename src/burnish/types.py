"""The nouns of Burnish: rows, sequences, micro-batches, loss terms; ``protocols.py`` says who hands them to whom.

One alignment rule holds everywhere: entry ``t`` of a per-token array belongs to token ``t``. Dimensions have one
name each: B rows, T tokens, V vocabulary, N sequences, P pairs, G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import pydantic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T", bound=np.generic)


class Config(pydantic.BaseModel):
    """Base of every block of settings: unknown keys and wrong types are errors, values never change."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


# --- rows: what a line of a data file means -----------------------------------------------------------------------


class Message(TypedDict):
    """One turn: ``{"role": "user", "content": "What is 2 + 2?"}``. Roles are system, user, assistant and tool."""

    role: str
    content: str


Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Text:
    """Plain text: ``Text("Once upon a time", source="books.jsonl:17")``."""

    text: str
    source: str


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from.

    ``Conversation(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}), 1, "chat.jsonl:17")``

    ``completion_start`` is the index of the first message of the completion where the row came as a prompt and a
    completion, else None: then every assistant turn may be learned.
    """

    messages: Messages
    completion_start: int | None
    source: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the first preferred; chosen and rejected hold only what follows the prompt.

    ``Preference(({"role": "user", "content": "Hi"},), ({"role": "assistant", "content": "Hello!"},),
    ({"role": "assistant", "content": "Go away."},), margin=None, p_chosen=None, source="pairs.jsonl:17")``

    ``margin`` is how much better chosen is (at least 0); ``p_chosen`` in [0, 1] is the share of judges that chose it.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: float | None
    p_chosen: float | None
    source: str


@dataclass(frozen=True)
class Ranking:
    """K answers to one prompt with a score each, higher is better; ranks in a file (1 is best) arrive negated.

    ``Ranking(({"role": "user", "content": "Hi"},), (({"role": "assistant", "content": "Hello!"},),
    ({"role": "assistant", "content": "Go away."},)), (1.0, -1.0), "ranked.jsonl:17")``
    """

    prompt: Messages
    completions: tuple[Messages, ...]
    scores: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered; further columns of the row reach the reward untouched.

    ``Prompt(({"role": "user", "content": "12 + 30 ="},), {"answer": "42"}, "prompts.jsonl:17")``
    """

    messages: Messages
    columns: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Labelled:
    """One answer to a prompt that somebody found good or bad (KTO).

    ``Labelled(({"role": "user", "content": "Hi"},), ({"role": "assistant", "content": "Hello!"},), True, "k.jsonl:9")``
    """

    prompt: Messages
    completion: Messages
    label: bool
    source: str


@dataclass(frozen=True)
class Scored:
    """A conversation with one number that says how good it was.

    ``Scored(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}), 1.0, "scored.jsonl:17")``
    """

    messages: Messages
    reward: float
    source: str


@dataclass(frozen=True)
class Steps:
    """A solution in steps with the value Q in [-1, 1] of each; the last one is the outcome, 1 (correct) or -1.

    ``Steps(({"role": "user", "content": "2 + 3 * 4 = ?"},), ("3 * 4 = 12", "2 + 12 = 14"), (0.8, 1.0), "s.jsonl:9")``
    """

    question: Messages
    steps: tuple[str, ...]
    values: tuple[float, ...]
    source: str

    @property
    def correct(self) -> bool:
        """Whether the outcome is 1."""
        return self.values[-1] > 0


Row = Text | Conversation | Preference | Ranking | Prompt | Labelled | Scored | Steps


# --- tokens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Sequence:
    """Token ids with a mask of those that are learned, as read-only numpy arrays of one length T.

    ``Sequence([1, 9, 8, 2], [False, False, True, True], "chat.jsonl:17", {"advantages": [0.0, 0.0, 0.5, -0.5]})``

    ``tokens`` are int64, ``loss_mask`` is bool, and every entry of ``arrays``, further per-token numbers of a method,
    is float64. The constructor also takes lists and tuples. The first token has no predecessor, so it is never
    learned. Two sequences are equal if all of their contents are.

    Raises:
        ValueError: arrays of different lengths, or a first token that is learned.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    source: str
    arrays: Mapping[str, npt.NDArray[np.float64]]

    def __init__(
        self,
        tokens: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        source: str,
        arrays: Mapping[str, npt.ArrayLike] | None = None,
    ) -> None:
        ids, mask = _read_only(tokens, np.int64), _read_only(loss_mask, np.bool_)
        numbers = {name: _read_only(values, np.float64) for name, values in (arrays or {}).items()}
        for name, values in (("loss_mask", mask), *numbers.items()):
            if len(values) != len(ids):
                raise ValueError(f"{source}: {name} must align with tokens: got {len(values)}, expected {len(ids)}")
        if mask.size and mask[0]:
            raise ValueError(f"{source}: the first token of a sequence has no predecessor and cannot be learned")
        for name, value in (("tokens", ids), ("loss_mask", mask), ("source", source), ("arrays", numbers)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return (
            self.source == other.source
            and self.arrays.keys() == other.arrays.keys()
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.loss_mask, other.loss_mask)
            and all(np.array_equal(values, other.arrays[name]) for name, values in self.arrays.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def with_arrays(self, **arrays: npt.ArrayLike) -> Sequence:
        """The same sequence with further per-token arrays."""
        return Sequence(self.tokens, self.loss_mask, self.source, {**self.arrays, **arrays})


def _read_only(values: npt.ArrayLike, dtype: type[T]) -> npt.NDArray[T]:
    """A one-dimensional array that cannot be changed, without a copy if the values are an array of this dtype."""
    array = np.asarray(values, dtype)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


class Pair(NamedTuple):
    """Sequence ``better`` of an example was preferred to sequence ``worse``: ``Pair(0, 1, weight=1.0)``."""

    better: int
    worse: int
    weight: float = 1.0
    margin: float = 0.0
    p_better: float = 1.0


Unit = Literal["tokens", "sequences", "pairs", "chosen_tokens", "step_ends", "trajectories"]


@dataclass(frozen=True)
class Example:
    """What must stay together in one micro-batch: one sequence, or those that are compared.

    ``Example((chosen, rejected), (Pair(0, 1),))``
    """

    sequences: tuple[Sequence, ...]
    pairs: tuple[Pair, ...] = ()

    @property
    def source(self) -> str:
        """Where the row came from: file and line."""
        return self.sequences[0].source

    @cached_property
    def counts(self) -> dict[Unit, float]:
        """What the example weighs in each unit that a term of a loss may be divided by.

        ``{"tokens": 17.0, "sequences": 2.0, "pairs": 1.0, "chosen_tokens": 9.0, "step_ends": 0.0, ...}``

        tokens: learned ones. sequences: those with a learned token. pairs: their weights. chosen_tokens: learned tokens
        of the better sequence of each pair, times its weight. step_ends: ends of reasoning steps, where the array
        ``outcomes`` is not 0. trajectories: 1 if any token is learned.
        """
        learned = [float(sequence.loss_mask.sum()) for sequence in self.sequences]
        return {
            "tokens": sum(learned),
            "sequences": float(sum(n > 0 for n in learned)),
            "pairs": float(sum(pair.weight for pair in self.pairs)),
            "chosen_tokens": float(sum(pair.weight * learned[pair.better] for pair in self.pairs)),
            "step_ends": float(
                sum((s.arrays["outcomes"] != 0).sum() for s in self.sequences if "outcomes" in s.arrays)
            ),
            "trajectories": float(any(learned)),
        }

    def to_plain(self) -> dict[str, Any]:
        """The example as dicts and lists, for a checkpoint."""
        sequences = [
            {
                "tokens": s.tokens.tolist(),
                "loss_mask": s.loss_mask.tolist(),
                "source": s.source,
                "arrays": {name: values.tolist() for name, values in s.arrays.items()},
            }
            for s in self.sequences
        ]
        return {"sequences": sequences, "pairs": [tuple(pair) for pair in self.pairs]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Example:
        """The example that ``to_plain`` was called on."""
        sequences = tuple(Sequence(**sequence) for sequence in plain["sequences"])
        return cls(sequences, tuple(Pair(*pair) for pair in plain["pairs"]))


def total_counts(examples: Iterable[Example]) -> dict[Unit, float]:
    """What examples weigh together in each unit, rounded only once."""
    units: tuple[Unit, ...] = get_args(Unit)
    counts = [example.counts for example in examples]
    return {unit: math.fsum(each[unit] for each in counts) for unit in units}


class Changed(NamedTuple):
    """A row that was cut or dropped: ``Changed("chat.jsonl:17", "truncate_left: 1200 tokens, max_length 1024")``."""

    source: str
    reason: str


class Encoded(NamedTuple):
    """Examples made from rows, and what was cut or dropped on the way."""

    examples: list[Example]
    changed: list[Changed]


class Segments(NamedTuple):
    """Stretches of a packed row, in order: their lengths, and for each the earlier one that stands before it, or None.

    Two answers behind their prompt, then padding: ``Segments((7, 3, 5, 1), (None, 0, 0, None))``.
    """

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors that fit one forward pass. Several sequences may share a row (packing), or a row may be padded.

    tokens, segments, parents, positions, loss_mask, and every one of arrays: (B, T). ``segments`` is 0 on padding and
    else numbers the sequences of a row from 1; ``positions`` restart with each. Where sequences share a prompt, it is
    a segment of its own, and ``parents`` of their tokens is its number (else 0). ``starts`` and ``ends`` (N,) are the
    flat index (row * T + column) of each sequence's first and last token, behind a shared prompt: the position of the
    first one is how many tokens lie there. ``pairs`` (P, 2) indexes sequences; ``pair_weights``, ``margins`` and
    ``p_better`` are (P,). ``packed`` says that a row may hold several sequences. ``counts`` is what the examples weigh
    in each unit (``Example.counts``).
    """

    tokens: Tensor
    segments: Tensor
    parents: Tensor
    positions: Tensor
    loss_mask: Tensor
    starts: Tensor
    ends: Tensor
    arrays: Mapping[str, Tensor]
    pairs: Tensor
    pair_weights: Tensor
    margins: Tensor
    p_better: Tensor
    packed: bool
    runs: Segments | None
    sources: tuple[str, ...]
    counts: Mapping[Unit, float]

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if hasattr(value, "to")}
        return replace(self, arrays={name: value.to(device) for name, value in self.arrays.items()}, **moved)


# --- rollouts -----------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """One message that the policy wrote, and why its generation ended: ``Turn("42", "stop")``."""

    text: str
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One sample of the policy for a prompt: the turns that it took, their tokens, and how they were scored.

    ``Trajectory(prompt=({"role": "user", "content": "12 + 30 ="},), turns=(Turn("42", "stop"),),
    sequences=(Sequence([5, 6, 42, 2], [False, False, True, True], "prompts.jsonl:17",
    {"sampler_logprobs": [0.0, 0.0, -0.1, -0.3]}),), finish_reason="stop", columns={"answer": "42"},
    source="prompts.jsonl:17", score=1.2, rewards={"exact": 1.0, "brevity": 2.0})``

    A sequence is one growing list of token ids. Its ``loss_mask`` is True on sampled tokens only, not on those of the
    prompt and of an environment. Its array ``sampler_logprobs`` holds the sampler's log-probabilities, 0 where nothing
    was sampled, and if a reward scores tokens, ``step_rewards`` holds the part of the score that lies on each. Where a
    chat template rewrites earlier turns, a new sequence begins; all of them are one trajectory, with one score.

    ``finish_reason`` is stop, length, context, turns, done or error. ``score`` is the weighted sum of ``rewards``; it
    is 0 before there are any.
    """

    prompt: Messages
    turns: tuple[Turn, ...]
    sequences: tuple[Sequence, ...]
    finish_reason: str
    columns: Mapping[str, Any]
    source: str
    score: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_text(
        cls,
        text: str,
        prompt: Messages = (),
        *,
        tokens: npt.ArrayLike = (),
        finish_reason: str = "stop",
        columns: Mapping[str, Any] | None = None,
        source: str = "",
    ) -> Trajectory:
        """A trajectory of one turn that nobody sampled, to try a reward on.

        ``Trajectory.from_text("42", columns={"answer": "42"})``
        """
        ids = np.asarray(tokens, np.int64)
        mask = np.arange(len(ids) + 1) > 0
        sequence = Sequence(np.append(0, ids), mask, source, {"sampler_logprobs": np.zeros(len(mask))})
        return cls(prompt, (Turn(text, finish_reason),), (sequence,), finish_reason, columns or {}, source)

    @property
    def text(self) -> str:
        """What the policy wrote; several turns are separated by line breaks."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The sampled ids of all turns."""
        return np.concatenate([sequence.tokens[sequence.loss_mask] for sequence in self.sequences])

    @property
    def stopped(self) -> bool:
        """Whether the policy ended the trajectory itself, rather than a limit."""
        return self.finish_reason == "stop"


Scoring = list[float] | list[list[float]]
"""A number for each trajectory, or for each of its sampled tokens."""


class Reward(Protocol):
    """Scores trajectories, in their order: a finite number each, or for each a list of one number a sampled token.

    A plain function is a reward, and so is an ``async def``. The trajectories are its own: it may change them.
    """

    def __call__(self, trajectories: list[Trajectory], /) -> Scoring | Awaitable[Scoring]:
        """Score trajectories."""
        ...


# --- losses -------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A sum and what it is divided by, both scalars: what a loss function returns, and what is only logged.

    ``Metric(torch.tensor(6.2), torch.tensor(4.0)).mean`` is 1.55; the mean of nothing is 0.
    """

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The quotient, 0 where the count is 0."""
        return self.total / self.count.where(self.count > 0, 1) * (self.count > 0)

    def over(self, unit: Unit) -> Term:
        """The sum as a part of a loss, to be divided by the units of the whole optimizer step."""
        return Term(self.total, unit, self.count)


class Term(NamedTuple):
    """One part of a loss: a sum over a micro-batch, and the unit in which the trainer counts what it is divided by.

    ``Term(torch.tensor(6.2), "tokens")``. ``count`` is how many units the sum covers, where the loss function knows it:
    the trainer then checks that it divides by the same.
    """

    total: Tensor
    unit: Unit
    count: Tensor | None = None


Terms = dict[str, Term | Metric]
