"""The schema of a recipe: its keys with their types and bounds."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import threading
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Discriminator, Field, Tag

from burnish.config.parallel import Parallel
from burnish.config.rounds import NAME, Loop, not_reserved
from burnish.data.selection import Select
from burnish.errors import UserError, did_you_mean
from burnish.files import expanded
from burnish.generate.sampling import Sampling
from burnish.generate.settings import GeneratorSettings
from burnish.judges.settings import JudgeSettings, Principles
from burnish.methods import METHODS, ROW_METHODS
from burnish.methods.settings import BLOCKS, JudgeConfig
from burnish.mistakes import Keys
from burnish.models.settings import AdapterConfig, ModelSource, Precision, StageModel, kind_of_source
from burnish.protocols import MethodSpec, RowMethodSpec
from burnish.ray_cluster import Actors
from burnish.render.truncate import Truncation
from burnish.rl.settings import EnvironmentSettings
from burnish.training.arguments import TrainerConfig
from burnish.types import Config

STAGE_NAME = rf"^{NAME}(/[0-9]+/{NAME})?$"
"""The name of a stage: ``sft``, or ``loop/2/values`` for the second round of one in a loop."""


class StageData(Config, use_attribute_docstrings=True):
    """Rows that an earlier stage wrote: ``{stage: make, file: train.jsonl}``."""

    stage: str
    file: str


DataSource = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[StageData, Tag("<stage>")],
    Discriminator(
        kind_of_source,
        custom_error_type="expected",
        custom_error_message="a file, a folder, a hub id or {stage: NAME, file: FILE}",
    ),
]


class Part(Config, use_attribute_docstrings=True):
    """One source of a mixture: ``{from: data/chat.jsonl, weight: 2, limit: 1000}``."""

    source: DataSource = Field(alias="from")
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Sampling weight relative to the other sources. Without weights, each row of every source is used once."""
    limit: int | None = Field(None, gt=0)
    """Maximum number of rows to read from this source."""
    format: str | None = None
    """Name of the row format, if it cannot be inferred from the keys. Default: data.format."""
    keys: dict[str, str] | None = None
    """Names of the file's keys. Default: data.keys."""


TrainSource = Annotated[
    Annotated[str, Tag("<path>")]
    | Annotated[StageData, Tag("<stage>")]
    | Annotated[list[Part], Field(min_length=1), Tag("<list>")],
    Discriminator(
        kind_of_source,
        custom_error_type="expected",
        custom_error_message="a file, a folder, a hub id, {stage: NAME, file: FILE}, or a list of {from:, weight:}",
    ),
]


class MethodChoice(Config, extra="allow"):
    """A method and its settings: ``{name: ppo, kl_coef: 0.05}``. The method's Config defines the settings."""

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the recipe sets explicitly, without defaults."""
        return dict(self.model_extra or {})

    @property
    def functions(self) -> dict[tuple[str, ...], str]:
        """The user's functions, by the keys that name them: ``{("policy_loss",): "my_loss.py:name"}``."""
        blocks = {key: self.settings[key] for key in {*BLOCKS, "function"} & set(self.settings)}
        names: dict[tuple[str, ...], Any] = {
            (key,): block.get("name") if isinstance(block, dict) else block for key, block in blocks.items()
        }
        if isinstance(answer := self.settings.get("answer"), dict):
            names |= {("answer", key): answer.get(key) for key in ("find", "check")}
        return {keys: name for keys, name in sorted(names.items()) if isinstance(name, str) and ":" in name}

    @property
    def files(self) -> dict[str, str]:
        """The files beside the recipe, by the keys that name them: ``{"constitution": "my.yaml"}``."""
        keys = ROW_METHODS[self.name].files if self.name in ROW_METHODS else ()
        return {key: name for key in keys if isinstance(name := self.settings.get(key), str)}


SPLITS = ("train", "eval", "rows")
"""The kinds of rows of a stage."""


