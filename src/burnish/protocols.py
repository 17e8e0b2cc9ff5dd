"""What a method provides to the trainer, and the engine and the run that the trainer provides to a method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from burnish.types import Config, Encoded, Example, MicroBatch, Row, Terms

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from burnish.generate.protocol import Generator
    from burnish.generate.sampling import Sampling
    from burnish.judges.settings import JudgeSettings
    from burnish.judges.store import StoredJudge
    from burnish.math.statistics import RowSums
    from burnish.models.heads import Network
    from burnish.models.loaded import Loaded
    from burnish.models.settings import ModelSource
    from burnish.render.truncate import Truncation
    from burnish.rewards.functions import NamedReward
    from burnish.rl.environment import Environments

T = TypeVar("T")


class StepLoader(Protocol):
    """Yields one optimizer step at a time: the examples of all processes, as the same list in every process.

    Iteration starts at the loader's state and ends with the current epoch. An empty list is a step without an update,
    for example after PPO stopped an update epoch early. Loaders subclass this protocol.
    """

    def __len__(self) -> int:
        """Optimizer steps per epoch."""
        ...

    def __iter__(self) -> Iterator[list[Example]]: ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume from here, as plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        ...

    def check(self) -> None:
        """Called before the update of each step. An error raised here stops the run before the update."""


class Engine(Protocol):
    """The trained network and its processes, as methods and loaders see them (``burnish.training.engine.Engine``).

    All processes make the same calls, and all of them get all results.
    """

    @property
    def network(self) -> Network:
        """The network that is trained: the policy, and the critic if there is one."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """The number of processes."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        ...

    @property
    def precision(self) -> str:
        """The precision of forward passes: no (that of the weights), bf16 or fp16."""
        ...

    @property
    def in_half(self) -> bool:
        """Whether weights or passes are in half precision."""
        ...

    between: Callable[[], None]
    """Called between micro-batches, outside of autocast: work that a loader does beside training."""

    def run(self, function: Callable[[MicroBatch], Mapping[str, Tensor]], examples: list[Example]) -> list[Example]:
        """Apply a function to micro-batches without gradient, and return the examples with its (B, T) arrays added."""
        ...

    def evaluate(self, method: Method, examples: list[Example]) -> tuple[dict[str, float], dict[str, RowSums]]:
        """The means of a method's terms over examples and the resulting loss, and the same as sums over each row."""
        ...

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        ...

    @property
    def generation_model(self) -> Any:
        """The model that generators sample from: the policy, or a copy that is not sharded or of lower precision."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's trained weights by name, each as a full tensor."""
        ...


class Run(Protocol):
    """The run, as its method sees it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with the chat template."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all random choices."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, over all processes."""
        ...

    @property
    def steps(self) -> int:
        """The number of optimizer steps after which training ends; 0 before it begins."""
        ...

    def last(self) -> dict[str, float]:
        """The means of the terms and metrics of the last optimizer step."""
        ...

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to those of the current step."""
        ...

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Write rows to samples.jsonl and display them."""
        ...

    def measured(self, metrics: Mapping[str, RowSums]) -> None:
        """Report metrics of this evaluation as sums over each row, to compare them with the first evaluation."""
        ...


@dataclass(frozen=True)
class MethodSpec:
    """What a recipe needs to know about a method. The specs of our own methods can be read without importing torch.

    ``MethodSpec("sft", SFTConfig, kinds=(Conversation,), streams=True, implementation="burnish.methods.sft:SFT")``

    ``config`` is the class of its settings, and ``kinds`` are the row classes that it reads.
    """

    name: str
    config: type[Config]
    kinds: tuple[type, ...]
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"
    """The head of its model: that of a language model, or of a classifier with one score."""
    streams: bool = False
    """Whether it can train on a ``RowStream``: it encodes a few rows at a time, and its steps need nothing else."""
    models: tuple[str, ...] = ()
    """Settings that name a model. The method also gets ``load``, which loads a model that they name."""
    too_long: str = "error"
    """What happens to rows over ``data.max_length`` if ``data.too_long`` is not set."""
    environments: bool = False
    """Whether its completions may be episodes with an environment. The class then also gets ``environments``."""
    implementation: str = ""
    """``package.module:Name`` of the class, for methods that recipes refer to by name."""


@dataclass(frozen=True)
class RowMethodSpec:
    """What a recipe needs to know about a method that makes rows. It can be read without importing torch.

    ``RowMethodSpec("sample", SampleConfig, kinds=(Prompt,), outputs={"samples.jsonl": (Conversation, Scored)},
    needs=("model",), implementation="burnish.methods.sample:Sample")``

    ``config`` is the class of its settings, ``kinds`` are the row classes that it reads, and ``outputs`` are the files
    that it writes, each with the row classes that it can be read as.
    """

    name: str
    config: type[Config]
    kinds: tuple[type, ...]
    outputs: Mapping[str, tuple[type, ...]]
    needs: tuple[str, ...] = ()
    """Keys that a stage with this method must have besides ``data``."""
    takes: tuple[str, ...] = ()
    """Keys that a stage with this method may have besides these."""
    any_column: bool = False
    """Whether rows may have any columns, which functions of the user read."""
    truncates: bool = False
    """Whether it reads ``data.max_length`` and ``data.too_long``."""
    models: tuple[str, ...] = ()
    """Settings that name a model, such as ``against``, or ``judge.model`` inside of a block."""
    files: tuple[str, ...] = ()
    """Settings that may name a file beside the recipe."""
    kinds_with_rewards: tuple[type, ...] = ()
    """The row classes that it reads in a stage with rewards, if these are others."""
    measures: tuple[str, ...] = ()
    """Its measures; () if they are not known before it runs."""
    measures_with_rewards: tuple[str, ...] = ()
    """Its measures in a stage with rewards, besides these, if they are others."""
    held_out: bool = False
    """Whether its rows should be held out: those that an earlier stage trains on are reported."""
    values: bool = False
    """Whether its generator returns the values of the model's step-level value head, if there is one."""
    implementation: str = ""
    """``package.module:Name`` of the class, for methods that recipes refer to by name."""


