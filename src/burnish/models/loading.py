"""Models and tokenizers from folders, hub ids, installed packages and GGUF files."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pickle
import shutil
import uuid
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import is_offline_mode
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from burnish import files, kernels
from burnish.errors import UserError, is_out_of_memory
from burnish.math.tensors import upcast
from burnish.models import bases, quantize
from burnish.models.adapters import without_warning
from burnish.models.finite import non_finite
from burnish.models.forward import backbone, head, unwrap
from burnish.models.heads import (
    VALUE_HEAD,
    Network,
    StepValueHead,
    disable_dropout,
    init_score,
    is_step_value_head,
    load_head,
    widen,
)
from burnish.models.precision import width_of
from burnish.models.settings import Quantization
from burnish.models.stored import json_object
from burnish.render.encode import cache_folder

ADAPTER = "adapter_model.safetensors"
LONGEST_REASON = 500  # characters of an error message of transformers


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def resolve(reference: str) -> str:
    """The folder or hub id that transformers can load for a model that the user named.

    It is what ``locate`` returns, except that a GGUF file is dequantized to float32 once and kept in the cache folder
    under the hash of its bytes.

    Raises:
        UserError: it is neither a model, a GGUF file, nor a possible hub id.
    """
    place = locate(reference)
    return str(convert_gguf(place)) if isinstance(place, Path) else place


def locate(reference: str) -> str | Path:
    """Where a model that the user named is: the path of a GGUF file, or a folder or hub id as a string.

    A folder without config.json stands for the model in its subfolder ``model``, or for its only GGUF file.

    Raises:
        UserError: it is neither a model, a GGUF file, nor a possible hub id.
    """
    path = files.expanded(reference)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir():
        if path.exists() or reference.startswith((".", "/", "~")) or reference.count("/") > 1:
            raise UserError(f"{reference}: not a model: expected a folder with config.json, a .gguf file, or a hub id")
        return reference
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file() or is_adapter(folder):
            return str(folder)
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return gguf[0]
    content = (
        f"{len(gguf)} GGUF files: name one of {', '.join(file.name for file in gguf)}" if gguf else "no config.json"
    )
    raise UserError(f"{reference}: expected a folder with config.json or one GGUF file; it has {content}")


def is_adapter(reference: str | Path) -> bool:
    """Whether a folder holds an adapter, which needs a base model."""
    return (files.expanded(reference) / "adapter_config.json").is_file()


def describe(reference: str) -> bases.Base:
    """The name of a whole model and the hash of its weights."""
    return bases.Base(reference, bases.weights_hash(resolve(reference)))


def convert_gguf(path: Path) -> Path:
    """Dequantize a GGUF file to a model folder in float32, unless the cache has it already; returns the folder."""
    folder = cache_folder() / "models" / f"{path.stem}-{_digest(path, *_stamp(path))[:16]}"
    if folder.is_dir():
        if (damage := _damage(folder, *map(_stamp, sorted(folder.iterdir())))) is None:
            return folder
        warnings.warn(f"{folder}: {damage}: it will be rebuilt", stacklevel=2)
        with contextlib.suppress(OSError):  # another process is removing it
            files.remove(folder)
    extra = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **extra)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the file is foreign: transformers may raise anything
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: cannot be read as a GGUF model: {reason}") from error
    with files.storing(folder):
        staging = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")  # several processes may convert the file
        staging.mkdir(parents=True)
        try:
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
            files.seal(staging)
            staging.rename(folder)
        except OSError:
            if files.damage(folder) is not None:  # else another process has made it
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of the last change. A file that has the same ones is not read again."""
    try:
        status = path.stat()
    except FileNotFoundError:  # another process has removed it
        return -1, -1
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _digest(path: Path, *stamp: int) -> str:
    """The SHA-256 of a file with this stamp."""
    return files.sha256(path)


