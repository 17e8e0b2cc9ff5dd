"""The section on an adapter: its settings, its weights, and whether its base is here and the right one."""

from __future__ import annotations

from pathlib import Path

from peft import PeftConfig, TaskType
from transformers import AutoModelForSequenceClassification

from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.head import is_head
from burnish.commands.inspect_model.opening import READ_LIMIT, Model, model_file, on_meta, open_gguf, open_model
from burnish.errors import UserError
from burnish.models import bases, loading
from burnish.models.stored import Stored, local_file, of_files, stored

LORA_NUMBERS = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
SHOWN = 3


def open_adapter(reference: str, folder: str, described: Description) -> Model | None:
    """The base of an adapter as a model with the adapter's head, after the adapter itself has been described."""
    config = loading.adapter_config(folder)
    weights = of_files(path for name in [loading.ADAPTER] if (path := model_file(folder, name)) is not None)
    described.add("adapter", {**_facts(config), **_weights(weights, described)})
    base = _base(folder, config, described)
    if base is None:
        return None
    place = loading.locate(base)
    model = open_gguf(base, place) if isinstance(place, Path) else open_model(base, place)
    model.adapter, model.reference = folder, reference
    head = next((shape for name, (_, shape) in weights.tensors.items() if is_head(name)), None)
    if config.task_type == TaskType.SEQ_CLS and model.config is not None:
        model.config.num_labels = head[0] if head else 1
        wanted = model.config
        model.network = on_meta(lambda: AutoModelForSequenceClassification.from_config(wanted), base)
    return model


def _facts(config: PeftConfig) -> dict[str, str | None]:
    settings = config.to_dict()
    targets = settings.get("target_modules")
    if not isinstance(targets, str):
        names = sorted({str(target).rpartition(".")[2] for target in targets or []})
        targets = f"{', '.join(names)} ({len(targets or []):,} modules)" if targets else None
    task = str(getattr(config.task_type, "value", config.task_type))
    kinds = {"CAUSAL_LM": "a language model", "SEQ_CLS": "a reward model or classifier"}
    details = [f"{name} {settings[key]:g}" for name, key in LORA_NUMBERS.items() if settings.get(key) is not None]
    details += [name for name, key in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if settings.get(key)]
    return {
        "kind": f"{getattr(config.peft_type, 'value', config.peft_type)} on {kinds.get(task, task)}",
        "settings": ", ".join(details) or None,
        "targets": targets,
    }


def _weights(weights: Stored, described: Description) -> dict[str, str | None]:
    if weights.damaged or not weights.tensors:
        wrong = f"cannot be read: {next(iter(weights.damaged.values()))}" if weights.damaged else "is missing"
        described.warnings.append(f"{loading.ADAPTER} {wrong}: the adapter cannot be loaded")
    whole = sorted({name.rpartition(".")[0].removeprefix("base_model.model.") for name in weights.tensors} - {""})
    whole = [name for name in whole if "lora_" not in name]
    note = f", {', '.join(whole[:SHOWN])} among them" if whole else ""
    return {"trained": f"{weights.parameters:,} parameters{note}; the base is frozen" if weights.tensors else None}


def _base(folder: str, config: PeftConfig, described: Description) -> str | None:
    """Where the base of an adapter is, or None if it is not here."""
    recorded = bases.recorded(folder)
    name = recorded.name if recorded else config.base_model_name_or_path
    digest = f"{recorded.weights[: bases.SHOWN]} recorded" if recorded else "none recorded"
    described.add("adapter", {"base": str(name or "not named"), "hash of the base": digest})
    try:
        base = loading.base_of(folder)
        if not Path(base).is_dir() and not local_file(base, "config.json"):
            raise UserError(f"{base} is not in the hub's cache")
    except UserError as error:
        described.add("adapter", {"base is here": "no"})
        described.warnings.append(f"the base is not here, so the adapter computes nothing yet: {error}")
        return None
    described.add("adapter", {"base is here": f"yes: {base}"})
    held = stored(base)
    size = held.bytes
    if recorded is None or not held.complete:
        return base
    if size > READ_LIMIT:
        described.add(
            "adapter", {"hash of the base": f"{digest}; not compared, because the base has {size / 2**30:.1f} GiB"}
        )
    elif (actual := bases.weights_hash(base)) == recorded.weights:
        described.add("adapter", {"hash of the base": f"{digest}; the base here has the same"})
    else:
        described.add("adapter", {"hash of the base": f"{digest}; the base here has {actual[: bases.SHOWN]}"})
        described.warnings.append(
            f"{base} is not the base that the adapter was trained on: its weights differ, and Burnish refuses it"
        )
    return base
