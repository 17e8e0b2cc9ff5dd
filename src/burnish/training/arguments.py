"""The settings of the trainer, and the fields of transformers.TrainingArguments that Burnish does not use.

This module does not import torch, so that checking a recipe is fast.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from burnish.errors import UserError, did_you_mean
from burnish.types import Config

if TYPE_CHECKING:
    from transformers import TrainingArguments

OnNonFinite = Literal["error", "skip"]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
]
Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adafactor",
    "adamw_anyprecision",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "ademamix",
    "sgd",
    "adagrad",
    "adamw_bnb_8bit",
    "adamw_8bit",
    "ademamix_8bit",
    "lion_8bit",
    "lion_32bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "galore_adamw",
    "galore_adamw_8bit",
    "galore_adafactor",
    "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise",
    "galore_adafactor_layerwise",
    "lomo",
    "adalomo",
    "grokadamw",
    "schedule_free_radam",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "apollo_adamw",
    "apollo_adamw_layerwise",
    "stable_adamw",
]
Tracker = Literal[
    "azure_ml",
    "comet_ml",
    "mlflow",
    "neptune",
    "tensorboard",
    "trackio",
    "wandb",
    "codecarbon",
    "clearml",
    "dagshub",
    "flyte",
    "dvclive",
    "swanlab",
    "kubeflow",
    "all",
    "none",
]


class TrainerConfig(Config):
    """How a stage trains: the fields of transformers.TrainingArguments that Burnish uses, and ``on_non_finite``.

    ``TrainerConfig(learning_rate=1e-4, num_train_epochs=2)``. The defaults are those of transformers, except for
    ``num_train_epochs``, ``logging_steps``, ``save_steps`` and ``save_total_limit``.
    """

    # rows and steps
    per_device_train_batch_size: int = Field(
        default=8, ge=1, description="rows of an optimizer step, over all processes"
    )
    num_train_epochs: float = Field(default=1.0, gt=0, description="passes over the training rows")
    max_steps: int = Field(
        default=-1, ge=-1, description="optimizer steps of the run; above 0 it overrides num_train_epochs"
    )
    # the optimizer
    optim: Optimizer = Field(default="adamw_torch_fused", description="optimizer")
    optim_args: str | None = Field(default=None, description="arguments of the optimizer: name=value, name=value")
    optim_target_modules: str | list[str] | None = Field(
        default=None, description="the modules that galore and apollo optimize"
    )
    learning_rate: float = Field(default=5e-5, ge=0, description="peak learning rate")
    lr_scheduler_type: Schedule = Field(default="linear", description="how the learning rate changes over the run")
    lr_scheduler_kwargs: dict[str, Any] | None = Field(
        default=None, description="arguments of the schedule: {min_lr: 1e-6}"
    )
    warmup_steps: float = Field(
        default=0, ge=0, description="steps over which the learning rate rises; below 1: a share of all steps"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay, except for biases and norms")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of gradients")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of squared gradients")
    adam_epsilon: float = Field(default=1e-8, ge=0, description="added to the denominator of the update")
    max_grad_norm: float = Field(default=1.0, ge=0, description="gradients are clipped to this norm; 0 does not clip")
    on_non_finite: OnNonFinite = Field(
        default="error", description="if a loss or gradient is not finite: stop, or skip the step"
    )
    # precision, memory and speed
    tf32: bool | None = Field(default=None, description="TF32 matrix products on a GPU; default: torch's setting")
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory"
    )
    activation_checkpointing_kwargs: dict[str, Any] | None = Field(default=None, description="{use_reentrant: false}")
    torch_compile: bool = Field(default=False, description="compile the model")
    torch_compile_backend: str | None = Field(default=None, description="backend of torch.compile")
    torch_compile_mode: str | None = Field(default=None, description="mode of torch.compile")
    use_liger_kernel: bool = Field(default=False, description="use the kernels of the package liger-kernel, on a GPU")
    liger_kernel_config: dict[str, bool] | None = Field(
        default=None, description="kernels to use: {rope: true, swiglu: false}"
    )
    neftune_noise_alpha: float | None = Field(
        default=None, ge=0, description="noise on the embeddings during training (NEFTune)"
    )
    full_determinism: bool = Field(
        default=False, description="use torch's deterministic algorithms, which may be slower"
    )
    # logs
    logging_strategy: Literal["no", "steps", "epoch"] = Field(default="steps", description="when metrics are logged")
    logging_steps: float = Field(
        default=1, gt=0, description="steps between two log lines; below 1: a share of all steps"
    )
    logging_first_step: bool = Field(default=False, description="also log the first step")
    report_to: Tracker | list[Tracker] = Field(
        default="none", description="experiment trackers, in addition to metrics.jsonl"
    )
    run_name: str | None = Field(default=None, description="name of the run in the tracker")
    project: str = Field(default="huggingface", description="trackio: project")
    trackio_space_id: str | None = Field(default=None, description="trackio: Space to log to")
    trackio_bucket_id: str | None = Field(default=None, description="trackio: bucket of the Space")
    trackio_static_space_id: str | Literal[False] | None = Field(
        default=None, description="trackio: static Space; false: none"
    )
    # evaluation on data.eval
    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        default="no", description="when data.eval is evaluated, in addition to before and after training"
    )
    eval_steps: float | None = Field(
        default=None, gt=0, description="steps between two evaluations; default: logging_steps"
    )
    eval_delay: float = Field(default=0, ge=0, description="epochs or steps before the first evaluation")
    # checkpoints
    save_strategy: Literal["no", "steps", "epoch", "best"] = Field(
        default="steps", description="when checkpoints are written"
    )
    save_steps: float = Field(
        default=0.25, gt=0, description="steps between two checkpoints; below 1: a share of all steps"
    )
    save_total_limit: int | None = Field(
        default=1, ge=1, description="maximum number of checkpoints to keep; null keeps all"
    )
    save_only_model: bool = Field(
        default=False, description="save checkpoints without the optimizer; a run cannot resume from them"
    )
    load_best_model_at_end: bool = Field(default=False, description="end with the weights of the best checkpoint")
    metric_for_best_model: str | None = Field(
        default=None, description="metric of data.eval that decides which checkpoint is best"
    )
    greater_is_better: bool | None = Field(default=None, description="whether a larger metric is better")
    # the hub
    push_to_hub: bool = Field(default=False, description="push the model to the hub")
    hub_model_id: str | None = Field(default=None, description="repository to push to")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = Field(
        default="every_save", description="what is pushed, and when"
    )
    hub_private_repo: bool | None = Field(default=None, description="whether the repository is private")
    hub_always_push: bool = Field(default=False, description="push even if the last push has not finished")
    hub_revision: str | None = Field(default=None, description="branch to push to")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of transformers.TrainingArguments."""
        return self.model_dump(exclude={"on_non_finite"}, exclude_none=True)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Fields that contradict the others, or have no effect: ``("eval_steps", "nothing reads it with ...")``."""
        for key, readers in READ_WITH.items():
            value = getattr(self, key)
            if value == type(self).model_fields[key].default or self._is_read(readers):
                continue
            here = " and ".join(f"{other}: {_yaml(getattr(self, other))}" for other in readers)
            ways = " or ".join(f"{other}: {_first(values)}" for other, values in readers.items())
            yield key, f"nothing reads it with {here}; it belongs to {ways}"
        if self.optim_args:
            yield from (("optim_args", text) for text in _optim_args_problems(self.optim, self.optim_args))
        problems = self._schedule_problems(self.lr_scheduler_kwargs or {})
        yield from (("lr_scheduler_kwargs", text) for text in problems)
        package = next((name for start, name in PACKAGES.items() if self.optim.startswith(start)), None)
        if package and importlib.util.find_spec(package) is None:
            name = PIP_NAMES.get(package, package)
            yield "optim", f"{self.optim} needs the package {package}, which is not installed: pip install {name}"
        if self.save_strategy == "best" and self.metric_for_best_model is None:
            yield "save_strategy", "best needs metric_for_best_model, such as loss"

    def _schedule_problems(self, given: dict[str, Any]) -> Iterator[str]:
        """Problems in lr_scheduler_kwargs: names that the schedule does not take, and values of the wrong kind."""
        if self.lr_scheduler_type.startswith("constant"):  # reported as a field that has no effect
            return
        known = SCHEDULE_ARGS.get(self.lr_scheduler_type, {})
        for name, value in given.items():
            if name not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                yield f"{self.lr_scheduler_type} takes no {name!r}{did_you_mean(name, known)}; {takes}"
            elif not known[name](value):
                yield f"{name}: {self.lr_scheduler_type} does not take the value {value!r}"
        if self.lr_scheduler_type == "warmup_stable_decay" and "num_decay_steps" not in given:
            yield "warmup_stable_decay needs num_decay_steps"
        if "min_lr_rate" in known and ("min_lr" in given) == ("min_lr_rate" in given):
            yield f"{self.lr_scheduler_type} needs either min_lr or min_lr_rate"
        end = given.get("lr_end", 1e-7)
        if self.lr_scheduler_type == "polynomial" and _is_number(end) and end >= self.learning_rate:
            yield f"lr_end must be less than learning_rate, {self.learning_rate:g}"

    def _is_read(self, readers: dict[str, Collection[Any]]) -> bool:
        given = ((getattr(self, other), values) for other, values in readers.items())
        return any(one in values for value, values in given for one in (value if isinstance(value, list) else [value]))


# --- fields that need another one ---------------------------------------------------------------------------------

LOW_RANK = ("galore", "apollo")
# Prefixes of the names of optimizers without betas.
NOT_ADAM = ("adafactor", "adagrad", "adalomo", "galore", "grokadamw", "lomo", "rmsprop", "schedule_free_sgd", "sgd")
_SCHEDULES: tuple[str, ...] = Schedule.__args__
_OPTIMIZERS: tuple[str, ...] = Optimizer.__args__
_ADAM = [name for name in _OPTIMIZERS if not name.startswith(NOT_ADAM)]
_BEST: dict[str, Collection[Any]] = {
    "load_best_model_at_end": [True],
    "save_strategy": ["best"],
    "lr_scheduler_type": ["reduce_lr_on_plateau", "greedy"],
}
_SAVES: dict[str, Collection[Any]] = {"save_strategy": ["steps", "epoch", "best"]}
_TRACKIO: dict[str, Collection[Any]] = {"report_to": ["trackio", "all"]}
_PUSHES: dict[str, Collection[Any]] = {"push_to_hub": [True]}
READ_WITH: dict[str, dict[str, Collection[Any]]] = {
    "activation_checkpointing_kwargs": {"activation_checkpointing": [True]},
    "adam_beta1": {"optim": _ADAM},
    "adam_beta2": {"optim": _ADAM},
    "adam_epsilon": {"optim": [name for name in _ADAM if "lion" not in name]},
    "eval_delay": {"eval_strategy": ["steps", "epoch"]},
    "eval_steps": {"eval_strategy": ["steps"]},
    "greater_is_better": _BEST,
    "hub_always_push": _PUSHES,
    "hub_model_id": _PUSHES,
    "hub_private_repo": _PUSHES | _TRACKIO,
    "hub_revision": _PUSHES,
    "hub_strategy": _PUSHES,
    "liger_kernel_config": {"use_liger_kernel": [True]},
    "logging_steps": {"logging_strategy": ["steps"], "eval_strategy": ["steps"]},
    "lr_scheduler_kwargs": {"lr_scheduler_type": [name for name in _SCHEDULES if not name.startswith("constant")]},
    "metric_for_best_model": _BEST,
    "optim_target_modules": {"optim": [name for name in _OPTIMIZERS if name.startswith(LOW_RANK)]},
    "project": _TRACKIO,
    "save_only_model": _SAVES,
    "save_steps": {"save_strategy": ["steps"]},
    "save_total_limit": _SAVES,
    "torch_compile_backend": {"torch_compile": [True]},
    "torch_compile_mode": {"torch_compile": [True]},
    "trackio_bucket_id": _TRACKIO,
    "trackio_space_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "warmup_steps": {
        "lr_scheduler_type": [n for n in _SCHEDULES if n not in ("constant", "reduce_lr_on_plateau", "greedy")],
        "optim": ["schedule_free_adamw", "schedule_free_sgd"],
    },
    "weight_decay": {"optim": [n for n in _OPTIMIZERS if not n.startswith((*LOW_RANK, "lomo", "adalomo"))]},
}
"""Fields that are read only if at least one of these other fields has one of these values."""

_GALORE = ("rank", "update_proj_gap", "scale", "proj_type")
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
"""The names that each optimizer reads from optim_args; None if it reads any name. Other optimizers read nothing."""


PACKAGES = {
    "adamw_torch_xla": "torch_xla",
    "adamw_torch_npu": "torch_npu",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "adamw_anyprecision": "torchdistx",
    **dict.fromkeys(("adamw_bnb", "adamw_8bit", "ademamix", "lion", "paged", "rmsprop_bnb"), "bitsandbytes"),
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "adalomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
}
"""The packages that optimizers need, by the beginning of their names. Other optimizers are part of torch."""
PIP_NAMES = {"optimi": "torch-optimi"}
"""Names of packages for pip, if they differ from those of their modules."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_true_or_false(value: Any) -> bool:
    return isinstance(value, bool)


