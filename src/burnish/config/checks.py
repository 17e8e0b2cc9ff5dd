"""What can be wrong with a recipe, found before anything is loaded."""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pydantic

from burnish.config.schema import (
    Data,
    PackageModel,
    Recipe,
    RewardSource,
    Stage,
    StageData,
    StageModel,
    is_module,
    method_spec,
)
from burnish.config.yaml import Keys, Problem, find, mistakes, shown
from burnish.data.readers import READERS
from burnish.errors import UserError, did_you_mean
from burnish.generate.sampling import Sampling
from burnish.methods import METHODS
from burnish.models.settings import AdapterConfig
from burnish.render.templates import PLAIN_TEMPLATES
from burnish.training.arguments import IGNORED, OWN
from burnish.types import Prompt

# Keys of TrainingArguments that a recipe may not set, and what to write instead.
OWNED = IGNORED | {
    "output_dir": "a stage writes to runs/NAME/STAGE; set out: to choose the folder of the run",
    "seed": "one seed rules a run: set seed: at the top of the recipe",
    "data_seed": "one seed rules a run: set seed: at the top of the recipe",
    "gradient_accumulation_steps": "per_device_train_batch_size is the rows of a step; token_budget: bounds the memory",
    "auto_find_batch_size": "when memory runs out, the token budget is halved and the step is done again",
    "resume_from_checkpoint": "an unfinished run goes on by itself; --fresh starts over",
    "ignore_data_skip": "the state of the data loader is saved and restored",
    "remove_unused_columns": "a method decides which columns it reads",
    "label_names": "a method decides what it learns",
    "parallelism_config": "it can only be given from Python",
    "use_cpu": "a GPU is used where there is one: CUDA_VISIBLE_DEVICES= before the command hides it",
    "do_train": "a stage always trains",
    "do_eval": "data.eval is evaluated before and after training, and as trainer.eval_strategy says",
    "do_predict": "use burnish generate",
}
LOW_RANK = ("galore", "apollo")
# Beginnings of the names of optimizers that have no betas.
NOT_ADAM = ("adafactor", "adagrad", "adalomo", "galore", "grokadamw", "lomo", "rmsprop", "schedule_free_sgd", "sgd")
_GALORE = ("rank", "update_proj_gap", "scale", "proj_type")
# What each optimizer of transformers reads in optim_args; any other reads nothing. None: all of it is passed on.
OPTIM_ARGS: dict[str, tuple[str, ...] | None] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
    "adamw_anyprecision": (
        "use_kahan_summation",
        "momentum_dtype",
        "variance_dtype",
        "compensation_buffer_dtype",
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("block_size", "bf16_stochastic_round")),
    **dict.fromkeys(
        ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3"),
    ),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")),
    **{f"galore_{kind}{each}": _GALORE for each in ("", "_layerwise") for kind in ("adamw", "adamw_8bit", "adafactor")},
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), (*_GALORE, "proj", "scale_type")),
    "grokadamw": ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), ("weight_lr_power", "r")),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
}


# --- checks of values ---------------------------------------------------------------------------------------------


def shape_problems(value: dict[str, Any]) -> Iterator[Problem]:
    """Unknown keys, wrong types and wrong values, all over the recipe."""
    try:
        Recipe.model_validate(value)
    except pydantic.ValidationError as error:
        for path, text in mistakes(error, Recipe, value):
            home = _home(path, value) if text.startswith("unknown key") else None
            yield Problem(path, f"unknown key here; it belongs to {home}" if home else text)
    stages = value["stages"] if isinstance(value["stages"], list) else []
    for index, stage in enumerate(stages):
        at = ("stages", index)
        if isinstance(name := find(stage, ("method", "name")), str):
            yield from _method_problems(name, stage["method"], (*at, "method"))
        if isinstance(trainer := find(stage, ("trainer",)), dict):
            yield from _trainer_problems(trainer, (*at, "trainer"))


def _home(path: Keys, value: dict[str, Any]) -> str | None:
    """Where a key that stands one level too high belongs: ``trainer.learning_rate``."""
    from transformers import TrainingArguments

    key = str(path[-1])
    if len(path) == 1:
        return f"a stage: stages.NAME.{key}" if key in Stage.model_fields else None
    if len(path) != 3:
        return None
    blocks: dict[str, Any] = {"data": Data, "generation": Sampling, "adapter": AdapterConfig}
    name = find(value, (*path[:2], "method", "name"))
    if name in METHODS:
        blocks["method"] = METHODS[name].config
    fields = {block: set(config.model_fields) for block, config in blocks.items()}
    fields["trainer"] = {field.name for field in dataclasses.fields(TrainingArguments)} - set(OWNED) | set(OWN)
    return next((f"{block}: {block}.{key}" for block, known in fields.items() if key in known), None)


