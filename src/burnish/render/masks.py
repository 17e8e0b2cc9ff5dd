"""Which tokens of a conversation are learned.

All ids of a row come from one tokenization. If the template marks the assistant's text with ``{% generation %}``, the
mask follows these marks. Otherwise, the tokens of a turn are those that follow its prompt. The ids of the prompt must
then be a prefix of the row's ids; this is checked, because the mask would silently be wrong. Where a template rewrites
earlier turns, for example by removing their reasoning, ``Renderer.learned_turns`` makes a sequence of each turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from burnish.errors import UserError
from burnish.render.special_tokens import SpecialTokens, Tokens
from burnish.types import Conversation

Learn = Literal["last", "all", "completion", "everything"]
"""``last``: the last assistant turn; ``all``: all of them; ``completion``: those after the prompt; ``everything``:
every token that has a predecessor."""


class Turn(NamedTuple):
    """The assistant's tokens are ``start`` to ``end``; ``end_id`` is the token that ends them: ``Turn(5, 8, 2)``."""

    start: int
    end: int
    end_id: int | None


class Prefix(NamedTuple):
    """The first messages of a conversation: ``Prefix(1, opens_turn=True)`` is the prompt of the first answer.

    ``opens_turn``: whether the template also opens the assistant's turn after them.
    """

    messages: int
    opens_turn: bool


class Added(NamedTuple):
    """The ids with which two texts end after their common beginning: ``Added([2], [5, 9, 2])``."""

    before: list[int]
    after: list[int]


class Endings(NamedTuple):
    """What a template writes where a turn of the assistant ends: ``Endings([2], 5, 7)``.

    Attributes:
        last: what it writes only after the last turn of a conversation, such as another EOS.
        answer, calls: the token that opens the next role's turn, after an answer and after a turn with tool calls. None
            if that says nothing about the end, because it opens the assistant's turns too.
    """

    last: list[int]
    answer: int | None
    calls: int | None


class RewrittenError(UserError):
    """The template renders a prefix of a conversation differently when messages follow."""


def learned_messages(row: Conversation, learn: Learn | None) -> list[int]:
    """Indices of the messages to learn. ``learn=None`` means the completion if the row has one, otherwise all turns.

    Raises:
        UserError: if the conversation has no assistant turn, or no completion to learn.
    """
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


def prefixes(row: Conversation, learned: list[int], opened: bool, closed: bool) -> list[Prefix]:
    """The prefixes to tokenize: each learned turn's prompt if ``opened``, and with the turn itself if ``closed``."""
    needed = []
    for i in learned:
        if opened:
            needed.append(Prefix(i, opens_turn=True))
        if closed and i + 1 < len(row.messages):
            needed.append(Prefix(i + 1, opens_turn=False))
    return needed


def turns_by_marks(
    row: Conversation,
    learned: list[int],
    tokens: Tokens,
    generated: tuple[tuple[int, int], ...],
    special: SpecialTokens,
) -> list[Turn]:
    """The learned turns, by the characters that the template marks as generated.

    Raises:
        UserError: the template marks another number of turns than the assistant has, or nothing of one.
    """
    said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    if len(generated) != len(said):
        raise UserError(
            f"{row.source}: the chat template marks {len(generated)} turns as generated, the conversation has"
            f" {len(said)} by the assistant: fix its {{% generation %}} marks, or take them out"
        )
    offsets = np.fromiter(chain.from_iterable(tokens.offsets), np.int64, 2 * len(tokens.offsets)).reshape(-1, 2)
    spans = {i: _tokens_inside(offsets, first, last) for i, (first, last) in zip(said, generated, strict=True)}
    ends = set(special.eos)
    last_end = spans[said[-1]]
    if last_end is not None and last_end[1] < len(tokens.ids) and tokens.ids[last_end[1]] in special.ids:
        ends.add(tokens.ids[last_end[1]])  # nothing follows the last turn except what ends it
    turns = []
    for i in said:
        span = spans[i]
        if span is None:
            raise UserError(f"{row.source}: message {i}: the chat template marks nothing of it as generated")
        if i in learned:
            start, stop = span
            turn = without_end(tokens.ids, start, stop, special)
            ended_outside = turn.end_id is None and stop < len(tokens.ids) and tokens.ids[stop] in ends
            turns.append(turn._replace(end_id=tokens.ids[stop]) if ended_outside else turn)
    return turns


