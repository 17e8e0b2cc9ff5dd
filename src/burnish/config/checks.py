"""Checks of a recipe. They do not load models or rows."""

from __future__ import annotations

import ast
import os
import re
import symtable
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import pydantic

from burnish.config.schema import (
    Data,
    MethodChoice,
    Recipe,
    RewardFromFunction,
    RewardFromJudge,
    RewardFromModel,
    RewardSource,
    Stage,
    StageData,
    any_spec,
    is_module,
    method_spec,
)
from burnish.data.readers import READERS
from burnish.errors import UserError, did_you_mean
from burnish.files import expanded, explain
from burnish.generate.sampling import Sampling
from burnish.generate.settings import CLASSES, IN_THIS_PROCESS, NO_VALUES, WITHOUT_VALUES, GeneratorSettings
from burnish.judges.settings import principle_texts
from burnish.methods import METHODS, ROW_METHODS
from burnish.methods.settings import JudgeConfig, ReviseConfig, SearchConfig, StepValueConfig
from burnish.mistakes import Keys, Problem, find, mistakes
from burnish.models.settings import AdapterConfig, PackageModel, StageModel
from burnish.protocols import MethodSpec
from burnish.render.templates import PLAIN_TEMPLATES
from burnish.report.metrics import FINISH_REASONS, METRICS, TOOL_ERRORS
from burnish.rl.settings import EnvironmentSettings
from burnish.training.arguments import ABSENT, TrainerConfig
from burnish.types import Prompt

if TYPE_CHECKING:
    from burnish.config.evaluation import Evaluation

RENAMED = {
    "baseline": "advantage: {name: ...}",
    "clip_high": "policy_loss: {name: clip, clip_high: ...}",
    "clip_low": "policy_loss: {name: clip, clip_low: ...}",
    "critic_frozen": "critic: {frozen: ...}",
    "critic_learning_rate": "critic: {learning_rate: ...}",
    "critic_start": "critic: {start: ...}",
    "critic_warmup": "critic: {warmup: ...}",
    "dtype": "precision",
    "dual_clip": "policy_loss: {dual_clip: ...}",
    "floor": "policy_loss: {name: reinforce, floor: ...}",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "importance_cap": "correction: {mode: truncate, cap: ...}",
    "lam": "advantage: {name: gae, lam: ...}",
    "max_gap": "max_sampler_mismatch",
    "normalise": "normalize",
    "on_long": "too_long",
    "quantise": "quantize",
    "score_normalise": "score_normalize",
    "unlikelihood": "policy_loss: {name: reinforce, unlikelihood: ...}",
    "value_clip": "critic: {clip: ...}",
    "value_coef": "critic: {coef: ...}",
    "whiten_advantages": "advantage: {name: gae, whiten: ...}",
}
"""Old names of keys, in any block, and their new names. An old name is an error."""


# --- checks of values ---------------------------------------------------------------------------------------------


def shape_problems(value: dict[str, Any]) -> Iterator[Problem]:
    """Unknown keys, wrong types and wrong values, anywhere in the recipe."""
    for problem in renamed([*_schema_problems(value), *_method_problems(value)]):
        hint = _explained(problem.path, value) if problem.text.startswith("unknown key") else None
        yield Problem(problem.path, hint or problem.text)


