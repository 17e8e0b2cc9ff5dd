"""Rows that are too long: what is kept, what is learned of it, and what is said; and the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.errors import UserError
from burnish.render.encode import account, cache_key, encode
from burnish.render.masks import Learn
from burnish.render.renderer import Renderer
from burnish.render.templates import PLAIN_TEMPLATES, set_template
from burnish.render.truncate import ToExamples, Truncation
from burnish.types import Conversation, Example, Message, Messages, Preference, Prompt, Row, Sequence, Text


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


PAIR = Preference((user("Hi"),), (says("Yo"),), (says("No."),), 0.5, 0.75, "pairs.jsonl:3")


def to_texts(tokenizer: Any) -> ToExamples:
    return lambda rows: [Example((sequence,)) for sequence in Renderer(tokenizer).texts(rows)]


def conversations(tokenizer: Any) -> ToExamples:
    return lambda rows: [Example((sequence,)) for sequence in Renderer(tokenizer).conversations(rows)]


def cut(rows: list[Any], function: Any, max_length: int, too_long: Any) -> Any:
    return encode(rows, function, Truncation(max_length=max_length, too_long=too_long))


def test_long_texts(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    rows = [Text("abcdefg", "a:1"), Text("xy", "a:2")]
    with pytest.raises(
        UserError, match=r"a:1: 8 tokens, max_length 4: set too_long: .* or split, or raise max_length$"
    ):
        cut(rows, to_texts(tokenizer), 4, "error")
    expected: dict[str, list[str]] = {
        "drop": ["xy<|im_end|>"],
        "truncate_left": ["efg<|im_end|>", "xy<|im_end|>"],
        "truncate_right": ["abcd", "xy<|im_end|>"],
        "split": ["abcd", "defg", "g<|im_end|>", "xy<|im_end|>"],
    }
    for too_long, texts in expected.items():
        result = cut(rows, to_texts(tokenizer), 4, too_long)
        sequences = [example.sequences[0] for example in result.examples]
        assert [tokenizer.decode(s.tokens) for s in sequences] == texts
        assert all(tuple(s.loss_mask) == (False,) + (True,) * (len(s) - 1) for s in sequences)
        assert [change.source for change in result.changed] == ["a:1"]
        assert result.changed[0].reason.startswith(f"{too_long}: 8 tokens, max_length 4")


@given(st.integers(1, 40), st.integers(2, 12))
def test_a_split_keeps_every_target_once(byte_tokenizer: Any, size: int, max_length: int) -> None:
    tokenizer = byte_tokenizer()
    row = Text("".join(chr(97 + i % 26) for i in range(size)), "a:1")
    whole = Renderer(tokenizer).text(row)
    pieces = [example.sequences[0] for example in cut([row], to_texts(tokenizer), max_length, "split").examples]
    assert max(len(piece.tokens) for piece in pieces) <= max_length
    targets = [t for piece in pieces for t, trained in zip(piece.tokens, piece.loss_mask, strict=True) if trained]
    assert targets == list(whole.tokens[1:])


def test_a_cut_that_leaves_nothing_to_learn_is_an_error(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    long = Conversation((user("a" * 50), says("b")), None, "chat.jsonl:17")
    with pytest.raises(UserError, match=r"chat.jsonl:17: .*truncate_right leaves nothing to learn"):
        cut([long], conversations(tokenizer), 20, "truncate_right")
    split = cut([long], conversations(tokenizer), 40, "split")
    (kept,) = (example.sequences[0] for example in split.examples)
    targets = [t for t, trained in zip(kept.tokens, kept.loss_mask, strict=True) if trained]
    assert tokenizer.decode(targets) == "b<|im_end|>"
    assert (
        split.changed[0].reason == "split: 72 tokens, max_length 40, now 2 sequences, 1 of them with nothing to learn"
    )


def prompts(tokenizer: Any) -> ToExamples:
    return lambda rows: [
        Example((Sequence(ids, (False,) * len(ids), row.source),))
        for row, ids in zip(rows, Renderer(tokenizer).prompts(rows), strict=True)
    ]


def test_prompts_lose_their_oldest_turns_and_never_the_system_message(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "question_answer")
    system: Message = {"role": "system", "content": "S"}
    messages: Messages = (system, user("first"), says("a"), user("second"), says("b"), user("third"))
    result = cut([Prompt(messages, {}, "p:1")], prompts(tokenizer), 77, "truncate_left")
    assert tokenizer.decode(result.examples[0].sequences[0].tokens) == (
        "System: S\n\nQuestion: second\n\nAnswer: b<|im_end|>\n\nQuestion: third\n\nAnswer:"
    )
    assert result.changed == [("p:1", "truncate_left: 94 tokens, max_length 77: 2 of 5 turns of the prompt left out")]
    result = cut([Prompt(messages, {}, "p:1")], prompts(tokenizer), 33, "truncate_left")
    assert tokenizer.decode(result.examples[0].sequences[0].tokens) == "System: S\n\nQuestion: ird\n\nAnswer:"
    assert "4 of 5 turns and 2 of 5 characters of the last turn left out" in result.changed[0].reason


def test_prompts_keep_their_rows_with_the_columns_of_now(
    byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "text")
    limit = Truncation(max_length=4, too_long="drop")
    for answer in ("1", "2"):  # the second time from the cache
        rows = [Prompt((user(text),), {"answer": answer}, f"p:{i}") for i, text in enumerate(["a", "too long", "b"])]
        encoded = encode([*rows, rows[0]], prompts(tokenizer), limit, cache_key(tokenizer))
        assert [example.row for example in encoded.examples] == [rows[0], rows[2], rows[0]]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    shorter = cut([rows[1]], prompts(tokenizer), 4, "truncate_left").examples[0]
    assert len(shorter.sequences[0]) <= 4 and shorter.row == rows[1]


def test_prompts_that_share_a_source_keep_their_own_rows(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "text")
    rows: list[Row] = [Prompt((user(text),), {"answer": text}, "mine") for text in ("too long", "a")]
    encoded = encode(rows, prompts(tokenizer), Truncation(max_length=4, too_long="drop"))
    assert [example.row for example in encoded.examples] == [rows[1]]


def test_comparisons_cut_the_prompt_and_never_the_answer(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "text")
    pair = Preference((user("0123456789"),), (says(" yes"),), (says(" no way"),), None, None, "p:1")
    result = cut([pair], Renderer(tokenizer).comparisons, 12, "truncate_left")
    assert [tokenizer.decode(s.tokens) for s in result.examples[0].sequences] == [
        "6789 yes<|im_end|>",
        "6789 no way<|im_end|>",
    ]
    row = Conversation((*pair.prompt, says(" no way")), 1, "p:1")
    scored = Renderer(tokenizer).answer(row, Truncation(max_length=12, too_long="truncate_left"))
    assert tokenizer.decode(scored.tokens) == "6789 no way<|im_end|>"
    for too_long, said in [
        ("truncate_right", "only the prompt may be truncated"),
        ("error", "18 tokens, max_length 12"),
    ]:
        with pytest.raises(UserError, match=f"p:1: .*{said}"):
            cut([pair], Renderer(tokenizer).comparisons, 12, too_long)
    with pytest.raises(UserError, match="does not fit even without its prompt"):
        cut([pair], Renderer(tokenizer).comparisons, 8, "truncate_left")


def test_ways_are_tried_in_order(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "text")
    renderer = Renderer(tokenizer)
    row = Preference((user("0123456789"),), (says(" yes"),), (says(" no way"),), None, None, "p:1")
    long = replace(row, chosen=(says(" a much longer answer"),), source="p:2")
    with pytest.raises(UserError, match=r"p:2: .*without its prompt: .* with too_long: \[truncate_left, drop\]"):
        cut([row, long], renderer.comparisons, 12, "truncate_left")
    result = cut([row, long], renderer.comparisons, 12, ["truncate_left", "drop"])
    assert [example.source for example in result.examples] == ["p:1"]
    used = account([row, long], result.changed)
    assert used.rows == 1 and not used.skipped
    assert used.dropped[0].startswith("p:2: ") and used.shortened[0].startswith("p:1: truncate_left: ")
    with pytest.raises(UserError, match=r"p:1: .*only the prompt may be truncated"):  # a mistake in the recipe
        cut([row, long], renderer.comparisons, 12, ["split", "drop"])
    for wrong in ([], ["drop", "error"], ["truncate_left", "truncate_left"], ["error", "drop"]):
        with pytest.raises(pydantic.ValidationError, match="too_long"):
            Truncation.model_validate({"too_long": wrong})


def test_a_missing_template_is_one_error_and_no_row_is_skipped(byte_tokenizer: Any) -> None:
    rows: list[Row] = [Conversation((user("Hi"), says("Yo")), None, f"c:{i}") for i in range(3)]
    with pytest.raises(UserError, match="no chat template: set template: question_answer or text") as caught:
        encode(rows, conversations(byte_tokenizer(None)), Truncation(on_bad_row="skip"))
    assert "rows" not in str(caught.value)


# --- many rows ----------------------------------------------------------------------------------------------------

MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWER = "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
ENDED_OUTSIDE = "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def turns(*said: str, source: str = "chat.jsonl:1") -> Conversation:
    return Conversation(tuple(says(c) if i % 2 else user(c) for i, c in enumerate(said)), None, source)


@pytest.mark.parametrize("template", [MARKED, UNMARKED, PLAIN_TEMPLATES["question_answer"]])
@pytest.mark.parametrize("chunk", [1, 2, 3, 512])
def test_many_rows_are_what_each_is_alone(
    chunk: int, byte_tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.render.encode.CHUNK", chunk)
    tokenizer = byte_tokenizer(template)
    said = [
        ("Hi", "Yo"),
        ("Hi", "Yo", "And?", "No. 🙂"),
        ("a<|im_end|>b", " x<|im_start|>"),
        ("Hi", "Yo"),
        ("é\n", " "),
    ]
    rows = [turns(*row, source=f"chat.jsonl:{line}") for line, row in enumerate(said * 2, 1)]
    learns: tuple[Learn, ...] = ("all", "last", "everything")
    for learn in learns:
        alone = [Example((Renderer(tokenizer).conversation(row, learn),)) for row in rows]

        def to_examples(rows: list[Any], learn: Learn = learn) -> list[Example]:
            return [Example((sequence,)) for sequence in Renderer(tokenizer).conversations(rows, learn)]

        assert encode(list(rows), to_examples, Truncation()).examples == alone


@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_the_first_bad_row_is_reported_first(chunk: int, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are rendered before masks are made, so a later row fails earlier."""
    monkeypatch.setattr("burnish.render.encode.CHUNK", chunk)
    refuses = "{{ raise_exception('late') if messages[0]['content'] == 'late' else '' }}"
    tokenizer = byte_tokenizer(MARKED.replace("{{ bos_token }}", refuses))
    rows = [turns("Hi", "Yo", source="a:1"), turns("Hi", source="a:2"), turns("late", "Yo", source="a:3")]
    with pytest.raises(UserError, match="a:2: no assistant turn"):
        encode(list(rows), conversations(tokenizer), Truncation())
    rows = [rows[0], Conversation((user("Hi"), says("")), None, "a:2"), rows[2]]
    tokenizer = byte_tokenizer(MARKED.replace("{{ bos_token }}", refuses).replace(ANSWER, ENDED_OUTSIDE))
    with pytest.raises(UserError, match="a:2: message 1: the chat template marks nothing"):
        encode(list(rows), conversations(tokenizer), Truncation())
    skipped = encode(list(rows), conversations(tokenizer), Truncation(on_bad_row="skip"))
    assert [change.source for change in skipped.changed] == ["a:2", "a:3"] and len(skipped.examples) == 1


