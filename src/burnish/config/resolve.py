"""Resolves the models and rewards of a recipe to folders, hub ids, and functions that score completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from burnish import user_functions
from burnish.config.evaluation import Evaluation
from burnish.config.schema import (
    Recipe,
    RewardFromFunction,
    RewardFromJudge,
    RewardFromModel,
    RewardFromURL,
    RewardSource,
    Stage,
)
from burnish.errors import UserError
from burnish.judges.endpoint import EndpointJudge, identity
from burnish.judges.local import LocalJudge
from burnish.judges.settings import JudgeSettings, principle_texts
from burnish.judges.store import FILE, StoredJudge, VerdictStore
from burnish.models import loading
from burnish.models.loaded import is_reward_model, load
from burnish.models.precision import weights_dtype
from burnish.models.settings import ModelSource, PackageModel, Precision, StageModel
from burnish.render.encode import cache_folder
from burnish.render.templates import set_template
from burnish.rewards.functions import TIMEOUT, NamedReward
from burnish.rewards.judge import JudgeReward
from burnish.rewards.model import ModelReward
from burnish.rewards.ray import RayReward
from burnish.rewards.remote import RemoteReward, token_of
from burnish.rewards.scoring import values_of
from burnish.rewards.steps import StepReward
from burnish.rl.environment import Environments
from burnish.rl.settings import Limits
from burnish.types import Reward

NO_LIMIT = 1e6
"""Seconds for a call of a service, which limits each of its requests itself."""


def model_reference(source: ModelSource, folder: Path) -> str:
    """The folder or hub id of a model. For a package that is not installed, the hub id."""
    if isinstance(source, StageModel):
        return str(folder / source.stage / "model")
    if isinstance(source, PackageModel):
        place = loading.package_folder(source.package)
        if place is None and source.hub is None:
            raise UserError(f"the package {source.package!r} is not installed, and its model has no hub: id")
        return str(place) if place is not None else str(source.hub)
    return str(source)


def environments_of(source: Stage | Evaluation, locate: Callable[[str], str]) -> Environments | None:
    """Load the environments and tools of a stage or an evaluation; None if it has none.

    Raises:
        UserError: if one of them does not follow its contract.
    """
    if not source.environment.classes and not source.tools:
        return None
    settings = source.environment
    limits = settings.model_dump(include=set(Limits.model_fields), exclude_unset=True)
    classes = {name: user_functions.load(locate(reference)) for name, reference in settings.classes.items()}
    functions = [user_functions.load(locate(reference)) for reference in source.tools]
    return Environments(classes, functions, settings.turns is not None, settings.arguments, **limits)


def named_reward(source: RewardSource, recipe: Recipe | Evaluation, folder: Path, device: str) -> NamedReward:
    """Load a reward with its name and weight. ``folder`` is the run's folder, which contains the stages.

    Raises:
        UserError: if the reward cannot be loaded, or its Ray cluster has no room for it.
    """
    if isinstance(source, RewardFromFunction | RewardFromModel) and source.ray is not None:
        load = partial(named_reward, source.model_copy(update={"ray": None}), recipe, folder)
        processes = dist.get_world_size() if dist.is_initialized() else 1
        actors = RayReward(load, values_of, source.ray, f"reward {source.title}: ray", processes)
        return NamedReward(source.title, source.weight, actors, timeout=NO_LIMIT)
    if isinstance(source, RewardFromFunction):
        function = user_functions.load(recipe.locate(source.function))
        return NamedReward(source.title, source.weight, function, source.function, source.timeout or TIMEOUT)
    if isinstance(source, RewardFromURL):
        return NamedReward(source.title, source.weight, remote_reward(source), source.url, NO_LIMIT)
    if isinstance(source, RewardFromJudge):
        principles = source.principles
        texts = principle_texts(str(recipe.beside(principles)) if isinstance(principles, str) else principles)
        place = folder if isinstance(recipe, Recipe) else cache_folder()
        judge = stored_judge(source.judge, folder, place, f"reward {source.title}")
        return NamedReward(source.title, source.weight, JudgeReward(judge, texts, waits=source.judge.url is not None))
    reference = model_reference(source.model, folder)
    tokenizer = loading.load_tokenizer(reference)
    if source.template is not None:
        set_template(tokenizer, source.template)
    dtype = weights_dtype(source.precision, loading.width(reference))
    if source.steps is not None:
        network = loading.load_value_model(reference, dtype=dtype).to(device)
        scorer: Reward = StepReward(network, tokenizer, steps=source.steps)
    else:
        model = loading.load_reward_model(reference, dtype=dtype, labels=None).to(device)
        scorer = ModelReward(model, tokenizer, label=source.label, normalize=source.normalize)
    return NamedReward(source.title, source.weight, scorer)


def remote_reward(source: RewardFromURL) -> RemoteReward:
    """The client of a service. It connects when it is first called.

    Raises:
        UserError: if the environment variable of its token is not set.
    """
    settings = source.model_dump(include={"timeout", "retries", "batch", "concurrency"})
    token = token_of(source.token, f"reward {source.title}: token")
    return RemoteReward(source.url, token, name=source.title, **settings)


def stored_judge(
    settings: JudgeSettings,
    folder: Path,
    place: Path,
    asked_by: str,
    precision: Precision = "auto",
    trust_remote_code: bool = False,
) -> StoredJudge:
    """A judge whose verdicts are stored.

    Args:
        settings: its settings.
        folder: the run's folder, which contains the stages.
        place: the folder of the store.
        asked_by: what asks, such as the name of a stage.
        precision: decides the dtype of the weights of a local model.
        trust_remote_code: run the code that comes with a local model.

    Raises:
        UserError: the model is a reward model, the key is not set, or the store is damaged.
    """
    if settings.model is None:
        store = VerdictStore(place / FILE)
        return StoredJudge(EndpointJudge(settings, *store.spent(identity(settings))), store, asked_by)
    reference = model_reference(settings.model, folder)
    if is_reward_model(reference, trust_remote_code=trust_remote_code):
        raise UserError(f"judge: {reference} is a reward model, which answers no questions: use it as a reward")
    loaded = load(reference, settings.template, precision, trust_remote_code=trust_remote_code)
    return StoredJudge(LocalJudge.of(loaded.model, loaded.tokenizer, settings), VerdictStore(place / FILE), asked_by)
