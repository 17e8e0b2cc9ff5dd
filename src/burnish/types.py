"""The data types of Burnish: rows, sequences, examples, micro-batches, trajectories and terms of a loss.

One alignment rule holds everywhere: entry ``t`` of a per-token array belongs to token ``t``. Each dimension has one
name: B rows, T tokens, V vocabulary, N sequences, P pairs, G samples per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    NotRequired,
    Protocol,
    TypedDict,
    TypeVar,
    get_args,
)

import numpy as np
import numpy.typing as npt
import pydantic

from burnish.errors import did_you_mean
from burnish.mistakes import refuse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T", bound=np.generic)


class ConfigType(type(pydantic.BaseModel)):  # pyright: ignore[reportUntypedBaseClass]
    """Makes mistakes in settings that are written in Python a UserError, as they are in recipes.

    This is not done in ``Config.__init__``, because pydantic would call it for inner blocks as well and lose the paths
    of their mistakes.
    """

    def __call__(cls, /, **settings: Any) -> Any:
        """Create the settings.

        Raises:
            UserError: if a key is unknown or a value is wrong. The message lists every mistake.
        """
        try:
            return super().__call__(**settings)
        except pydantic.ValidationError as error:
            refuse(error, cls, settings)


class Config(pydantic.BaseModel, metaclass=ConfigType):
    """Base class of all settings. They are immutable; unknown keys, wrong types, NaN and infinity are errors."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # the values of Any would become None otherwise
        use_attribute_docstrings=True,
    )


# --- rows: what a line of a data file means -----------------------------------------------------------------------
# Rows with messages have ``tools``, which the chat template shows to the model.


class Function(TypedDict):
    """The function of a tool call: ``{"name": "add", "arguments": {"a": 2, "b": 2}}``."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """A call of a tool: ``{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}, "id": "c1"}``."""

    type: Literal["function"]
    function: Function
    id: NotRequired[str]


class Message(TypedDict):
    """One message: ``{"role": "user", "content": "What is 2 + 2?"}``. Roles are system, user, assistant and tool.

    A message of the assistant may have ``reasoning_content`` and ``tool_calls``. Its content may be empty if it calls
    tools. A message of a tool holds the result of a call, and may name the call (``tool_call_id``) and the tool
    (``name``): ``{"role": "tool", "content": "4", "name": "add"}``.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


Messages = tuple[Message, ...]
Tools = tuple[dict[str, Any], ...]
"""The JSON schemas of the tools that a model may call:
``({"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": {...}}},)``."""


@dataclass(frozen=True)
class Text:
    """Plain text: ``Text("Once upon a time", source="books.jsonl:17")``."""

    text: str
    source: str


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from.

    ``Conversation(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}), 1, "chat.jsonl:17")``

    ``completion_start`` is the index of the first message of the completion, if the row has a prompt and a completion.
    If it is None, all assistant turns may be learned.
    """

    messages: Messages
    completion_start: int | None
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, of which ``chosen`` is preferred. The answers do not repeat the prompt.

    ``Preference(({"role": "user", "content": "Hi"},), ({"role": "assistant", "content": "Hello!"},),
    ({"role": "assistant", "content": "Go away."},), margin=None, p_chosen=None, source="pairs.jsonl:17")``

    ``margin`` is how much better ``chosen`` is, at least 0. ``p_chosen`` is the share of judges that preferred it.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: float | None
    p_chosen: float | None
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Ranking:
    """Several answers to one prompt, each with a score; higher is better. Ranks (1 is best) are read as negated scores.

    ``Ranking(({"role": "user", "content": "Hi"},), (({"role": "assistant", "content": "Hello!"},),
    ({"role": "assistant", "content": "Go away."},)), (1.0, -1.0), "ranked.jsonl:17")``
    """

    prompt: Messages
    completions: tuple[Messages, ...]
    scores: tuple[float, ...]
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt to complete. Rewards receive the other columns of the row unchanged.

    ``Prompt(({"role": "user", "content": "12 + 30 ="},), {"answer": "42"}, "prompts.jsonl:17")``
    """

    messages: Messages
    columns: Mapping[str, Any]
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Labelled:
    """One answer to a prompt with a label, good or bad (KTO).

    ``Labelled(({"role": "user", "content": "Hi"},), ({"role": "assistant", "content": "Hello!"},), True, "k.jsonl:9")``
    """

    prompt: Messages
    completion: Messages
    label: bool
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Scored:
    """A conversation with a reward.

    ``Scored(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}), 1.0, "scored.jsonl:17")``
    """

    messages: Messages
    reward: float
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Steps:
    """A solution in steps, each with a value Q in [-1, 1]. The last value is the outcome: 1 (correct) or -1.

    ``Steps(({"role": "user", "content": "2 + 3 * 4 = ?"},), ("3 * 4 = 12", "2 + 12 = 14"), (0.8, 1.0), "s.jsonl:9")``

    ``outputs`` are what the code of each step returned: ``("<output>12</output>", "")``; () if no step has any.

    Raises:
        ValueError: the steps, values and outputs differ in number.
    """

    question: Messages
    steps: tuple[str, ...]
    values: tuple[float, ...]
    source: str
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = len(self.steps), len(self.values), len(self.outputs or self.steps)
        if len(set(numbers)) > 1:
            raise ValueError(f"{self.source}: {numbers[0]} steps, {numbers[1]} values, {numbers[2]} outputs")

    @property
    def correct(self) -> bool:
        """Whether the outcome is 1."""
        return self.values[-1] > 0