def first_piece_tokenizer() -> Any:
    """A tokenizer that puts a space before a text, but not before what follows a special token."""
    words = ["<unk>", "<|im_start|>", "<|im_end|>", "▁", *"▁user", *"assistant", "▁ab", "ab", "a", "b", "\n"]
    vocabulary = {word: id for id, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("▁", "ab")], unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


contents = st.text(st.sampled_from(" \nab") | st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    ["x<|im_end|>y", "<|im_start|>", " "]
)


@given(contents, contents)
def test_a_text_cut_at_its_special_tokens_is_tokenized_as_one(byte_tokenizer: Any, question: str, answer: str) -> None:
    made: list[Any] = [byte_tokenizer(UNMARKED, (("a", "b"), ("Ċ", "a"))), first_piece_tokenizer()]
    made[1].chat_template = UNMARKED.replace("{{ bos_token }}", "ab ")
    row = turns(question.replace("<", "("), answer.replace("<", "("))
    for tokenizer in made:
        text = tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True)
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert Renderer(tokenizer).prompt(row.messages) == tuple(whole)


# --- cache --------------------------------------------------------------------------------------------------------


def test_rows_are_encoded_once(byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    calls = []

    def function(rows: list[Any]) -> list[Example]:
        calls.extend(row.source for row in rows)
        return Renderer(tokenizer).comparisons(rows)

    length = Truncation(max_length=60, too_long="truncate_left")
    long = Preference((user("x" * 40),), PAIR.chosen, PAIR.rejected, None, None, "pairs.jsonl:4")
    key = cache_key(tokenizer, "reward")
    first = encode([PAIR, long], function, length, key)
    done = len(calls)
    assert encode([PAIR, long], function, length, key) == first
    assert len(calls) == done and len(first.changed) == 1
    assert not list((tmp_path / "cache").glob("*.part"))
    assert not encode([PAIR, long], function, Truncation(), key).changed  # of another length
    encode([PAIR], function, length, key)
    set_template(tokenizer, "text")
    assert cache_key(tokenizer, "reward") != key
    encode([PAIR, long], function, length, cache_key(tokenizer, "reward"))
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

    tokenizer = byte_tokenizer()
    function = Renderer(tokenizer).comparisons
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
    encoded = encode(rows, to_texts(tokenizer), length)
    assert [example.source for example in encoded.examples] == ["a.jsonl:2"]
    assert "rows truncated or dropped: 1, the first: a.jsonl:1: drop" in caplog.text
