"""Merges an adapter into the base that it was trained on, in full precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, TaskType
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from burnish import files
from burnish.errors import UserError
from burnish.math.tensors import upcast
from burnish.models import bases, loading
from burnish.models.heads import VALUE_HEAD
from burnish.models.quantize import is_quantized

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest change of a logit that rounding explains, relative to the largest logit."""


def merge(
    adapter: str,
    base: str | None = None,
    output: str | Path | None = None,
    *,
    card: Callable[[Path], str] | None = None,
    say: Callable[[str], None] = print,
    trust_remote_code: bool = False,
) -> Path:
    """Write a whole model: an adapter merged into its base, with its tokenizer and its value head if it has one.

    W + scale B A (with DoRA, rescaled by row) is computed in float32 or wider from the base's own files and stored in
    their dtype. The stored model is loaded again to check that its logits are those of the adapter.

    Args:
        adapter: a folder with adapter_config.json, or a stage's folder that has ``adapter/``.
        base: where the base is now; by default, where the adapter says.
        output: a new folder; by default, the adapter's folder with ``-merged`` appended.
        card: makes the model card, the text of README.md, of the adapter's folder; None writes no card.
        say: called with each line about the result.
        trust_remote_code: run the code that comes with the base.

    Returns:
        The folder. It is complete, or it does not exist.

    Raises:
        UserError: the base is missing or is not the one that the adapter was trained on; or the output exists.
    """
    folder = _folder(adapter)
    target = files.expanded(output) if output is not None else folder.with_name(f"{folder.name}-merged")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists already: name a new folder with --output")
    reference = _base(folder, base)
    readme = card(folder) if card is not None else None
    with torch.random.fork_rng():
        model: Any = _load(folder, reference, trust_remote_code)
        if is_quantized(loading.unwrap(model)):
            raise UserError(f"{reference} is quantized: name the full-precision model with --base")
        recorded = bases.recorded(folder)
        if recorded is None:
            say(f"note: {folder} does not record the weights it was trained on: {reference} cannot be checked")
        stored = AutoConfig.from_pretrained(loading.resolve(reference), trust_remote_code=trust_remote_code).dtype
        before = _logits(model)
        tokenizer = loading.load_tokenizer(str(folder) if _has_tokenizer(folder) else reference)
        model.get_base_model().config.pad_token_id = tokenizer.pad_token_id
        with files.writing(target) as staging:
            merged: Any = model.merge_and_unload()
            merged.to(stored or torch.float32).save_pretrained(staging)
            tokenizer.save_pretrained(staging)
            if (folder / VALUE_HEAD).is_file():
                shutil.copy2(folder / VALUE_HEAD, staging / VALUE_HEAD)
            if readme is not None:
                (staging / "README.md").write_text(readme, "utf-8")
            dtype = merged.dtype
            del model, merged
            stored_model = _loader(folder)(str(staging), trust_remote_code=trust_remote_code).eval()
            change = ((_logits(stored_model) - before).abs().max() / before.abs().max()).item()
            assert change <= TOLERANCE[dtype], f"{target}: merging changed the logits by {change:.1e} of the largest"
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    say(f"adapter {folder}: {(folder / loading.ADAPTER).stat().st_size / 2**20:,.1f} MiB")
    say(f"base {reference}: " + ("the weights it was trained on" if recorded else "not checked"))
    say(
        f"merged {target}: {size / 2**20:,.1f} MiB, {str(dtype).removeprefix('torch.')}; logits changed by {change:.1e}"
    )
    return target


def start_from(adapter: str, folder: Path, *, say: Callable[[str], None], trust_remote_code: bool = False) -> str:
    """Merge the adapter that training starts from into a whole model in ``folder``, unless that exists already."""
    if files.damage(folder) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        merge(adapter, output=folder, say=lambda line: None, trust_remote_code=trust_remote_code)
    say(f"{adapter} is an adapter: merged into its base before the new one is added: {folder}")
    return str(folder)


def policy_of(adapted: PeftModel, adapter: Path, trust_remote_code: bool = False) -> Any:
    """A trained model with its adapter merged; a sharded base, or one in low precision, is loaded again for it.

    Then the weights of ``adapted`` that were not trained are freed first. ``adapter`` is the folder that the adapter
    was saved to.
    """
    base = loading.unwrap(adapted)
    sharded = any(isinstance(parameter, DTensor) for parameter in adapted.parameters())
    if base.dtype in (torch.float32, torch.float64) and not is_quantized(base) and not sharded:
        return adapted.merge_and_unload()
    for parameter in adapted.parameters():
        if not parameter.requires_grad and not sharded:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    merged = _load(adapter, None, trust_remote_code).merge_and_unload()
    for name in ("score_mean", "score_std", "pad_token_id"):
        if hasattr(base.config, name):
            setattr(merged.config, name, getattr(base.config, name))
    return merged


def _folder(adapter: str) -> Path:
    path = files.expanded(adapter)
    for folder in (path, path / "adapter"):
        if loading.is_adapter(folder):
            return folder
    raise UserError(
        f"{adapter}: not an adapter: expected a folder with adapter_config.json, or a stage's folder with adapter/"
    )


def _base(folder: Path, named: str | None) -> str:
    """The folder or hub id of the base: the one that the user names, or else the one that the adapter records."""
    if named is None:
        try:
            return loading.base_of(str(folder))
        except UserError as error:
            name = (
                bases.recorded(folder)
                or loading.adapter_config(str(folder)).base_model_name_or_path
                or "that it does not name"
            )
            raise UserError(f"{folder}: its base {name} is not there: say where it is with --base FOLDER") from error
    if loading.is_adapter(named):
        raise UserError(f"{named} is an adapter itself: merge it into its own base first, and name the result")
    return named


def _load(folder: Path, base: str | None, trust_remote_code: bool) -> Any:
    """An adapter on its base, in float32, as a policy or a reward model."""
    return _loader(folder)(str(folder), base=base, trust_remote_code=trust_remote_code).eval()


def _loader(folder: Path) -> Callable[..., Any]:
    """The function that loads the kind of model that an adapter belongs to."""
    task = loading.adapter_config(str(folder)).task_type
    if task not in (TaskType.CAUSAL_LM, TaskType.SEQ_CLS, None):
        raise UserError(f"{folder}: an adapter for {task}: expected one of a language model or of a reward model")
    return loading.load_reward_model if task == TaskType.SEQ_CLS else loading.load_policy


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Logits of a few tokens, to compare a model with an adapter and the merged one."""
    tokens = torch.arange(3, 3 + min(13, model.config.get_text_config().vocab_size - 3), device=model.device)
    return upcast(model(input_ids=tokens[None]).logits).cpu()