@lru_cache(maxsize=8)
def _damage(folder: Path, *stamps: tuple[int, int]) -> str | None:
    """What is wrong with a sealed folder whose files have these stamps."""
    return files.damage(folder)


def load_tokenizer(reference: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, always with a pad token: see ``choose_pad_token``.

    An adapter without a tokenizer uses the one of its base.
    """
    folder = resolve(reference)
    if is_adapter(folder) and not (Path(folder) / "tokenizer_config.json").is_file():
        reference = base_of(folder)
    tokenizer = stored_tokenizer(resolve(reference), trust_remote_code=trust_remote_code)
    choose_pad_token(tokenizer)
    return tokenizer


def stored_tokenizer(folder: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or of a hub id, as it is stored: it may have no pad token."""
    tokenizer = _pretrained(AutoTokenizer, folder, **options)
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or not longest >= 1:
        raise UserError(
            f"{folder}/tokenizer_config.json: model_max_length: expected a number of tokens, got {longest!r}"
        )
    return tokenizer


def choose_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a pad token one: a special token made for padding, else the unknown token, else EOS.

    Burnish derives no mask, pooling or stop from the pad id, so padding with EOS is harmless here. Transformers itself
    does: it scores a row at the last token that is not the pad token.
    """
    if tokenizer.pad_token_id is None:
        spare = [
            t
            for t in ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|endoftext|>", "<|finetune_right_pad_id|>")
            if t in tokenizer.get_vocab() and t != tokenizer.eos_token
        ]
        unknown = tokenizer.unk_token if tokenizer.unk_token != tokenizer.eos_token else None
        tokenizer.pad_token = spare[0] if spare else unknown or tokenizer.eos_token


def load_policy(
    reference: str,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    quantized: Quantization | None = None,
    base: str | None = None,
) -> nn.Module:
    """Load a causal language model; an adapter is loaded on its base and stays trainable.

    Args:
        reference: a folder, a .gguf file or a hub id.
        dtype: of the weights, or of the products with 4-bit weights.
        trust_remote_code: run the code that comes with the model.
        quantized: keep the weights in 4 or 8 bits.
        base: where the base of an adapter is now; by default, where the adapter says.

    Raises:
        UserError: the model cannot be loaded, lacks weights, or holds NaN or infinity.
    """
    folder = resolve(reference)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "quantized": quantized}
    if is_adapter(folder):
        model = _load_adapter(AutoModelForCausalLM, folder, base, **options)
    else:
        model = _whole(AutoModelForCausalLM, folder, **options)
    _check_head(model, reference)
    return model


def load_reward_model(
    reference: str,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    labels: int | None = 1,
    quantized: Quantization | None = None,
    base: str | None = None,
) -> nn.Module:
    """Load a sequence classifier without dropout; a model without a classification head gets a new scalar one.

    With ``labels=None`` the model must have a head, and keeps its number of labels. The other arguments are those of
    ``load_policy``. The head of a causal model is in float32 or wider, whatever ``dtype`` says.
    """
    folder = resolve(reference)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "quantized": quantized}
    if labels is not None:
        options["num_labels"] = labels
    new_head = labels is not None
    if is_adapter(folder):
        # The config of the base does not know how many labels the adapter has.
        options["num_labels"] = 1
        model = _load_adapter(AutoModelForSequenceClassification, folder, base, new_head=new_head, **options)
    else:
        model = _whole(AutoModelForSequenceClassification, folder, new_head=new_head, **options)
    if hasattr(unwrap(model), "score"):
        widen(unwrap(model).score)
    return disable_dropout(model)


def load_value_model(reference: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Network:
    """Load a policy and its step-level value head, as ``methods.step_value`` saved them, without dropout.

    ``network.critic.delimiter`` is the text that ends a reasoning step.

    Raises:
        UserError: there is no value head, or it is of another kind or belongs to another model.
    """
    path = Path(resolve(reference)) / VALUE_HEAD
    if not path.is_file():
        raise UserError(f"{reference}: no {VALUE_HEAD}: expected a model trained by a stage with method step_value")
    policy = load_policy(reference, dtype=dtype, trust_remote_code=trust_remote_code)
    head = _step_value_head(path, policy)
    return Network(disable_dropout(policy), head)


def load_value_head(reference: str, policy: nn.Module) -> StepValueHead | None:
    """Load the step-level value head that is saved beside a policy; None if there is none.

    Raises:
        UserError: the head cannot be read, or belongs to another model.
    """
    path = Path(resolve(reference)) / VALUE_HEAD
    return _step_value_head(path, policy) if path.is_file() and is_step_value_head(path) else None


def _step_value_head(path: Path, policy: nn.Module) -> StepValueHead:
    head = StepValueHead(unwrap(policy).config.get_text_config().hidden_size, unwrap(policy).dtype)
    load_head(head, path)
    _check_finite(head, str(path))
    return head


def adapter_config(folder: str) -> Any:
    """The settings (``adapter_config.json``) of the adapter in a folder.

    Raises:
        UserError: the file cannot be read.
    """
    from peft import PeftConfig

    if (path := Path(folder) / "adapter_config.json").is_file():
        json_object(path)
    try:
        return PeftConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder}/adapter_config.json: cannot be read as settings of an adapter: {error}") from error


def stays_adapter(reference: str, task: str) -> bool:
    """Whether a model is an adapter that is trained further if it is loaded for a task, ``CAUSAL_LM`` or ``SEQ_CLS``.

    The adapter of a language model is merged into its base if it is loaded for ``SEQ_CLS``.
    """
    from peft import TaskType

    folder = locate(reference)
    if not isinstance(folder, str) or not is_adapter(folder):
        return False
    return task == "CAUSAL_LM" or adapter_config(folder).task_type == TaskType.SEQ_CLS


def base_of(adapter: str) -> str:
    """The folder or hub id of the model that an adapter was trained on.

    The adapter names it as the recipe did, often by a path relative to the folder that ``burnish run`` was started in.
    So a relative path is looked up in the working directory first and then in each folder above the adapter. This way
    adapters work from any directory, and a run can be moved.

    Raises:
        UserError: the adapter does not name its base, or there is no such model.
    """
    recorded = bases.recorded(adapter)
    name = recorded.name if recorded else adapter_config(adapter).base_model_name_or_path
    if not name:
        raise UserError(f"{adapter}: the adapter does not name its base model")
    places = (Path(name), *(folder / name for folder in Path(adapter).resolve().parents))
    try:
        return resolve(next((str(place) for place in places if place.exists()), name))
    except UserError as error:
        raise UserError(
            f"{adapter}: its base {name} is not there: burnish merge {adapter} --base FOLDER writes a whole model from "
            "the adapter and its base in another place"
        ) from error


def _load_adapter(cls: Any, folder: str, base: str | None, *, new_head: bool = False, **options: Any) -> nn.Module:
    """Load an adapter on its base.

    If a reward model starts from the adapter of a language model, the adapter is merged, because the base gets a new
    head.

    Raises:
        UserError: the adapter was trained on a base with other weights; or the adapter's own weights are missing,
            damaged, or belong to another model.
    """
    from peft import PeftModel, TaskType

    config = adapter_config(folder)
    if not (Path(folder) / ADAPTER).is_file():
        raise UserError(f"{folder}: no {ADAPTER} beside adapter_config.json")
    if cls is AutoModelForCausalLM and config.task_type == TaskType.SEQ_CLS:
        raise UserError(f"{folder}: this is the adapter of a reward model: expected one of a language model")
    reference = base or base_of(folder)
    trained_on = None
    if bases.recorded(folder) is not None:
        trained_on = describe(reference)
        bases.check(folder, trained_on)
    brings_head = config.task_type == TaskType.SEQ_CLS
    whole = _whole(cls, reference, new_head=new_head or brings_head, **options)
    merged = new_head and not brings_head
    if merged:
        config.task_type = None  # it is the type of a language model
    try:
        with without_warning(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model: Any = PeftModel.from_pretrained(whole, folder, config=config, is_trainable=True)
    except (OSError, ValueError, RuntimeError, SafetensorError, UserWarning) as error:
        reason = " ".join(str(error).split("\n\t")[:2])
        raise UserError(f"{folder}: damaged, or not an adapter of {reference}: {reason}") from error
    _check_finite(model, folder)
    model.trained_on = trained_on
    return model.merge_and_unload().requires_grad_(True) if merged else model


def _whole(
    cls: Any, reference: str, *, new_head: bool = False, quantized: Quantization | None = None, **options: Any
) -> Any:
    """Load a whole model. Only the head may have new random weights, and only with ``new_head``."""
    if quantized is not None:
        quantize.require(quantized)
        options["quantization_config"] = quantize.settings(quantized, options["dtype"])
    model, info = _pretrained(cls, reference, output_loading_info=True, **options)
    if quantized is not None:
        quantize.prepare(model)
    body = f"{model.base_model_prefix}."
    missing = sorted(info["missing_keys"])
    required = [key for key in missing if not new_head or (key.startswith(body) and "pooler" not in key)]
    if required:
        raise UserError(
            f"{reference}: not a {type(model).__name__}: it has no weights for {', '.join(required[:3])}"
            + (f" and {len(required) - 3} more" if len(required) > 3 else "")
        )
    if "score.weight" in missing:
        init_score(model)
    _check_finite(model, reference)
    return model


def _check_finite(model: nn.Module, reference: str) -> None:
    if (name := non_finite(model)) is not None:
        raise UserError(
            f"{reference}: the weight {name} holds NaN or infinity: its file is damaged, or the model diverged in "
            "training: use another checkpoint of this model"
        )


@torch.no_grad()
def _check_head(model: nn.Module, reference: str) -> None:
    """Check that training, which applies the head itself, computes the logits of the model."""
    tokens = torch.tensor([[0, 1]], device=unwrap(model).device)
    try:
        expected = upcast(unwrap(model)(input_ids=tokens, use_cache=False).logits)
        logits = head(model)(backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state)
    except Exception as error:  # the config of a model is foreign: its code may raise anything
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{reference}: {type(unwrap(model)).__name__} cannot run with the settings of its config.json: "
            f"{_first_line(error)}"
        ) from error
    if (logits - expected).abs().max() > 0.02 * expected.abs().max():
        raise UserError(
            f"{reference}: {type(unwrap(model)).__name__} changes its logits after the head in a way that Burnish does "
            "not support; it supports soft-capping (Gemma), division (Granite) and multiplication (Cohere)"
        )


def _pretrained(cls: Any, reference: str, **options: Any) -> Any:
    """``cls.from_pretrained``; what goes wrong because of the user's input is a UserError."""
    kernels.prepare_process()
    folder = reference if "gguf_file" in options else resolve(reference)
    for path in (Path(folder) / name for name in OBJECTS):
        if path.is_file():
            _check_counts(path, json_object(path))
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        if issubclass(cls, AutoModelForCausalLM | AutoModelForSequenceClassification):
            trust = bool(options.get("trust_remote_code"))
            _check_sizes(Path(folder), AutoConfig.from_pretrained(folder, trust_remote_code=trust))
        return cls.from_pretrained(folder, **options)
    except UserError:
        raise
    except Exception as error:  # the files of a model are foreign: transformers may raise anything
        if is_out_of_memory(error):
            raise
        reason = _first_line(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = "its weights are a pickle that is damaged or holds more than tensors, which could run any code"
        elif not isinstance(error, OSError | ValueError | RuntimeError | SafetensorError):
            reason = f"one of its files is damaged ({type(error).__name__}: {reason})"
        if isinstance(error, OSError) and not Path(folder).is_dir():
            offline = "HF_HUB_OFFLINE is set, and it is not in the hub's cache" if is_offline_mode() else reason
            raise UserError(f"{reference}: no such folder, and it could not be read from the hub: {offline}") from error
        if "ignore_mismatched_sizes" in reason:
            reason = "the shapes of its weights do not match its config or the requested number of labels"
        raise UserError(f"{reference}: cannot be loaded as {cls.__name__}: {reason}") from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    """What is wrong: the first line of a message, or two where the first one only announces the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."


def load_config(reference: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a model; of an adapter, that of its base."""
    folder = resolve(reference)
    if is_adapter(folder):
        folder = base_of(folder)
    return _pretrained(AutoConfig, folder, trust_remote_code=trust_remote_code)


def width(reference: str, *, trust_remote_code: bool = False) -> int | None:
    """The hidden size of a model, or of an adapter's base; None if its config has none."""
    return width_of(load_config(reference, trust_remote_code=trust_remote_code))


OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files that must hold a JSON object, if a model has them. Transformers raises anything if they do not."""
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
)
COUNTS = ("num_hidden_layers", "num_labels")
"""Keys for which transformers makes lists of this length while it reads a config."""
LARGEST_COUNT = 10**6
WEIGHTS = ("*.safetensors", "*.bin")
SMALLEST = 1 / 16
"""Bytes of a parameter: even half a bit is less than any quantization needs."""


def _check_counts(path: Path, value: dict[str, Any]) -> None:
    """Raise a UserError if a config would be expanded to lists that fill the memory."""
    for block in (value, *(inner for inner in value.values() if isinstance(inner, dict))):  # such as text_config
        for name in COUNTS:
            if isinstance(count := block.get(name), int) and count > LARGEST_COUNT:
                raise UserError(f"{path}: {name}: expected at most {LARGEST_COUNT:,}, got {count:,}")


def _check_sizes(folder: Path, config: Any) -> None:
    """Raise a UserError if a config has sizes below 1, or describes a model much larger than its files.

    Such a model would be built, and its missing weights drawn at random, before the mistake is found.
    """
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PretrainedConfig):
        raise UserError(f"{folder / 'config.json'}: its settings of a language model are a {type(text).__name__}")
    sizes = {name: getattr(text, name, None) for name in SIZES}
    for name, size in sizes.items():
        if isinstance(size, int) and size < 1:
            raise UserError(f"{folder / 'config.json'}: {name}: expected 1 or more, got {size}")
    layers, hidden, inner, vocabulary = (
        size if isinstance(size := sizes[name], int) else 1
        for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    )
    heads = max(size if isinstance(size := sizes[name], int) else 1 for name in SIZES[2:4])
    heads *= size if isinstance(size := sizes["head_dim"], int) else 1
    described = vocabulary * hidden + layers * (hidden + heads) * (hidden + inner)
    held = sum(path.stat().st_size for pattern in WEIGHTS for path in folder.glob(pattern))
    if held and described * SMALLEST > held:
        raise UserError(
            f"{folder / 'config.json'}: its sizes are those of a model with {described:.1e} parameters, but its weight "
            f"files have only {files.megabytes(held)}: restore the config or the weights"
        )


def summary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Facts about a loaded model: its class and file, its parameters, dtype, special ids and head shape."""
    base: PreTrainedModel = unwrap(model)
    total = base.num_parameters()  # counts the values of weights in 4 bits, which are packed two to a byte
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layer = next((getattr(base, n) for n in ("score", "classifier") if hasattr(base, n)), None)
    layer = getattr(layer, "original_module", layer) or base.get_output_embeddings()
    return {
        "class": type(base).__name__,
        "defined in": Path(inspect.getfile(type(base))).name,
        "parameters": total,
        "trainable": trainable,
        "trainable share": trainable / total,
        "dtype": str(base.dtype).removeprefix("torch."),
        "pad/eos/bos": [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id],
        "head": list(layer.weight.shape) if isinstance(layer, nn.Linear) else None,
    }
