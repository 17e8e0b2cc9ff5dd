"""The models of a stage on the meta device, where tensors have shapes but no values, made by the code that trains them.

A model that an earlier stage will make has the sizes of the model which that stage starts from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from burnish.config import Recipe, Stage, StageModel, method_class, method_spec
from burnish.config.resolve import environments_of, model_reference
from burnish.config.schema import any_spec
from burnish.errors import UserError
from burnish.methods.dpo import DPO
from burnish.methods.policy_gradient import PolicyGradient
from burnish.models import loading
from burnish.models.adapters import Reference, add_adapter, wrap
from burnish.models.heads import Network
from burnish.models.loaded import Loaded
from burnish.models.precision import weights_dtype, width_of
from burnish.models.settings import AdapterConfig, ModelSource, Precision
from burnish.protocols import Method, MethodSpec
from burnish.render.templates import prepare_template, set_template
from burnish.types import Prompt


class NotMadeYet(Exception):
    """A model is made by a function of the recipe, so its sizes are not known before burnish run has called it."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"unknown until burnish run has made the model of stage {stage}")


def origin(recipe: Recipe, stage: Stage) -> tuple[str | None, str | None]:
    """The model whose tokenizer the stage will use, and its plain template; no model if a function will make it.

    Training changes neither tokenizer nor template, so a stage that has not run yet has those of its initial model.
    """
    by_name = {stage.name: stage for stage in recipe.stages}
    template = stage.template
    while isinstance(stage.model, StageModel):
        made = model_reference(stage.model, recipe.folder)
        if Path(made).is_dir():
            return made, template
        stage = by_name[stage.model.stage]
        template = template or stage.template
    return (None, template) if stage.model is None else (model_reference(stage.model, recipe.folder), template)


def tokenizer_of(recipe: Recipe, stage: Stage) -> PreTrainedTokenizerBase:
    """The tokenizer of a stage's model, with the stage's chat template.

    Raises:
        NotMadeYet: if a function of the recipe will make the model.
    """
    reference, template = origin(recipe, stage)
    if reference is None:
        raise NotMadeYet(_maker(recipe, stage))
    place = loading.locate(reference)
    if isinstance(place, Path):
        tokenizer = copy.deepcopy(_gguf_tokenizer(place))
    else:
        tokenizer = loading.load_tokenizer(reference, trust_remote_code=stage.trust_remote_code)
    if template is not None:
        set_template(tokenizer, template)
    prepare_template(tokenizer)
    return tokenizer


def _maker(recipe: Recipe, stage: Stage) -> str:
    """The stage whose function makes the first model of a chain."""
    by_name = {stage.name: stage for stage in recipe.stages}
    while isinstance(stage.model, StageModel):
        stage = by_name[stage.model.stage]
    return stage.name


def without_weights(
    recipe: Recipe,
    stage: Stage,
    source: ModelSource,
    precision: Precision,
    gpu: bool,
    *,
    trained: bool = False,
    task: str = "CAUSAL_LM",
    adapter: AdapterConfig | None = None,
) -> Any:
    """A model of a stage on the meta device, from its config, as the stage loads it.

    Args:
        recipe: the recipe.
        stage: the stage that reads the model.
        source: the model.
        precision: decides the dtype of the weights.
        gpu: whether it is for a GPU that supports bfloat16, or for a CPU.
        trained: whether the stage trains all weights, unless they stay an adapter.
        task: ``CAUSAL_LM``, or ``SEQ_CLS`` for a model with one score.
        adapter: a new adapter on the model.

    Raises:
        NotMadeYet: if a function of the recipe will make the model.
        UserError: if there is no such model.
    """
    reading = stage.model_copy(update={"model": source})
    reference, _ = origin(recipe, reading)
    if reference is None:
        raise NotMadeYet(_maker(recipe, reading))
    place = loading.locate(reference)
    if isinstance(place, Path):  # a GGUF file: a run converts it, but its config is enough here
        config: Any = copy.deepcopy(_gguf_config(place))
    else:
        config = loading.load_config(reference, trust_remote_code=stage.trust_remote_code)
    kind: Any = AutoModelForCausalLM
    trained = trained and adapter is None and not loading.stays_adapter(reference, task)
    dtype = weights_dtype(precision, width_of(config), trained=trained, gpu=gpu)
    if task == "SEQ_CLS":
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    try:
        with torch.device("meta"):
            model = kind.from_config(config, dtype=dtype, trust_remote_code=stage.trust_remote_code)
    except ValueError as error:
        raise UserError(f"{reference}: cannot be used as {kind.__name__}: {str(error).splitlines()[0]}") from error
    if adapter is not None:
        return add_adapter(model, adapter, task)  # type: ignore[arg-type]
    if loading.stays_adapter(reference, task):
        return wrap(model, loading.adapter_config(str(place)))
    return model


@lru_cache(maxsize=8)
def _gguf_config(file: Path) -> Any:
    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


@lru_cache(maxsize=8)
def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    tokenizer = loading.stored_tokenizer(str(file.parent), gguf_file=file.name)
    loading.choose_pad_token(tokenizer)
    return tokenizer


def method_of(recipe: Recipe, stage: Stage, gpu: bool) -> Method:
    """A stage's method without rewards, whose other models are on the meta device."""
    assert stage.method is not None
    spec = method_spec(stage.method.name)
    settings = recipe.method_settings(stage.method)
    if Prompt in spec.kinds:
        settings |= {"reward": [], "sampling": stage.generation}
    if spec.environments:
        settings["environments"] = environments_of(stage, recipe.locate)
    if spec.models:
        settings["load"] = _load_in(recipe, stage, gpu)
    return method_class(stage.method.name)(**settings)


def _load_in(recipe: Recipe, stage: Stage, gpu: bool) -> Callable[[ModelSource], Loaded]:
    def load(source: ModelSource) -> Loaded:
        model = without_weights(recipe, stage, source, stage.precision, gpu)
        tokenizer = tokenizer_of(recipe, stage.model_copy(update={"model": source, "template": None}))
        return Loaded(str(source), model, tokenizer, False, None)

    return load


def network_of(recipe: Recipe, stage: Stage, method: Method, tokenizer: PreTrainedTokenizerBase, gpu: bool) -> Network:
    """What a stage trains, on the meta device: its model and what the method adds, such as a critic.

    Raises:
        NotMadeYet: if a function of the recipe will make the model.
        UserError: if there is no such model, or a method of the user needs its weights.
    """
    assert stage.model is not None and stage.method is not None
    spec = any_spec(stage.method.name)
    assert isinstance(spec, MethodSpec)
    how: dict[str, Any] = {"trained": True, "task": spec.task, "adapter": stage.adapter}
    model = without_weights(recipe, stage, stage.model, stage.precision, gpu, **how)
    try:
        with torch.device("meta"):
            return method.prepare(model, tokenizer)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"method {spec.name}: cannot be planned, since prepare reads weights: {reason}") from error


def reference_of(method: Method) -> Reference | None:
    """The reference model that a method keeps."""
    if isinstance(method, DPO):
        return method.reference and method.reference.reference
    return method.reference if isinstance(method, PolicyGradient) else None