def _method_problems(name: str, value: dict[str, Any], at: Keys) -> Iterator[Problem]:
    try:
        config = method_spec(name).config
    except UserError as error:
        yield Problem((*at, "name"), str(error))
        return
    settings = {key: value[key] for key in value if key != "name"}
    try:
        config.model_validate(settings)
    except pydantic.ValidationError as error:
        yield from (Problem((*at, *path), text) for path, text in mistakes(error, config, settings))


def _trainer_problems(trainer: dict[str, Any], at: Keys) -> Iterator[Problem]:
    from transformers import TrainingArguments

    types = get_type_hints(TrainingArguments)
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    for key, value in trainer.items():
        if key in OWN:
            if value not in OWN[key]:
                near = did_you_mean(value, OWN[key]) if isinstance(value, str) else ""
                yield Problem((*at, key), f"expected {' or '.join(OWN[key])}, got {shown(value)}{near}")
        elif key in OWNED:
            yield Problem((*at, key), f"this key is not for recipes: {OWNED[key]}")
        elif key not in fields:
            free = [*OWN, *(name for name in fields if name not in OWNED)]
            yield Problem((*at, key), f"no field of TrainingArguments{did_you_mean(key, free)}")
        elif key == "report_to":
            yield from (Problem((*at, key), text) for text in _tracker_problems(value))
        elif (expected := _unfit(value, types[key], fields[key].default)) is not None:
            near = did_you_mean(value, expected.split(", ")) if isinstance(value, str) else ""
            yield Problem((*at, key), f"expected {expected}, got {shown(value)}{near}")
        elif value != fields[key].default and (text := _unread(key, trainer)):
            yield Problem((*at, key), text)
        elif key == "optim_args" and value:
            yield from (Problem((*at, key), text) for text in _optim_args_problems(value, trainer))


def _optim_args_problems(written: str, trainer: dict[str, Any]) -> Iterator[str]:
    """Optimizers take what they know of optim_args and leave the rest; most of them know nothing."""
    from transformers import TrainingArguments

    optimizer = trainer.get("optim", TrainingArguments.optim)
    if optimizer not in OPTIM_ARGS:
        yield f"{optimizer} reads no optim_args; those that do are {', '.join(OPTIM_ARGS)}"
        return
    known = OPTIM_ARGS[optimizer]
    for part in written.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value) or "=" in value:
            yield f"expected name=value, name=value, got {written!r}"
        elif name == "weight_decay":
            yield "weight_decay is overruled by trainer.weight_decay: set it there"
        elif known is not None and name not in known:
            yield f"{optimizer} does not read {name!r}{did_you_mean(name, known)}; it reads {', '.join(known)}"


def _unread(key: str, trainer: dict[str, Any]) -> str | None:
    """Why a field of TrainingArguments does nothing beside the others, None where it is read."""
    from transformers import TrainingArguments

    reasons = _read_with().get(key, {})
    given = {other: trainer.get(other, getattr(TrainingArguments, other)) for other in reasons}
    for other, values in reasons.items():
        if any(value in values for value in (given[other] if isinstance(given[other], list) else [given[other]])):
            return None
    here = " and ".join(f"{other}: {str(value).lower()}" for other, value in given.items())
    ways = " or ".join(f"{other}: {_first(values)}" for other, values in reasons.items())
    return f"nothing reads it with {here}; it belongs to {ways}" if reasons else None


