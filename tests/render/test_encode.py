"""Rows that are too long: what is kept, what is learned of it, and what is said; and the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.render import chat
from burnish.render.chat import (
    Draft,
    Renderer,
    Truncation,
    answer,
    comparison,
    conversation,
    encode,
    prompt,
    set_template,
    text,
)
from burnish.types import Conversation, Example, Message, Messages, Preference, Prompt, Sequence, Text


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


PAIR = Preference((user("Hi"),), (says("Yo"),), (says("No."),), 0.5, 0.75, "pairs.jsonl:3")


def alone(draft: Draft[Sequence]) -> Draft[Example]:
    return Example(((yield from draft),))


def byte_text(tokenizer: Any) -> Any:
    return lambda row: alone(text.draft(Renderer(tokenizer), row))


def cut(rows: list[Any], function: Any, max_length: int, too_long: Any) -> Any:
    return encode(rows, function, Truncation(max_length=max_length, too_long=too_long))


def test_long_texts(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    rows = [Text("abcdefg", "a:1"), Text("xy", "a:2")]
    with pytest.raises(UserError, match="a:1: 8 tokens, max_length 4: raise it, or set too_long"):
        cut(rows, byte_text(tokenizer), 4, "error")
    expected: dict[str, list[str]] = {
        "drop": ["xy<|im_end|>"],
        "truncate_left": ["efg<|im_end|>", "xy<|im_end|>"],
        "truncate_right": ["abcd", "xy<|im_end|>"],
        "split": ["abcd", "defg", "g<|im_end|>", "xy<|im_end|>"],
    }
    for too_long, texts in expected.items():
        result = cut(rows, byte_text(tokenizer), 4, too_long)
        sequences = [example.sequences[0] for example in result.examples]
        assert [tokenizer.decode(s.tokens) for s in sequences] == texts
        assert all(tuple(s.loss_mask) == (False,) + (True,) * (len(s) - 1) for s in sequences)
        assert [change.source for change in result.changed] == ["a:1"]
        assert result.changed[0].reason.startswith(f"{too_long}: 8 tokens, max_length 4")


@given(st.integers(1, 40), st.integers(2, 12))
def test_a_split_keeps_every_target_once(byte_tokenizer: Any, size: int, max_length: int) -> None:
    tokenizer = byte_tokenizer()
    row = Text("".join(chr(97 + i % 26) for i in range(size)), "a:1")
    whole = text(tokenizer, row)
    pieces = [example.sequences[0] for example in cut([row], byte_text(tokenizer), max_length, "split").examples]
    assert max(len(piece.tokens) for piece in pieces) <= max_length
    targets = [t for piece in pieces for t, trained in zip(piece.tokens, piece.loss_mask, strict=True) if trained]
    assert targets == list(whole.tokens[1:])


def test_a_cut_that_leaves_nothing_to_learn_is_an_error(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    long = Conversation((user("a" * 50), says("b")), None, "chat.jsonl:17")
    with pytest.raises(UserError, match=r"chat.jsonl:17: .*truncate_right leaves nothing to learn"):
        cut([long], lambda row: alone(conversation.draft(Renderer(tokenizer), row)), 20, "truncate_right")
    split = cut([long], lambda row: alone(conversation.draft(Renderer(tokenizer), row)), 40, "split")
    (kept,) = (example.sequences[0] for example in split.examples)
    targets = [t for t, trained in zip(kept.tokens, kept.loss_mask, strict=True) if trained]
    assert tokenizer.decode(targets) == "b<|im_end|>"
    assert split.changed[0].reason == "split: 72 tokens, max_length 40 into 2, 1 of them with nothing to learn"


def prompts(tokenizer: Any, row: Prompt) -> Draft[Example]:
    ids = yield from prompt.draft(Renderer(tokenizer), row)
    return Example((Sequence(ids, (False,) * len(ids), row.source),))


def test_prompts_lose_their_oldest_turns_and_never_the_system_message(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "question_answer")
    system: Message = {"role": "system", "content": "S"}
    messages: Messages = (system, user("first"), says("a"), user("second"), says("b"), user("third"))
    result = cut([Prompt(messages, {}, "p:1")], lambda row: prompts(tokenizer, row), 77, "truncate_left")
    assert tokenizer.decode(result.examples[0].sequences[0].tokens) == (
        "System: S\n\nQuestion: second\n\nAnswer: b<|im_end|>\n\nQuestion: third\n\nAnswer:"
    )
    assert result.changed == [("p:1", "truncate_left: 94 tokens, max_length 77: 2 of 5 turns of the prompt left out")]
    result = cut([Prompt(messages, {}, "p:1")], lambda row: prompts(tokenizer, row), 33, "truncate_left")
    assert tokenizer.decode(result.examples[0].sequences[0].tokens) == "System: S\n\nQuestion: ird\n\nAnswer:"
    assert "4 of 5 turns and 2 of 5 characters of the last turn left out" in result.changed[0].reason


def test_comparisons_cut_the_prompt_and_never_the_answer(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "text")
    pair = Preference((user("0123456789"),), (says(" yes"),), (says(" no way"),), None, None, "p:1")
    result = cut([pair], lambda row: comparison.draft(Renderer(tokenizer), row), 12, "truncate_left")
    assert [tokenizer.decode(s.tokens) for s in result.examples[0].sequences] == [
        "6789 yes<|im_end|>",
        "6789 no way<|im_end|>",
    ]
    scored = answer(tokenizer, pair.prompt, " no way", Truncation(max_length=12, too_long="truncate_left"))
    assert tokenizer.decode(scored.tokens) == "6789 no way<|im_end|>"
    for too_long, said in [("truncate_right", "only the prompt is cut"), ("error", "18 tokens, max_length 12")]:
        with pytest.raises(UserError, match=f"p:1: .*{said}"):
            cut([pair], lambda row: comparison.draft(Renderer(tokenizer), row), 12, too_long)
    with pytest.raises(UserError, match="does not fit even without its prompt"):
        cut([pair], lambda row: comparison.draft(Renderer(tokenizer), row), 8, "truncate_left")


# --- cache --------------------------------------------------------------------------------------------------------


def test_rows_are_encoded_once(byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    calls = []

    def function(row: Preference) -> Draft[Example]:
        calls.append(row.source)
        return comparison.draft(Renderer(tokenizer), row)

    length = Truncation(max_length=60, too_long="truncate_left")
    long = Preference((user("x" * 40),), PAIR.chosen, PAIR.rejected, None, None, "pairs.jsonl:4")
    key = chat.cache_key(tokenizer, "reward")
    first = encode([PAIR, long], function, length, key)
    done = len(calls)
    assert encode([PAIR, long], function, length, key) == first
    assert len(calls) == done and len(first.changed) == 1
    assert not list((tmp_path / "cache").glob("*.part"))
    assert not encode([PAIR, long], function, Truncation(), key).changed  # of another length
    encode([PAIR], function, length, key)
    set_template(tokenizer, "text")
    assert chat.cache_key(tokenizer, "reward") != key
    encode([PAIR, long], function, length, chat.cache_key(tokenizer, "reward"))
    assert len(calls) > done + 4


def flip(data: bytes) -> bytes:
    """With one bit of the last array's changed, which is still a file that can be read."""
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-1], flip]
)
def test_a_damaged_file_is_made_again(
    damage: Any, byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))

    def function(row: Preference) -> Draft[Example]:
        return comparison.draft(Renderer(tokenizer), row)

    tokenizer = byte_tokenizer()
    first = encode([PAIR], function, Truncation(), "key")
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged and will be rebuilt"):
        assert encode([PAIR], function, Truncation(), "key") == first
    assert encode([PAIR], function, Truncation(), "key") == first  # without a warning


def test_rows_that_are_cut_are_told(byte_tokenizer, caplog) -> None:
    tokenizer = byte_tokenizer()
    caplog.set_level("WARNING", logger="burnish")
    rows: list[Any] = [Text("abcdefgh", "a.jsonl:1"), Text("ab", "a.jsonl:2")]
    length = Truncation(max_length=6, too_long="drop")
    encoded = encode(rows, byte_text(tokenizer), length)
    assert [example.source for example in encoded.examples] == ["a.jsonl:2"]
    assert "1 rows were cut or dropped, the first: a.jsonl:1: drop" in caplog.text
