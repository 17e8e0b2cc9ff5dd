"""Folds an adapter into the base that it was trained on, and into no other, in full precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, TaskType
from transformers import AutoConfig

from burnish import files
from burnish.errors import UserError
from burnish.math.tensors import upcast
from burnish.models import bases, loading
from burnish.models.heads import VALUE_HEAD
from burnish.models.quantize import is_quantized

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""How far logits may move, as a share of the largest: the rounding of sums, or of what is stored."""


def merge(
    adapter: str,
    base: str | None = None,
    output: str | Path | None = None,
    *,
    say: Callable[[str], None] = print,
    trust_remote_code: bool = False,
) -> Path:
    """Write a whole model: an adapter's base with the adapter folded in, its tokenizer and its value head.

    W + scale B A (DoRA: rescaled by row) is computed in float32 or wider from the base's own files, and stored in
    the dtype of those. What was stored is read again and has to give the logits that the adapter gave.

    Args:
        adapter: a folder with adapter_config.json, or a stage's folder with ``adapter/`` in it.
        base: where the base lies now; None is where the adapter says that it is.
        output: a new folder; None is the adapter's, with ``-merged`` at its end.
        say: takes each line about what was done.
        trust_remote_code: run the code that comes with the base.

    Returns:
        The folder, complete or absent.

    Raises:
        UserError: the base is not the one that the adapter was trained on, or is not there; the output exists.
    """
    folder = _folder(adapter)
    target = Path(output).expanduser() if output is not None else folder.with_name(f"{folder.name}-merged")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: there is something already: name a new folder with --output")
    reference = _base(folder, base)
    with torch.random.fork_rng():
        model: Any = _load(folder, reference, trust_remote_code)
        if is_quantized(loading.unwrap(model)):
            raise UserError(f"{reference}: it is stored in fewer bits: name the full-precision model with --base")
        said = bases.recorded(folder)
        if said is None:
            say(f"note: {folder} does not record which weights it was trained on: {reference} is taken at its word")
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
            dtype = merged.dtype
            del model, merged
            again = _loader(folder)(str(staging), trust_remote_code=trust_remote_code).eval()
            moved = ((_logits(again) - before).abs().max() / before.abs().max()).item()
            assert moved <= TOLERANCE[dtype], f"{target}: merging moved the logits by {moved:.1e} of the largest"
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    say(f"adapter {folder}: {(folder / loading.ADAPTER).stat().st_size / 2**20:,.1f} MiB")
    say(f"base {reference}: " + ("the weights it was trained on" if said else "not checked"))
    say(f"merged {target}: {size / 2**20:,.1f} MiB, {str(dtype).removeprefix('torch.')}; logits moved by {moved:.1e}")
    return target


def start_from(adapter: str, folder: Path, *, say: Callable[[str], None], trust_remote_code: bool = False) -> str:
    """A whole model in ``folder`` made of an adapter that training starts from, unless it is there already."""
    if files.damage(folder) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        merge(adapter, output=folder, say=lambda line: None, trust_remote_code=trust_remote_code)
    say(f"{adapter} is an adapter: merged into its base before the new one is added: {folder}")
    return str(folder)


def policy_of(adapted: PeftModel, adapter: Path, trust_remote_code: bool = False) -> Any:
    """A trained model with its adapter folded in; into its base's own files where memory holds the base in fewer bits.

    ``adapter`` is the folder that the adapter was saved to.
    """
    base = loading.unwrap(adapted)
    if base.dtype in (torch.float32, torch.float64) and not is_quantized(base):
        return adapted.merge_and_unload()
    merged = _load(adapter, None, trust_remote_code).merge_and_unload()
    for name in ("score_mean", "score_std", "pad_token_id"):
        if hasattr(base.config, name):
            setattr(merged.config, name, getattr(base.config, name))
    return merged


def _folder(adapter: str) -> Path:
    path = Path(adapter).expanduser()
    for folder in (path, path / "adapter"):
        if loading.is_adapter(folder):
            return folder
    raise UserError(
        f"{adapter}: not an adapter: expected a folder with adapter_config.json, or a stage's with adapter/"
    )


def _base(folder: Path, named: str | None) -> str:
    """Where the base is: where the user says, else where the adapter does."""
    if named is None:
        try:
            return loading.base_of(str(folder))
        except UserError as error:
            known = bases.recorded(folder)
            name = known or loading.adapter_config(str(folder)).base_model_name_or_path or "that it does not name"
            raise UserError(f"{folder}: its base {name} is not there: say where it lies with --base FOLDER") from error
    if loading.is_adapter(named):
        raise UserError(f"{named}: it is an adapter itself: merge it into its own base first, and name the outcome")
    return named


def _load(folder: Path, base: str | None, trust_remote_code: bool) -> Any:
    """An adapter on its base, in float32, as what it was trained to be."""
    return _loader(folder)(str(folder), base=base, trust_remote_code=trust_remote_code).eval()


def _loader(folder: Path) -> Callable[..., Any]:
    """What loads the kind of model that an adapter belongs to."""
    task = loading.adapter_config(str(folder)).task_type
    if task not in (TaskType.CAUSAL_LM, TaskType.SEQ_CLS, None):
        raise UserError(f"{folder}: an adapter for {task}: expected one of a language model or of a reward model")
    return loading.load_reward_model if task == TaskType.SEQ_CLS else loading.load_policy


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Logits of some tokens, which a base with an adapter and what they are merged into share."""
    tokens = torch.arange(3, 3 + min(13, model.config.get_text_config().vocab_size - 3), device=model.device)
    return upcast(model(input_ids=tokens[None]).logits).cpu()