class Data(Truncation, use_attribute_docstrings=True):
    """Rows of a stage: ``{train: data/chat.jsonl, eval: data/chat-eval.jsonl, max_length: 1024}``."""

    train: TrainSource | None = None
    """One source, or a mixture given as a list of {from: SOURCE, weight: 2, limit: 1000}."""
    eval: DataSource | None = None
    """Held-out rows for evaluation."""
    rows: TrainSource | None = None
    """The input of a method that makes rows: one source, or a list of {from: SOURCE, limit: 1000}."""
    format: str | None = None
    """Name of the row format, if it cannot be inferred from the keys."""
    keys: dict[str, str] | None = None
    """Names of the file's keys: {prompt: question}."""
    keep: list[str] = Field([])
    """Extra columns that the rows may have besides id, source and the like: [score_chosen]. Any other unknown column
    is an error."""
    limit: int | None = Field(None, gt=0)
    """Maximum number of training rows to read."""
    select: Select | None = None
    """Which of the training rows to use, by their scores."""
    stream: bool = False
    """Read training rows during the run instead of loading all of them first. Requires trainer.max_steps."""
    shuffle_buffer: int = Field(2048, gt=0)
    """Number of streamed rows that are shuffled together."""

    @pydantic.model_validator(mode="after")
    def _fitting(self) -> Data:
        parts = self.parts("rows" if self.train is None else "train")
        if len(weighted := [part for part in parts if part.weight is not None]) not in (0, len(parts)):
            raise ValueError(
                f"{len(weighted)} of {len(parts)} sources have a weight: give a weight to all of them or to none"
            )
        if isinstance(self.train or self.rows, list) and self.limit is not None:
            raise ValueError(
                "data.limit does not apply to a list of sources; limit each source: train: [{from: FILE, limit: 1000}]"
            )
        if self.stream and self.select is not None:
            raise ValueError("select needs all rows at once: remove it, or remove stream: true")
        if not self.stream and "shuffle_buffer" in self.model_fields_set:
            raise ValueError("shuffle_buffer requires stream: true; without streaming, all rows are shuffled together")
        return self

    @property
    def splits(self) -> list[str]:
        """The kinds of rows that the stage reads."""
        return [split for split in SPLITS if getattr(self, split) is not None]

    def parts(self, split: str) -> list[Part]:
        """The sources of a split, with all their settings."""
        source = getattr(self, split)
        if source is None:
            return []
        if not isinstance(source, list):
            limit = None if split == "eval" else self.limit
            return [Part.model_validate({"from": source, "limit": limit, "format": self.format, "keys": self.keys})]
        shared = {"format": self.format, "keys": self.keys}
        return [
            part.model_copy(update={k: v for k, v in shared.items() if getattr(part, k) is None}) for part in source
        ]

    @property
    def length(self) -> Truncation:
        """How to handle rows that are too long or cannot be encoded."""
        return Truncation(**{name: getattr(self, name) for name in Truncation.model_fields})


class RewardPart(Config, use_attribute_docstrings=True):
    """What every reward of a recipe may have. Each kind of reward is a subclass with keys of its own."""

    weight: float = 1.0
    """Weight of this score in the reward. A score with weight 0 is logged but not used."""
    name: str | None = None

    @property
    def title(self) -> str:
        """The name of the reward in metrics and messages. By default it is the key of its kind."""
        return self.name or next(kind for kind, source in REWARDS.items() if isinstance(self, source))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _own_keys(cls, given: Any) -> Any:
        """Name the kind of reward that a key belongs to, if it is not this one."""
        own = next(kind for kind, source in REWARDS.items() if source is cls)
        for kind, other in REWARDS.items():
            belongs = other.model_fields.keys() - cls.model_fields.keys()
            if keys := [key for key in given if key in belongs]:
                raise ValueError(f"{', '.join(keys)}: only for a reward with {kind}:, but this one has {own}:")
        return given


class RewardFromModel(RewardPart):
    """Scores of a reward model, a classifier or a step-value model: ``{model: {stage: reward}, normalize: true}``."""

    model: ModelSource
    label: int | str | None = None
    """The label of a classifier to use as the score."""
    template: str | None = None
    normalize: bool = False
    """Use (score - mean) / std, with the mean and std of held-out scores stored when the model was trained."""
    steps: Literal["differences", "raw"] | None = None
    """Reward each reasoning step at its end, using a step-value model. differences: the change in value; raw: the value
    itself."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 takes half of the memory, but rounding changes the scores."""
    ray: Actors | None = None
    """Score in actors of a Ray cluster, each of which loads the model: {workers: 2, gpus: 1}."""

    @property
    def title(self) -> str:
        """The name of the reward in metrics and messages."""
        return self.name or (self.model.stage if isinstance(self.model, StageModel) else super().title)

    @pydantic.model_validator(mode="after")
    def _one_score_or_steps(self) -> RewardFromModel:
        if self.steps is not None and (self.label is not None or self.normalize):
            raise ValueError(
                "label and normalize apply only to a model with one score per completion, not to one with steps:"
            )
        return self


