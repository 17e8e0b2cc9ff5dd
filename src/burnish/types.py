"""The nouns of Burnish: rows, sequences, micro-batches, loss terms; ``protocols.py`` says who hands them to whom.

One alignment rule holds everywhere: entry ``t`` of a per-token array belongs to token ``t``. Dimensions have one
name each: B rows, T tokens, V vocabulary, N sequences, P pairs, G samples a prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import pydantic

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids and, of the same length, which of them are learned.

    ``Sequence((1, 9, 8, 2), (False, False, True, True), "chat.jsonl:17", {"advantages": (0.0, 0.0, 0.5, -0.5)})``

    ``arrays`` holds further per-token numbers of a method, aligned with ``tokens``. The first token has no
    predecessor, so it is never learned.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str
    arrays: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.tokens)
        for name, values in (("loss_mask", self.loss_mask), *self.arrays.items()):
            if len(values) != size:
                raise ValueError(f"{self.source}: {name} must align with tokens: got {len(values)}, expected {size}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"{self.source}: the first token of a sequence has no predecessor and cannot be learned")

    def with_arrays(self, **arrays: tuple[float, ...]) -> Sequence:
        """The same sequence with further per-token arrays."""
        return replace(self, arrays={**self.arrays, **arrays})


class Pair(NamedTuple):
    """Sequence ``better`` of an example was preferred to sequence ``worse``: ``Pair(0, 1, weight=1.0)``."""

    better: int
    worse: int
    weight: float = 1.0
    margin: float = 0.0
    p_better: float = 1.0


@dataclass(frozen=True, slots=True)
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
    ``p_better`` are (P,). ``packed`` says that a row may hold several sequences.
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

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if hasattr(value, "to")}
        return replace(self, arrays={name: value.to(device) for name, value in self.arrays.items()}, **moved)


# --- rollouts -----------------------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """What a generator returns: ``Completion((42, 2), (-0.1, -0.3), "stop")``.

    ``logprobs`` are those of the distribution that was sampled from; ``finish`` is stop, length or aborted.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


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
    prompt and of an environment; its array ``sampler_logprobs`` holds the sampler's log-probabilities (0 where nothing
    was sampled), and ``step_rewards``, if a reward scores tokens, the part of the score on each token. There are several
    sequences where a chat template rewrites what came before a turn. They still are one trajectory, with one score.

    ``finish_reason`` is stop, length, context, turns, done or error. ``score`` is the weighted sum of ``rewards``, and 0
    before there are any.
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
        return np.concatenate([np.asarray(s.tokens, np.int64)[np.asarray(s.loss_mask, bool)] for s in self.sequences])

    @property
    def stopped(self) -> bool:
        """Whether the policy ended the trajectory itself, rather than a limit."""
        return self.finish_reason == "stop"


Scoring = list[float] | list[list[float]]


class Reward(Protocol):
    """Scores trajectories, in their order: a finite number each, or for each a list of one number a sampled token.

    A plain function is a reward, and so is an ``async def``. The trajectories are its own: it may change them.
    """

    def __call__(self, trajectories: list[Trajectory], /) -> Scoring | Awaitable[Scoring]:
        """Score trajectories."""
        ...


# --- losses -------------------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """One part of a loss or one metric: a sum and what it will be divided by, both scalars.

    ``Term(torch.tensor(6.2), torch.tensor(4.0)).mean`` is 1.55; the mean of nothing is 0.
    """

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The quotient, 0 where the count is 0."""
        return self.total / self.count.where(self.count > 0, 1) * (self.count > 0)


Terms = dict[str, Term]
