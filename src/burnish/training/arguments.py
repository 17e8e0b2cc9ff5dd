"""Fields of transformers.TrainingArguments that this trainer has no use for, and what does their work."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

_LOADED = "rows are encoded before a run or in buffers of a stream, and no process loads them"
_MEASURED = "a method measures held-out rows itself, and keeps no predictions"
_ORDERED = "rows come in a seeded order, and a token budget groups them by length"

IGNORED = {
    "average_tokens_across_devices": "a step is always divided by the counts of all processes",
    "batch_eval_metrics": _MEASURED,
    "data_seed": "one seed rules a run: seed",
    "dataloader_drop_last": "the last step of an epoch keeps the rows that are left",
    "dataloader_in_order": _LOADED,
    "dataloader_multiprocessing_context": _LOADED,
    "dataloader_num_workers": _LOADED,
    "dataloader_persistent_workers": _LOADED,
    "dataloader_pin_memory": _LOADED,
    "dataloader_prefetch_factor": _LOADED,
    "eval_accumulation_steps": _MEASURED,
    "eval_do_concat_batches": _MEASURED,
    "eval_use_gather_object": _MEASURED,
    "include_for_metrics": _MEASURED,
    "include_num_input_tokens_seen": "every line of the log has the tokens of its steps",
    "label_smoothing_factor": "a method whose loss has smoothed labels has a setting of its own for them",
    "length_column_name": _ORDERED,
    "per_device_eval_batch_size": "token_budget bounds micro-batches in training and on held-out rows",
    "prediction_loss_only": _MEASURED,
    "torch_empty_cache_steps": "the cache is emptied when memory runs out, and the token budget is halved",
    "train_sampling_strategy": _ORDERED,
}
"""Name of a field: why it is not read. A recipe may not set these; from Python they are warned about."""

OWN = {"on_non_finite": ("error", "skip")}
"""Settings of ``burnish.Trainer`` that a recipe gives beside the fields of TrainingArguments, with their values."""

_DERIVED = {"average_tokens_across_devices", "dataloader_pin_memory"}  # TrainingArguments changes these itself


def warn_ignored(args: TrainingArguments) -> None:
    """Warn about every field that was set and does nothing."""
    for field in dataclasses.fields(args):
        if field.name not in IGNORED or field.name in _DERIVED:
            continue
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default  # type: ignore[misc]
        value = getattr(args, field.name)
        if value != default:
            warnings.warn(f"{field.name}={value!r} is ignored: {IGNORED[field.name]}", stacklevel=3)