class RewardFromFunction(RewardPart):
    """Scores of a function: ``{function: my_rewards.py:brevity, weight: 0.1}``."""

    function: str
    """file.py:name (beside the recipe) or package.module:name."""
    timeout: float | None = Field(default=None, gt=0, le=threading.TIMEOUT_MAX)
    """Time limit in seconds for one call of the function. A longer call stops the run. Default: 600."""
    ray: Actors | None = None
    """Call the function in actors of a Ray cluster, each of which loads it: {workers: 2}."""

    @property
    def title(self) -> str:
        """The name of the reward in metrics and messages."""
        return self.name or self.function.rpartition(":")[2]


class RewardFromURL(RewardPart):
    """Scores of a service: ``{url: "http://127.0.0.1:8001", token: REWARD_TOKEN}``."""

    url: str
    """Address of a service that follows the protocol of docs/serving.md, such as one of burnish serve reward."""
    token: str | None = None
    """Name of the environment variable that holds the service's token."""
    timeout: float = Field(60.0, gt=0, le=threading.TIMEOUT_MAX)
    """Time limit in seconds for one request."""
    retries: int = Field(5, ge=0, le=100)
    """How often a request is repeated if the service is down or busy, after waits of 0.5, 1, 2, 4, ... 30 seconds."""
    batch: int = Field(64, gt=0)
    """Maximum number of completions in a request."""
    concurrency: int = Field(8, gt=0, le=1000)
    """Maximum number of requests at the same time."""

    @pydantic.field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError("not the address of a service: expected one such as http://127.0.0.1:8001")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("write the address without a password and parameters; a token is given with token: NAME")
        return url


class RewardFromJudge(RewardPart):
    """Grades of a judge, rescaled to [-1, 1]: ``{judge: {model: {stage: sft}}, principles: my.yaml}``."""

    judge: JudgeSettings
    principles: Principles = None
    """What to judge by: a list of texts, or a YAML file of principles with compare: beside the recipe."""


REWARDS: dict[str, type[RewardPart]] = {
    "model": RewardFromModel,
    "function": RewardFromFunction,
    "url": RewardFromURL,
    "judge": RewardFromJudge,
}
"""The kinds of rewards, by the key that each of them must have."""


def _reward_kind(value: Any) -> str | None:
    """The tag of a reward: the only kind whose key it has, or whose key it misspells."""
    keys = value if isinstance(value, dict) else vars(value) if isinstance(value, RewardPart) else ()
    kinds = [kind for kind in REWARDS if kind in keys]
    kinds = kinds or [kind for kind in REWARDS if any(did_you_mean(str(key), [kind]) for key in keys)]
    return f"<{kinds[0]}>" if len(kinds) == 1 else None


RewardSource = Annotated[
    Annotated[RewardFromModel, Tag("<model>")]
    | Annotated[RewardFromFunction, Tag("<function>")]
    | Annotated[RewardFromURL, Tag("<url>")]
    | Annotated[RewardFromJudge, Tag("<judge>")],
    Discriminator(
        _reward_kind,
        custom_error_type="kind",
        custom_error_message=f"a reward needs exactly one of {', '.join(f'{kind}:' for kind in REWARDS)}",
    ),
]