@dataclass(frozen=True)
class Made:
    """What a method made of a chunk of rows.

    ``Made({"samples.jsonl": [{"prompt": "1+1", "completion": "2", "score": 1.0}]}, {"made": 1}, {"score": [1.0]}, [])``
    """

    files: Mapping[str, list[dict[str, Any]]]
    """The rows of each output file, in the order of their input."""
    counts: Mapping[str, int]
    """What became of the rows that were read: ``{"made": 60, "skipped: empty answer": 4}``."""
    measured: Mapping[str, list[float]]
    """Measures, each with a value for every row that was made, for means with intervals."""
    samples: list[dict[str, Any]]
    """Some rows for a person to read."""


class RowRun(Protocol):
    """The run, as a method that makes rows sees it."""

    @property
    def model(self) -> Any:
        """The stage's model, on its device."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with the chat template."""
        ...

    @property
    def generator(self) -> Generator:
        """The stage's generator, with the weights of the model."""
        ...

    @property
    def sampling(self) -> Sampling:
        """The settings of ``generation:``."""
        ...

    @property
    def rewards(self) -> list[NamedReward]:
        """The stage's rewards."""
        ...

    @property
    def environments(self) -> Environments | None:
        """The stage's environments and tools, if it has any."""
        ...

    @property
    def truncation(self) -> Truncation:
        """How to handle rows that are too long."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all random choices."""
        ...

    @property
    def folder(self) -> Path:
        """The stage's folder."""
        ...

    @property
    def run_folder(self) -> Path:
        """The run's folder, which contains the stages."""
        ...

    def message(self, text: str) -> None:
        """Show a line to the user."""
        ...

    def load(self, source: ModelSource | None = None) -> Loaded:
        """The stage's model, or another one that the settings of its method name. Each model is loaded once."""
        ...

    def generator_of(self, loaded: Loaded) -> Generator:
        """A generator as the stage sets it, with the weights of a model. Each model has one."""
        ...

    def judge(self, settings: JudgeSettings) -> StoredJudge:
        """A judge whose verdicts are stored in the run's folder. There is one for each settings."""
        ...


class RowMethod(Protocol):
    """A method that makes rows of rows. A recipe makes it from the settings of its ``method:`` block."""

    spec: RowMethodSpec

    def start(self, rows: list[Row], records: list[Mapping[str, Any]], run: RowRun) -> None:
        """Called with the whole input before the first chunk, also when the stage resumes."""

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Make rows of a chunk of the input.

        The result may depend only on the chunk, its place and the run, because a stopped stage goes on with the first
        chunk that is not finished.

        Args:
            rows: the chunk.
            records: the columns of each row.
            first: the index of its first row in the input.
            run: the stage's model, rewards and seed.
        """
        ...

    def check(self, rows: list[Row], keys: Collection[str], reward_model: bool | None) -> None:
        """Check the input before anything is made of it.

        Args:
            rows: all rows.
            keys: the keys that the stage sets, such as ``reward`` and ``generation``.
            reward_model: whether the stage's model is a reward model; None if this is not known yet.

        Raises:
            UserError: the rows do not suit the method or the stage.
        """

    def results(self, folder: Path, seed: int) -> Mapping[str, Mapping[str, float]]:
        """Results from the finished files in ``folder``, besides the means of the measures, by metric.

        ``{"after": {"accuracy": 0.9, "accuracy_low": 0.87, "accuracy_high": 0.93}}``. With ``before``, the results are
        compared with those of another model.
        """
        return {}


class Method(Protocol):
    """A training algorithm. The trainer asks it for steps, sums its terms, and divides each term by its global count.

    Methods subclass this protocol. A recipe makes a method from the settings of its ``method:`` block, as in
    ``SFT(learn="all")``. A method that reads ``Prompt`` rows also gets ``reward``, ``sampling`` and ``generator``.
    """

    spec: MethodSpec

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the terms in the loss. All other terms are only logged."""
        ...

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Separate learning rates for parts of the network: ``{"critic": 1e-5}``. There are none by default."""
        return {}

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps that learn from one batch of rollouts; 1 by default."""
        return 1

    @property
    def iterations(self) -> int | None:
        """The number of iterations after which training ends. By default, the trainer's arguments decide."""
        return None

    def prepare(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> Network:
        """The network to train: the model, with what the method adds to it, such as a critic."""
        ...

    def examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Encode rows as examples: their tokens, and which of them are learned."""
        ...

    def eval_examples(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, truncation: Truncation) -> Encoded:
        """Encode rows for ``evaluate``; by default as in ``examples``."""
        return self.examples(rows, tokenizer, truncation)

    def loader(self, examples: list[Example], engine: Engine, run: Run) -> StepLoader:
        """The loader of a run's steps over its examples."""
        ...

    def loss(self, network: Network, batch: MicroBatch) -> Terms:
        """The terms and metrics of one micro-batch, as sums. A term names the unit that it is divided by."""
        ...

    def evaluate(self, examples: list[Example], engine: Engine, run: Run) -> dict[str, float]:
        """Metrics on held-out examples."""
        ...

    def close(self) -> None:
        """Release resources such as the processes of a generator. A stage calls this when it ends, also on errors."""
