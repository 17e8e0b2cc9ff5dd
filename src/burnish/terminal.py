"""Text from models, rows and people: shown without obeying it, and read without what is not text."""

from __future__ import annotations

import re

from burnish.errors import UserError

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters besides newline and tab, characters that reverse the order of others, and lone surrogates."""


def visible(text: str) -> str:
    r"""The text with control characters escaped, so that it cannot control the terminal: ``\x1b[2J``."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def check_typed(text: str, what: str) -> str:
    """Return a text that was typed or given on the command line.

    Raises:
        UserError: if it has bytes that are not UTF-8, which Python turns into lone surrogates.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what}: not valid UTF-8 at character {error.start + 1}, {text[error.start]!r}") from None
    return text
