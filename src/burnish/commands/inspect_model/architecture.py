"""The section on the model itself: its kind, its class, code that comes with it, its context window and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.opening import Model, model_file
from burnish.models.forward import layer_types
from burnish.models.heads import VALUE_HEAD

WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_chunk_size")  # config attributes


def describe_model(model: Model, described: Description) -> None:
    """Describe what kind of model it is, and what it can read."""
    names = model.settings.get("architectures") or ["unknown"]
    remote = {**_auto_map(model.settings), **_auto_map(model.read("tokenizer_config.json"))}
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
            "attention": _attention(text, causal=not model.is_encoder),
            "tied embeddings": ("yes: the head is the input embedding" if tied else "no") if has_output else None,
        },
    )


def _what(model: Model) -> str:
    of = " with its adapter" if model.adapter else " in a GGUF file" if model.gguf else ""
    if model_file(model.folder, VALUE_HEAD) is not None:
        return f"a language model with a value head{of}"
    if model.network is None:
        return "unknown"
    if model.classifies:
        kind = "an encoder" if model.is_encoder else "a causal model"
        labels = getattr(model.config, "num_labels", 0)
        what = "a reward model" if labels == 1 else f"a classifier with {labels} labels"
        return f"{what}: {kind} that scores whole texts{of}"
    if type(model.network).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return f"a language model{of}"
    if type(model.network).__name__.endswith("ForTokenClassification"):
        return "a classifier of tokens, such as the separate critic of PPO"
    return "neither a language model nor a sequence classifier; training a reward model adds a new head"


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
