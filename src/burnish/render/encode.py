"""Sequences that are too long, and the cache of what rows were encoded to."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from burnish import files
from burnish.errors import UserError
from burnish.render.drafts import Draft, outcomes, without_collection
from burnish.render.truncate import Truncation
from burnish.types import (
    Changed,
    Encoded,
    Example,
    Labelled,
    Messages,
    Pair,
    Preference,
    Prompt,
    Ranking,
    Row,
    Sequence,
    Steps,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
logger = logging.getLogger(__name__)
SKIPPED = "skip: "  # how the reason begins of a row that could not be encoded and was left out
ARRAY = "array."  # before the names of a sequence's arrays in the cache
CHECKSUM = "sha256"
_cached: ContextVar[bool] = ContextVar("cached", default=True)


@without_collection()
def encode(
    rows: list[Row], function: Callable[[Any], Draft[Example]], length: Truncation, cache_key: str | None = None
) -> Encoded:
    """Rows as examples, of a length that fits.

    Args:
        rows: what ``function`` takes.
        function: a row to the draft of its example, uncut.
        length: the longest sequence allowed.
        cache_key: says all that ``function`` depends on (``cache_key``): the result is then read from disk when the
            same rows were encoded before. None: not kept.

    Raises:
        UserError: a row cannot be encoded, is too long and may not be cut, or has nothing left to learn.
    """
    path = None
    if cache_key is not None and _cached.get():
        path = cache_folder() / f"{_fingerprint(rows, length, cache_key)}.safetensors"
    if path is not None and path.exists() and (kept := _read(path)) is not None:
        return _told(kept)
    encoded = Encoded([], [])
    distinct = {id(row): row for row in rows}  # a mixture may draw a row more than once
    found = outcomes(_encoded(row, function, length) for row in distinct.values())
    done: dict[int, list[Example]] = {}
    for row, outcome in _progress(zip(distinct.values(), found, strict=True), len(distinct)):
        if isinstance(outcome, UserError):
            raise outcome
        done[id(row)], reason = outcome
        if reason:
            encoded.changed.append(Changed(row.source, reason))
    for row in rows:
        encoded.examples.extend(done[id(row)])
    if done and all(change.reason.startswith(SKIPPED) for change in encoded.changed) and not encoded.examples:
        first = encoded.changed[0]
        reason = first.reason.removeprefix(SKIPPED)
        raise UserError(f"all {len(rows)} rows were skipped, the first as {first.source}: {reason}")
    if path is not None and len({tuple(s.arrays) for example in encoded.examples for s in example.sequences}) <= 1:
        _keep(encoded, path)
    return _told(encoded)


def sort_changes(changed: list[Changed]) -> tuple[list[str], list[str]]:
    """Rows that were skipped because they could not be encoded, and those cut or dropped for their length."""
    skipped, cut = [], []
    for source, reason in changed:
        kind = skipped if reason.startswith(SKIPPED) else cut
        kind.append(f"{source}: {reason.removeprefix(SKIPPED)}")
    return skipped, cut


@contextmanager
def without_cache() -> Iterator[None]:
    """Encode without reading or keeping anything on disk, as for rows that pass by."""
    token = _cached.set(False)
    try:
        yield
    finally:
        _cached.reset(token)


def _told(encoded: Encoded) -> Encoded:
    if encoded.changed:
        first = encoded.changed[0]
        logger.warning(
            "%d rows were cut or dropped, the first: %s: %s", len(encoded.changed), first.source, first.reason
        )
    return encoded


def _encoded(
    row: Row, function: Callable[[Any], Draft[Example]], length: Truncation
) -> Draft[tuple[list[Example], str]]:
    """As ``fit``; a row that cannot be encoded is left out where that is asked for."""
    try:
        example = yield from function(row)
    except UserError as error:
        if length.on_bad_row == "error":
            raise
        return [], SKIPPED + str(error).removeprefix(f"{row.source}: ")
    return (yield from _fitted(row, example, function, length))


def fit(row: Row, function: Callable[[Any], Draft[Example]], length: Truncation) -> Draft[tuple[list[Example], str]]:
    """The examples that one row makes, and what was done to make them fit ("" where nothing was).

    Raises:
        UserError: the row is too long and may not be cut, or has nothing left to learn.
    """
    return (yield from _fitted(row, (yield from function(row)), function, length))


def _fitted(
    row: Row, example: Example, function: Callable[[Any], Draft[Example]], length: Truncation
) -> Draft[tuple[list[Example], str]]:
    limit, how = length.max_length, length.too_long or "error"
    if limit is None or (longest := _longest(example)) <= limit:
        return [example], ""
    what = f"{longest} tokens, max_length {limit}"
    prompted = isinstance(row, Preference | Ranking | Labelled | Prompt)
    if how == "error":
        ways = "drop or truncate_left" if prompted else "drop, truncate_left, truncate_right or split"
        ways = "drop or truncate_right" if isinstance(row, Steps) else ways
        raise UserError(f"{row.source}: {what}: raise it, or set too_long: {ways}")
    if how == "drop":
        return [], f"drop: {what}"
    if prompted:
        if how != "truncate_left":
            detail = "would cut the answer; of a prompt and its answers only the prompt is cut"
            raise UserError(f"{row.source}: {what}: too_long: {how} {detail}: set truncate_left or drop")
        shorter, cut = yield from _cut_prompt(row, function, limit, what)
        return [shorter], f"truncate_left: {what}: {cut}"
    (sequence,) = example.sequences
    if isinstance(row, Steps):
        if how != "truncate_right":
            detail = "would part steps from their question; of a solution only its last steps are left out"
            raise UserError(f"{row.source}: {what}: too_long: {how} {detail}: set truncate_right or drop")
        shorter, cut = _whole_steps(sequence, limit, what)
        return [Example((shorter,))], f"truncate_right: {what}: {cut}"
    pieces = [_part(sequence, start, end) for start, end in _spans(longest, limit, how)]
    learned = [piece for piece in pieces if piece.loss_mask.any()]
    if not learned:
        raise UserError(f"{row.source}: {what}: {how} leaves nothing to learn: raise max_length, or drop")
    left_out = len(pieces) - len(learned)
    note = f" into {len(pieces)}" + (f", {left_out} of them with nothing to learn" if left_out else "")
    return [Example((piece,)) for piece in learned], f"{how}: {what}" + (note if len(pieces) > 1 else "")


def _longest(example: Example) -> int:
    return max(len(sequence) for sequence in example.sequences)


def _spans(size: int, limit: int, how: str) -> list[tuple[int, int]]:
    if how == "truncate_left":
        return [(size - limit, size)]
    if how == "truncate_right":
        return [(0, limit)]
    return [(start, min(start + limit, size)) for start in range(0, size - 1, limit - 1)]


def _part(sequence: Sequence, start: int, end: int) -> Sequence:
    """Tokens ``start`` to ``end``; the first has lost its predecessor and is not learned."""
    return Sequence(
        sequence.tokens[start:end],
        sequence.loss_mask[start:end] & (np.arange(end - start) > 0),
        sequence.source,
        {name: values[start:end] for name, values in sequence.arrays.items()},
    )


def _whole_steps(sequence: Sequence, limit: int, what: str) -> tuple[Sequence, str]:
    """The sequence up to the end of its last whole step, and how many steps were left out."""
    ends = np.flatnonzero(sequence.arrays["outcomes"]).tolist()
    kept = [t for t in ends if t < limit]
    if not kept:
        raise UserError(f"{sequence.source}: {what}: not one step fits: raise max_length, or drop")
    lost = len(ends) - len(kept)
    said = f"{lost} of {len(ends)} steps left out" if lost else "the end token left out"
    return _part(sequence, 0, kept[-1] + 1), said


# --- prompts ------------------------------------------------------------------------------------------------------


def _cut_prompt(
    row: Preference | Ranking | Labelled | Prompt, function: Callable[[Any], Draft[Example]], limit: int, what: str
) -> Draft[tuple[Example, str]]:
    """The example of the row with as much of its prompt as fits, and what was left out."""

    def with_prompt(messages: Messages) -> Draft[Example | None]:
        changed = replace(row, messages=messages) if isinstance(row, Prompt) else replace(row, prompt=messages)
        example = yield from function(changed)
        return example if _longest(example) <= limit else None

    prompt = row.messages if isinstance(row, Prompt) else row.prompt
    first = 1 if prompt[0]["role"] == "system" else 0
    head, turns = prompt[:first], prompt[first:]
    # A conversation that begins with an answer is refused by many templates, so cuts fall before a user's turn.
    starts = [i for i in range(1, len(turns)) if turns[i]["role"] == "user"]
    for start in starts:
        if fitting := (yield from with_prompt(head + turns[start:])):
            return fitting, f"{start} of {len(turns)} turns of the prompt left out"
    start = starts[-1] if starts else 0
    if not turns or turns[start]["role"] == "assistant":
        raise UserError(f"{row.source}: {what}: there is no turn of the prompt to cut: raise max_length, or drop")
    whole = turns[start]["content"]

    def without(characters: int) -> Draft[Example | None]:
        return with_prompt((*head, {**turns[start], "content": whole[characters:].lstrip()}, *turns[start + 1 :]))

    low, high = 0, len(whole) - 1  # the least that is cut keeps a character
    fitting = yield from without(high)
    if fitting is None:
        raise UserError(f"{row.source}: {what}: it does not fit even without its prompt: raise max_length, or drop")
    while low < high:
        middle = (low + high) // 2
        if shorter := (yield from without(middle)):
            fitting, high = shorter, middle
        else:
            low = middle + 1
    dropped = f"{start} of {len(turns)} turns and " if start else ""
    return fitting, f"{dropped}{low} of {len(whole)} characters of the last turn left out"


# --- cache --------------------------------------------------------------------------------------------------------


def cache_key(tokenizer: PreTrainedTokenizerBase, *options: Any) -> str:
    """A digest of the tokenizer, its template, and the options: what the ids of a row depend on besides the row."""
    import tokenizers
    import transformers

    from burnish.render.templates import Renderer

    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    parts = [
        hashlib.sha256(code).hexdigest(),
        transformers.__version__,
        tokenizers.__version__,
        Renderer(tokenizer).rust.to_str(),
        repr(tokenizer.chat_template),
        repr(sorted(tokenizer.special_tokens_map.items())),
        repr(options),
    ]
    return _digest(parts)


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _fingerprint(rows: list[Row], length: Truncation, key: str) -> str:
    plain = (replace(row, columns={}) if isinstance(row, Prompt) else row for row in rows)
    return _digest([key, repr(length), *(repr(row) for row in plain)])


def cache_folder() -> Path:
    """Where encoded rows and converted models are kept: ``$BURNISH_CACHE`` or ``~/.cache/burnish``."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")


