"""Model cards: README.md in the ``model/`` and ``adapter/`` of a stage, and in the folder of a merged adapter.

The card of a stage is made from the stage's entry in the manifest. It depends only on the recipe, the rows and the
results, so that a resumed run writes the same bytes. Text of users is written as code or escaped: it is never markup,
and cannot break the YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from burnish import __version__
from burnish.config.manifest import MANIFEST, read_manifest
from burnish.config.schema import Recipe, Stage, method_spec
from burnish.config.sources import references
from burnish.methods import METHODS
from burnish.models.bases import recorded as recorded_base
from burnish.models.heads import VALUE_HEAD
from burnish.models.loading import adapter_config, is_adapter
from burnish.models.settings import PackageModel, StageModel
from burnish.report.page import METHODS as METHOD_NAMES
from burnish.report.page import as_yaml, changes, headline_changes, with_interval

CARD = "README.md"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ALWAYS = ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_steps", "lr_scheduler_type")
"""Trainer settings that a card shows even if they have their defaults."""


def write_card(folder: Path, recipe: Recipe, stage: Stage, entry: Mapping[str, Any]) -> None:
    """Write the model card of a folder that is about to be sealed.

    Args:
        folder: has the weights of a model or adapter already.
        recipe: of the run.
        stage: the stage that trained the model.
        entry: the stage's entry in the manifest, with ``rows``, ``results``, ``data`` and ``inputs``.
    """
    assert stage.method is not None
    adapter, scores = is_adapter(folder), method_spec(stage.method.name).task == "SEQ_CLS"
    base = base_id(recipe, stage)
    method = [stage.method.name] if stage.method.name in METHODS else []
    front: dict[str, Any] = {"base_model": base} if base else {}
    front |= {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "tags": ["burnish", *method, *(["lora"] if stage.adapter else [])],
    }
    step_value = stage.method.name == "step_value"
    page = _render(
        "model_card.md.j2",
        front=as_yaml(front),
        name=recipe.name,
        stage=stage.name,
        kind="adapter" if adapter else "model",
        method=METHOD_NAMES.get(stage.method.name, stage.method.name),
        start=_start(stage, base),
        load=_load_code(adapter, scores, stage.trust_remote_code, step_value),
        critic=(folder / "critic").is_dir(),
        value_head=(folder / VALUE_HEAD).is_file() and not step_value,
        scores=scores,
        results=_results(entry),
        step=entry["results"]["after"].get("step") if entry.get("results") else None,
        data=_data(recipe, stage, entry.get("rows") or {}),
        hashes={short(name): digest for kind in ("data", "inputs") for name, digest in entry.get(kind, {}).items()},
        settings=as_yaml(_settings(recipe, stage)),
    )
    (folder / CARD).write_text(page, "utf-8")


def merged_card(adapter: Path, *, trust_remote_code: bool = False) -> str:
    """The card of an adapter that is merged into its base.

    For the adapter of a finished stage, it is the card of the stage's ``model/``, which is the same model. For any
    other adapter, it names the base and shows how to load the model.

    Raises:
        UserError: the settings of the adapter, or the manifest of its run, cannot be read.
    """
    stage, model = adapter.resolve().parent, adapter.resolve().parent / "model"
    if (stage.parent / MANIFEST).is_file() and (model / CARD).is_file():
        entries = read_manifest(stage.parent / MANIFEST)["stages"]
        if any(entry["name"] == stage.name and entry["state"] == "done" for entry in entries):
            return (model / CARD).read_text("utf-8")
    config, recorded = adapter_config(str(adapter)), recorded_base(adapter)
    base = recorded.name if recorded else str(config.base_model_name_or_path or "unknown")
    scores = config.task_type == "SEQ_CLS"
    front: dict[str, Any] = {"base_model": base} if _on_hub(base) else {}
    front |= {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "tags": ["burnish", "merged"],
    }
    return _render(
        "merged_card.md.j2",
        front=as_yaml(front),
        name=adapter.resolve().name,
        base=short(base),
        weights=recorded.weights if recorded else None,
        load=_load_code(adapter=False, scores=scores, trust_remote_code=trust_remote_code, step_value=False),
        scores=scores,
        value_head=(adapter / VALUE_HEAD).is_file(),
    )


def _render(template: str, **values: Any) -> str:
    """The text of a card, from a template of the report and its values."""
    from jinja2 import Environment, StrictUndefined

    source = (files("burnish.report") / "templates" / template).read_text("utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": code, "escape": escape, "fence": fence}
    return environment.from_string(source).render(values, version=__version__)


def base_id(recipe: Recipe, stage: Stage) -> str | None:
    """The hub id of the model that a chain of stages started from, or None if it is not on the hub."""
    source = stage.model
    while isinstance(source, StageModel):
        name = source.stage
        source = next(earlier for earlier in recipe.stages if earlier.name == name).model
    if isinstance(source, PackageModel):
        return source.hub
    return source if isinstance(source, str) and _on_hub(source) else None


def _on_hub(name: str) -> bool:
    """Whether a model is named by its id on the hub, and not by a folder."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _start(stage: Stage, base: str | None) -> str:
    """The model that a stage starts from, as Markdown."""
    if isinstance(stage.model, StageModel):
        return f"the model of stage {code(stage.model.stage)}" + (f" (made from {code(base)})" if base else "")
    return code(base or (stage.model.package if isinstance(stage.model, PackageModel) else short(str(stage.model))))


