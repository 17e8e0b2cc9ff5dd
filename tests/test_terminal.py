"""Control characters of models and rows do not reach the terminal, and bytes that are not text are refused."""

import pytest

from burnish.errors import UserError
from burnish.terminal import check_typed, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("漢字\u3000 नमस्\u200cते 👩\u200d🔬", "漢字\u3000 नमस्\u200cते 👩\u200d🔬"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb\x07\x9b1m\x7f\0", "a\\rb\\x07\\x9b1m\\x7f\\x00"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_escaped_and_all_others_are_kept(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    assert check_typed("漢字", "prompt 1") == "漢字"
    with pytest.raises(UserError, match=r"prompt 1: not valid UTF-8 at character 2, '\\udcff'"):
        check_typed(b"a\xff".decode("utf-8", "surrogateescape"), "prompt 1")
