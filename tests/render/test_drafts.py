"""Work on many rows at once gives what each row gives alone, in the rows' order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from burnish.errors import UserError
from burnish.render import chat, drafts
from burnish.render.chat import Renderer, conversation, prompt
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Message

MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
contents = st.text(st.sampled_from(" \nab") | st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    ["x<|im_end|>y", "<|im_start|>", " "]
)


def turns(*said: str, source: str = "chat.jsonl:1") -> Conversation:
    messages: list[Message] = [
        {"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(said)
    ]
    return Conversation(tuple(messages), None, source)


@pytest.fixture(scope="module", params=[1, 2, 3, 512])
def at_once(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "AT_ONCE", request.param)
        yield request.param


@pytest.mark.parametrize("template", [MARKED, UNMARKED, chat.PLAIN_TEMPLATES["question_answer"]])
def test_many_rows_are_what_each_is_alone(at_once: int, byte_tokenizer: Callable[..., Any], template: str) -> None:
    tokenizer = byte_tokenizer(template)
    said = [
        ("Hi", "Yo"),
        ("Hi", "Yo", "And?", "No. 🙂"),
        ("a<|im_end|>b", " x<|im_start|>"),
        ("Hi", "Yo"),
        ("é\n", " "),
    ]
    rows = [turns(*row, source=f"chat.jsonl:{line}") for line, row in enumerate(said * 2, 1)]
    for learn in ("all", "last", "everything"):
        together = drafts.results(conversation.draft(Renderer(tokenizer), row, learn) for row in rows)
        assert together == [conversation(tokenizer, row, learn) for row in rows]


def test_the_first_bad_row_is_told_first(at_once: int, byte_tokenizer: Callable[..., Any]) -> None:
    writer = Renderer(
        byte_tokenizer(
            MARKED.replace(
                "{{ bos_token }}",
                "{{ raise_exception('late') if loop is undefined and messages[0]['content'] == 'late' else '' }}",
            )
        )
    )
    rows = [turns("Hi", "Yo", source="a:1"), turns("Hi", source="a:2"), turns("late", "Yo", source="a:3")]
    made = list(drafts.outcomes(conversation.draft(writer, row) for row in rows))
    assert [str(outcome).split(":")[1] for outcome in made[1:]] == ["2", "3"]
    assert made[0] == conversation(writer.tokenizer, rows[0])

    def encode(row: Any) -> chat.Draft[Example]:
        return Example(((yield from conversation.draft(writer, row)),))

    with pytest.raises(UserError, match="a:2: no assistant turn"):
        chat.encode(list(rows), encode, Truncation())
    skipped = chat.encode(list(rows), encode, Truncation(on_bad_row="skip"))
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


@given(contents, contents)
def test_a_text_cut_at_its_special_tokens_is_tokenized_as_one(
    byte_tokenizer: Callable[..., Any], question: str, answer: str
) -> None:
    made: list[Any] = [byte_tokenizer(UNMARKED, (("a", "b"), ("Ċ", "a"))), first_piece_tokenizer()]
    made[1].chat_template = UNMARKED.replace("{{ bos_token }}", "ab ")
    row = turns(question.replace("<", "("), answer.replace("<", "("))
    for tokenizer in made:
        ((text,), _) = render_jinja_template(
            conversations=[list(row.messages)],  # pyright: ignore[reportArgumentType]
            chat_template=tokenizer.chat_template,
            add_generation_prompt=True,
            **tokenizer.special_tokens_map,
        )
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert prompt(tokenizer, row.messages) == tuple(whole)


def test_what_rows_have_in_common_is_made_once(
    monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Callable[..., Any]
) -> None:
    asked: list[str] = []
    make = drafts.make

    def counted(wanted: Any) -> Any:
        asked.extend(text for texts in wanted.values() for text in texts)
        return make(wanted)

    monkeypatch.setattr(drafts, "make", counted)
    monkeypatch.setattr(drafts, "AT_ONCE", 20)
    writer = Renderer(byte_tokenizer(UNMARKED))
    drafts.results(conversation.draft(writer, turns(f"Is {n} odd?", f"{n % 2}")) for n in range(200))
    opening = "<|im_start|>assistant\n"
    assert asked.count(opening) <= drafts.CHUNKS  # by the chunks that began before the first had an answer
    assert sum(text.startswith("<|im_start|>user") for text in asked) == 200