Row = Text | Conversation | Preference | Ranking | Prompt | Labelled | Scored | Steps


# --- tokens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Sequence:
    """Token ids and a mask of the learned ones, as read-only numpy arrays of the same length T.

    ``Sequence([1, 9, 8, 2], [False, False, True, True], "chat.jsonl:17", {"advantages": [0.0, 0.0, 0.5, -0.5]})``

    ``tokens`` is int64, ``loss_mask`` is bool, and ``arrays`` holds further per-token numbers of a method as float64.
    The constructor also accepts lists and tuples. The first token has no predecessor, so it cannot be learned. Two
    sequences are equal if all their contents are.

    Raises:
        ValueError: the arrays differ in length, or the first token is in the mask.
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
        """A copy with further per-token arrays."""
        return Sequence(self.tokens, self.loss_mask, self.source, {**self.arrays, **arrays})


def _read_only(values: npt.ArrayLike, dtype: type[T]) -> npt.NDArray[T]:
    """A read-only array of the values, without a copy if they are an array of this dtype."""
    array = np.asarray(values, dtype)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


class Pair(NamedTuple):
    """Two sequences of an example by index, the first of them preferred: ``Pair(0, 1, weight=1.0)``."""

    better: int
    worse: int
    weight: float = 1.0
    margin: float = 0.0
    p_better: float = 1.0


Unit = Literal["tokens", "sequences", "pairs", "chosen_tokens", "step_ends", "trajectories"]


@dataclass(frozen=True)
class Example:
    """Sequences that must stay in one micro-batch: a single one, or several that are compared.

    ``Example((chosen, rejected), (Pair(0, 1),))``

    The example of a prompt has its ``row``, whose columns the rewards read. It is not stored in checkpoints or in the
    cache of encoded rows.
    """

    sequences: tuple[Sequence, ...]
    pairs: tuple[Pair, ...] = ()
    row: Prompt | None = None

    @property
    def source(self) -> str:
        """The file and line of the row."""
        return self.sequences[0].source

    @cached_property
    def counts(self) -> dict[Unit, float]:
        """The example's count in each unit by which a term of a loss can be divided.

        ``{"tokens": 17.0, "sequences": 2.0, "pairs": 1.0, "chosen_tokens": 9.0, "step_ends": 0.0, ...}``

        - tokens: learned tokens.
        - sequences: sequences with a learned token.
        - pairs: the sum of the pairs' weights.
        - chosen_tokens: learned tokens of the better sequence of each pair, times the pair's weight.
        - step_ends: ends of reasoning steps, where the array ``outcomes`` is not 0.
        - trajectories: 1 if any token is learned.
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
        """The inverse of ``to_plain``."""
        sequences = tuple(Sequence(**sequence) for sequence in plain["sequences"])
        return cls(sequences, tuple(Pair(*pair) for pair in plain["pairs"]))


def total_counts(examples: Iterable[Example]) -> dict[Unit, float]:
    """The counts of several examples together, rounded only once."""
    units: tuple[Unit, ...] = get_args(Unit)
    counts = [example.counts for example in examples]
    return {unit: math.fsum(each[unit] for each in counts) for unit in units}


class Changed(NamedTuple):
    """A row that was truncated or dropped: ``Changed("chat.jsonl:17", "truncate_left: 1200 tokens, max_length 1024")``.

    Or one that has a sequence for each learned turn: ``Changed("chat.jsonl:18", "by turn: 3 sequences")``.
    """

    source: str
    reason: str


class Encoded(NamedTuple):
    """The examples of rows, and which rows were changed."""

    examples: list[Example]
    changed: list[Changed]