def renamed(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The problems, with the new name of every unknown key that was renamed."""
    for path, text in problems:
        new = RENAMED.get(str(path[-1])) if path and text.startswith("unknown key") else None
        if new and len(path) > 1 and new.startswith(f"{path[-2]}:"):
            new = None  # the key is already in the right block, whose variant does not have it
        yield Problem(path, f"this key was renamed: write {new}" if new else text)


def _schema_problems(value: dict[str, Any]) -> list[Problem]:
    try:
        Recipe.model_validate(value)
    except pydantic.ValidationError as error:
        return mistakes(error, Recipe, value)
    return []


def _method_problems(value: dict[str, Any]) -> Iterator[Problem]:
    """Mistakes in the settings of methods, which the schema of a recipe leaves open."""
    stages = value["stages"] if isinstance(value["stages"], list) else []
    for index, stage in enumerate(stages):
        at = ("stages", index, "method")
        if not isinstance(name := find(stage, ("method", "name")), str):
            continue
        settings = {key: setting for key, setting in stage["method"].items() if key != "name"}
        try:
            config = any_spec(name).config
        except UserError as error:
            yield Problem((*at, "name"), str(error))
            continue
        try:
            config.model_validate(settings)
        except pydantic.ValidationError as error:
            yield from (Problem((*at, *path), text) for path, text in mistakes(error, config, settings))


def _explained(path: Keys, value: dict[str, Any]) -> str | None:
    """Why an unknown key is not allowed in recipes, or which block it belongs to; None if neither is known."""
    key = str(path[-1])
    if path[-2:-1] == ("trainer",) and key in ABSENT:
        return f"this key is not allowed in recipes: {ABSENT[key]}"
    if len(path) == 1:
        return f"unknown key here; it belongs to a stage: stages.NAME.{key}" if key in Stage.model_fields else None
    if len(path) != 3:
        return None
    blocks = {
        "data": Data,
        "generation": Sampling,
        "generator": GeneratorSettings,
        "environment": EnvironmentSettings,
        "adapter": AdapterConfig,
        "trainer": TrainerConfig,
    }
    if (name := find(value, (*path[:2], "method", "name"))) in METHODS:
        blocks["method"] = METHODS[name].config
    home = next((block for block, config in blocks.items() if key in config.model_fields), None)
    return f"unknown key here; it belongs to {home}: {home}.{key}" if home else None


# --- checks of what values refer to -------------------------------------------------------------------------------


def _sources(stage: Stage) -> Iterator[tuple[Keys, Any]]:
    """Every model and data source of a stage, with its path below the stage."""
    yield from stage.models.items()
    if stage.data:
        for split in ("train", "rows"):
            mixed = isinstance(getattr(stage.data, split), list)
            for index, part in enumerate(stage.data.parts(split)):
                yield ("data", split, *((index, "from") if mixed else ())), part.source
        yield ("data", "eval"), stage.data.eval


def reference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Stages that do not exist, come later or share a name; unknown templates; settings without effect."""
    names = {name for stage in recipe.stages for name in (stage.name, _short(stage.name))}
    earlier: dict[str, Stage] = {}
    for index, stage in enumerate(recipe.stages):
        if stage.name in earlier:
            yield Problem(("stages", index, "name"), f"two stages are called {stage.name!r}")
        for path, source in _sources(stage):
            if not isinstance(source, StageModel | StageData):
                continue
            if source.stage in earlier:
                if text := _output_problem(source, earlier[source.stage], stage, path):
                    yield Problem(("stages", index, *path), text)
                continue
            known = dict.fromkeys(map(_short, earlier))
            have = f"earlier stages are {', '.join(known)}" if known else "this is the first stage"
            late = "is not an earlier stage" if source.stage in names else "is not a stage"
            text = f"{source.stage!r} {late}{did_you_mean(source.stage, known)}; {have}"
            yield Problem(("stages", index, *path, "stage"), text)
        templates: list[tuple[Keys, str | None]] = [(("template",), stage.template)]
        templates += reward_templates(stage.reward)
        if stage.method and stage.method.name == "judge":
            judge = JudgeConfig.model_validate(stage.method.settings).judge
            templates.append((("method", "judge", "template"), judge.template))
        for path, name in templates:
            if name is not None and name not in PLAIN_TEMPLATES:
                text = f"unknown template {name!r}{did_you_mean(name, PLAIN_TEMPLATES)}"
                yield Problem(("stages", index, *path), f"{text}; templates are {', '.join(PLAIN_TEMPLATES)}")
        if stage.method and (text := _reward_problem(stage)):
            yield Problem(("stages", index, "reward"), text)
        if stage.method and (text := _environment_problem(stage)):
            yield Problem(("stages", index, "environment" if stage.environment.classes else "tools"), text)
        titles = [*(["environment"] if stage.environment.classes else []), *(reward.title for reward in stage.reward)]
        if repeated := sorted({title for title in titles if titles.count(title) > 1}):
            text = f"two rewards are named {', '.join(repeated)}: give each its own name:"
            yield Problem(("stages", index, "reward"), text)
        if text := _generator_problem(stage):
            yield Problem(("stages", index, "generator"), text)
        if text := _staleness_problem(stage):
            yield Problem(("stages", index, "method", "max_staleness"), text)
        if stage.method and stage.method.name == "search":
            yield from (Problem(("stages", index, *path), text) for path, text in _search_problems(stage, earlier))
        if stage.method and stage.data and stage.data.stream:
            yield from (Problem(("stages", index, *path), text) for path, text in _stream_problems(stage))
        for key, text in stage.trainer.conflicts():
            yield Problem(("stages", index, "trainer", key), text)
        if text := _best_metric_problem(stage):
            yield Problem(("stages", index, "trainer", "metric_for_best_model"), text)
        for text in _tracker_problems(stage.trainer):
            yield Problem(("stages", index, "trainer", "report_to"), text)
        if stage.data and stage.trainer.eval_strategy != "no" and stage.data.eval is None:
            yield Problem(
                ("stages", index, "trainer", "eval_strategy"), "there are no rows to evaluate: data.eval is missing"
            )
        earlier.setdefault(stage.name, stage)
    yield from until_problems(recipe)


def until_problems(recipe: Recipe) -> Iterator[Problem]:
    """Metrics that end a loop, but that their stage cannot have."""
    for name, loop in recipe.loops.items():
        if loop.until is not None:
            stage = next(stage for stage in recipe.stages if stage.name == f"{name}/1/{loop.until.stage}")
            if text := _until_problem(loop.until.metric, loop.until.stage, stage):
                yield Problem(("stages", name, "until", "metric"), text)


def _until_problem(metric: str, name: str, stage: Stage) -> str | None:
    """Why a stage cannot have a metric; None if it can, or if that is only known when it has run."""
    if stage.method is None:
        return f"stage {name!r} runs a function, which has no metrics"
    rewards = [*(["environment"] if stage.environment.classes else []), *(reward.title for reward in stage.reward)]
    spec = ROW_METHODS.get(stage.method.name)
    if spec is None:
        if stage.data is not None and stage.data.eval is None:
            return f"stage {name!r} has no data.eval, so it measures nothing"
        known = [key for key, meaning in METRICS.items() if meaning.better]
        possible_metrics = [*METRICS, *EPISODES, *rewards] if stage.method.name in METHODS else []
    else:
        measures = [*(spec.measures_with_rewards if rewards else spec.measures), *(EPISODES if stage.acts else ())]
        known = list(dict.fromkeys([*rewards, *measures]))
        possible_metrics = known if spec.measures else []
    of_reward = metric.removeprefix("reward_")
    base, kind, k = _parts_of_reward(of_reward) if of_reward not in rewards else (of_reward, "", 0)
    if spec is not None and possible_metrics and kind and base in rewards:
        return _k_problem(metric, kind, k, name, stage)
    if not possible_metrics or metric in possible_metrics or base in rewards:
        setting = NEEDS.get(metric)
        lacks = setting is not None and spec is not None and setting not in stage.method.settings
        return f"the metric {metric!r} needs method.{setting} in stage {name!r}" if lacks else None
    return f"stage {name!r} has no metric {metric!r}{did_you_mean(metric, known)}; its metrics are {', '.join(known)}"


def _parts_of_reward(metric: str) -> tuple[str, str, int]:
    """The reward, the kind of metric and its k: ``("exact", "pass@", 4)``; of a plain reward ``("exact", "", 0)``."""
    found = re.fullmatch(r"(.+)_(pass@|best_of_)([0-9]+)", metric)
    return (found[1], found[2], int(found[3])) if found else (metric, "", 0)


def _k_problem(metric: str, kind: str, k: int, name: str, stage: Stage) -> str | None:
    """Why a stage that makes rows cannot have pass@k or best of k of a reward; None if it can."""
    assert stage.method is not None
    if stage.method.name != "eval":
        return f"stage {name!r} has no metric {metric!r}: only the method eval measures pass@k and best of k"
    samples = stage.generation.samples
    known = [2**power for power in range(kind == "best_of_", samples.bit_length())]
    if k in known:
        return None
    listed = f"k is {', '.join(map(str, known))}" if known else "there is no such metric"
    return f"stage {name!r} has no metric {metric!r}: with generation.samples: {samples}, {listed}"


EPISODES = (
    *("turns", "tool_calls", "tool_errors", "sequences", "environment_tokens", "computed_tokens"),
    *(f"finished_{reason}" for reason in ("stop", *FINISH_REASONS)),
    *(f"tool_error_{kind}" for kind in TOOL_ERRORS),
)
"""Metrics of a stage with an environment or tools."""
NEEDS = {"kl": "reference", "log_ratio": "reference", "win_rate": "against"}
"""Metrics of an evaluation that need another model, and the setting that names it."""


def _short(name: str) -> str:
    """The name of a stage as recipes write it, without its loop and round."""
    return name.rpartition("/")[2]


def _output_problem(source: StageModel | StageData, maker: Stage, reader: Stage, path: Keys) -> str | None:
    """What an earlier stage with a method cannot have made, whatever happens when it runs."""
    if maker.method is None:
        return None
    if maker.makes_rows:
        return _row_problem(source, maker) or _score_problem(source, maker, reader)
    if maker.method.name not in METHODS:
        return None
    if isinstance(source, StageData):
        return f"stage {maker.name!r} trains a model and writes no rows: expected a stage that makes rows"
    if path[-2:] == ("judge", "model") and METHODS[maker.method.name].task == "SEQ_CLS":
        return f"stage {maker.name!r} trains a reward model, which answers no questions: expected a language model"
    if path[0] != "reward" or not isinstance(reward := reader.reward[int(path[1])], RewardFromModel):
        return None
    if reward.steps is not None:
        problem = f"stage {maker.name!r} trains no values of steps: expected a stage with method: {{name: step_value}}"
        return problem if maker.method.name != "step_value" else None
    if METHODS[maker.method.name].task != "SEQ_CLS":
        return f"stage {maker.name!r} trains a model that gives no score: expected one with method: {{name: reward}}"
    if reward.normalize and maker.data and maker.data.eval is None:
        return f"normalize needs the mean and spread of held-out scores, and stage {maker.name!r} has no data.eval"
    return None


def _score_problem(source: StageModel | StageData, maker: Stage, reader: Stage) -> str | None:
    """A file of samples without scores, from which a stage reads scores."""
    if not isinstance(source, StageData) or maker.method is None or maker.method.name != "sample":
        return None
    if maker.reward or maker.environment.classes:
        return None
    select = reader.data.select if reader.data else None
    if source.file == "ranked.jsonl" and not reader.makes_rows:
        return f"stage {maker.name!r} has no reward:, so it ranks nothing: in {source.file}, all scores are 0"
    if select is not None and select.reads_scores and select.key == "score":
        return f"stage {maker.name!r} has no reward:, so its samples have no score for data.select"
    return None


def _row_problem(source: StageModel | StageData, maker: Stage) -> str | None:
    """A model or a file that a stage with a row method does not make."""
    assert maker.method is not None
    outputs = ROW_METHODS[maker.method.name].outputs
    if isinstance(source, StageModel):
        return f"stage {maker.name!r} makes rows and no model"
    if source.file in outputs:
        return None
    near = did_you_mean(source.file, outputs)
    return f"stage {maker.name!r} writes no file {source.file!r}{near}; it writes {', '.join(outputs)}"


def reward_models(rewards: list[RewardSource]) -> list[tuple[Keys, Any]]:
    """The models that rewards name, with their keys."""
    judges = [(i, r.judge.model) for i, r in enumerate(rewards) if isinstance(r, RewardFromJudge)]
    models: list[tuple[Keys, Any]] = [(("reward", i, "judge", "model"), model) for i, model in judges if model]
    return [
        *((("reward", i, "model"), r.model) for i, r in enumerate(rewards) if isinstance(r, RewardFromModel)),
        *models,
    ]


def reward_templates(rewards: list[RewardSource]) -> list[tuple[Keys, str | None]]:
    """The templates that rewards name, with their keys."""
    judges = [(i, r.judge.template) for i, r in enumerate(rewards) if isinstance(r, RewardFromJudge)]
    return [
        *((("reward", i, "template"), r.template) for i, r in enumerate(rewards) if isinstance(r, RewardFromModel)),
        *((("reward", i, "judge", "template"), template) for i, template in judges),
    ]


def reward_functions(rewards: list[RewardSource]) -> list[tuple[Keys, str]]:
    """The functions that rewards name, with their keys."""
    return [(("reward", i, "function"), r.function) for i, r in enumerate(rewards) if isinstance(r, RewardFromFunction)]


def _tracker_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Trackers whose packages are not installed; transformers, which knows them, is imported only if one is named."""
    named = [trainer.report_to] if isinstance(trainer.report_to, str) else trainer.report_to
    if trackers := [name for name in named if name not in ("none", "all")]:
        from transformers.integrations import integration_utils

        installed = integration_utils.get_available_reporting_integrations()
        yield from (f"{name} is not installed: pip install {name}" for name in trackers if name not in installed)


def _best_metric_problem(stage: Stage) -> str | None:
    """A metric that no method of Burnish has. The user's own methods may have any."""
    metric = (stage.trainer.metric_for_best_model or "loss").removeprefix("eval_")
    known = [name for name, meaning in METRICS.items() if meaning.better]
    if stage.method is None or stage.method.name not in METHODS or metric in METRICS or metric.startswith("reward_"):
        return None
    return f"there is no metric {metric!r}{did_you_mean(metric, known)}; metrics are {', '.join(known)}"


def _stream_problems(stage: Stage) -> Iterator[tuple[Keys, str]]:
    assert stage.method is not None
    spec = any_spec(stage.method.name)
    if not isinstance(spec, MethodSpec) or not spec.streams:
        yield ("data", "stream"), f"method {stage.method.name!r} needs all of its rows at once: remove this key"
    if stage.trainer.max_steps <= 0:
        yield ("data", "stream"), "a stream has no end: set trainer.max_steps to the number of optimizer steps"


def environment_functions(stage: Stage | Evaluation) -> list[tuple[Keys, str]]:
    """The classes and functions that an environment names, with their keys."""
    settings = stage.environment
    key = "turns" if settings.turns is not None else "class"
    classes = [(("environment", key, *([name] if name else [])), ref) for name, ref in settings.classes.items()]
    return [*classes, *((("tools", i), function) for i, function in enumerate(stage.tools))]


def _environment_problem(stage: Stage) -> str | None:
    """An environment is an error in a stage whose method does not sample episodes."""
    assert stage.method is not None
    if not stage.acts or stage.method.name in ROW_METHODS or method_spec(stage.method.name).environments:
        return None
    can = ", ".join(name for name, spec in METHODS.items() if spec.environments)
    return f"method {stage.method.name!r} has no episodes: remove this key; methods with episodes are {can}"


def _reward_problem(stage: Stage) -> str | None:
    """A method that samples completions needs a reward; any other method would ignore it."""
    assert stage.method is not None
    method, rewards = stage.method.name, stage.reward
    if method == "rank":
        return _rank_problem(stage)
    if method in ROW_METHODS or stage.environment.classes:
        return None
    kinds = method_spec(method).kinds
    samples = Prompt in kinds
    if kinds == (Prompt,) and not rewards:
        return f"method {method!r} needs a reward: [{{model: {{stage: NAME}}}}] or [{{function: file.py:name}}]"
    return f"method {method!r} does not use rewards: remove this key" if rewards and not samples else None


def _rank_problem(stage: Stage) -> str | None:
    """Rewards choose which prompts people get first: those about which they disagree."""
    count = sum(reward.weight != 0 for reward in stage.reward)
    if stage.reward and count < 2:
        return f"rank shows those prompts first about which rewards disagree: expected two rewards or more, got {count}"
    return None


def _generator_problem(stage: Stage) -> str | None:
    """A generator is an error in a stage that samples nothing."""
    if stage.method is None or stage.makes_rows or "generator" not in stage.model_fields_set:
        return None
    samples = Prompt in method_spec(stage.method.name).kinds
    return None if samples else f"method {stage.method.name!r} does not sample: remove this key"


def _staleness_problem(stage: Stage) -> str | None:
    """Batches can be sampled ahead only by a generator in another process."""
    staleness = stage.method.settings.get("max_staleness") if stage.method else None
    if not staleness or stage.generator.name not in IN_THIS_PROCESS:
        return None
    works = ", ".join(f"{{name: {name}}}" for name in CLASSES if name not in IN_THIS_PROCESS)
    return (
        f"{staleness} needs a generator that samples while the policy is updated, and {stage.generator.name} works in "
        f"the same process: set generator to {works}"
    )


def _search_problems(stage: Stage, earlier: Mapping[str, Stage]) -> Iterator[tuple[Keys, str]]:
    """Settings of a search that it ignores, or that do not suit the value head of an earlier stage."""
    assert stage.method is not None
    for key, instead in STEPS_SET.items():
        if key in stage.generation.model_fields_set:
            yield ("generation", key), f"search does not use this: {instead}"
    settings = SearchConfig.model_validate(stage.method.settings)
    if stage.generation.temperature == 0 and (settings.children > 1 or settings.trees > 1):
        yield ("generation", "temperature"), "at temperature 0, all steps after a state are equal: use more than 0"
    maker = earlier.get(stage.model.stage) if isinstance(stage.model, StageModel) else None
    if maker is None or maker.method is None or maker.method.name != "step_value":
        return
    if (name := stage.generator.name) in WITHOUT_VALUES:
        yield ("generator", "name"), f"stage {maker.name!r} trains a value head, and {NO_VALUES.format(name=name)}"
    own = settings.step.delimiter
    theirs = StepValueConfig.model_validate(maker.method.settings).delimiter
    if own != theirs:
        at = "method", "step", "delimiter"
        yield at, f"stage {maker.name!r} trains values of steps that end with {theirs!r}, but these end with {own!r}"


STEPS_SET = {
    "samples": "method.children sets how many steps are sampled, and method.trees how many trees",
    "stop": "method.step.delimiter ends a step, and method.step.final a solution",
    "length_range": "max_new_tokens limits the tokens of each step",
    "min_new_tokens": "a step ends at its first delimiter",
}
"""What to set in a search instead of a key of ``generation``."""


P = ParamSpec("P")


def possible(check: Callable[P, str | None]) -> Callable[P, str | None]:
    """A check of a path that reports what the file system refuses, such as a path that is too long."""

    def checked(*args: P.args, **kwargs: P.kwargs) -> str | None:
        try:
            return check(*args, **kwargs)
        except OSError as error:
            return explain(error) or str(error)
        except UserError as error:
            return str(error)

    return checked


def file_problems(recipe: Recipe) -> Iterator[Problem]:
    """Files, folders, packages and functions that do not exist, or whose path is impossible."""
    if text := _folder_problem(recipe):
        yield Problem(("out",) if recipe.out else (), text)
    for index, stage in enumerate(recipe.stages):
        for path, source in _sources(stage):
            text = None
            if isinstance(source, str):
                text = data_problem(source) if path[0] == "data" else model_problem(source)
            elif isinstance(source, PackageModel) and source.hub is None and not is_module(source.package):
                text = f"package {source.package!r} is not installed, and no hub: id is given for its model"
            if text:
                yield Problem(("stages", index, *path), text)
        functions: list[tuple[Keys, str | None]] = [(("run",), stage.run)]
        functions += [*reward_functions(stage.reward), *environment_functions(stage)]
        if stage.method:
            functions += [(("method", *keys), name) for keys, name in stage.method.functions.items()]
        for path, reference in functions:
            if reference and (text := function_problem(reference, recipe.locate)):
                yield Problem(("stages", index, *path), text)
        if stage.method and (text := _constitution_problem(recipe, stage.method)):
            yield Problem(("stages", index, "method"), text)
        for path, text in principle_problems(stage.reward, recipe.beside):
            yield Problem(("stages", index, *path), text)


@possible
def _constitution_problem(recipe: Recipe, method: MethodChoice) -> str | None:
    """A problem with the principles by which answers are revised or judged; None if there is none."""
    settings = recipe.method_settings(method)
    if method.name == "judge":
        JudgeConfig.model_validate(settings).principle_texts()
    elif method.name == "revise":
        ReviseConfig.model_validate(settings).principles()
    return None


def principle_problems(rewards: list[RewardSource], beside: Callable[[str], Path]) -> Iterator[tuple[Keys, str]]:
    """Problems with the principles of judges that are rewards. ``beside`` finds a file beside the recipe."""
    for i, reward in enumerate(rewards):
        if isinstance(reward, RewardFromJudge) and isinstance(reward.principles, str):
            try:
                principle_texts(str(beside(reward.principles)))
            except UserError as error:
                yield ("reward", i, "principles"), str(error)


def _is_hub_id(source: str) -> bool:
    """Whether a name that is no local path may be a hub id: ``owner/name``, with no local folder ``owner``."""
    owner, slash, _ = source.partition("/")
    shape = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+){0,2}", source)
    return bool(shape) and not source.endswith((*READERS, ".gguf", ".gz")) and not (slash and Path(owner).is_dir())