def _one_of(*choices: str) -> Callable[[Any], bool]:
    return lambda value: value in choices


_SHAPE = _one_of("linear", "cosine", "1-sqrt")
_PLATEAU: dict[str, Callable[[Any], bool]] = {
    "mode": _one_of("min", "max"),
    **dict.fromkeys(("factor", "threshold", "min_lr", "eps"), _is_number),
    **dict.fromkeys(("patience", "cooldown"), _is_count),
}
_MIN_LR: dict[str, Callable[[Any], bool]] = dict.fromkeys(("num_cycles", "min_lr", "min_lr_rate"), _is_number)
SCHEDULE_ARGS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "cosine": {"num_cycles": _is_number},
    "cosine_with_restarts": {"num_cycles": _is_count},
    "polynomial": {"lr_end": _is_number, "power": _is_number},
    "inverse_sqrt": {"timescale": lambda value: _is_count(value) and value > 0},
    "reduce_lr_on_plateau": {**_PLATEAU, "threshold_mode": _one_of("rel", "abs")},
    "greedy": {
        **_PLATEAU,
        "threshold_mode": _one_of("rel", "abs"),
        "max_lr": _is_number,
        **dict.fromkeys(("warmup", "window_size", "reset_start"), _is_count),
        **dict.fromkeys(("verbose", "smooth"), _is_true_or_false),
    },
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": {**_MIN_LR, "warmup_lr_rate": _is_number},
    "warmup_stable_decay": {
        **dict.fromkeys(("num_decay_steps", "num_stable_steps"), _is_count),
        **dict.fromkeys(("warmup_type", "decay_type"), _SHAPE),
        **dict.fromkeys(("min_lr_ratio", "num_cycles"), _is_number),
    },
}
"""What each schedule takes from lr_scheduler_kwargs, with a check of the value."""