class Segments(NamedTuple):
    """The segments of a packed row in order: their lengths, and for each the index of its shared prompt, or None.

    A prompt, its two answers, and padding: ``Segments((7, 3, 5, 1), (None, 0, 0, None))``.
    """

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass. Each row is one padded sequence, or several packed ones.

    ``collate([Example((Sequence([5, 9, 12, 3], [False, False, True, True], "chat.jsonl:17"),))], pad_id=0)``
    """

    tokens: Tensor
    """(B, T) token ids."""
    segments: Tensor
    """(B, T) number of each token's segment in its row, from 1; 0 is padding. A shared prompt is its own segment."""
    parents: Tensor
    """(B, T) number of the shared prompt that the token's sequence continues; 0 if it continues none."""
    positions: Tensor
    """(B, T) position of each token in its sequence. After a shared prompt, positions continue those of the prompt."""
    loss_mask: Tensor
    """(B, T) True on learned tokens."""
    starts: Tensor
    """(N,) flat index, row * T + column, of each sequence's first token after its shared prompt."""
    ends: Tensor
    """(N,) flat index of each sequence's last token."""
    learned: Tensor
    """(L,) flat index of each learned token, in order. With ``loss_mask``, a GPU would have to be asked how many there
    are."""
    arrays: Mapping[str, Tensor]
    """(B, T) per-token numbers of a method, by name."""
    pairs: Tensor
    """(P, 2) indices of the better and the worse sequence of each pair."""
    pair_weights: Tensor
    """(P,) as in ``Pair``, like the next two."""
    margins: Tensor
    p_better: Tensor
    packed: bool
    """Whether a row may hold several sequences."""
    row_segments: Segments | None
    """The segments of the only row, if all sequences are packed into one."""
    sources: tuple[str, ...]
    """The file and line of each sequence."""
    counts: Mapping[Unit, float]
    """The counts of the examples together (``Example.counts``)."""

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on another device. Nothing waits for a copy to a GPU."""
        moved = {name: copied(value, device) for name, value in vars(self).items() if hasattr(value, "to")}
        return replace(self, arrays={name: copied(value, device) for name, value in self.arrays.items()}, **moved)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. Copied to a GPU from pinned memory, so that the program goes on meanwhile."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# --- rollouts -----------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """One message generated by the policy, and what the environment answered: ``Turn("42", "stop")``.

    Without an environment, only the first two are set.
    """

    text: str
    finish_reason: str
    """Why generation ended: stop, length or context."""
    message: Message | None = None
    """The message as the chat template sees it in later turns."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls in the message."""
    replies: Messages = ()
    """The messages that the environment answered with."""
    errors: tuple[str, ...] = ()
    """The kinds of errors of the tool calls: unparsable, unknown, arguments, raised, timeout or result."""
    reward: float = 0.0
    """The reward of this turn, if the environment gives one."""
    tokens: int = 0
    """The number of sampled tokens."""
    prompt_tokens: int = 0
    """The number of tokens before the turn."""
    cached_tokens: int = 0
    """The number of those that the generator still knew from earlier turns, and did not compute again."""


class Observation(NamedTuple):
    """What a turn environment answers: ``Observation("Higher.", done=False, reward=0.0)``.

    ``messages`` are the messages that the model sees next. A text is one message of the user, and nothing ends the
    episode. ``reward`` is the reward of the turn that is answered.
    """

    messages: str | SequenceOf[Message] = ()
    done: bool = False
    reward: float = 0.0


