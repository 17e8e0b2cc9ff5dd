"""Shows what a model is and computes: its class, parameters, head, special tokens, pooled position and template.

The weights are loaded only to compare the scores of a small classifier. Everything else comes from the config, from the
tokenizer, from the headers of the weight files, and from the model's class on the meta device.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import PeftConfig, TaskType
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from burnish.config import shipped
from burnish.errors import UserError, did_you_mean
from burnish.models import bases, loading, pooling
from burnish.models.forward import layer_types
from burnish.models.heads import VALUE_HEAD
from burnish.models.stored import Stored, local_file, of_files, stored
from burnish.render.renderer import Renderer
from burnish.render.solutions import step_ends
from burnish.render.templates import PLAIN_TEMPLATES, ChatTemplate
from burnish.rewards.model import longest
from burnish.types import Conversation, Message

READ_LIMIT = 2**30
"""Bytes of weights up to which they are read, to compare scores and to hash the base of an adapter."""
MOST_LAYERS = 10_000
CLOSE = 1e-3  # rounding of a score
SHOWN = 3
# What transformers raises for configs that it does not understand.
BAD_CONFIG = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    StrictDataclassError,
)
WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_chunk_size")  # config attributes
LORA_NUMBERS = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
QUESTION, ANSWER = "What is 2 + 3?", "2 + 3 is 5."
STEPS = ("2 + 3 = 5", "The answer is 5")
# Families of chat templates, by what they write; more special ones first.
FAMILIES = {
    "Harmony (gpt-oss)": "<|channel|>",
    "ChatML": "<|im_start|>",
    "Llama 3": "<|start_header_id|>",
    "Llama 4": "<|header_start|>",
    "Gemma": "<start_of_turn>",
    "Command R": "<|START_OF_TURN_TOKEN|>",
    "DeepSeek": "<\uff5cUser\uff5c>",
    "Granite": "<|start_of_role|>",
    "Phi": "<|end|>",
    "Zephyr": "<|user|>",
    "Llama 2 or Mistral": "[INST]",
    "Alpaca": "### Instruction",
    "Vicuna": "USER:",
}


@dataclass
class Description:
    """What is known of a model: facts by section and name, and warnings.

    ``Description({"head": {"shape": "1 x 64", "bias": "none"}}, ["..."])``
    """

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, section: str, facts: Mapping[str, str | None]) -> None:
        """Add facts to a section, except those that are None."""
        self.facts.setdefault(section, {}).update({name: fact for name, fact in facts.items() if fact is not None})


@dataclass
class Model:
    """A model whose weights have not been loaded.

    Attributes:
        reference: what the user named.
        source: a folder or hub id, or for a GGUF file its folder.
        settings: config.json.
        config: the same, as transformers reads it. None if only the model's own code can read it.
        network: the model on the meta device. None if transformers has no class for it.
        stored: its tensors.
        gguf: the name of the GGUF file, or None.
        adapter: the adapter's folder, or None. The other attributes then describe its base.
    """

    reference: str
    source: str
    settings: Mapping[str, Any]
    config: PreTrainedConfig | None
    network: PreTrainedModel | None
    stored: Stored
    gguf: str | None = None
    adapter: str | None = None

    @property
    def classifies(self) -> bool:
        """Whether the model is a sequence classifier."""
        return self.network is not None and type(self.network).__name__.endswith("ForSequenceClassification")

    @property
    def folder(self) -> str:
        """Where a value head and a tokenizer are: the adapter's folder if there is one."""
        return self.adapter or self.source


def show(reference: str, console: Console) -> None:
    """Print the description of a model.

    Raises:
        UserError: it is not a model, or its config cannot be read.
    """
    described = describe(reference)
    for section, facts in described.facts.items():
        console.print(section, style="bold")
        width = max(map(len, facts))
        for name, fact in facts.items():
            console.print(Text(f"  {name:{width}}  {fact}"), soft_wrap=True)
    for warning in described.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)


