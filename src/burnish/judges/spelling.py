"""How tokens spell choices: which continuations complete a choice, and which may still become one. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

NOT_A_CHOICE = -1


class Continued(NamedTuple):
    """What a text is once a token follows it: ``Continued(text="1", choice=0)``.

    ``choice`` is the index of the choice that is complete, whatever follows. ``text`` is what more tokens may turn into
    a choice; None if that is impossible. A text that is a choice already, but could become a longer one, has no
    ``choice`` yet: it is complete if the next token does not continue the word (`continues_word`).
    """

    text: str | None
    choice: int = NOT_A_CHOICE


NOTHING = Continued(None)


def continued(text: str, token: str, choices: tuple[str, ...]) -> Continued:
    """Add the text of a token to what was written so far.

    White space before a choice is dropped, and white space after it ends it: ``continued("", " A", ("A", "B"))`` is
    choice 0, and ``continued("", "1", ("1", "10"))`` is the text "1", which "0" turns into choice 1.

    Args:
        text: what was written before, without white space at its start; a proper prefix of a choice.
        token: the text of the token, with its white space.
        choices: the words to choose from.
    """
    written = (text + token).lstrip() if not text else text + token
    word = written.rstrip()
    if not word:
        return Continued("")  # only white space so far
    longer = any(choice != word and choice.startswith(written) for choice in choices)
    if longer:
        return Continued(written)
    return Continued(None, choices.index(word)) if word in choices else NOTHING


def continues_word(token: str) -> bool:
    """Whether a token continues the word before it: "0" and "s" do, " 0", "." and "" do not."""
    return token[:1].isalnum()
