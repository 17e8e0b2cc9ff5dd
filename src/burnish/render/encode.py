"""Many rows to examples: encoded, truncated, and cached on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from burnish import files, progress
from burnish.errors import UserError
from burnish.render.templates import NoTemplateError
from burnish.render.truncate import ToExamples, Truncation, fit
from burnish.types import Changed, Conversation, Encoded, Example, Pair, Prompt, Row, Scored, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
logger = logging.getLogger(__name__)
CHUNK = 512  # rows that are tokenized together
SKIPPED = "skip: "  # prefix of the reason for rows that were skipped because they could not be encoded
DROPPED = "drop: "  # prefix of the reason for rows that were dropped because they are too long
BY_TURN = "by turn: "  # prefix of the reason for rows that have a sequence for each learned turn
Outcome = Literal["skipped", "dropped", "shortened", "by_turn"]
PREFIXES: dict[Outcome, str] = {"skipped": SKIPPED, "dropped": DROPPED, "by_turn": BY_TURN}
ARRAY = "array."  # before the names of a sequence's arrays in the cache
CHECKSUM = "sha256"
_cached: ContextVar[bool] = ContextVar("cached", default=True)


class AllSkippedError(UserError):
    """No row could be encoded. ``changed`` has the reason of each."""

    def __init__(self, text: str, changed: list[Changed]) -> None:
        super().__init__(text)
        self.changed = changed


def encode(
    rows: list[Row], function: ToExamples, truncation: Truncation, cache_key: str | None = None, completion: int = 0
) -> Encoded:
    """Encode rows as examples that fit ``truncation.max_length``. Examples of prompts keep their row.

    Args:
        rows: rows of a type that ``function`` accepts.
        function: converts rows to one example each, without truncation.
        truncation: the maximum length, and how to handle longer rows and rows that cannot be encoded.
        cache_key: a digest of everything that ``function`` depends on (``cache_key``). If the same rows were encoded
            before, the result is read from disk. None disables the cache.
        completion: tokens of ``max_length`` that are kept free for the completion of a prompt.

    Raises:
        UserError: if a row cannot be encoded, is too long and must not be truncated, or has nothing left to learn. The
            message names the first such row.
    """
    path = None
    if cache_key is not None and _cached.get():
        path = cache_folder() / f"{_fingerprint(rows, truncation, completion, cache_key)}.safetensors"
    if path is not None and path.exists() and (cached := _read(path)) is not None:
        return _logged(_with_prompts(*cached, rows))
    encoded = Encoded([], [])
    origins: list[int] = []  # the index of each example's row
    distinct = list({id(row): row for row in rows}.values())  # a mixture may draw a row more than once
    examples_of: dict[int, list[Example]] = {}
    for start in range(0, len(distinct), CHUNK):
        progress.report("encoding rows", start, len(distinct))
        chunk = distinct[start : start + CHUNK]
        for row, example in zip(chunk, _each(chunk, function), strict=True):
            if isinstance(example, Example):
                examples_of[id(row)], reason = fit(row, example, function, truncation, completion)
                if examples_of[id(row)] and isinstance(row, Conversation | Scored) and len(example.sequences) > 1:
                    encoded.changed.append(Changed(row.source, f"{BY_TURN}{len(example.sequences)} sequences"))
            elif truncation.on_bad_row == "skip":
                examples_of[id(row)], reason = [], SKIPPED + str(example).removeprefix(f"{row.source}: ")
            else:
                raise example
            if reason:
                encoded.changed.append(Changed(row.source, reason))
    progress.report("encoding rows", len(distinct), len(distinct))
    for index, row in enumerate(rows):
        encoded.examples.extend(examples_of[id(row)])
        origins += [index] * len(examples_of[id(row)])
    if rows and all(change.reason.startswith(SKIPPED) for change in encoded.changed) and not encoded.examples:
        first = encoded.changed[0]
        reason = first.reason.removeprefix(SKIPPED)
        text = f"all {len(rows)} rows were skipped, the first as {first.source}: {reason}"
        raise AllSkippedError(text, encoded.changed)
    if path is not None and len({tuple(s.arrays) for example in encoded.examples for s in example.sequences}) <= 1:
        _write(encoded, origins, path)
    return _logged(_with_prompts(encoded, origins, rows))


def _with_prompts(encoded: Encoded, origins: list[int], rows: list[Row]) -> Encoded:
    """Attach to each example of a prompt its row, with the whole prompt even if the tokens were truncated."""
    examples = [
        replace(example, row=row) if isinstance(row := rows[index], Prompt) else example
        for example, index in zip(encoded.examples, origins, strict=True)
    ]
    return encoded._replace(examples=examples)


def _each(rows: list[Row], function: ToExamples) -> Iterator[Example | UserError]:
    """The example of each row, or its error. If a batch fails, its halves are tried separately, down to single rows.

    Rows after an error are not tried before the caller asks for them.
    """
    try:
        examples = list(function(rows))
    except NoTemplateError:  # no row is at fault, so none is skipped
        raise
    except UserError as error:
        if len(rows) == 1:
            yield error
            return
    else:
        yield from examples
        return
    middle = len(rows) // 2
    yield from _each(rows[:middle], function)
    yield from _each(rows[middle:], function)


class Account(NamedTuple):
    """The number of rows that are used, and which are not: ``Account(2, ["a:3: one token"], ["a:4: ..."], [], [])``.

    ``skipped`` rows could not be read or encoded, ``dropped`` rows were too long, and ``shortened`` rows are truncated
    or split. Rows ``by_turn`` have a sequence for each learned turn, because the chat template rewrites earlier turns.
    A row that a mixture draws twice counts twice.
    """

    rows: int
    skipped: list[str]
    dropped: list[str]
    shortened: list[str]
    by_turn: list[str]


def account(rows: Iterable[Row], changed: Iterable[Changed]) -> Account:
    """Count the rows that are used, and sort the changes."""
    used = Account(0, [], [], [], [])
    named, unused = used._asdict(), set()
    for source, reason in changed:
        kind = outcome(reason)
        named[kind].append(f"{source}: {reason.removeprefix(PREFIXES.get(kind, ''))}")
        if kind in ("skipped", "dropped"):
            unused.add(source)
    return used._replace(rows=sum(row.source not in unused for row in rows))


def outcome(reason: str) -> Outcome:
    """What became of a row that was changed for a reason."""
    for kind, prefix in PREFIXES.items():
        if reason.startswith(prefix):
            return kind
    return "shortened"


@contextmanager
def without_cache() -> Iterator[None]:
    """Disable the cache, for example for streamed rows."""
    token = _cached.set(False)
    try:
        yield
    finally:
        _cached.reset(token)


def _logged(encoded: Encoded) -> Encoded:
    changed = [change for change in encoded.changed if outcome(change.reason) != "by_turn"]
    if changed:
        first = changed[0]
        logger.warning("rows truncated or dropped: %d, the first: %s: %s", len(changed), first.source, first.reason)
    return encoded


# --- cache --------------------------------------------------------------------------------------------------------


def cache_key(tokenizer: PreTrainedTokenizerBase, *options: Any) -> str:
    """A digest of the tokenizer, its template and the options, on which the ids of a row depend."""
    import tokenizers
    import transformers

    rust: Any = tokenizer.backend_tokenizer
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    parts = [
        hashlib.sha256(code).hexdigest(),
        transformers.__version__,
        tokenizers.__version__,
        rust.to_str(),
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


def _fingerprint(rows: list[Row], truncation: Truncation, completion: int, key: str) -> str:
    plain = (replace(row, columns={}) if isinstance(row, Prompt) else row for row in rows)
    return _digest([key, repr(truncation), repr(completion), *(repr(row) for row in plain)])


def cache_folder() -> Path:
    """Where encoded rows and converted models are kept: ``$BURNISH_CACHE`` or ``~/.cache/burnish``."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")