class Stage(Config, use_attribute_docstrings=True):
    """One stage of a pipeline. It trains with a method, or runs a function that makes rows or a model."""

    name: Annotated[str, Field(pattern=STAGE_NAME), pydantic.AfterValidator(not_reserved)]
    seed: int | None = Field(None, ge=0, lt=2**32)
    """Seed of this stage. Default: the seed of the recipe, and another one in every later round of a loop."""
    run: str | None = None
    """file.py:name (beside the recipe) or package.module:name of a function(folder, seed, **with)."""
    arguments: dict[str, Any] = Field({}, alias="with")
    """Arguments of the function."""
    method: MethodChoice | None = None
    model: ModelSource | None = None
    template: str | None = None
    """Name of a plain template, for a model without a chat template."""
    precision: Precision = "auto"
    """bf16: trained weights in float32, other weights and all passes in bfloat16. auto: bf16 on a GPU that supports it,
    and on a CPU with AMX or AVX512-BF16 if the model's hidden size is at least 384; otherwise float32."""
    loader: Literal["transformers", "unsloth"] = "transformers"
    """What loads the model. unsloth: Unsloth's kernels for language models, on one GPU, if it is installed."""
    trust_remote_code: bool = False
    adapter: AdapterConfig | None = None
    """Without an adapter, all weights are trained."""
    data: Data | None = None
    reward: list[RewardSource] = Field([])
    generation: Sampling = Field(default_factory=Sampling)
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)
    tools: list[str] = Field([])
    """Functions that the model may call while it samples: [my_tools.py:calculator]."""
    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    """What answers the model while it samples, and its limits: {class: my_env.py:Guess, max_turns: 8}."""
    token_budget: int | None = Field(None, gt=0)
    """Maximum number of tokens in a micro-batch. Default: 512 on a CPU, otherwise a whole optimizer step."""
    packed: bool | None = None
    """Pack several sequences into one row of a micro-batch. Packed sequences do not attend to each other, so the result
    is the same. Default: packed where it is faster."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Learning rate, batch size, checkpoints and other fields of transformers.TrainingArguments."""

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> Stage:
        if (self.run is None) == (self.method is None):
            which = "both run: and" if self.run else "neither run: nor"
            raise ValueError(f"has {which} method:; a stage either runs a function or trains with a method")
        given = self.model_fields_set
        if self.run and (extra := given - {"name", "seed", "run", "arguments"}):
            raise ValueError(
                f"{', '.join(sorted(extra))} cannot be combined with run:; pass arguments to the function in with:"
            )
        if self.method:
            self._check_method(self.method.name, given)
        if self.method and "arguments" in given:
            raise ValueError("with: applies only to a stage with run:")
        if self.loader == "unsloth":
            self._check_unsloth()
        return self

    def _check_unsloth(self) -> None:
        if self.packed:
            raise ValueError("packed: true: a model of loader: unsloth ignores attention masks: remove one of the two")
        if self.adapter is not None and self.adapter.dora:
            raise ValueError("adapter.dora: loader: unsloth trains plain LoRA adapters: remove one of the two")
        if self.adapter is not None and isinstance(self.adapter.targets, str) and self.adapter.targets != "all-linear":
            raise ValueError("adapter.targets: loader: unsloth takes a list of names or all-linear, not a pattern")

    @property
    def acts(self) -> bool:
        """Whether completions are episodes, with an environment or tools."""
        return bool(self.environment.classes or self.tools)

    @property
    def makes_rows(self) -> bool:
        """Whether the stage makes rows with a method, and trains nothing."""
        return self.method is not None and self.method.name in ROW_METHODS

    @property
    def models(self) -> dict[Keys, ModelSource]:
        """The models that the stage reads, by the keys that name them. The settings of its method must be valid."""
        models = {("model",): self.model}
        models |= {("reward", i, "model"): r.model for i, r in enumerate(self.reward) if isinstance(r, RewardFromModel)}
        judges = {i: r.judge for i, r in enumerate(self.reward) if isinstance(r, RewardFromJudge)}
        models |= {("reward", i, "judge", "model"): judge.model for i, judge in judges.items()}
        if self.method is not None and (spec := any_spec(self.method.name)).models:
            settings = spec.config(**self.method.settings)
            models |= {("method", *key.split(".")): operator.attrgetter(key)(settings) for key in spec.models}
        return {keys: model for keys, model in models.items() if model is not None}

    @property
    def judges(self) -> list[JudgeSettings]:
        """The judges of the stage. The settings of its method must be valid."""
        judges = [reward.judge for reward in self.reward if isinstance(reward, RewardFromJudge)]
        if self.method is not None and self.method.name == "judge":
            judges.append(JudgeConfig.model_validate(self.method.settings).judge)
        return judges

    def _check_method(self, name: str, given: set[str]) -> None:
        """Check that the stage has the keys that its method needs, and no others."""
        spec = ROW_METHODS.get(name)
        needs = ("model", "data") if spec is None else (*spec.needs, "data")
        if lacking := [key for key in needs if not getattr(self, key)]:
            raise ValueError(f"{' and '.join(lacking)} missing; a stage with method {name!r} needs {', '.join(needs)}")
        assert self.data is not None
        split, others = ("train", ("rows",)) if spec is None else ("rows", ("train", "eval"))
        if getattr(self.data, split) is None:
            raise ValueError(f"data.{split} missing: the rows that the method {name!r} reads")
        if wrong := [f"data.{key}" for key in others if getattr(self.data, key) is not None]:
            raise ValueError(f"{', '.join(wrong)}: the method {name!r} reads data.{split}")
        if "environment" in given and not self.acts:
            raise ValueError("environment has only limits: set class: or turns: in it, or tools: in the stage")
        if spec is not None and (extra := given - {"name", "seed", "method", *needs, *spec.takes}):
            raise ValueError(f"{', '.join(sorted(extra))}: the method {name!r} does not use this")
        lengths = sorted(self.data.model_fields_set & {"max_length", "too_long"})
        if spec is not None and lengths and not spec.truncates:
            raise ValueError(f"data.{', data.'.join(lengths)}: the method {name!r} reads rows of any length")


