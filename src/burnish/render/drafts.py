"""Work on many rows at once: each row's goes on until it needs tokens, and those of all rows are made together.

A **draft** is a generator. It yields what it needs tokenized, is sent the tokens, and returns what it made of them; it
reads like code for one row. One thread writes texts and masks while another, inside the tokenizer, makes tokens.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from burnish.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from burnish.render.templates import Renderer

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 512  # rows of a chunk
FEW = 8  # texts of a chunk
CHUNKS = 3  # one that is worked on here, one in the tokenizer, and one that waits for it
_LOCK = threading.Lock()  # whether special tokens stay text is a switch of the whole tokenizer


class How(NamedTuple):
    """How a text is to be tokenized: ``How(tokenizer)``.

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

    def __init__(self, draft: Callable[Concatenate[Renderer, P], Draft[T]]) -> None:
        self.draft = draft
        functools.update_wrapper(self, draft)

    def __call__(self, tokenizer: PreTrainedTokenizerBase, *args: P.args, **kwargs: P.kwargs) -> T:
        """Work on this row alone."""
        from burnish.render.templates import Renderer

        return results([self.draft(Renderer(tokenizer), *args, **kwargs)])[0]


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
    running: deque[tuple[int, Generator[Wanted, Any, list[Any]], Future[Made] | None]] = deque()
    common: Made = defaultdict(dict)
    shown = 0
    with ThreadPoolExecutor(1) as worker:
        while True:
            if len(running) < CHUNKS and (started := next(chunks, None)) is not None:
                number, chunk, future = started[0], _chunk(started[1], common), None
            elif running:
                number, chunk, future = running.popleft()
            else:
                return
            try:
                asked = chunk.send(future.result() if future else None)
                running.append((number, chunk, worker.submit(make, asked)))
            except StopIteration as done:
                finished[number] = done.value
            while shown in finished:
                yield from finished.pop(shown)
                shown += 1


Wanted = dict[How, list[str]]
Made = dict[How, dict[str, Piece]]


def _chunk(drafts: list[Draft[T]], common: Made) -> Generator[Wanted, Any, list[Any]]:
    """Outcomes of drafts that ask together; a text is tokenized once, however many ask for it.

    Where a whole chunk lacks only a few texts, they are what rows have in common: kept for the chunks that follow.
    """
    found: list[Any] = [None] * len(drafts)
    known: Made = defaultdict(dict, {how: dict(pieces) for how, pieces in common.items()})
    going: list[tuple[int, Draft[T], How | None, list[str]]] = [(i, draft, None, []) for i, draft in enumerate(drafts)]
    while going:
        asking: list[tuple[int, Draft[T], How | None, list[str]]] = []
        asked: defaultdict[How, list[str]] = defaultdict(list)
        for i, draft, how, texts in going:
            try:
                answer = None if how is None else [known[how][text] for text in texts]
                while True:
                    how, texts = draft.send(answer)  # type: ignore[arg-type]
                    try:
                        answer = list(map(known[how].__getitem__, texts))
                    except KeyError:
                        break
                asked[how] += texts
                asking.append((i, draft, how, texts))
            except StopIteration as done:
                found[i] = done.value
            except UserError as error:
                found[i] = error
        going = asking
        if asked:
            lacking = {
                how: [text for text in dict.fromkeys(texts) if text not in known[how]] for how, texts in asked.items()
            }
            for how, made in (yield lacking).items():
                known[how].update(made)
                if len(made) <= FEW:
                    common[how].update(made)
    return found


def make(wanted: Wanted) -> Made:
    """The pieces of texts, without the truncation and padding that a tokenizer's file or another call may have set."""
    made: Made = {}
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
            found = encode(texts, add_special_tokens=how.framed)
            pieces = [Piece(e.ids, e.offsets if how.offsets else []) for e in found]
            made[how] = dict(zip(texts, pieces, strict=True))
    return made