def _optim_args_problems(optimizer: str, written: str) -> Iterator[str]:
    """Problems in optim_args. Optimizers silently ignore names that they do not know."""
    if optimizer not in OPTIM_ARGS:
        yield f"{optimizer} reads no optim_args; these do: {', '.join(OPTIM_ARGS)}"
        return
    known = OPTIM_ARGS[optimizer]
    for part in written.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value) or "=" in value:
            yield f"expected name=value, name=value, got {written!r}"
        elif name == "weight_decay":
            yield "trainer.weight_decay overrides weight_decay: set it there"
        elif known is not None and name not in known:
            yield f"{optimizer} does not read {name!r}{did_you_mean(name, known)}; it reads {', '.join(known)}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _first(values: Collection[Any], count: int = 6) -> str:
    names = [_yaml(value) for value in values]
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


# --- fields that Burnish does not use -----------------------------------------------------------------------------

_LOADED = "rows are encoded before training or in the buffers of a stream, without worker processes"
_MEASURED = "methods evaluate held-out rows themselves and keep no predictions"
_SUMMED = "gradients are summed over processes after the last micro-batch, without DistributedDataParallel"
_ORDERED = "the seed determines the order of rows, and a token budget groups them by length"

IGNORED = {
    "average_tokens_across_devices": "the loss of a step is always divided by the counts of all processes",
    "batch_eval_metrics": _MEASURED,
    "bf16_full_eval": "evaluation uses the precision of training",
    "data_seed": "a run has one seed: set seed at the top of the recipe",
    "dataloader_drop_last": "the last step of an epoch trains on the remaining rows",
    "dataloader_in_order": _LOADED,
    "dataloader_multiprocessing_context": _LOADED,
    "dataloader_num_workers": _LOADED,
    "dataloader_persistent_workers": _LOADED,
    "dataloader_pin_memory": _LOADED,
    "dataloader_prefetch_factor": _LOADED,
    "ddp_broadcast_buffers": _SUMMED,
    "ddp_bucket_cap_mb": _SUMMED,
    "ddp_find_unused_parameters": _SUMMED,
    "ddp_static_graph": _SUMMED,
    "eval_accumulation_steps": _MEASURED,
    "eval_do_concat_batches": _MEASURED,
    "eval_use_gather_object": _MEASURED,
    "fp16_full_eval": "evaluation uses the precision of training",
    "include_for_metrics": _MEASURED,
    "include_num_input_tokens_seen": "every line of the log reports the tokens of its steps",
    "label_smoothing_factor": "methods with label smoothing have a separate setting for it",
    "length_column_name": _ORDERED,
    "per_device_eval_batch_size": "token_budget limits micro-batches in training and evaluation",
    "prediction_loss_only": _MEASURED,
    "torch_empty_cache_steps": "when memory runs out, the cache is emptied and the token budget is halved",
    "train_sampling_strategy": _ORDERED,
}
"""Fields of TrainingArguments that ``burnish.Trainer`` does not read, and why. Setting one from Python is a warning."""

