"""The section on parameters: how they are stored, how many there are in each part, and what is missing."""

from __future__ import annotations

from collections import Counter

from torch import nn

from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.opening import Model
from burnish.models.precision import weights_dtype, width_of
from burnish.models.stored import Stored


def describe_parameters(model: Model, described: Description) -> None:
    """Describe the parameters. Missing, damaged and pickled weight files are warnings."""
    held = model.stored
    dtypes = [f"{name} ({count / max(1, held.parameters):.1%})" for name, count in held.dtypes().items()]
    if len(dtypes) == 1:
        dtypes = list(held.dtypes())
    quantized = model.settings.get("quantization_config")
    width = None if model.config is None else width_of(model.config)
    default = str(weights_dtype("auto", width, trained=model.adapter is None)).removeprefix("torch.")
    described.add(
        "parameters",
        {
            "stored as": ", ".join(dtypes) or "no weights here",
            "loaded as": f"{default}, unless precision: says otherwise",
            "quantized": str(quantized.get("quant_method", "yes")) if isinstance(quantized, dict) else None,
            "files": _files(held, described) if not model.gguf else None,
        },
    )
    if model.network is None:
        described.add("parameters", {"total": f"{held.parameters:,}" if held.tensors else None})
        return
    total = sum(p.numel() for p in model.network.parameters())
    described.add("parameters", {"total": f"{total:,}"})
    if not model.adapter:
        described.add("parameters", {"trained": "all, unless a recipe sets an adapter"})
    for name, count in _parts(model.network).items():
        described.add("parameters", {f"  {name}": f"{count:,}"})


def _files(held: Stored, described: Description) -> str | None:
    if held.missing:
        lost = ", ".join(f"{name} ({count} tensors)" for name, count in held.missing.items())
        described.warnings.append(
            f"{len(held.missing)} of {held.files} weight files are missing, so the model cannot be loaded: {lost}"
        )
        return f"{held.files - len(held.missing)} of {held.files}; missing: {lost}"
    if held.damaged:
        described.warnings.extend(f"{name} cannot be read: {reason}" for name, reason in held.damaged.items())
    elif not held.tensors:
        reason = "are pickle files, which can run code: Burnish does not load them" if held.pickled else "are not here"
        described.warnings.append(f"its weights {reason}")
    return f"{held.files} in safetensors" if held.files > 1 else None


def _parts(network: nn.Module) -> dict[str, int]:
    """The number of parameters of each part: ``{"model.embed_tokens": 512, "model.layers (2)": 9216, "score": 32}``."""
    sums: Counter[str] = Counter()
    layers: dict[str, set[str]] = {}
    prefix = getattr(network, "base_model_prefix", "")
    for name, parameter in network.named_parameters():
        path = name.split(".")[:-1]
        number = next((i for i, part in enumerate(path) if part.isdigit()), None)
        if number is None:
            part = ".".join(path[: 2 if path[0] == prefix else 1])
        else:
            part = ".".join(path[:number])
            layers.setdefault(part, set()).add(path[number])
        sums[part] += parameter.numel()
    return {f"{part} ({len(layers[part])})" if part in layers else part: count for part, count in sums.items()}