@possible
def _folder_problem(recipe: Recipe) -> str | None:
    """A problem with the folder of a run; None if there is none."""
    folder = recipe.folder
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link to {os.readlink(folder)}, which does not exist: remove the link"
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            return f"{part} is a file: expected a folder for the run: name another one with out=FOLDER"
    place = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place}: permission denied: name another folder with out="


def _missing(source: str, what: str) -> str:
    path = expanded(source)
    if path.is_symlink():
        return f"{source} is a link to {os.readlink(path)}, which does not exist"
    beside = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    home = "" if path.parent.is_dir() else f"; there is no folder {path.parent}"
    return f"no such {what}: {source}{did_you_mean(str(path), beside)}{home}; paths start at {Path.cwd()}"


@possible
def data_problem(source: str) -> str | None:
    """A problem with the name of a file, folder or dataset; None if there is none."""
    name, _, _ = source.partition(":")  # a folder or a hub id may end in :split
    path = expanded(source if expanded(source).exists() else name)
    if not path.exists():
        return None if "/" in name and _is_hub_id(name) else _missing(source, "file")
    ending = Path(path.name.removesuffix(".gz")).suffix
    if path.is_file() and ending not in READERS:
        return f"{source}: cannot read {ending or 'a file without extension'}; expected {', '.join(READERS)}"
    return None