def describe(reference: str) -> Description:
    """Describe a model without training or running it.

    Args:
        reference: a folder (of a model, an adapter or a stage), a .gguf file or a hub id.

    Raises:
        UserError: it is not a model, or its config cannot be read.
    """
    described = Description()
    place = _locate(reference)
    if isinstance(place, Path):
        model = _open_gguf(reference, place)
    elif (adapter := _file(place, "adapter_config.json")) is not None and _file(place, "config.json") is None:
        model = _open_adapter(reference, str(adapter.parent), described)
        if model is None:  # the base is not here
            return described
    else:
        model = _open(reference, place)
    _describe_model(model, described)
    _describe_weights(model, described)
    _describe_head(model, described)
    tokenizer = _tokenizer(model, described)
    if tokenizer is not None:
        _describe_special_tokens(model, tokenizer, described)
        template = _describe_template(tokenizer, described)
        _describe_reading(model, tokenizer, template, described)
    return described


# --- opening ------------------------------------------------------------------------------------------------------


def _locate(reference: str) -> str | Path:
    path = Path(reference).expanduser()
    try:
        place = loading.locate(reference)
    except UserError as error:
        stages = sorted(folder.parent.name for folder in path.glob("*/model"))
        if stages:
            reason = f"this is the folder of a run: name one of its stages: {', '.join(stages)}"
        elif path.is_dir():
            reason = str(error).removeprefix(f"{reference}: ")
        else:
            reason = "a file of another kind" if path.exists() else "there is no such file or folder"
        raise _neither(reference, reason) from error
    if isinstance(place, str) and not any(_file(place, name) for name in ("config.json", "adapter_config.json")):
        reason = "there is no such file or folder, and no such model in the hub's cache or on the hub"
        raise _neither(reference, reason + did_you_mean(reference, shipped()))
    return place


def _neither(reference: str, reason: str) -> UserError:
    return UserError(
        f"{reference}: neither a recipe nor a model: {reason}\n"
        f"  a recipe is a .yaml file or one of {', '.join(shipped())}\n"
        "  a model is a folder (of a model, adapter or stage), a .gguf file or a hub id"
    )


def _file(source: str, name: str) -> Path | None:
    """A file of a model folder or hub id, downloaded if it must be."""
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # there is no network, or no such id
        return None
    return Path(found) if found else None


def _settings(source: str, name: str) -> dict[str, Any]:
    path = _file(source, name)
    if path is None:
        return {}
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected keys such as model_type, got a {type(settings).__name__}")
    return settings


def _config(source: str, **options: Any) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    except BAD_CONFIG as error:
        raise UserError(f"{source}: its config cannot be read: {_reason(error)}") from error
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        raise UserError(f"{source}: its config cannot be right: {layers} layers")
    return config


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def _on_meta(make: Callable[[], PreTrainedModel], reference: str) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return make()
    except BAD_CONFIG as error:
        raise UserError(f"{reference}: no model can be built from its config: {_reason(error)}") from error


def _open(reference: str, source: str) -> Model:
    settings = _settings(source, "config.json")
    known = isinstance(kind := settings.get("model_type"), str) and kind in transformers.CONFIG_MAPPING
    if not known and "auto_map" in settings:
        return Model(reference, source, settings, None, None, stored(source))
    config = _config(source)
    names = settings.get("architectures") or []
    cls = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel)):
        cls = None
    network = _on_meta(lambda: cls(config) if cls else AutoModel.from_config(config), reference)
    return Model(reference, source, settings, config, network, stored(source))


def _open_gguf(reference: str, path: Path) -> Model:
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(path).tensors
        config = _config(str(path.parent), gguf_file=path.name)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{path}: cannot be read as a GGUF model: {_reason(error)}") from error
    network = _on_meta(lambda: AutoModelForCausalLM.from_config(config), reference)
    held = {tensor.name: (tensor.tensor_type.name, tuple(int(n) for n in tensor.shape)) for tensor in tensors}
    return Model(reference, str(path.parent), config.to_dict(), config, network, Stored(held, 1), path.name)


def _open_adapter(reference: str, folder: str, described: Description) -> Model | None:
    """The base of an adapter as a model with the adapter's head, after the adapter itself has been described."""
    _settings(folder, "adapter_config.json")  # checks that it is JSON with keys
    config = loading.adapter_config(folder)
    weights = of_files(path for name in [loading.ADAPTER] if (path := _file(folder, name)) is not None)
    described.add("adapter", {**_adapter_facts(config), **_adapter_weights(weights, described)})
    base = _base(folder, config, described)
    if base is None:
        return None
    place = loading.locate(base)
    model = _open_gguf(base, place) if isinstance(place, Path) else _open(base, place)
    model.adapter, model.reference = folder, reference
    head = next((shape for name, (_, shape) in weights.tensors.items() if _is_head(name)), None)
    if config.task_type == TaskType.SEQ_CLS and model.config is not None:
        model.config.num_labels = head[0] if head else 1
        wanted = model.config
        model.network = _on_meta(lambda: AutoModelForSequenceClassification.from_config(wanted), base)
    return model