def _tokens_inside(offsets: np.ndarray, first: int, last: int) -> tuple[int, int] | None:
    """The first token inside these characters and the one after the last; None if there is none.

    Byte-level tokenizers may leave white space out of a token's characters, so a token can have none.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = np.flatnonzero((ends > first) & (starts < last + (starts == ends)))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else None


def turns_by_prefixes(
    row: Conversation, learned: list[int], ids: list[int], lengths: Mapping[Prefix, int], special: SpecialTokens
) -> list[Turn]:
    """The learned turns, by what each adds to its prompt; ``lengths`` are the numbers of tokens of the prefixes.

    Raises:
        UserError: the template adds nothing for a turn.
    """
    turns = []
    for i in learned:
        start = lengths[Prefix(i, opens_turn=True)]
        stop = lengths[Prefix(i + 1, opens_turn=False)] if i + 1 < len(row.messages) else len(ids)
        turns.append(without_end(ids, start, stop, special))
    if any(turn.start >= turn.end for turn in turns):
        raise UserError(f"{row.source}: the chat template adds nothing for a turn of the assistant")
    return turns


def endings(opening: Added | None, answer: Added | None, calls: Added | None, special: SpecialTokens) -> Endings:
    """The endings of a template.

    Args:
        opening: what opens the assistant's turn.
        answer: what the template writes after an answer at the end, and before a message of the user.
        calls: what it writes after tool calls at the end, and before the result of a tool.
        special: the special tokens.
    """
    last = answer.before if answer is not None and special.ids.issuperset(answer.before) else []

    def closer(added: Added | None) -> int | None:
        if opening is None or added is None or added.before != last or not added.after:
            return None
        first = added.after[0]
        return first if first in special.ids and first not in opening.after else None

    return Endings(last, closer(answer), closer(calls))


def closed(
    row: Conversation, learned: list[int], ids: list[int], turns: list[Turn], endings: Endings
) -> tuple[list[int], list[Turn]]:
    """Turns that are ended by the token of the next role, with this token as their end.

    It is appended after the last turn, where the template has no next role to write.
    """
    ids, ended = list(ids), []
    for i, turn in zip(learned, turns, strict=True):
        end = endings.calls if row.messages[i].get("tool_calls") else endings.answer
        if turn.end_id is None and end is not None:
            if turn.end == len(ids):
                ids.append(end)
            if ids[turn.end] in (endings.calls, endings.answer):
                turn = turn._replace(end_id=ids[turn.end])
        ended.append(turn)
    return ids, ended


def same(a: list[int], b: list[int]) -> int:
    """How many tokens two lists of ids begin with in common."""
    differ = (t for t, (left, right) in enumerate(zip(a, b, strict=False)) if left != right)
    return next(differ, min(len(a), len(b)))


def reasoning_left_out(row: Conversation, learned: list[int], text: str) -> RewrittenError | None:
    """An error that names the first learned turn whose reasoning does not follow that of earlier ones in the text."""
    end = 0
    for i in learned:
        message = row.messages[i]
        inside = message["content"].rpartition("</think>")[0].rpartition("<think>")[2]
        for part in (message.get("reasoning_content", "").strip(), inside.strip()):
            start = text.find(part, end)
            if start < 0:
                return RewrittenError(
                    f"{row.source}: the chat template leaves out the reasoning of message {i}, so the model would not "
                    "learn it: use a template that keeps it, or remove it from the row"
                )
            end = start + len(part)
    return None


def check_prefix(source: str, ids: list[int], before: list[int], messages: int, special: SpecialTokens) -> None:
    """Check that the ids of the first messages, ``before``, are the first ids of the whole conversation.

    Raises:
        RewrittenError: if they differ. The message shows both.
    """
    if ids[: len(before)] == before:
        return
    alike = same(before, ids)
    start = max(0, alike - 8)
    alone, whole = (special.show(part[start : alike + 8]) for part in (before, ids))
    raise RewrittenError(
        f"{source}: the first {messages} messages alone do not have the ids that they have in the whole conversation,"
        f" so what the model learns is not what it is asked; from token {start} on\n"
        f"  alone:    {alone}\n  in whole: {whole}\n"
        "Use a template that marks {% generation %}, make all turns but the last one part of the prompt, or let the"
        " completion begin with the space that the prompt ends with"
    )


def without_end(ids: list[int], start: int, stop: int, special: SpecialTokens) -> Turn:
    """The turn in ``ids[start:stop]``, without its end token and the white space after that."""
    for end in range(stop - 1, start - 1, -1):
        if ids[end] in special.ids:
            return Turn(start, end, ids[end])
        if not special.is_blank(ids[end]):
            break
    return Turn(start, stop, None)


def loss_mask(
    row: Conversation, ids: list[int], turns: list[Turn], learn: Learn | None, learn_eos: bool, special: SpecialTokens
) -> np.ndarray:
    """The mask (T,) of learned tokens; the first token has no predecessor and is never learned.

    Raises:
        UserError: an end token is to be learned and the template writes none, or there is nothing to learn.
    """
    if learn_eos and any(turn.end_id is None for turn in turns):
        raise UserError(
            f"{row.source}: the chat template writes no end token after the assistant's turn, so the model would not"
            " learn to stop: use a template that does, or set learn_eos: false"
        )
    mask = np.zeros(len(ids), dtype=np.bool_)
    if learn == "everything":
        mask[:] = _everything(ids, turns[-1].end_id, learn_eos, special)
    else:
        for turn in turns:
            mask[turn.start : turn.end + learn_eos] = True
    mask[0] = False
    if not mask.any():
        raise UserError(f"{row.source}: nothing to learn")
    return mask


def _everything(ids: list[int], end_id: int | None, learn_eos: bool, special: SpecialTokens) -> list[bool]:
    """Every token, except white space after an end token, and except end tokens if they are not to be learned."""
    mask, after_end = [], False
    for id in ids:
        blank = after_end and special.is_blank(id)
        after_end = id == end_id or blank
        mask.append(not blank and (learn_eos or id != end_id))
    return mask
