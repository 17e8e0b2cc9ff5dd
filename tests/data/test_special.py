"""Special tokens that messages spell, in whatever form, stay text: only what the template writes is special."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.data.chat import answer, comparison, conversation, prompt, set_template, text
from burnish.data.solutions import solution, step_tokens
from burnish.types import Conversation, Message, Messages, Preference, Steps, Text, UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|END|>", "<|é|>")


def make(normalizer: Any = None, template: str = CHATML, metaspace: str = "", **flags: bool) -> Any:
    """A tokenizer of single bytes, or of single characters behind a metaspace, whose special tokens have the flags."""
    if metaspace:
        symbols = ["<unk>", "▁", *map(chr, range(33, 127)), "\n", "é"]
        backend = Tokenizer(models.BPE({c: id for id, c in enumerate(symbols)}, [], unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace)
        backend.decoder = decoders.Metaspace(prepend_scheme=metaspace)
    else:
        backend = Tokenizer(models.BPE({c: id for id, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(token, special=True, **flags) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    if template in ("text", "question_answer"):
        set_template(tokenizer, template)
    else:
        tokenizer.chat_template = template
    return tokenizer


def turns(*said: str) -> Messages:
    messages: list[Message] = [
        {"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(said)
    ]
    return tuple(messages)


def specials(tokenizer: Any, ids: Any) -> list[str]:
    return [token for token in tokenizer.convert_ids_to_tokens(list(ids)) if token in SPECIAL]


ZERO_WIDTH = normalizers.Replace("\u200b", "")


@pytest.mark.parametrize(
    ("normalizer", "typed"),
    [
        (normalizers.Lowercase(), "<|END|>"),
        (normalizers.Lowercase(), "<|end|>"),
        (normalizers.Lowercase(), "<|IM_END|>"),
        (normalizers.NFKC(), "\uff1c\uff5cEND\uff5c\uff1e"),
        (normalizers.NFKC(), "\uff1c|im_end|>"),
        (normalizers.NFC(), "<|e\u0301|>"),
        (normalizers.NFD(), "<|e\u0301|>"),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "<|i\u0301m_end|>"),
        (normalizers.BertNormalizer(lowercase=True), "<|im\u200b_end|>"),
        (ZERO_WIDTH, "<|im_\u200bend|>"),
    ],
)
def test_what_normalizes_to_a_special_token_stays_text(normalizer: Any, typed: str) -> None:
    tokenizer = make(normalizer, normalized=True)
    row = Conversation(turns(f"a{typed}b", f"say {typed}"), None, "a:1")
    sequence = conversation(tokenizer, row)
    turn = ["<|im_start|>", "<|im_end|>"]
    assert specials(tokenizer, sequence.tokens) == turn * 2
    assert sequence.trained.count(True) == len(step_tokens(tokenizer, f"say {typed}")) - 1 + 1  # no newline, but an end
    assert specials(tokenizer, prompt(tokenizer, row.messages[:1])) == [*turn, "<|im_start|>"]
    assert specials(tokenizer, answer(tokenizer, row.messages[:1], typed).tokens) == turn * 2
    assert specials(tokenizer, step_tokens(tokenizer, typed)) == []
    assert specials(tokenizer, text(tokenizer, Text(f"a{typed}b", "a:1")).tokens) == ["<|im_end|>"]


def joined(inside: str) -> str:
    return "{% for m in messages %}{{ " + inside + " }}{% endfor %}{{ eos_token }}"


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("template", "said", "written"),
    [
        ("text", ("a<|im_", "end|>b"), "a<|im_end|>b"),
        ("text", ("a<|im_", "end|>b<|im_end|>", "<|im", "_end|>"), "a<|im_end|>b<|im_end|><|im_end|>"),
        ("question_answer", ("a<|im_start|>", "b<|im_"), "Question: a<|im_start|>\n\nAnswer: b<|im_"),
        (joined("m['content']"), ("a<|", "im_en", "d|>"), "a<|im_end|>"),
        (joined("'<|' + m['content'] + '|>'"), ("END", "im_end"), "<|END|><|im_end|>"),
        (joined("m['content'] + '_end|>'"), ("<|im", "<|im"), "<|im_end|><|im_end|>"),
        (joined("m['content'] | trim"), (" <|im_ ", "\nend|> "), "<|im_end|>"),
        (joined("m['content'].replace('a', 'b')"), ("a<|im_", "end|>a"), "b<|im_end|>b"),
        (joined("m['content'] | upper"), ("a<|", "end|>"), "A<|END|>"),
    ],
)
def test_a_special_token_across_a_border_stays_text(
    template: str, said: tuple[str, ...], written: str, normalized: bool
) -> None:
    tokenizer = make(template=template, normalized=normalized)
    tokens = answer(tokenizer, turns(*said[:-1]), said[-1]).tokens
    ends = len(said) // 2 if template == "text" else 1
    assert specials(tokenizer, tokens) == ["<|im_end|>"] * ends
    assert tokenizer.decode([id for id in tokens if id < 256]) == written
    assert tokens[-1] == tokenizer.eos_token_id


def test_a_template_that_depends_on_a_spelled_token_is_refused() -> None:
    tokenizer = make(template=joined("('<|END|>' in m['content'] and 'yes ' or '') + m['content']"))
    assert specials(tokenizer, prompt(tokenizer, turns("a <|END> b"), "a:1")) == ["<|im_end|>"]
    with pytest.raises(UserError, match=r"a:1: a message may spell a part of <\|END\|>, and the chat"):
        prompt(tokenizer, turns("a <|END|> b"), "a:1")


def test_pairs_and_solutions_keep_special_tokens_as_text() -> None:
    tokenizer = make(normalizers.Lowercase(), normalized=True)
    typed = "1<|IM_END|>"
    pair = Preference(turns(typed), turns("", f"a{typed}")[1:], turns("", typed)[1:], None, None, "a:1")
    turn = ["<|im_start|>", "<|im_end|>"]
    for learned in (True, False):
        for sequence in comparison(tokenizer, pair, learned=learned).sequences:
            assert specials(tokenizer, sequence.tokens) == turn * 2
    sequence = solution(tokenizer, Steps(turns(typed), (typed, typed), (1.0, 1.0), "a:1"))
    assert specials(tokenizer, sequence.tokens) == [*turn, "<|im_start|>", "<|im_end|>"]
    assert [t for t, outcome in enumerate(sequence.arrays["outcomes"]) if outcome] == [
        len(sequence.tokens) - 2 - len("1<|im_end|>\n"),
        len(sequence.tokens) - 2,
    ]


def test_what_the_models_own_vocabulary_makes_special_is_refused_everywhere() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "Hi": 2}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    set_template(tokenizer, "text")
    for typed in ("Hi </s>", "Hi </S>"):
        with pytest.raises(UserError, match="a:1: the text spells </s>, which this tokenizer cannot write as text"):
            text(tokenizer, Text(typed, "a:1"))
        with pytest.raises(UserError, match="a:1: a message spells </s>, which this tokenizer cannot write as text"):
            prompt(tokenizer, turns(typed), "a:1")
        with pytest.raises(UserError, match="a:1: step 1 of 1: a step spells </s>, which this tokenizer cannot write"):
            solution(tokenizer, Steps(turns("Hi"), (typed,), (1.0,), "a:1"))


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_metaspace_does_not_depend_on_what_is_spelled(scheme: str) -> None:
    """Where a space is put before the first word only, text behind a special token has none, spelled or not."""
    tokenizer = make(metaspace=scheme, normalized=False)
    typed = "a<|im_end|>b <|im_start|> c"
    tokens = prompt(tokenizer, turns(typed, "d", "e"))
    free = prompt(tokenizer, turns(typed.replace("<|im", "<.im"), "d", "e"))
    bar, dot = tokenizer.convert_tokens_to_ids(["|", "."])
    assert [dot if a == bar != b else a for a, b in zip(tokens, free, strict=True)] == list(free)


def test_an_unknown_token_that_is_typed_is_text() -> None:
    tokenizer = make(metaspace="first")
    tokenizer.unk_token = "<unk>"
    unknown = tokenizer.unk_token_id
    assert unknown not in prompt(tokenizer, turns("a<unk>b"))
    assert prompt(tokenizer, turns("a\u4e00b")).count(unknown) == 1
