"""Solutions in steps to sequences: each step is tokenized by itself, with its value on its last token.

Training and search build their tokens from the same parts, ``Renderer.prompt`` for the question, ``step_tokens`` for a
step, and ``output_text`` for the output of its code, so that the model meets the same ids in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from burnish.errors import UserError
from burnish.render.renderer import Renderer
from burnish.types import Conversation, Prompt, Sequence, Steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Learn = Literal["steps", "everything"]


def step_text(step: str, delimiter: str = "\n") -> str:
    r"""A step as it is tokenized: stripped, with one delimiter, such as ``"3 + 8 = 11\n"``.

    Raises:
        ValueError: the step is empty, or contains the delimiter and so would be several.
    """
    stripped = step.strip()
    if not stripped:
        raise ValueError("a step is empty")
    if delimiter in stripped:
        raise ValueError(f"a step holds the delimiter {delimiter!r}, which ends it: {stripped[:80]!r}")
    return stripped + delimiter


def output_text(output: str, delimiter: str = "\n") -> str:
    r"""The output of a step's code as it is tokenized behind the step: ``"<output>12</output>\n"``."""
    return output + delimiter


def step_tokens(renderer: Renderer, step: str, delimiter: str = "\n") -> tuple[int, ...]:
    """The ids of one step and its delimiter; a special token that the step spells stays text.

    Raises:
        ValueError: as ``step_text``; or the tokenizer cannot keep a special token that the step spells as text.
    """
    (ids,) = renderer.encode_text([step_text(step, delimiter)])
    renderer.special.check_absent(ids, "a step")
    return tuple(ids)


def check_delimiter(tokenizer: PreTrainedTokenizerBase, delimiter: str) -> None:
    """Check that a step's tokens give the delimiter back, so that the end of a step can be seen.

    Raises:
        UserError: they do not.
    """
    try:
        tokens = step_tokens(Renderer(tokenizer), "1", delimiter)
    except ValueError as error:
        raise UserError(f"method.delimiter: {error}") from error
    if step_ends(tokenizer, tokens, delimiter) != [len(tokens) - 1]:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        raise UserError(
            f"method.delimiter: the tokenizer reads {delimiter!r} behind a step 1 back as {text!r}, so that no step "
            "would be seen to end: choose another one"
        )


def solution(
    renderer: Renderer,
    row: Steps,
    learn: Learn = "steps",
    learn_eos: bool = True,
    delimiter: str = "\n",
    mask_output: bool = True,
) -> Sequence:
    r"""A question under the model's template, its steps, and the end token if it is learned.

    Three arrays are 0 except on the last token of each step: ``targets``, its Q; ``outcomes``, 1 in a correct solution
    and -1 in an incorrect one, which also tells a Q of 0 from no Q; ``depths``, k / K at step k of K. A target judges
    the text up to and including its token, and is not shifted.

    Args:
        renderer: of a tokenizer with a chat template.
        row: the solution. The tokens of a correct one are learned; of an incorrect one only its values are.
        learn: ``steps``, or ``everything``: the question too, if the solution is correct.
        learn_eos: a correct solution ends with the token that ends the assistant's turn, and it is learned.
        delimiter: ends every step.
        mask_output: the output of a step's code, and the delimiter after it, are not learned.

    Raises:
        UserError: the template refuses the question or writes no end token; a step is empty or contains the delimiter;
            a special token that a step spells cannot be kept as text.
    """
    return solutions(renderer, [row], learn, learn_eos, delimiter, mask_output)[0]


def solutions(
    renderer: Renderer,
    rows: list[Steps],
    learn: Learn = "steps",
    learn_eos: bool = True,
    delimiter: str = "\n",
    mask_output: bool = True,
) -> list[Sequence]:
    """As ``solution``, for many rows."""
    questions = renderer.prompts([Prompt(row.question, {}, row.source) for row in rows])
    steps = _steps(renderer, rows, delimiter)
    ended = [row for row in rows if row.correct and learn_eos]
    end_ids = dict(zip(map(id, ended), _end_ids(renderer, ended), strict=True))
    sequences = []
    for row, question, its_steps in zip(rows, questions, steps, strict=True):
        end = [end_ids[id(row)]] if id(row) in end_ids else []
        tokens = [*question, *(token for text, output in its_steps for token in (*text, *output)), *end]
        sizes = [len(text) + len(output) for text, output in its_steps]
        last = len(question) - 1 + np.cumsum(sizes)  # the last token of each step
        targets, outcomes, depths = np.zeros((3, len(tokens)))
        targets[last] = row.values
        outcomes[last] = 1.0 if row.correct else -1.0
        depths[last] = np.arange(1, len(its_steps) + 1) / len(its_steps)
        loss_mask = np.zeros(len(tokens), np.bool_)
        if row.correct:
            loss_mask[1 if learn == "everything" else len(question) :] = True
            for (_, output), t in zip(its_steps, last, strict=True):
                if mask_output:
                    loss_mask[t + 1 - len(output) : t + 1] = False
        arrays = {"targets": targets, "outcomes": outcomes, "depths": depths}
        sequences.append(Sequence(tokens, loss_mask, row.source, arrays))
    return sequences


def _steps(renderer: Renderer, rows: list[Steps], delimiter: str) -> list[list[tuple[list[int], list[int]]]]:
    """The ids of each step of each row: of its text, and of the output of its code. The delimiter ends the last."""
    texts, places = [], []
    for row in rows:
        for k, (step, output) in enumerate(zip(row.steps, row.outputs or ("",) * len(row.steps), strict=True), start=1):
            place = f"{row.source}: step {k} of {len(row.steps)}"
            try:
                text = step_text(step, delimiter)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from error
            texts += [step.strip(), output_text(output, delimiter)] if output else [text, ""]
            places += [f"{place}: a step", f"{place}: an output"]
    encoded = renderer.encode_text(texts)
    for place, ids in zip(places, encoded, strict=True):
        renderer.special.check_absent(ids, place)
    pairs = iter(list(zip(encoded[::2], encoded[1::2], strict=True)))
    return [[next(pairs) for _ in row.steps] for row in rows]


def _end_ids(renderer: Renderer, rows: list[Steps]) -> list[int]:
    """For each row the token that the template ends an assistant's turn with: the last one learned of such a turn."""
    turns = [
        Conversation((*row.question, {"role": "assistant", "content": row.steps[-1]}), None, row.source) for row in rows
    ]
    sequences = renderer.conversations(turns, "last", learn_eos=True)
    return [int(sequence.tokens[np.flatnonzero(sequence.loss_mask)[-1]]) for sequence in sequences]


def step_ends(tokenizer: PreTrainedTokenizerBase, tokens: tuple[int, ...], delimiter: str = "\n") -> list[int]:
    r"""Where the steps of a completion end: the index of each token that completes a delimiter.

    ``"3+4=7\n7-2=5"`` as characters gives ``[5]``. The delimiter may be a part of its token (``".\n"``), or several
    tokens long. A step that the model left unfinished has no end, and blank lines are no steps.
    """
    ends, start = [], 0
    for t in range(len(tokens)):
        text = str(tokenizer.decode(list(tokens[start : t + 1]), skip_special_tokens=True))
        if delimiter in text:
            if text.replace(delimiter, "").strip():
                ends.append(t)
            start = t + 1
    return ends