def _keep(encoded: Encoded, path: Path) -> None:
    """Write the examples as arrays, whole or not at all."""
    from safetensors.numpy import save

    sequences = [s for example in encoded.examples for s in example.sequences]
    tensors = {
        "tokens": np.concatenate([s.tokens for s in sequences] or [np.zeros(0, np.int64)]),
        "loss_mask": np.concatenate([s.loss_mask for s in sequences] or [np.zeros(0, np.bool_)]),
        "lengths": np.array([len(s) for s in sequences], dtype=np.int64),
        "sequences": np.array([len(example.sequences) for example in encoded.examples], dtype=np.int64),
        "pairs": np.array([pair for e in encoded.examples for pair in e.pairs], dtype=np.float64).reshape(-1, 5),
        "pair_counts": np.array([len(example.pairs) for example in encoded.examples], dtype=np.int64),
    }
    for name in sequences[0].arrays if sequences else ():
        tensors[ARRAY + name] = np.concatenate([s.arrays[name] for s in sequences])
    notes = {"sources": json.dumps([s.source for s in sequences]), "changed": json.dumps(encoded.changed)}
    notes |= {CHECKSUM: _checksum(tensors, notes)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(save(tensors, notes))
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"encoded rows are not kept for the next run: {error}", stacklevel=3)