def _first(values: list[Any], count: int = 6) -> str:
    names = [str(value).lower() for value in values]
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def _read_with() -> dict[str, dict[str, list[Any]]]:
    """Fields that are read only where another field has one of these values; one of several fields is enough."""
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    schedules = [str(kind.value) for kind in SchedulerType]
    optimizers = [str(kind.value) for kind in OptimizerNames]
    adam = [name for name in optimizers if not name.startswith(NOT_ADAM)]
    decays = [name for name in schedules if name not in ("constant", "reduce_lr_on_plateau", "greedy")]
    best = {"load_best_model_at_end": [True], "save_strategy": ["best"]}
    best |= {"lr_scheduler_type": ["reduce_lr_on_plateau", "greedy"]}
    saves = {"save_strategy": ["steps", "epoch", "best"]}
    checkpointing = {"activation_checkpointing": [True], "gradient_checkpointing": [True]}
    hub = ("hub_always_push", "hub_model_id", "hub_revision", "hub_strategy", "hub_token")
    trackio = ("project", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id")
    return {
        "activation_checkpointing_kwargs": checkpointing,
        "adam_beta1": {"optim": adam},
        "adam_beta2": {"optim": adam},
        "adam_epsilon": {"optim": [name for name in adam if "lion" not in name]},
        "eval_delay": {"eval_strategy": ["steps", "epoch"]},
        "eval_steps": {"eval_strategy": ["steps"]},
        "gradient_checkpointing_kwargs": checkpointing,
        "greater_is_better": best,
        "liger_kernel_config": {"use_liger_kernel": [True]},
        "logging_steps": {"logging_strategy": ["steps"], "eval_strategy": ["steps"]},
        "lr_scheduler_kwargs": {
            "lr_scheduler_type": [name for name in schedules if not name.startswith("constant")],
        },
        "metric_for_best_model": best,
        "optim_target_modules": {"optim": [name for name in optimizers if name.startswith(LOW_RANK)]},
        "save_only_model": saves,
        "save_steps": {"save_strategy": ["steps"]},
        "save_total_limit": saves,
        "warmup_steps": {"lr_scheduler_type": decays, "optim": ["schedule_free_adamw", "schedule_free_sgd"]},
        "weight_decay": {"optim": [name for name in optimizers if not name.startswith((*LOW_RANK, "lomo", "adalomo"))]},
        **{key: {"push_to_hub": [True]} for key in hub},
        **{key: {"report_to": ["trackio", "all"]} for key in trackio},
        "hub_private_repo": {"push_to_hub": [True], "report_to": ["trackio", "all"]},
    }


def _tracker_problems(value: Any) -> Iterator[str]:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in value if isinstance(value, list) else [value]:
        known = [*INTEGRATION_TO_CALLBACK, "none", "all"]
        if name is not None and name not in known:
            near = did_you_mean(name, known) if isinstance(name, str) else ""
            yield f"expected {', '.join(known)}, got {shown(name)}{near}"
        elif name in INTEGRATION_TO_CALLBACK and name not in get_available_reporting_integrations():
            yield f"{name} is not installed: pip install {name}"


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _unfit(value: Any, hint: Any, default: Any) -> str | None:
    """What was expected of a TrainingArguments field, or None where the value is right.

    The fields have no bounds: a number below 0 is taken for a mistake where the default is not below 0 itself.
    """
    branches = get_args(hint) or (hint,)
    kinds = [branch for branch in branches if isinstance(branch, type) and issubclass(branch, enum.Enum)]
    if kinds:
        choices = [str(member.value) for member in kinds[0]]
        return None if value in choices else ", ".join(choices)
    adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(strict=True))
    try:
        adapter.validate_python(value)
    except pydantic.ValidationError:
        names = (_NAMES.get(b) or ("a list" if "list" in str(b) else "a block of keys") for b in branches)
        return " or ".join(dict.fromkeys(names))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and value < 0 and not (isinstance(default, int | float) and default < 0):
        return "0 or more"
    return None


# --- checks of what values refer to -------------------------------------------------------------------------------


def _sources(stage: Stage) -> Iterator[tuple[Keys, Any]]:
    """Every model and data source of a stage, with its path below the stage."""
    yield ("model",), stage.model
    if stage.data:
        mixed = isinstance(stage.data.train, list)
        for index, part in enumerate(stage.data.parts("train")):
            yield ("data", "train", *((index, "from") if mixed else ())), part.source
        yield ("data", "eval"), stage.data.eval
    for index, reward in enumerate(stage.reward):
        yield ("reward", index, "model"), reward.model


