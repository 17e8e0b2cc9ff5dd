"""What the trainer and a method are to each other: one gives steps and terms, the other tells of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from burnish.types import Config, Encoded, Example, MicroBatch, Row, Terms

if TYPE_CHECKING:
    from torch import Tensor


class StepLoader(Protocol):
    """Yields one optimizer step at a time: the examples of all processes, the same list in each of them.

    Iterating goes on from the loader's state, through the end of the current epoch. An empty list is a step that
    changes nothing (an update epoch that was stopped early). A loader may also have ``check()``, which is called when
    the gradient of a step is there and before it is taken: an error that it raises stops the run.
    """

    def __len__(self) -> int:
        """Optimizer steps an epoch."""
        ...

    def __iter__(self) -> Iterator[list[Example]]: ...

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        ...


@dataclass(frozen=True)
class Context:
    """What a method may use of the run it is in; the trainer makes it.

    ``rows_per_step`` counts rows of all processes. ``evaluate`` gives the means of the method's terms over examples;
    ``annotate`` runs a function that gives named (B, T) tensors on the micro-batches of examples, without gradient,
    and returns the examples with those arrays, on every process; ``gather`` collects a value of every process;
    ``last`` gives the means of the terms of the last step; ``log`` adds metrics to the current step's; ``samples``
    writes rows to samples.jsonl and shows them.
    """

    network: Any
    tokenizer: Any
    length: Any
    seed: int
    rows_per_step: int
    rank: int
    world_size: int
    device: Any
    evaluate: Callable[[list[Example]], dict[str, float]]
    annotate: Callable[[Callable[[MicroBatch], Mapping[str, Tensor]], list[Example]], list[Example]]
    gather: Callable[[Any], list[Any]]
    last: Callable[[], dict[str, float]]
    log: Callable[[Mapping[str, float]], None]
    samples: Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True)
class MethodSpec:
    """What a recipe needs to know of a method; the specs of the shipped ones are known without importing torch.

    ``MethodSpec("sft", SFTConfig, kinds=(Conversation,), streams=True, implementation="burnish.methods.sft:SFT")``

    ``config`` is the class of its settings, and ``kinds`` are the rows that it reads.
    """

    name: str
    config: type[Config]
    kinds: tuple[type, ...]
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"
    """The head that its model needs: of a language model, or of a classifier with one score."""
    streams: bool = False
    """It can learn from a ``RowStream``: ``examples`` takes a few rows at a time, and its steps need nothing else."""
    too_long: str = "error"
    """What happens to rows that are too long if ``data.too_long`` is not set."""
    implementation: str = ""
    """``package.module:Name`` of the class, for the methods that recipes call by their name alone."""


class Method(Protocol):
    """A training algorithm. The trainer asks it for steps, sums its terms, and divides each by its global count.

    A recipe's method is made from the settings of its block, ``SFT(learn="all")``; if it reads ``Prompt`` rows, also
    from ``reward``, ``sampling`` and ``generator``. A method may also have ``learning_rates``: those of parts of the
    network that have one of their own, ``{"critic": 1e-5}``.
    """

    spec: MethodSpec

    @property
    def weights(self) -> Mapping[str, float]:
        """Which terms make the loss, with their weights; every other term is a metric."""
        ...

    def prepare(self, model: Any, tokenizer: Any) -> Any:
        """The network that is trained: the model, with what the method adds to it (a critic)."""
        ...

    def examples(self, rows: list[Row], tokenizer: Any, truncation: Any) -> Encoded:
        """Rows as the model will see them: tokens, and which of them are learned."""
        ...

    def loader(self, rows: list[Row], context: Context) -> StepLoader:
        """The steps of a run over these rows."""
        ...

    def loss(self, network: Any, batch: MicroBatch) -> Terms:
        """Terms and metrics of one micro-batch: sums, never means. A term names the unit that it is divided by."""
        ...

    def evaluate(self, rows: list[Row], context: Context) -> dict[str, float]:
        """Metrics on rows that training does not see."""
        ...