_PROCESSES = "the key parallel starts and connects the processes of a run"
_SHARDED = "shard the weights with parallel.shard: fsdp2"
_SHOWN = "the live view and metrics.jsonl show the run"
_AUTOMATIC = "an unfinished run resumes automatically; --fresh starts over"

_PRECISION = "the stage's key precision decides: float32, bf16 or fp16"

ABSENT = IGNORED | {
    "accelerator_config": _LOADED,
    "auto_find_batch_size": "when memory runs out, the token budget is halved and the step is repeated",
    "bf16": _PRECISION,
    "ddp_backend": _PROCESSES,
    "ddp_timeout": _PROCESSES,
    "debug": "on_non_finite reports the first NaN or infinite number",
    "deepspeed": _SHARDED,
    "disable_tqdm": _SHOWN,
    "do_eval": "data.eval is evaluated before and after training, and according to trainer.eval_strategy",
    "do_predict": "use burnish generate",
    "do_train": "a stage always trains",
    "enable_jit_checkpoint": "a killed run resumes from its last complete checkpoint: set save_steps",
    "eval_on_start": "data.eval is always evaluated before training",
    "fp16": _PRECISION,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "gradient_accumulation_steps": "per_device_train_batch_size sets the rows of a step; token_budget limits memory",
    "hub_token": "the manifest contains a copy of the recipe, which must not hold secrets: set the variable HF_TOKEN",
    "ignore_data_skip": "the state of the data loader is saved and restored",
    "label_names": "the method decides what is learned",
    "local_rank": _PROCESSES,
    "log_level": _SHOWN,
    "log_level_replica": _PROCESSES,
    "log_on_each_node": _PROCESSES,
    "logging_nan_inf_filter": "all numbers are logged unchanged; on_non_finite decides what happens to the step",
    "output_dir": "a stage writes to runs/NAME/STAGE; set out: to choose the folder of the run",
    "parallelism_config": _PROCESSES,
    "remove_unused_columns": "the method decides which columns it reads",
    "restore_callback_states_from_checkpoint": _AUTOMATIC,
    "resume_from_checkpoint": _AUTOMATIC,
    "save_on_each_node": _PROCESSES,
    "seed": "a run has one seed: set seed at the top of the recipe",
    "skip_memory_metrics": "Burnish does not report the memory in use",
    "use_cache": "training passes never use a key/value cache",
    "use_cpu": "a GPU is used if there is one: set CUDA_VISIBLE_DEVICES= to hide it",
}
"""Fields of TrainingArguments that a recipe may not set, and why."""

