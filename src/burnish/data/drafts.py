"""Work on many rows at once: each row's goes on until it needs tokens, and those of all rows are made together.

A **draft** is a generator. It yields what it needs tokenised, is sent the tokens, and returns what it made of them; it
reads like code for one row. One thread writes texts and masks while another, inside the tokenizer, makes tokens.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from burnish.types import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from burnish.data.templates import Writer

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 512  # rows of a chunk
CHUNKS = 3  # one that is worked on here, one in the tokenizer, and one that waits for it
_LOCK = threading.Lock()  # whether special tokens stay text is a switch of the whole tokenizer


class How(NamedTuple):
    """How a text is to be tokenised: ``How(tokenizer)``.

    ``as_text``: special tokens that the text spells are not made special tokens of. ``framed``: with the tokens that
    the tokenizer puts around a text. ``offsets``: with the characters that each token was made from.
    """

    rust: Tokenizer
    as_text: bool = False
    framed: bool = False
    offsets: bool = False


class Piece(NamedTuple):
    """Ids of a text, and where asked for the characters of each: ``Piece([1, 9], [(0, 3), (3, 5)])``."""

    ids: list[int]
    offsets: list[tuple[int, int]]


Ask = tuple[How, list[str]]
Draft = Generator[Ask, list[Piece], T]


class OneRow(Generic[P, T]):
    """A function of one row: called with a tokenizer it gives its result; ``draft`` is its part in work on many."""

    def __init__(self, draft: Callable[Concatenate[Writer, P], Draft[T]]) -> None:
        self.draft = draft
        functools.update_wrapper(self, draft)

    def __call__(self, tokenizer: PreTrainedTokenizerBase, *args: P.args, **kwargs: P.kwargs) -> T:
        """Work on this row alone."""
        from burnish.data.templates import Writer

        return results([self.draft(Writer(tokenizer), *args, **kwargs)])[0]


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage in cycles: rows are many objects and have none, but would be visited again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collection()
def results(drafts: Iterable[Draft[T]]) -> list[T]:
    """What drafts come to, in their order.

    Raises:
        UserError: the first of them.
    """
    found = []
    for outcome in outcomes(drafts):
        if isinstance(outcome, UserError):
            raise outcome
        found.append(outcome)
    return found


def outcomes(drafts: Iterable[Draft[T]]) -> Iterator[T | UserError]:
    """What each draft comes to, or the UserError that it ends with, in their order."""
    remaining = iter(drafts)
    chunks = enumerate(iter(lambda: list(islice(remaining, AT_ONCE)), []))
    finished: dict[int, list[T | UserError]] = {}
    running: deque[tuple[int, Generator[Wanted, Any, list[Any]], Future[Wanted] | None]] = deque()
    shown = 0
    with ThreadPoolExecutor(1) as worker:
        while True:
            if len(running) < CHUNKS and (started := next(chunks, None)) is not None:
                number, chunk, future = started[0], _chunk(started[1]), None
            elif running:
                number, chunk, future = running.popleft()
            else:
                return
            try:
                asked = chunk.send(future.result() if future else None)
                running.append((number, chunk, worker.submit(_tokenise, asked)))
            except StopIteration as done:
                finished[number] = done.value
            while shown in finished:
                yield from finished.pop(shown)
                shown += 1


Wanted = dict[How, dict[str, Any]]


def _chunk(drafts: list[Draft[T]]) -> Generator[Wanted, Any, list[Any]]:
    """Outcomes of drafts that ask together; a text is tokenised once, however many ask for it."""
    found: list[Any] = [None] * len(drafts)
    known: dict[How, dict[str, Piece]] = {}
    going: list[tuple[int, Draft[T], Ask | None]] = [(i, draft, None) for i, draft in enumerate(drafts)]
    while going:
        asking: list[tuple[int, Draft[T], Ask | None]] = []
        wanted: Wanted = {}
        for i, draft, ask in going:
            try:
                while True:
                    here = {} if ask is None else known[ask[0]]
                    ask = draft.send(None if ask is None else [here[text] for text in ask[1]])  # type: ignore[arg-type]
                    have = known.setdefault(ask[0], {})
                    lacking = [text for text in ask[1] if text not in have]
                    if lacking:
                        wanted.setdefault(ask[0], {}).update(dict.fromkeys(lacking))
                        asking.append((i, draft, ask))
                        break
            except StopIteration as done:
                found[i] = done.value
            except UserError as error:
                found[i] = error
        going = asking
        if wanted:
            for how, made in (yield wanted).items():
                known[how].update(made)
    return found


def _tokenise(wanted: Wanted) -> Wanted:
    """The pieces of texts, without the truncation and padding that a tokenizer's file or another call may have set."""
    made: Wanted = {}
    with _LOCK:
        for how, texts in wanted.items():
            rust = how.rust
            if rust.truncation is not None:
                rust.no_truncation()
            if rust.padding is not None:
                rust.no_padding()
            if rust.encode_special_tokens != how.as_text:
                rust.encode_special_tokens = how.as_text
            encode = rust.encode_batch if how.offsets else rust.encode_batch_fast
            found = encode(list(texts), add_special_tokens=how.framed)
            pieces = (Piece(e.ids, e.offsets if how.offsets else []) for e in found)
            made[how] = dict(zip(texts, pieces, strict=True))
    return made