class Recipe(Config, use_attribute_docstrings=True):
    """A run: its name, its seed and its stages, in order."""

    name: str = Field(pattern=f"^{NAME}$")
    out: str | None = None
    """Folder of the run. Default: runs/NAME."""
    seed: int = Field(0, ge=0, lt=2**32)
    threads: int | None = Field(None, gt=0, le=4096)
    """Number of torch threads of each process. Default: one per core."""
    parallel: Parallel = Field(default_factory=Parallel)
    """Train in several processes: {processes: 4, shard: fsdp2}."""
    stages: list[Stage] = Field(min_length=1)
    _home: Path = pydantic.PrivateAttr(Path())
    _loops: dict[str, Loop] = pydantic.PrivateAttr({})

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return expanded(self.out) if self.out else Path("runs") / self.name

    @property
    def loops(self) -> dict[str, Loop]:
        """The loops by name. Their stages are in ``stages``, once for each round."""
        return self._loops

    def seed_of(self, stage: Stage) -> int:
        """The seed of a stage."""
        return self.seed if stage.seed is None else stage.seed

    def locate(self, reference: str) -> str:
        """``file.py:name`` with a path relative to the recipe's folder; ``package.module:name`` unchanged."""
        return locate(self._home, reference)

    def beside(self, file: str) -> Path:
        """The path of a file that is named relative to the recipe's folder."""
        return self._home / expanded(file)

    def method_settings(self, method: MethodChoice) -> dict[str, Any]:
        """The settings of a method, with the paths of files and functions beside the recipe relative to its folder."""
        settings = method.settings
        settings |= {key: str(self.beside(name)) for key, name in method.files.items()}
        for (key, *inner), name in method.functions.items():
            block = settings[key] if isinstance(settings[key], dict) else {}
            where = inner[0] if inner else "name"
            settings[key] = self.locate(name) if key == "function" else {**block, where: self.locate(name)}
        return settings

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in, as plain values."""
        plain = self.model_dump(mode="json", by_alias=True)
        for stage, values in zip(self.stages, plain["stages"], strict=True):
            if stage.method:
                spec = any_spec(stage.method.name)
                values["method"] |= spec.config(**stage.method.settings).model_dump(mode="json")
                if isinstance(spec, MethodSpec):
                    values["data"]["too_long"] = values["data"]["too_long"] or spec.too_long
        return plain


def locate(home: Path, reference: str) -> str:
    """``file.py:name`` with the path of the file relative to a folder; ``package.module:name`` unchanged."""
    file, _, name = reference.rpartition(":")
    return f"{home / expanded(file)}:{name}" if file.endswith(".py") else reference


def any_spec(name: str) -> MethodSpec | RowMethodSpec:
    """The spec of a method that trains or makes rows."""
    return ROW_METHODS.get(name) or method_spec(name)


def method_spec(name: str) -> MethodSpec:
    """The spec of a method, given its name or ``package.module:Name``, which is imported.

    Raises:
        UserError: if there is no such method, or its class has no ``spec``.
    """
    if name in METHODS:
        return METHODS[name]
    spec = getattr(method_class(name), "spec", None)
    if not isinstance(spec, MethodSpec):
        raise UserError(f"method {name!r}: the attribute spec of its class must be a MethodSpec, got {spec!r}")
    return spec


def method_class(name: str) -> Any:
    """The class of a method, given its name or ``package.module:Name``. This imports torch.

    Raises:
        UserError: if there is no such method.
    """
    known = {**METHODS, **ROW_METHODS}
    reference = known[name].implementation if name in known else name
    module, colon, attribute = reference.partition(":")
    if not colon:
        names = f"methods are {', '.join(known)}; write your own as package.module:Name"
        raise UserError(f"unknown method {name!r}{did_you_mean(name, known)}; {names}")
    if not is_module(module):
        raise UserError(f"method {name!r}: there is no module {module!r}")
    home = importlib.import_module(module)
    if not hasattr(home, attribute):
        raise UserError(f"method {name!r}: {module} has no {attribute!r}{did_you_mean(attribute, vars(home))}")
    return getattr(home, attribute)


def is_module(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