_DERIVED = {"average_tokens_across_devices", "dataloader_pin_memory"}  # TrainingArguments changes these itself


def check_arguments(args: TrainingArguments, on_non_finite: str) -> None:
    """Raise a UserError for arguments with which the trainer cannot run."""
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs in one process: start one process for each (torchrun --nproc-per-node {args.n_gpu} "
            "...), or choose one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    for name, variable in (("deepspeed", "ACCELERATE_USE_DEEPSPEED"), ("fsdp", "ACCELERATE_USE_FSDP")):
        if getattr(args, name) or os.environ.get(variable, "false").lower() in ("1", "true"):
            raise UserError(
                f"{name}: Burnish shards the weights itself: remove it from TrainingArguments and from the "
                "configuration of accelerate, and set Trainer(sharded=True), or parallel.shard: fsdp2 in a recipe"
            )
    if on_non_finite not in get_args(OnNonFinite):
        raise UserError(f"on_non_finite: expected error or skip, got {on_non_finite!r}")
    if on_non_finite == "skip" and args.fp16:
        raise UserError("on_non_finite: skip: with fp16, the loss scaler already skips such steps; remove this setting")


def check_generation_config(model: Any) -> None:
    """Raise a UserError if transformers would refuse to save the model's generation config with a checkpoint."""
    config = getattr(model, "generation_config", None)
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the model's generation_config.json cannot be saved again: correct it: {reason}") from error


SHARDED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
NOT_SHARDED = {
    "fp16": "use bf16",
    "torch_compile": "remove it",
    "push_to_hub": "remove it, and upload the finished folder of the model",
}
"""Arguments with which the weights cannot be sharded, and what works instead."""


def check_sharded(args: TrainingArguments) -> None:
    """Raise a UserError for arguments with which the weights cannot be sharded."""
    if args.optim not in SHARDED_OPTIMIZERS:
        name = getattr(args.optim, "value", args.optim)
        raise UserError(f"sharded: optim {name} does not work: use {', '.join(SHARDED_OPTIMIZERS)}")
    for name, instead in NOT_SHARDED.items():
        if getattr(args, name):
            raise UserError(f"sharded: {name} does not work: {instead}")
    if args.world_size == 1:
        raise UserError(
            "sharded: there is only one process: start several with torchrun --nproc-per-node N, or remove it"
        )


def warn_ignored(args: TrainingArguments) -> None:
    """Warn about every field that is set but ignored."""
    for field in dataclasses.fields(args):
        if field.name not in IGNORED or field.name in _DERIVED:
            continue
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default  # type: ignore[misc]
        value = getattr(args, field.name)
        if value != default:
            warnings.warn(f"{field.name}={value!r} is ignored: {IGNORED[field.name]}", stacklevel=3)