# --- adapters -----------------------------------------------------------------------------------------------------


def _adapter_facts(config: PeftConfig) -> dict[str, str | None]:
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


def _adapter_weights(weights: Stored, described: Description) -> dict[str, str | None]:
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


# --- the model ----------------------------------------------------------------------------------------------------


def _describe_model(model: Model, described: Description) -> None:
    names = model.settings.get("architectures") or ["unknown"]
    tokenizer = _settings(model.source, "tokenizer_config.json") if not model.gguf else {}
    remote = {**_auto_map(model.settings), **_auto_map(tokenizer)}
    network = model.network
    described.add(
        "model",
        {
            "what": _what(model),
            "class": type(network).__name__ if network is not None else str(names[0]),
            "file": _file_of(type(network)) if network is not None else "not in transformers",
            "remote code": _remote_code(remote, network is not None),
        },
    )
    if remote and network is None:
        described.warnings.append(
            "only the model's own code can build it: read that code, then set trust_remote_code: true to run it"
        )
    if model.config is None:
        return
    text = model.config.get_text_config()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    has_output = network is not None and network.get_output_embeddings() is not None
    described.add(
        "model",
        {
            "context window": _window(text),
            "attention": _attention(text, causal=not _is_encoder(model)),
            "tied embeddings": ("yes: the head is the input embedding" if tied else "no") if has_output else None,
        },
    )


def _what(model: Model) -> str:
    of = " with its adapter" if model.adapter else " in a GGUF file" if model.gguf else ""
    if _file(model.folder, VALUE_HEAD) is not None:
        return f"a language model with a value head{of}"
    if model.network is None:
        return "unknown"
    if model.classifies:
        kind = "an encoder" if _is_encoder(model) else "a causal model"
        labels = getattr(model.config, "num_labels", 0)
        what = "a reward model" if labels == 1 else f"a classifier with {labels} labels"
        return f"{what}: {kind} that scores whole texts{of}"
    if type(model.network).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return f"a language model{of}"
    if type(model.network).__name__.endswith("ForTokenClassification"):
        return "a classifier of tokens, such as the separate critic of PPO"
    return "neither a language model nor a sequence classifier; training a reward model adds a new head"


def _is_encoder(model: Model) -> bool:
    """Whether the model is an encoder. Transformers names the head of causal classifiers ``score``."""
    if model.network is None or model.network.get_output_embeddings() is not None:
        return False
    return not hasattr(model.network, "score") and not getattr(model.config, "is_decoder", False)


def _file_of(cls: type) -> str:
    """The file of a class, from the name of its package on: ``transformers/models/llama/modeling_llama.py``."""
    return cls.__module__.replace(".", "/") + ".py"


