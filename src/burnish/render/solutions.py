"""Solutions in steps to sequences: each step tokenized by itself, with its value on its last token.

Training and search build their tokens by the same two functions, ``chat.prompt`` for the question and ``step_tokens``
for a step, so that the model meets the same ids in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from burnish.errors import UserError
from burnish.render import chat
from burnish.render.drafts import Draft, OneRow
from burnish.render.templates import Renderer, check_text
from burnish.types import Conversation, Sequence, Steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Learn = Literal["steps", "everything"]


@OneRow
def step_tokens(writer: Renderer, text: str, delimiter: str = "\n") -> Draft[tuple[int, ...]]:
    r"""The ids of one step: its stripped text and one delimiter, such as those of ``"3 + 8 = 11\n"``.

    No special token is added, and one that the step spells stays text.

    Raises:
        ValueError: the step is empty, or holds the delimiter and so would be several; or the tokenizer cannot write as
            text a special token that it spells.
    """
    stripped = text.strip()
    if not stripped:
        raise ValueError("a step is empty")
    if delimiter in stripped:
        raise ValueError(f"a step holds the delimiter {delimiter!r}, which ends it: {stripped[:80]!r}")
    ((ids, _),) = yield writer.of_text, [stripped + delimiter]
    check_text(writer, ids, "a step")
    return tuple(ids)


def check_delimiter(tokenizer: PreTrainedTokenizerBase, delimiter: str) -> None:
    """Raise a UserError where a step's tokens do not give the delimiter back, so that no step would be seen to end."""
    try:
        tokens = step_tokens(tokenizer, "1", delimiter)
    except ValueError as error:
        raise UserError(f"method.delimiter: {error}") from error
    if step_ends(tokenizer, tokens, delimiter) != [len(tokens) - 1]:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        raise UserError(
            f"method.delimiter: the tokenizer reads {delimiter!r} behind a step 1 back as {text!r}, so that no step "
            "would be seen to end: choose another one"
        )


@OneRow
def solution(
    writer: Renderer,
    row: Steps,
    learn: Learn = "steps",
    learn_eos: bool = True,
    delimiter: str = "\n",
) -> Draft[Sequence]:
    r"""A question under the model's template, its steps, and the end token where it is learned.

    Three arrays are 0 but on the last token of each step: ``targets``, its Q; ``outcomes``, 1 in a correct solution and
    -1 in another, which also tells a Q of 0 from no Q; ``depths``, k / K at step k of K. A target judges what stands up
    to and including its token, and is not shifted.

    Args:
        writer: of a tokenizer with a chat template.
        row: the solution. The tokens of a correct one are learned; of another one only its values are.
        learn: ``steps``, or ``everything``: the question too, where the solution is correct.
        learn_eos: a correct solution ends with the token that ends the assistant's turn, and it is learned.
        delimiter: ends every step.

    Raises:
        UserError: the template refuses the question or writes no end token; a step is empty or holds the delimiter; a
            special token that is spelled cannot be written as text.
    """
    question = yield from chat.prompt.draft(writer, row.question, row.source)
    tokens = list(question)
    targets, outcomes, depths = ([0.0] * len(question) for _ in range(3))
    for k, (text, value) in enumerate(zip(row.steps, row.values, strict=True), start=1):
        try:
            step = yield from step_tokens.draft(writer, text, delimiter)
        except ValueError as error:
            raise UserError(f"{row.source}: step {k} of {len(row.steps)}: {error}") from error
        tokens += step
        here = (value, 1.0 if row.correct else -1.0, k / len(row.steps))
        for array, number in zip((targets, outcomes, depths), here, strict=True):
            array += [0.0] * (len(step) - 1) + [number]
    if row.correct and learn_eos:
        tokens.append((yield from _end(writer, row)))
        for array in (targets, outcomes, depths):
            array.append(0.0)
    first = 1 if learn == "everything" else len(question)
    loss_mask = tuple(row.correct and t >= first for t in range(len(tokens)))
    arrays = {"targets": tuple(targets), "outcomes": tuple(outcomes), "depths": tuple(depths)}
    return Sequence(tuple(tokens), loss_mask, row.source, arrays)


def step_ends(tokenizer: PreTrainedTokenizerBase, tokens: tuple[int, ...], delimiter: str = "\n") -> list[int]:
    r"""Where the steps of a completion end: the index of each token that completes a delimiter, found on the ids.

    ``"3+4=7\n7-2=5"`` as characters gives ``[5]``. The delimiter may be a part of its token (``".\n"``), or several
    tokens long. What a model left unfinished has no end, and blank lines are no steps.
    """
    ends, start = [], 0
    for t in range(len(tokens)):
        text = str(tokenizer.decode(list(tokens[start : t + 1]), skip_special_tokens=True))
        if delimiter in text:
            if text.replace(delimiter, "").strip():
                ends.append(t)
            start = t + 1
    return ends


def _end(writer: Renderer, row: Steps) -> Draft[int]:
    """The token that the template ends an assistant's turn with: the last one that is learned of such a turn."""
    turn = Conversation((*row.question, {"role": "assistant", "content": row.steps[-1]}), None, row.source)
    sequence = yield from chat.conversation.draft(writer, turn, "last", learn_eos=True)
    learned = np.flatnonzero(sequence.loss_mask)
    return int(sequence.tokens[learned[-1] if learned.size else -1])
