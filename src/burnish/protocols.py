"""The trainer and a method: a method gives examples, steps and terms, and sees the engine and the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from burnish.types import Config, Encoded, Example, MicroBatch, Row, Terms

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from burnish.models.heads import Network
    from burnish.render.truncate import Truncation

T = TypeVar("T")


class StepLoader(Protocol):
    """Yields one optimizer step at a time: the examples of all processes, the same list in each of them.

    Iterating continues from the loader's state, through the end of the current epoch. An empty list is a step that
    changes nothing (an update epoch that was stopped early). Loaders are subclasses of it.
    """

    def __len__(self) -> int:
        """Optimizer steps an epoch."""
        ...

    def __iter__(self) -> Iterator[list[Example]]: ...

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue from here, as plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        ...

    def check(self) -> None:
        """Called between a step's gradient and its update: an error that it raises stops the run before the update."""


class Engine(Protocol):
    """Where the trained modules live, as methods and loaders see it (``burnish.training.engine.Engine``).

    Every process calls it alike, and every process gets all the results.
    """

    @property
    def network(self) -> Network:
        """What is trained: the policy, and the critic where there is one."""
        ...

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        ...

    @property
    def precision(self) -> str:
        """What passes compute in: no (as the weights are), bf16 or fp16."""
        ...

    def run(self, function: Callable[[MicroBatch], Mapping[str, Tensor]], examples: list[Example]) -> list[Example]:
        """Examples with the named (B, T) arrays that a function gives for their micro-batches, without gradient."""
        ...

    def evaluate(self, method: Method, examples: list[Example]) -> dict[str, float]:
        """Means of a method's terms over examples, and the loss that they make."""
        ...

    def gather(self, value: T) -> list[T]:
        """A value of every process."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's trained weights by name, each as a whole tensor."""
        ...


class Run(Protocol):
    """The run that a method is part of."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with the chat template."""
        ...

    @property
    def seed(self) -> int:
        """The seed that all random choices depend on."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, of all processes."""
        ...

    def last(self) -> dict[str, float]:
        """Means of the terms of the last optimizer step."""
        ...

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to those of the current step."""
        ...

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Write rows to samples.jsonl and show them."""
        ...


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

    A method is a subclass of this. A recipe's method is made from the settings of its block, ``SFT(learn="all")``; if
    it reads ``Prompt`` rows, also from ``reward``, ``sampling`` and ``generator``.
    """

    spec: MethodSpec

    @property
    def weights(self) -> Mapping[str, float]:
        """Which terms make the loss, with their weights; every other term is a metric."""
        ...

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Of the parts of the network that have one of their own: ``{"critic": 1e-5}``; by default of none."""
        return {}

    def prepare(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The network that is trained: the model, with what the method adds to it (a critic)."""
        ...

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Rows as the model will see them: tokens, and which of them are learned."""
        ...

    def eval_examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Rows as ``evaluate`` reads them; by default as ``examples``."""
        return self.examples(rows, tokenizer, truncation)

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> StepLoader:
        """The steps of a run over the examples of its rows."""
        ...

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """Terms and metrics of one micro-batch: sums, never means. A term names the unit that it is divided by."""
        ...

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Metrics on examples that training does not see."""
        ...

    def close(self) -> None:
        """Release resources such as the processes of a generator. A stage calls this when it ends, also on errors."""