def _auto_map(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The classes that a model brings with it: ``{"AutoModel": "modeling_mine.MineModel"}``."""
    named = settings.get("auto_map")
    return named if isinstance(named, dict) else {}


def _remote_code(remote: Mapping[str, Any], known: bool) -> str:
    if not remote:
        return "none"
    names = [name for value in remote.values() for name in (value if isinstance(value, list) else [value]) if name]
    files = sorted({str(name).rpartition("--")[2].partition(".")[0] + ".py" for name in names})
    named = f"the model comes with code of its own ({', '.join(files)})"
    return f"{named}, which {'does not run by default; transformers has this class itself' if known else 'would run'}"


def _window(text: PreTrainedConfig) -> str:
    positions = getattr(text, "max_position_embeddings", None)
    return f"{positions:,} tokens" if isinstance(positions, int) else "no limit in the config"


def _attention(text: PreTrainedConfig, *, causal: bool) -> str:
    """The attention of the layers: ``causal, 6 layers full, 26 layers sliding with a window of 1,024 tokens``."""
    window = next((w for name in WINDOWS if isinstance(w := getattr(text, name, None), int)), None)
    within = f" with a window of {window:,} tokens" if window else ""
    direction = "causal" if causal else "in both directions"
    if kinds := Counter(layer_types(text)):
        shown = [
            f"{count} layers {kind.removesuffix('_attention').replace('_', ' ')}"
            + (within if kind.startswith(("sliding", "local", "chunked")) else "")
            for kind, count in kinds.items()
        ]
        return f"{direction}, {', '.join(shown)}"
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    layers = f"in all {text.num_hidden_layers} layers" if hasattr(text, "num_hidden_layers") else "in all layers"
    return f"{direction}, {'sliding' + within if sliding else 'full'} {layers}"


# --- the weights --------------------------------------------------------------------------------------------------


def _describe_weights(model: Model, described: Description) -> None:
    held = model.stored
    dtypes = [f"{name} ({count / max(1, held.parameters):.1%})" for name, count in held.dtypes().items()]
    if len(dtypes) == 1:
        dtypes = list(held.dtypes())
    quantized = model.settings.get("quantization_config")
    default = str(loading.choose_dtype("auto", adapter=model.adapter is not None)).removeprefix("torch.")
    described.add(
        "parameters",
        {
            "stored as": ", ".join(dtypes) or "no weights here",
            "loaded as": f"{default}, unless dtype: says otherwise",
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


# --- the head -----------------------------------------------------------------------------------------------------


def _is_head(name: str) -> bool:
    return bool({"score", "classifier"}.intersection(name.split("."))) and name.endswith("weight")


def _describe_head(model: Model, described: Description) -> None:
    path = _file(model.folder, VALUE_HEAD)
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
            "stored mean and spread": f"{mean} and {std}, used with normalize: true" if mean is not None else "none",
        },
    )
    held = model.stored if not model.adapter else of_files([Path(model.adapter) / loading.ADAPTER])
    if held.complete and not any(_is_head(name) for name in held.tensors):
        described.warnings.append("the weights hold no head: transformers would make up a random one")


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


# --- tokens -------------------------------------------------------------------------------------------------------


def _tokenizer(model: Model, described: Description) -> PreTrainedTokenizerBase | None:
    own = model.adapter if model.adapter and _file(model.adapter, "tokenizer_config.json") else model.source
    try:
        gguf = {"gguf_file": model.gguf} if model.gguf else {}
        return loading.stored_tokenizer(own, trust_remote_code=False, **gguf)
    except UserError as error:
        described.warnings.append(f"no tokenizer: {error}")
        return None


def _describe_special_tokens(model: Model, tokenizer: PreTrainedTokenizerBase, described: Description) -> None:
    text = model.config.get_text_config() if model.config is not None else None
    stored_pad = tokenizer.pad_token_id
    for kind in ("pad", "eos", "bos"):
        token, number = getattr(tokenizer, f"{kind}_token"), getattr(tokenizer, f"{kind}_token_id")
        known = "none in the tokenizer" if number is None else f"{token!r} ({number})"
        configured = getattr(text, f"{kind}_token_id", None)
        differs = "" if configured == number else f"; in the config: {'none' if configured is None else configured}"
        described.add("special tokens", {kind: known + differs})
    loading.choose_pad_token(tokenizer)
    if stored_pad is None:
        chosen = f"{tokenizer.pad_token!r} ({tokenizer.pad_token_id})"
        described.add(
            "special tokens", {"pad": f"{described.facts['special tokens']['pad']}; Burnish pads with {chosen}"}
        )
    same = stored_pad is not None and stored_pad == tokenizer.eos_token_id
    described.add("special tokens", {"pad equals eos": "yes" if same else "no"})
    generation = _settings(model.source, "generation_config.json") if not model.gguf else {}
    stops = generation.get("eos_token_id")
    if stops is not None and stops != tokenizer.eos_token_id:
        described.add("special tokens", {"generation ends with": str(stops)})
    embeddings = getattr(text, "vocab_size", None)
    if isinstance(embeddings, int) and len(tokenizer) > embeddings:
        described.warnings.append(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model has only {embeddings:,} embeddings: it cannot "
            "compute a text with one of the other tokens"
        )
    if model.config is not None and (limit := longest(model.config, tokenizer)) is not None:
        described.add("model", {"longest text": f"{limit:,} tokens, by the model and its tokenizer"})


# --- templates ----------------------------------------------------------------------------------------------------


def _messages(*contents: str) -> tuple[Message, ...]:
    return tuple(Message(role="assistant" if i % 2 else "user", content=content) for i, content in enumerate(contents))


def _describe_template(tokenizer: PreTrainedTokenizerBase, described: Description) -> ChatTemplate | None:
    """Describe the chat template. Returns None if there is none that works."""
    section = "chat template"
    try:
        template = ChatTemplate(tokenizer)
    except UserError:
        described.add(section, {"family": f"none: a recipe has to set template: {' or '.join(PLAIN_TEMPLATES)}"})
        return None
    chat = _messages(QUESTION, ANSWER, QUESTION, ANSWER)
    try:
        texts = {n: template.render(chat[:n], "a sample conversation").text for n in (2, 4)}
        prompts = {
            n: template.render(chat[:n], "a sample conversation", add_generation_prompt=True).text for n in (1, 3)
        }
    except UserError as error:
        described.warnings.append(str(error))
        described.add(section, {"family": "unknown: it cannot render a conversation"})
        return None
    described.add(
        section,
        {
            "family": _family(template, texts[4]),
            "marks the assistant": "yes" if template.marks_generation else "no",
            "ends turns": _end_of_turns(tokenizer, chat),
            "keeps prefixes": _kept(
                texts[4].startswith(texts[2]), all(texts[4].startswith(text) for text in prompts.values())
            ),
            "keeps reasoning of earlier turns": _kept_reasoning(template),
        },
    )
    return template


def _family(template: ChatTemplate, text: str) -> str:
    if template.plain:
        return next(name for name, source in PLAIN_TEMPLATES.items() if source == template.source)
    return next((family for family, mark in FAMILIES.items() if mark in text), "unknown")


def _end_of_turns(tokenizer: PreTrainedTokenizerBase, chat: tuple[Message, ...]) -> str:
    """The token that ends the assistant's turns, as the token after the learned text of a turn."""
    row = Conversation(chat[:2], None, "a sample conversation")
    try:
        renderer = Renderer(tokenizer)
        with_end, without = (renderer.conversation(row, "last", learn_eos=learned) for learned in (True, False))
    except UserError as error:
        return f"no: {error}"
    ends = with_end.tokens[with_end.loss_mask & ~without.loss_mask].tolist()
    return f"yes, with {', '.join(repr(str(tokenizer.decode([token]))) for token in ends)}"


def _kept(turns: bool, prompts: bool) -> str:
    if turns and prompts:
        return "yes"
    lost = [what for what, kept in (("turns", turns), ("prompts", prompts)) if not kept]
    return f"no: earlier {' and '.join(lost)} are written in another way when more follows"


def _kept_reasoning(template: ChatTemplate) -> str | None:
    """Whether the reasoning in an earlier turn stays. None if the template rejects it."""
    chat = _messages(QUESTION, f"<think>\nseven\n</think>\n\n{ANSWER}", QUESTION, ANSWER)
    try:
        return "yes" if "seven" in template.render(chat, "a sample conversation").text else "no"
    except UserError:
        return None


# --- what is read of a text ---------------------------------------------------------------------------------------


def _describe_reading(
    model: Model, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, described: Description
) -> None:
    """Describe which tokens of a sample text are scored."""
    head = described.facts.get("head", {})
    if not model.classifies and "delimiter" not in head:
        return
    try:
        text = _sample(tokenizer, template)
    except UserError as error:
        described.warnings.append(str(error))
        return
    tokens = [str(tokenizer.decode([token])) for token in text]
    described.add("position of the score", {"sample": f"{str(tokenizer.decode(text))!r}: tokens 0 to {len(text) - 1}"})
    if not model.classifies:
        _describe_steps(model, tokenizer, template, described)
    elif _is_encoder(model):
        _describe_encoder(model, text, tokens, described)
    else:
        _describe_pooling(model, tokenizer, text, tokens, described)


def _sample(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None) -> list[int]:
    if template is None:
        return list(tokenizer(f"{QUESTION} {ANSWER}")["input_ids"])  # pyright: ignore[reportArgumentType]
    row = Conversation(_messages(QUESTION, ANSWER), None, "a sample conversation")
    return Renderer(tokenizer).answers([row])[0].tokens.tolist()


def _describe_steps(
    model: Model, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, described: Description
) -> None:
    """Describe where a step-value model is read."""
    path = _file(model.folder, VALUE_HEAD)
    assert path is not None
    with safe_open(path, "pt") as file:
        delimiter = (file.metadata() or {})["delimiter"]
    solution = delimiter.join((*STEPS, ""))
    ids = list(tokenizer(solution, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]
    ends = step_ends(tokenizer, tuple(ids), delimiter)
    read = ", ".join(f"{end} {str(tokenizer.decode([ids[end]]))!r}" for end in ends)
    described.add(
        "position of the score",
        {
            "sample": f"{solution!r}, after a prompt: tokens 0 to {len(ids) - 1}",
            "Burnish": f"reads a value at the last token of each step: {read}",
            "transformers": "does not read the value head",
        },
    )


def _describe_encoder(model: Model, text: list[int], tokens: list[str], described: Description) -> None:
    """Describe what an encoder pools. Burnish calls its class, so plain transformers reads the same."""
    same = "reads the same: it calls the class of transformers, with padding on the right"
    described.add("position of the score", {"transformers": "as its class pools", "Burnish": same})
    network = _loaded(model, text, described)
    if network is None:
        return
    read = pooling.positions_of_encoder(network, text)
    if read is not None:
        every = read == list(range(len(text)))
        places = "all tokens" if every else ", ".join(f"{i} {tokens[i]!r}" for i in read)
        described.add("position of the score", {"transformers": f"pools {places}, as the gradient of the logits shows"})
    described.add("position of the score", {"score of the sample": f"{pooling.burnish_score(network, text, 0):.4g}"})


def _describe_pooling(
    model: Model, tokenizer: PreTrainedTokenizerBase, text: list[int], tokens: list[str], described: Description
) -> None:
    """Describe which position plain transformers and Burnish read, and warn where they differ."""
    assert model.network is not None and model.config is not None
    pad_id: Any = tokenizer.pad_token_id
    pad = 0 if pad_id is None else pad_id
    loaded = _loaded(model, text, described)
    network = pooling.replace_backbone(model.network)

    def place(position: int, score: float | None) -> str:
        what = repr(tokens[position]) if 0 <= position < len(tokens) else "padding"
        return f"{position} {what}" + (f", score {score:.4g}" if score is not None else "")

    expected = pooling.burnish_position(network, text, pad)
    score = pooling.burnish_score(loaded, text, pad) if loaded is not None else None
    reads, refusals = {}, {}
    for padding in pooling.PADDINGS:
        try:
            position = pooling.plain_position(network, text, pad, padding)
            plain = pooling.plain_score(loaded, text, pad, padding) if loaded is not None else None
        except ValueError as error:
            reads[padding] = f"refused: {error}"
            refusals[f"plain transformers cannot score a batch: {error}"] = padding
            continue
        reads[padding] = place(position, plain)
        if position != expected:
            described.warnings.append(
                f"plain transformers reads another token than Burnish ({padding}): {place(position, plain)} instead of "
                f"{place(expected, score)}"
            )
        elif plain is not None and score is not None and abs(plain - score) > CLOSE * max(1.0, abs(score)):
            described.warnings.append(
                f"the score of plain transformers depends on padding ({padding}): {plain:.4g} instead of {score:.4g}, "
                "because the model counts positions from the padding"
            )
    described.warnings.extend(refusals)
    described.add("position of the score", {f"transformers, {padding}": read for padding, read in reads.items()})
    described.add("position of the score", {"Burnish": f"{place(expected, score)}, with any padding"})
    configured = model.config.get_text_config().pad_token_id
    if configured is None:
        described.warnings.append(
            "the config has no pad_token_id, by which transformers finds the end of a text: set it to the id of a "
            "token that no text ends with"
        )
    elif configured == tokenizer.eos_token_id:
        described.warnings.append(
            "the pad_token_id of the config is the eos token: of a text that ends with it, plain transformers reads "
            "the token before, and Burnish the last one"
        )


def _loaded(model: Model, text: list[int], described: Description) -> PreTrainedModel | None:
    """The classifier with its weights, or None if it is large or cannot be loaded."""
    size = model.stored.bytes
    if size > READ_LIMIT or not model.stored.complete:
        why = f"{size / 2**30:.1f} GiB of weights" if size > READ_LIMIT else "without all weights"
        described.add("position of the score", {"score of the sample": f"not computed ({why})"})
        return None
    if model.network is None or model.config is None or model.config.is_encoder_decoder:
        return None
    settings = model.config.get_text_config()
    if max(text) >= settings.vocab_size or 2 * len(text) > getattr(settings, "max_position_embeddings", 2 * len(text)):
        described.add(
            "position of the score", {"score of the sample": "not computed (the model cannot take the sample)"}
        )
        return None
    try:
        return loading.load_reward_model(model.folder, labels=None).eval()  # type: ignore[return-value]
    except UserError as error:
        described.warnings.append(str(error))
        return None