def _load_code(adapter: bool, scores: bool, trust_remote_code: bool, step_value: bool) -> str:
    """Python code that loads a folder with an adapter or a model."""
    remote = ", trust_remote_code=True" if trust_remote_code else ""
    kind = "SequenceClassification" if scores else "CausalLM"
    auto = f"AutoPeftModelFor{kind}" if adapter else f"AutoModelFor{kind}"
    labels = ", num_labels=1" if adapter and scores else ""
    lines = [f"from peft import {auto}"] if adapter else []
    lines += [f"from transformers import {'' if adapter else f'{auto}, '}AutoTokenizer", ""]
    if step_value:
        lines.insert(0, "from burnish.models.loading import load_value_model")
    lines += [
        'folder = "PATH/TO/THIS/FOLDER"',
        f"model = {auto}.from_pretrained(folder{labels}{remote})",
        f"tokenizer = AutoTokenizer.from_pretrained(folder{remote})",
    ]
    if step_value:
        lines.append("network = load_value_model(folder)  # the model with its value head, network.critic")
    return "\n".join(lines)


def _results(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    """The headline metrics on held-out rows, as they are shown: ``{"metric": "Accuracy", "before": "43.8 %", ...}``."""
    evaluations = entry.get("results") or {}
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    if before.get("step") == after.get("step"):
        before = {}
    return [
        {
            "metric": change.metric.label,
            "before": with_interval(change.before, change.metric.share),
            "after": with_interval(change.after, change.metric.share),
            "change": change.verdict.lower(),
        }
        for change in headline_changes(changes(before, after))
    ]


def _data(recipe: Recipe, stage: Stage, counts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each split: ``{"split": "train", "sources": ["chat.jsonl"], "rows": "24 rows, 1 skipped"}``."""
    assert stage.data is not None
    splits = []
    for split in ("train", "eval"):
        if getattr(stage.data, split) is None:
            continue
        read = counts.get(split, {})
        said = [f"{read['rows']:,} rows"] if "rows" in read else ["read as a stream"]
        for kind, named in read.items():
            many = read.get(f"{kind} in all", len(named) if isinstance(named, list) else 0)
            if isinstance(named, list) and kind != "mixed" and many:
                said.append(f"{many:,} {kind}")
        sources = [short(name, recipe.folder) for name in references(stage.data, split, recipe.folder)]
        splits.append({"split": split, "sources": sources, "rows": ", ".join(said)})
    return splits


def _settings(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """The settings of a stage: all of the method, and the others that the recipe sets."""
    resolved = next(values for values in recipe.resolved()["stages"] if values["name"] == stage.name)
    given = stage.model_dump(mode="json", by_alias=True, exclude_unset=True)
    settings = {key: value for key, value in given.items() if key not in ("name", "model")}
    settings["method"] = {key: value for key, value in resolved["method"].items() if value is not None}
    always = {key: resolved["trainer"][key] for key in ALWAYS if key in resolved["trainer"]}
    settings["trainer"] = always | given.get("trainer", {})
    if settings["trainer"].get("max_steps", -1) < 0:
        settings["trainer"].pop("max_steps", None)
    settings["data"] = {key: value for key, value in given["data"].items() if key not in ("train", "eval")}
    return _shortened({"seed": recipe.seed_of(stage), **{key: value for key, value in settings.items() if value}})


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return short(value) if isinstance(value, str) else value


def short(name: str, folder: Path | None = None) -> str:
    """A path without what only this machine knows: relative to ``folder``, or if it is absolute, its last part."""
    path = Path(name)
    if folder is not None and path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return path.name or name if name.startswith(("/", "~")) else name


# --- text of users in Markdown ------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Text as inline code, whatever it contains."""
    plain = " ".join(str(text).split())
    ticks = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    pad = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{ticks}{pad}{plain}{pad}{ticks}"


def fence(text: str, language: str) -> str:
    """Text as a block of code, whatever it contains."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def escape(text: str) -> str:
    """Text on one line, without any character that Markdown or HTML would interpret."""
    return re.sub(r"([\\`*_\[\]<>|&#~$!])", r"\\\1", " ".join(str(text).split()))