def _checksum(tensors: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """The SHA-256 of arrays and notes, whatever their order."""
    parts = [f"{name} {found.dtype} {found.shape}".encode() for name, found in sorted(tensors.items())]
    parts += [f"{name} {text}".encode() for name, text in sorted(notes.items())]
    return files.digest([*parts, *(tensor.data for _, tensor in sorted(tensors.items()))])


def _read(path: Path) -> Encoded | None:
    """What was kept; None where the file is damaged, and the rows are to be encoded again."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            notes = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if notes.pop(CHECKSUM, None) != _checksum(tensors, notes):
            raise ValueError("its bytes do not match its checksum")
    except (OSError, ValueError, SafetensorError) as error:
        warnings.warn(f"{path} is damaged and will be rebuilt: {error}", stacklevel=3)
        return None
    sources, lengths = iter(json.loads(notes["sources"])), iter(tensors["lengths"].tolist())
    numbers = {name.removeprefix(ARRAY): values for name, values in tensors.items() if name.startswith(ARRAY)}
    pairs = iter(tensors["pairs"].tolist())
    examples, done = [], 0
    for count, pair_count in zip(tensors["sequences"].tolist(), tensors["pair_counts"].tolist(), strict=True):
        made = []
        for _ in range(count):
            here = slice(done, done := done + next(lengths))
            aligned = {name: values[here] for name, values in numbers.items()}
            made.append(Sequence(tensors["tokens"][here], tensors["loss_mask"][here], next(sources), aligned))
        compared = (next(pairs) for _ in range(pair_count))
        examples.append(Example(tuple(made), tuple(Pair(int(a), int(b), *rest) for a, b, *rest in compared)))
    return Encoded(examples, [Changed(*change) for change in json.loads(notes["changed"])])


def _progress(found: Iterable[T], total: int) -> Iterable[T]:
    if not sys.stderr.isatty():
        return found
    from rich.console import Console
    from rich.progress import track

    return track(found, "Encoding rows", total, console=Console(stderr=True), transient=True)
