"""The section on the head: its layers, labels and scale, and a value head."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.opening import Model, model_file
from burnish.models import loading
from burnish.models.heads import VALUE_HEAD
from burnish.models.stored import of_files
from burnish.report.metrics import number


def is_head(name: str) -> bool:
    """Whether a tensor of this name is the weight of a classification head."""
    return bool({"score", "classifier"}.intersection(name.split("."))) and name.endswith("weight")


def describe_head(model: Model, described: Description) -> None:
    """Describe the head, and the heads or critics that Burnish stores beside a model."""
    path = model_file(model.folder, VALUE_HEAD)
    if path is not None:
        _describe_value_head(path, described)
    if (Path(model.folder) / "critic" / "config.json").is_file():
        described.add(
            "head", {"critic": "the critic of PPO is a model of its own in critic/ (AutoModelForTokenClassification)"}
        )
    network = model.network
    if network is None:
        return
    named = next((name for name in ("score", "classifier") if hasattr(network, name)), None)
    if named is None:
        output = network.get_output_embeddings()
        described.add("head", {"layer": _linear(output) if isinstance(output, nn.Linear) else "none"})
        return
    modules = getattr(network, named).named_modules()
    linear = {".".join(filter(None, (named, name))): part for name, part in modules if isinstance(part, nn.Linear)}
    described.add("head", {f"layer {name}": _linear(part) for name, part in linear.items()})
    if not model.classifies or model.config is None:
        return
    labels = {int(index): str(name) for index, name in (model.config.id2label or {}).items()}
    mean, std = (model.settings.get(key) for key in ("score_mean", "score_std"))
    one = len(labels) == 1
    described.add(
        "head",
        {
            "labels": ", ".join(f"{index} {name!r}" for index, name in labels.items()),
            "score": f"the raw logit{'' if one else ' of the label that label: names'}, without sigmoid or softmax",
            "stored mean and spread": _spread(mean, std),
        },
    )
    held = model.stored if not model.adapter else of_files([Path(model.adapter) / loading.ADAPTER])
    if held.complete and not any(is_head(name) for name in held.tensors):
        described.warnings.append("the weights hold no head: transformers would make up a random one")


def _spread(mean: object, std: object) -> str:
    """The stored mean and standard deviation of a reward model's scores. The config of a stranger may hold anything."""
    if mean is None:
        return "none"
    shown = (number(value) if isinstance(value, float | int) else str(value) for value in (mean, std))
    return f"{' and '.join(shown)}, used with normalize: true"


def _linear(layer: nn.Linear) -> str:
    return f"{layer.out_features:,} x {layer.in_features:,}, {'with' if layer.bias is not None else 'without'} bias"


def _describe_value_head(path: Path, described: Description) -> None:
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            delimiter = (file.metadata() or {}).get("delimiter")
    except (OSError, SafetensorError) as error:
        described.warnings.append(f"{path.name} cannot be read: {error}")
        return
    shape = next((f"{s[0]:,} x {s[1]:,}" for s in shapes.values() if len(s) == 2), "unknown shape")
    bias = "with" if any(name.endswith("bias") for name in shapes) else "without"
    steps = "value.weight" in shapes
    described.add(
        "head",
        {
            "value head": f"{shape}, {bias} bias, in {path.name}",
            "value": "tanh(w h + b), in -1 to 1, of the text up to each reasoning step"
            if steps
            else "w h + b, of each token",
            "delimiter": f"{delimiter!r} ends a reasoning step" if delimiter is not None else None,
            "loaded by": "burnish.models.loading.load_value_model; plain transformers ignores it" if steps else None,
        },
    )