@possible
def model_problem(source: str) -> str | None:
    """A problem with the name of a model; None if there is none."""
    path = expanded(source)
    if not path.exists():
        return None if _is_hub_id(source) else _missing(source, "model")
    if path.is_file():
        return (
            None
            if path.suffix == ".gguf"
            else f"{source}: expected a model, which is a folder, a .gguf file or a hub id"
        )
    folders = [path, path / "model"]
    if any((folder / name).is_file() for folder in folders for name in ("config.json", "adapter_config.json")):
        return None
    if any(path.glob("*.gguf")):
        return None
    near = next((f" (did you mean {str(p.parent)!r}?)" for p in sorted(path.glob("*/config.json"))), "")
    return f"{source}: this folder contains no model: config.json is missing{near}"


@possible
def function_problem(reference: str, locate: Callable[[str], str]) -> str | None:
    """A problem with ``file.py:name`` or ``package.module:name``; None if there is none."""
    reference = locate(reference)
    file, colon, name = reference.rpartition(":")
    if not colon:
        return f"expected file.py:name or package.module:name, got {reference!r}"
    if not file.endswith(".py"):
        return None if is_module(file) else f"there is no module {file!r}"
    if not Path(file).is_file():
        return _missing(file, "file")
    try:
        known = _defined(Path(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: not valid Python: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # not UTF-8, NUL, or too many brackets
        return f"{file}: not valid Python: {error}"
    return None if known is None or name in known else f"{file} defines no {name!r}{did_you_mean(name, known)}"


def _defined(file: Path) -> set[str] | None:
    """The names that a file assigns, defines or imports anywhere outside of functions; None if only running it tells.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    text = file.read_text("utf-8")
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(ast.parse(text))):
        return None
    symbols = symtable.symtable(text, str(file), "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
