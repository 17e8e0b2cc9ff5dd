"""Models and tokenizers from folders, hub ids, installed packages and GGUF files."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from burnish.models.forward import unwrap
from burnish.models.heads import disable_dropout, init_score
from burnish.types import UserError

DType = Literal["auto", "float32", "bfloat16", "float16"]


def cache_folder() -> Path:
    """Where converted models and tokenised rows are kept: ``$BURNISH_CACHE`` or ``~/.cache/burnish``."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")


def choose_dtype(name: DType, *, adapter: bool = False) -> torch.dtype:
    """The dtype that weights are loaded in.

    ``auto`` is float32 for weights that are trained, so that small updates are not lost, and on a CPU; a frozen base
    under an adapter is kept in bfloat16 on a GPU that computes in it.
    """
    if name != "auto":
        return getattr(torch, name)
    if adapter and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def resolve(reference: str) -> str:
    """A reference as a folder that transformers can load, or the hub id that it is.

    A folder that holds no config.json but a GGUF file (or a subfolder ``model``) stands for that model; a GGUF file
    is dequantised once to float32 and kept in the cache folder under the hash of its bytes.
    """
    path = Path(reference).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(convert_gguf(path))
    if not path.is_dir():
        if path.exists() or reference.startswith((".", "/", "~")) or reference.count("/") > 1:
            raise UserError(f"{reference}: not a model: expected a folder with config.json, a .gguf file, or a hub id")
        return reference
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return str(folder)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return str(convert_gguf(found[0]))
    what = f"{len(found)} GGUF files: name one of {', '.join(f.name for f in found)}" if found else "no config.json"
    raise UserError(f"{reference}: expected a folder with config.json or one GGUF file; it has {what}")


def convert_gguf(path: Path) -> Path:
    """Dequantise a GGUF file to a transformers folder in float32, once; returns the folder."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{path.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    extra = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **extra)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(folder)
    return folder


def load_tokenizer(reference: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with a pad token: its own, else one of its unused special tokens, else EOS.

    No mask, pooling or stop is ever derived from the pad id, so padding by EOS is harmless.
    """
    tokenizer = _pretrained(AutoTokenizer, reference, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        spare = [
            t
            for t in ("<|pad|>", "<pad>", "[PAD]", "<|endoftext|>", "<|finetune_right_pad_id|>")
            if t in tokenizer.get_vocab() and t != tokenizer.eos_token
        ]
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    return tokenizer


def load_policy(reference: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> nn.Module:
    """A causal language model; a folder with an adapter gives its base with the adapter on it, ready to go on."""
    folder = resolve(reference)
    if (Path(folder) / "adapter_config.json").is_file():
        return _load_adapter(AutoModelForCausalLM, folder, dtype, trust_remote_code)
    return _pretrained(AutoModelForCausalLM, folder, dtype=dtype, trust_remote_code=trust_remote_code)


def load_reward_model(
    reference: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False, labels: int | None = 1
) -> nn.Module:
    """A sequence classifier without dropout: a trained one as it is, or any backbone with a fresh scalar head.

    ``labels`` None takes a trained classifier with the labels that it has.

    Raises:
        UserError: there is no such model, or ``labels`` is None and it has no trained head.
    """
    folder = resolve(reference)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if labels is not None:
        options["num_labels"] = labels
    if (Path(folder) / "adapter_config.json").is_file():
        model = _load_adapter(AutoModelForSequenceClassification, folder, dtype, trust_remote_code, **options)
        return disable_dropout(model)
    model, info = _pretrained(AutoModelForSequenceClassification, folder, output_loading_info=True, **options)
    if labels is None and info["missing_keys"]:
        lacking = ", ".join(sorted(info["missing_keys"])[:2])
        raise UserError(f"{reference}: not a trained reward model: it has no {lacking}; train one with method: reward")
    if any(key.startswith("score.") for key in info["missing_keys"]):
        init_score(model)
    return disable_dropout(model)


def _load_adapter(cls: Any, folder: str, dtype: torch.dtype, trust_remote_code: bool, **options: Any) -> nn.Module:
    from peft import PeftConfig, PeftModel

    base_name = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base_name:
        raise UserError(f"{folder}: the adapter does not name its base model")
    options.setdefault("dtype", dtype)
    base = _pretrained(cls, resolve(base_name), **options)
    return PeftModel.from_pretrained(base, folder, is_trainable=True)


def _pretrained(cls: Any, reference: str, **options: Any) -> Any:
    """``cls.from_pretrained`` with the user's mistakes told as such."""
    folder = resolve(reference)
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        return cls.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{reference}: cannot be loaded as {cls.__name__}: {reason}") from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()


def is_encoder(model: nn.Module) -> bool:
    """Whether a sequence classifier pools as an encoder does, not at the last token."""
    return not hasattr(unwrap(model), "score")


def summary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What was loaded: class and where it is defined, parameters, dtype, special ids, head shape."""
    base: PreTrainedModel = unwrap(model)
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    score = getattr(base, "score", None) or base.get_output_embeddings()
    return {
        "class": type(base).__name__,
        "defined in": Path(inspect.getfile(type(base))).name,
        "parameters": total,
        "trainable": trainable,
        "trainable share": trainable / total,
        "dtype": str(base.dtype).removeprefix("torch."),
        "pad/eos/bos": [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id],
        "head": list(score.weight.shape) if isinstance(score, nn.Linear) else None,
    }