def reference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Stages that do not exist, come too late or share a name; templates that do not exist."""
    names = [stage.name for stage in recipe.stages]
    for index, stage in enumerate(recipe.stages):
        earlier = names[:index]
        if stage.name in earlier:
            yield Problem(("stages", index, "name"), f"two stages are called {stage.name!r}")
        for path, source in _sources(stage):
            if not isinstance(source, StageModel | StageData) or source.stage in earlier:
                continue
            have = f"earlier stages are {', '.join(earlier)}" if earlier else "this is the first stage"
            late = "is not an earlier stage" if source.stage in names else "is no stage"
            text = f"{source.stage!r} {late}{did_you_mean(source.stage, earlier)}; {have}"
            yield Problem(("stages", index, *path, "stage"), text)
        templates = [(("template",), stage.template)]
        templates += [(("reward", i, "template"), reward.template) for i, reward in enumerate(stage.reward)]
        for path, name in templates:
            if name is not None and name not in PLAIN_TEMPLATES:
                text = f"unknown template {name!r}{did_you_mean(name, PLAIN_TEMPLATES)}"
                yield Problem(("stages", index, *path), f"{text}; templates are {', '.join(PLAIN_TEMPLATES)}")
        if stage.method and (text := _reward_problem(stage.method.name, stage.reward)):
            yield Problem(("stages", index, "reward"), text)
        if stage.method and stage.data and stage.data.stream:
            yield from (Problem(("stages", index, *path), text) for path, text in _stream_problems(stage))
        evaluates = stage.trainer.get("eval_strategy", "no") != "no"
        if stage.data and evaluates and stage.data.eval is None:
            yield Problem(("stages", index, "trainer", "eval_strategy"), "no rows for it: data.eval is missing")


def _stream_problems(stage: Stage) -> Iterator[tuple[Keys, str]]:
    assert stage.method is not None
    if not method_spec(stage.method.name).streams:
        yield ("data", "stream"), f"method {stage.method.name!r} needs all of its rows at once; take this key away"
    if stage.trainer.get("max_steps", -1) <= 0:
        yield ("data", "stream"), "a stream has no end: set trainer.max_steps to the steps of the run"


def _reward_problem(method: str, rewards: list[RewardSource]) -> str | None:
    """A method that samples completions needs something that scores them; any other would ignore it."""
    kinds = method_spec(method).kinds
    samples = Prompt in kinds
    if kinds == (Prompt,) and not rewards:
        return f"method {method!r} needs a reward: [{{model: {{stage: NAME}}}}] or [{{function: file.py:name}}]"
    return f"method {method!r} uses no reward; take this key away" if rewards and not samples else None


def file_problems(recipe: Recipe) -> Iterator[Problem]:
    """Files, folders, packages and functions that are not there."""
    for index, stage in enumerate(recipe.stages):
        for path, source in _sources(stage):
            text = None
            if isinstance(source, str):
                text = data_problem(source) if path[0] == "data" else model_problem(source)
            elif isinstance(source, PackageModel) and source.hub is None and not is_module(source.package):
                text = f"package {source.package!r} is not installed, and no hub: names its model elsewhere"
            if text:
                yield Problem(("stages", index, *path), text)
        functions = [(("run",), stage.run)]
        functions += [(("reward", i, "function"), reward.function) for i, reward in enumerate(stage.reward)]
        for path, reference in functions:
            if reference and (text := function_problem(recipe.locate(reference))):
                yield Problem(("stages", index, *path), text)


def _is_hub_id(source: str) -> bool:
    """Whether what is not here may be on the hub: ``owner/name``, with no folder ``owner`` here."""
    owner, slash, _ = source.partition("/")
    shape = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+){0,2}", source)
    return bool(shape) and not source.endswith((*READERS, ".gguf", ".gz")) and not (slash and Path(owner).is_dir())


def _missing(source: str, what: str) -> str:
    path = Path(source).expanduser()
    beside = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    home = "" if path.parent.is_dir() else f"; there is no folder {path.parent}"
    return f"no such {what}: {source}{did_you_mean(str(path), beside)}{home}; paths start at {Path.cwd()}"


def data_problem(source: str) -> str | None:
    """What is wrong with the name of a file, folder or data set of rows, None where nothing is."""
    name, _, _ = source.partition(":")  # a folder or a hub id may end in :split
    path = Path(source if Path(source).exists() else name)
    if not path.exists():
        return None if "/" in name and _is_hub_id(name) else _missing(source, "file")
    ending = Path(path.name.removesuffix(".gz")).suffix
    if path.is_file() and ending not in READERS:
        return f"{source}: cannot read {ending or 'a file without ending'}; expected {', '.join(READERS)}"
    return None


def model_problem(source: str) -> str | None:
    """What is wrong with the name of a model, None where nothing is."""
    path = Path(source).expanduser()
    if not path.exists():
        return None if _is_hub_id(source) else _missing(source, "model")
    if path.is_file():
        return None if path.suffix == ".gguf" else f"{source}: a model is a folder, a .gguf file or a hub id"
    folders = [path, path / "model"]
    if any((folder / name).is_file() for folder in folders for name in ("config.json", "adapter_config.json")):
        return None
    if any(path.glob("*.gguf")):
        return None
    near = next((f"; did you mean {str(p.parent)!r}?" for p in sorted(path.glob("*/config.json"))), "")
    return f"{source}: no model in this folder: it has no config.json{near}"


def function_problem(reference: str) -> str | None:
    """What is wrong with ``file.py:name`` or ``package.module:name``, None where nothing is."""
    file, colon, name = reference.rpartition(":")
    if not colon:
        return f"expected file.py:name or package.module:name, got {reference!r}"
    if not file.endswith(".py"):
        return None if is_module(file) else f"there is no module {file!r}"
    if not Path(file).is_file():
        return _missing(file, "file")
    try:
        body = ast.parse(Path(file).read_text("utf-8")).body
    except SyntaxError as error:
        return f"{file}:{error.lineno}: not valid Python: {error.msg}"
    known = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    known |= {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return None if name in known else f"{file} defines no {name!r}{did_you_mean(name, known)}"
