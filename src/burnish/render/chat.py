"""Rows to sequences: which tokens a conversation becomes, and which of them are learned.

All ids of a row come from one tokenization. Where the template marks what the assistant writes (``{% generation %}``),
the mask is that mark; else a turn's tokens are those that it adds to the prompt before it, and the ids of that prompt
must be a prefix of the row's, or the mask would be wrong without a word.

The functions take a tokenizer and one row; their drafts (``drafts.OneRow``) a ``Renderer`` and one of many rows.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal, NamedTuple

from burnish.errors import UserError
from burnish.render.drafts import Draft, OneRow, Piece, results
from burnish.render.encode import cache_key, encode, fit
from burnish.render.templates import (
    PLAIN_TEMPLATES,
    Renderer,
    Tokens,
    Written,
    check_text,
    set_template,
    tokenize,
    write,
)
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Messages, Pair, Preference, Prompt, Ranking, Sequence, Text

__all__ = [
    "PLAIN_TEMPLATES",
    "Draft",
    "Renderer",
    "Truncation",
    "answer",
    "cache_key",
    "comparison",
    "completion",
    "conversation",
    "encode",
    "prompt",
    "results",
    "set_template",
    "text",
]

Learn = Literal["last", "all", "completion", "everything"]


class Turn(NamedTuple):
    """Tokens ``start`` to ``end`` are what the assistant says; ``end_id`` follows, if it ends: ``Turn(5, 8, 2)``."""

    start: int
    end: int
    end_id: int | None


@OneRow
def text(writer: Renderer, row: Text) -> Draft[Sequence]:
    """Text and EOS, all of it learned but the first token, which has no predecessor.

    The tokenizer's own BOS, or ``[CLS]`` and ``[SEP]``, stand around it as the tokenizer has them; a special token that
    it spells stays text.

    Raises:
        UserError: the tokenizer cannot write that as text, or the text is a single token.
    """
    ((ids, _),) = yield writer.of_text._replace(framed=True), [row.text]
    before, after = writer.frame
    check_text(writer, ids[len(before) : len(ids) - len(after)], f"{row.source}: the text")
    if ids[-len(writer.eos) :] != writer.eos:
        ids = ids + writer.eos
    if len(ids) < 2:
        raise UserError(f"{row.source}: one token: there is nothing to learn")
    return Sequence(tuple(ids), (False,) + (True,) * (len(ids) - 1), row.source)


@OneRow
def prompt(writer: Renderer, row: Prompt | Messages, source: str = "prompt") -> Draft[tuple[int, ...]]:
    """The ids that a model is given before it answers, up to the opening of the assistant's turn.

    Raises:
        UserError: the template refuses the messages.
    """
    messages, source = (row.messages, row.source) if isinstance(row, Prompt) else (row, source)
    return tuple((yield from _opened(writer, messages, source)))


@OneRow
def answer(
    writer: Renderer,
    prompt: Messages,
    completion: Messages | str,
    length: Truncation | None = None,
    source: str = "answer",
) -> Draft[Sequence]:
    """A prompt with one answer to it, as a reward model sees it, in training and in scoring; nothing is learned.

    ``length`` cuts the prompt, never the answer (``Truncation``).

    Raises:
        UserError: the template refuses the messages, or they are too long and may not be cut.
    """
    turns: Messages = ({"role": "assistant", "content": completion},) if isinstance(completion, str) else completion

    def render(row: Prompt) -> Draft[Example]:
        ids = (yield from _closed(writer, write(writer, row.messages + turns, source), source)).ids
        return Example((Sequence(tuple(ids), (False,) * len(ids), source),))

    examples, _ = yield from fit(Prompt(prompt, {}, source), render, length or Truncation())
    if not examples:
        raise UserError(f"{source}: longer than max_length {length and length.max_length}: set too_long: truncate_left")
    return examples[0].sequences[0]


@OneRow
def comparison(
    writer: Renderer,
    row: Preference | Ranking,
    *,
    ties: Literal["drop", "half"] = "drop",
    learned: bool = False,
) -> Draft[Example]:
    """The answers of a row, with the pairs that are compared; ``encode`` cuts the prompt where they are too long.

    Nothing of the answers is learned, or, where ``learned``, all that the assistant says in them (``completion``).
    A ranking of K answers makes all its K (K - 1) / 2 pairs, each weighted 1 / (K (K - 1) / 2); answers of equal score
    make none (``ties="drop"``) or one with p = 0.5 (``"half"``).

    Raises:
        UserError: no pair is left, or the template refuses the messages.
    """
    answers = (row.chosen, row.rejected) if isinstance(row, Preference) else row.completions
    encode_one = completion if learned else answer
    made = []
    for messages in answers:
        made.append((yield from encode_one.draft(writer, row.prompt, messages, source=row.source)))
    sequences = tuple(made)
    if isinstance(row, Preference):
        p_chosen = 1.0 if row.p_chosen is None else row.p_chosen
        return Example(sequences, (Pair(0, 1, margin=row.margin or 0.0, p_better=p_chosen),))
    every = list(combinations(range(len(sequences)), 2))
    pairs = []
    for i, j in every:
        better, worse = (i, j) if row.scores[i] >= row.scores[j] else (j, i)
        tie = row.scores[i] == row.scores[j]
        if not tie or ties == "half":
            pairs.append(Pair(better, worse, weight=1 / len(every), p_better=0.5 if tie else 1.0))
    if not pairs:
        raise UserError(f"{row.source}: all answers have the same score: there is nothing to prefer")
    return Example(sequences, tuple(pairs))


@OneRow
def completion(writer: Renderer, prompt: Messages, completion: Messages, source: str = "completion") -> Draft[Sequence]:
    """A prompt with one answer to it, of which all that the assistant says is learned, with the end of its turns.

    Raises:
        UserError: as ``conversation``.
    """
    row = Conversation(prompt + completion, len(prompt), source)
    return (yield from conversation.draft(writer, row, "completion"))


@OneRow
def conversation(
    writer: Renderer, row: Conversation, learn: Learn | None = None, learn_eos: bool = True
) -> Draft[Sequence]:
    """A conversation with its assistant turns learned.

    Args:
        writer: of a tokenizer with a chat template; a plain one is set by ``set_template``.
        row: the conversation.
        learn: ``last`` the last assistant turn; ``all`` of them; ``completion`` those after the prompt; ``everything``
            every token that has a predecessor. None: ``completion`` where the row has one, else ``all``.
        learn_eos: learn the token that ends a turn too. White space after it is never learned.

    Raises:
        UserError: the template refuses the messages, does not keep a prompt's ids when its answer follows, marks
            another number of turns, or never ends a turn; or there is nothing to learn.
    """
    wanted = _wanted(row, learn)
    written = write(writer, row.messages, row.source)
    tokens = yield from _closed(writer, written, row.source)
    find = _marked if writer.marks else _grown
    turns = yield from find(writer, row, written, tokens, wanted)
    if learn_eos and any(turn.end_id is None for turn in turns):
        raise UserError(
            f"{row.source}: the chat template writes no end token after the assistant's turn, so the model would not"
            " learn to stop: use a template that does, or set learn_eos: false"
        )
    if learn == "everything":
        loss_mask = _everything(writer, tokens.ids, turns[-1].end_id, learn_eos)
    else:
        loss_mask = [False] * len(tokens.ids)
        for turn in turns:
            loss_mask[turn.start : turn.end + learn_eos] = [True] * (turn.end + learn_eos - turn.start)
    loss_mask[0] = False
    if True not in loss_mask:
        raise UserError(f"{row.source}: nothing to learn")
    return Sequence(tuple(tokens.ids), tuple(loss_mask), row.source)


# --- ids ----------------------------------------------------------------------------------------------------------


def _opened(writer: Renderer, messages: Messages, source: str) -> Draft[list[int]]:
    before, _ = writer.around
    tokens = yield from tokenize(writer, write(writer, messages, source, generation_prompt=True), source)
    return before + tokens.ids


def _closed(writer: Renderer, written: Written, source: str) -> Draft[Tokens]:
    """The tokens of a whole conversation; where the tokenizer ends a text with EOS, it is not ended twice."""
    before, after = writer.around
    tokens = yield from tokenize(writer, written, source)
    if after and tokens.ids[-len(after) :] == after:
        after = []
    if not before and not after:
        return tokens
    frame = [Piece(ids, [(0, 0)] * len(ids)) for ids in (before, after)]
    pieces = [frame[0], *tokens.pieces, frame[1]]
    return Tokens(before + tokens.ids + after, ["", *tokens.texts, ""], pieces)


# --- masks --------------------------------------------------------------------------------------------------------


def _wanted(row: Conversation, learn: Learn | None) -> list[int]:
    """Indices of the messages to be learned."""
    turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    start = row.completion_start
    if learn == "completion" and start is None:
        raise UserError(
            f"{row.source}: learn: completion: the row has no prompt and completion: set learn: last or all"
        )
    if learn == "completion" or (learn is None and start is not None):
        turns = [i for i in turns if i >= (start or 0)]
    if not turns:
        raise UserError(f"{row.source}: no assistant turn: there is nothing to learn")
    return turns[-1:] if learn in ("last", "everything") else turns


def _marked(
    writer: Renderer, row: Conversation, written: Written, tokens: Tokens, wanted: list[int]
) -> Draft[list[Turn]]:
    """Turns by the template's own marks."""
    said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    if len(written.marked) != len(said):
        raise UserError(
            f"{row.source}: the chat template marks {len(written.marked)} turns as generated, the conversation has"
            f" {len(said)} by the assistant: mend its {{% generation %}} marks, or take them out"
        )
    ends = set(writer.eos)
    turns = []
    for i, (first, last) in reversed(list(zip(said, written.marked, strict=True))):
        inside = tokens.inside(first, last)
        if inside is None:
            raise UserError(f"{row.source}: message {i}: the chat template marks nothing of it as generated")
        start, stop = inside
        if i == said[-1] and stop < len(tokens.ids) and tokens.ids[stop] in writer.special:
            ends.add(tokens.ids[stop])  # nothing follows the last turn but what ends it
        if i in wanted:
            turn = _ended(writer, tokens.ids, start, stop)
            outside = turn.end_id is None and stop < len(tokens.ids) and tokens.ids[stop] in ends
            turns.append(turn._replace(end_id=tokens.ids[stop]) if outside else turn)
            if writer.plain:
                _check_prefix(writer, row, i, (yield from _opened(writer, row.messages[:i], row.source)), tokens.ids)
    return turns[::-1]