def _write(encoded: Encoded, origins: list[int], path: Path) -> None:
    """Write the examples as arrays, atomically, with the index of each example's row."""
    from safetensors.numpy import save

    sequences = [s for example in encoded.examples for s in example.sequences]
    tensors = {
        "tokens": np.concatenate([s.tokens for s in sequences] or [np.zeros(0, np.int64)]),
        "loss_mask": np.concatenate([s.loss_mask for s in sequences] or [np.zeros(0, np.bool_)]),
        "lengths": np.array([len(s) for s in sequences], dtype=np.int64),
        "sequences": np.array([len(example.sequences) for example in encoded.examples], dtype=np.int64),
        "origins": np.array(origins, dtype=np.int64),
        "pairs": np.array([pair for e in encoded.examples for pair in e.pairs], dtype=np.float64).reshape(-1, 5),
        "pair_counts": np.array([len(example.pairs) for example in encoded.examples], dtype=np.int64),
    }
    for name in sequences[0].arrays if sequences else ():
        tensors[ARRAY + name] = np.concatenate([s.arrays[name] for s in sequences])
    notes = {"sources": json.dumps([s.source for s in sequences]), "changed": json.dumps(encoded.changed)}
    notes |= {CHECKSUM: _checksum(tensors, notes)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            aside = Path(folder) / path.name
            aside.write_bytes(save(tensors, notes))
            os.replace(aside, path)
    except OSError as error:
        warnings.warn(f"encoded rows are not kept for the next run: {error}", stacklevel=3)


def _checksum(tensors: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """The SHA-256 of arrays and notes. It does not depend on their order."""
    parts = [f"{name} {array.dtype} {array.shape}".encode() for name, array in sorted(tensors.items())]
    parts += [f"{name} {text}".encode() for name, text in sorted(notes.items())]
    return files.digest([*parts, *(tensor.data for _, tensor in sorted(tensors.items()))])


def _read(path: Path) -> tuple[Encoded, list[int]] | None:
    """The cached examples and the index of each one's row, or None if the file is damaged."""
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
    changed = [Changed(*change) for change in json.loads(notes["changed"])]
    return Encoded(examples, changed), tensors["origins"].tolist()