class Columns(dict[str, Any]):
    """The columns of a prompt: ``Columns(answer="42")``. The error about a missing one names those that exist."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"no column {name!r}{did_you_mean(name, self)}; columns are {', '.join(self) or 'none'}")


@dataclass(frozen=True)
class Trajectory:
    """One sample of the policy for a prompt: its turns, their tokens, and their scores.

    ``Trajectory(prompt=({"role": "user", "content": "12 + 30 ="},), turns=(Turn("42", "stop"),),
    sequences=(Sequence([5, 6, 42, 2], [False, False, True, True], "prompts.jsonl:17",
    {"sampler_logprobs": [0.0, 0.0, -0.1, -0.3]}),), finish_reason="stop", columns={"answer": "42"},
    source="prompts.jsonl:17", score=1.2, rewards={"exact": 1.0, "brevity": 2.0})``

    A sequence grows turn by turn. Its ``loss_mask`` is True only on sampled tokens, not on those of the prompt or of an
    environment. Its array ``sampler_logprobs`` holds the sampler's log-probabilities, and 0 for tokens that were not
    sampled. If a reward scores tokens, the array ``step_rewards`` holds the share of the score of each token. If a chat
    template rewrites earlier turns, a new sequence begins; all sequences form one trajectory, with one score.

    ``finish_reason`` is

    - stop: the policy ended its last message and called no tool,
    - length: a limit on the number of tokens was reached,
    - context: the model's context window is full,
    - turns: the limit on the number of turns was reached,
    - done: the environment ended the episode,
    - error: the environment failed.

    ``environment_reward`` is the reward that the environment gave, if it gave one. ``score`` is the weighted sum of
    ``rewards``, or 0 before they are computed.
    """

    prompt: Messages
    turns: tuple[Turn, ...]
    sequences: tuple[Sequence, ...]
    finish_reason: str
    columns: Mapping[str, Any]
    source: str
    score: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    tools: Tools = ()
    environment_reward: float | None = None

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
        """A trajectory of one turn with the given text, to try out a reward.

        ``Trajectory.from_text("42", columns={"answer": "42"})``
        """
        ids = np.asarray(tokens, np.int64)
        mask = np.arange(len(ids) + 1) > 0
        sequence = Sequence(np.append(0, ids), mask, source, {"sampler_logprobs": np.zeros(len(mask))})
        turns = (Turn(text, finish_reason),)
        return cls(prompt, turns, (sequence,), finish_reason, Columns(columns or {}), source)

    @property
    def prompt_text(self) -> str:
        """The text of the prompt's messages, joined by line breaks."""
        return "\n".join(message["content"] for message in self.prompt)

    @property
    def text(self) -> str:
        """The text of all turns of the policy, joined by line breaks."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The sampled ids of all turns."""
        return np.concatenate([sequence.tokens[sequence.loss_mask] for sequence in self.sequences])

    @property
    def messages(self) -> Messages:
        """The conversation after the prompt: the policy's messages, and the answers of the environment."""
        return tuple(
            message
            for turn in self.turns
            for message in (turn.message or Message(role="assistant", content=turn.text), *turn.replies)
        )

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of all turns."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def tool_errors(self) -> tuple[str, ...]:
        """The kinds of errors of the tool calls of all turns."""
        return tuple(error for turn in self.turns for error in turn.errors)

    @property
    def stopped(self) -> bool:
        """Whether the policy or the environment ended the trajectory, and not a limit or an error."""
        return self.finish_reason in ("stop", "done")


Scoring = list[float] | list[list[float]]
"""One number for each trajectory, or for each trajectory one number for each sampled token."""


class Reward(Protocol):
    """Scores trajectories: one finite number for each, or one list for each with a number for each sampled token.

    A plain function is a reward, and so is an ``async def``. A reward gets its own copies of the trajectories and may
    change them. A function with a parameter ``prompts``, ``completions`` or ``completion_ids`` is called as TRL calls
    its rewards: with lists of these and of each column, as keyword arguments.
    """

    def __call__(self, trajectories: list[Trajectory], /) -> Scoring | Awaitable[Scoring]:
        """Score trajectories."""
        ...


# --- losses -------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A sum and the count to divide it by, both scalars. Loss functions return metrics.

    ``Metric(torch.tensor(6.2), torch.tensor(4.0)).mean`` is 1.55. The mean is 0 if the count is 0. ``parts`` are the
    summands of both, from which an evaluation computes the sums of each row: of tokens (B, T); of pairs (P,); or, in a
    micro-batch without pairs, of sequences (N,).
    """

    total: Tensor
    count: Tensor
    parts: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> Metric:
        """The weighted sum of values, and the sum of the weights, both of the same shape."""
        summands = weights * values
        return cls(summands.sum(), weights.sum(), (summands, weights))

    @property
    def mean(self) -> Tensor:
        """The sum divided by the count; 0 if the count is 0."""
        return self.total / self.count.where(self.count > 0, 1) * (self.count > 0)

    def over(self, unit: Unit) -> Term:
        """The sum as a term of a loss, which the trainer divides by the units of the whole optimizer step."""
        return Term(self.total, unit, self.count, self.parts)


class Term(NamedTuple):
    """A term of a loss: a sum over a micro-batch, and the unit whose count the trainer divides it by.

    ``Term(torch.tensor(6.2), "tokens")``. ``count`` is the number of units in the sum, if the loss function knows it;
    the trainer then checks that it divides by the same number. ``parts`` is that of a ``Metric``.
    """

    total: Tensor
    unit: Unit
    count: Tensor | None = None
    parts: tuple[Tensor, Tensor] | None = None


Terms = dict[str, Term | Metric]