def _grown(
    writer: Renderer, row: Conversation, written: Written, tokens: Tokens, wanted: list[int]
) -> Draft[list[Turn]]:
    """Turns by growing the conversation: what a turn adds to the prompt before it."""
    turns = []
    for i in wanted:
        before = yield from _opened(writer, row.messages[:i], row.source)
        _check_prefix(writer, row, i, before, tokens.ids)
        after = tokens.ids
        if i + 1 < len(row.messages):
            closed = yield from _closed(writer, write(writer, row.messages[: i + 1], row.source), row.source)
            after = closed.ids
            _check_prefix(writer, row, i + 1, after, tokens.ids)
        turns.append(_ended(writer, tokens.ids, len(before), len(after)))
    if any(turn.start >= turn.end for turn in turns):
        raise UserError(f"{row.source}: the chat template adds nothing for a turn of the assistant")
    return turns


def _check_prefix(writer: Renderer, row: Conversation, i: int, before: list[int], ids: list[int]) -> None:
    if ids[: len(before)] == before:
        return
    same = next((t for t, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids)))
    start = max(0, same - 8)
    shown = [writer.tokenizer.convert_ids_to_tokens(part[start : same + 8]) for part in (before, ids)]
    raise UserError(
        f"{row.source}: the first {i} messages alone do not have the ids that they have in the whole conversation, so"
        f" what the model learns is not what it is asked; from token {start} on\n  alone:    {shown[0]}\n"
        f"  in whole: {shown[1]}\nSet learn: last, use a template that marks {{% generation %}}, or let the completion"
        " begin with the space that the prompt ends with"
    )


def _ended(writer: Renderer, ids: list[int], start: int, stop: int) -> Turn:
    """The turn in ``ids[start:stop]``, without its end token and the white space after that."""
    for end in range(stop - 1, start - 1, -1):
        if ids[end] in writer.special:
            return Turn(start, end, ids[end])
        if not writer.blank(ids[end]):
            break
    return Turn(start, stop, None)


def _everything(writer: Renderer, ids: list[int], end_id: int | None, learn_eos: bool) -> list[bool]:
    loss_mask, after_end = [], False
    for id in ids:
        blank = after_end and writer.blank(id)
        after_end = id == end_id or blank
        loss_mask.append(not blank and (learn_eos or id != end_id))
    return loss_mask
