"""Special tokens that messages spell, in whatever form, stay text: only what the template writes is special."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from builders import word_tokenizer
from burnish.errors import UserError
from burnish.render.renderer import Renderer
from burnish.render.solutions import solution, step_tokens
from burnish.render.templates import set_template
from burnish.types import Conversation, Message, Messages, Preference, Sequence, Steps, Text

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FRAGMENTS = (
    *(
        "<|im_end|>",
        "<|IM_START|>",
        "<|END|>",
        "<|end|>",
        "<|é|>",
        "<|e\u0301|>",
        "<|im_",
        "<|",
        "|>",
        "end",
        "END|>",
        ">",
    ),
    *(
        "\uff1c",
        "\uff5c",
        "\uff1e",
        "\uff25\uff2e\uff24",
        "\u200b",
        "\u0301",
        "\u0338",
        " ",
        "\n",
        "hi",
        "é",
        "[INST]",
        "user",
    ),
    *("\u4e00", "\ufb01", "▁", "im", "start|>", "<|im_start|>user\n", "\U000f0000", "."),
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|END|>", "<|é|>")


def make(normalizer: Any = None, template: str = CHATML, metaspace: str = "", **flags: bool) -> Any:
    """A tokenizer of single bytes, or of single characters behind a metaspace, whose special tokens have the flags."""
    if metaspace:
        ascii, accents = [*map(chr, range(33, 127))], ("", "\u0301", "\u0338")
        typed = "".join([*FRAGMENTS, *(c + accent for c in ascii for accent in accents)])
        forms = [unicodedata.normalize(form, typed) for form in ("NFC", "NFD", "NFKC")]
        symbols = ["<unk>", "▁", *ascii, "\n", *sorted({*typed, *typed.lower(), *"".join(forms)})]
        symbols = list(dict.fromkeys(symbols))
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


def answer(tokenizer: Any, prompt: Messages, said: str, source: str = "answer") -> Sequence:
    """A prompt with one answer, of which nothing is learned."""
    row = Conversation((*prompt, Message(role="assistant", content=said)), len(prompt), source)
    return Renderer(tokenizer).answer(row)


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
    sequence = Renderer(tokenizer).conversation(row)
    turn = ["<|im_start|>", "<|im_end|>"]
    assert specials(tokenizer, sequence.tokens) == turn * 2
    assert (
        sequence.loss_mask.tolist().count(True) == len(step_tokens(Renderer(tokenizer), f"say {typed}")) - 1 + 1
    )  # no newline, but an end
    assert specials(tokenizer, Renderer(tokenizer).prompt(row.messages[:1])) == [*turn, "<|im_start|>"]
    assert specials(tokenizer, answer(tokenizer, row.messages[:1], typed).tokens) == turn * 2
    assert specials(tokenizer, step_tokens(Renderer(tokenizer), typed)) == []
    assert specials(tokenizer, Renderer(tokenizer).text(Text(f"a{typed}b", "a:1")).tokens) == ["<|im_end|>"]


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


def test_what_a_template_makes_of_a_content_is_not_special() -> None:
    tokenizer = make(template=joined("m['content'].replace('</think>', '').replace('!', '<|END|>')"))
    assert specials(tokenizer, Renderer(tokenizer).prompt(turns("a </think>|>! b"), "a:1")) == ["<|END|>", "<|im_end|>"]
    with pytest.raises(UserError, match=r"a:1: a message may spell a part of <\|im_end\|>, and the chat template"):
        Renderer(tokenizer).prompt(turns("a <|im_</think>end|> b"), "a:1")


def test_a_template_that_depends_on_a_spelled_token_is_refused() -> None:
    tokenizer = make(template=joined("('<|END|>' in m['content'] and 'yes ' or '') + m['content']"))
    assert specials(tokenizer, Renderer(tokenizer).prompt(turns("a <|END> b"), "a:1")) == ["<|im_end|>"]
    with pytest.raises(UserError, match=r"a:1: a message may spell a part of <\|END\|>, and the chat"):
        Renderer(tokenizer).prompt(turns("a <|END|> b"), "a:1")


def test_pairs_and_solutions_keep_special_tokens_as_text() -> None:
    tokenizer = make(normalizers.Lowercase(), normalized=True)
    typed = "1<|IM_END|>"
    pair = Preference(turns(typed), turns("", f"a{typed}")[1:], turns("", typed)[1:], None, None, "a:1")
    turn = ["<|im_start|>", "<|im_end|>"]
    for learned in (True, False):
        for sequence in Renderer(tokenizer).comparison(pair, learned=learned).sequences:
            assert specials(tokenizer, sequence.tokens) == turn * 2
    sequence = solution(Renderer(tokenizer), Steps(turns(typed), (typed, typed), (1.0, 1.0), "a:1"))
    assert specials(tokenizer, sequence.tokens) == [*turn, "<|im_start|>", "<|im_end|>"]
    assert [t for t, outcome in enumerate(sequence.arrays["outcomes"]) if outcome] == [
        len(sequence.tokens) - 2 - len("1<|im_end|>\n"),
        len(sequence.tokens) - 2,
    ]


def test_what_the_models_own_vocabulary_makes_special_is_refused_everywhere() -> None:
    lowercase = normalizers.Lowercase()
    tokenizer = word_tokenizer("<unk>", "</s>", "Hi", normalizer=lowercase, unk_token="<unk>", eos_token="</s>")
    set_template(tokenizer, "text")
    for typed in ("Hi </s>", "Hi </S>"):
        with pytest.raises(UserError, match="a:1: the text spells </s>, which this tokenizer cannot write as text"):
            Renderer(tokenizer).text(Text(typed, "a:1"))
        with pytest.raises(UserError, match="a:1: a message spells </s>, which this tokenizer cannot write as text"):
            Renderer(tokenizer).prompt(turns(typed), "a:1")
        with pytest.raises(UserError, match="a:1: step 1 of 1: a step spells </s>, which this tokenizer cannot write"):
            solution(Renderer(tokenizer), Steps(turns("Hi"), (typed,), (1.0,), "a:1"))


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_metaspace_does_not_depend_on_what_is_spelled(scheme: str) -> None:
    """Where a space is put before the first word only, text behind a special token has none, spelled or not."""
    tokenizer = make(metaspace=scheme, normalized=False)
    typed = "a<|im_end|>b <|im_start|> c"
    tokens = Renderer(tokenizer).prompt(turns(typed, "d", "e"))
    free = Renderer(tokenizer).prompt(turns(typed.replace("<|im", "<.im"), "d", "e"))
    bar, dot = tokenizer.convert_tokens_to_ids(["|", "."])
    assert [dot if a == bar != b else a for a, b in zip(tokens, free, strict=True)] == list(free)


def test_an_unknown_token_that_is_typed_is_text() -> None:
    tokenizer = make(metaspace="first")
    tokenizer.unk_token = "<unk>"
    unknown = tokenizer.unk_token_id
    assert unknown not in Renderer(tokenizer).prompt(turns("a<unk>b"))
    assert Renderer(tokenizer).prompt(turns("a\u4e01b")).count(unknown) == 1


# --- any normalizer, token, template and content -----------------------------------------------------------------

NORMALIZERS = {
    "none": None,
    "lowercase": normalizers.Lowercase(),
    "nfkc": normalizers.NFKC(),
    "nfc": normalizers.NFC(),
    "nfd": normalizers.NFD(),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    "bert": normalizers.BertNormalizer(lowercase=True),
    "zero width": ZERO_WIDTH,
    "sentencepiece": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{{ m['content'].split('end')[-1] if m['role'] == 'assistant' else m['content'] }}"
    "{{ eos_token }}{% endfor %}"
)
TEMPLATES = ("text", "question_answer", CHATML, MARKED, INSTRUCT, THINKS)
FLAGS = ("normalized", "lstrip", "rstrip", "single_word")


@functools.cache
def made(normalizer: str, template: str, metaspace: str, flags: tuple[bool, ...]) -> Any:
    return make(NORMALIZERS[normalizer], template, metaspace, **dict(zip(FLAGS, flags, strict=True)))


def harmless(content: str, keep_shape: bool) -> str:
    """Letters for all of it; else only for letters, where what stands beside a special token decides about it."""
    if not keep_shape:
        return "x" * len(content)
    words = ("L", "N", "M", "Pc")  # what a regular expression calls a word
    kept = (c if c.isspace() else "x" if unicodedata.category(c).startswith(words) else "." for c in content)
    return "".join(kept)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(NORMALIZERS)),
    st.sampled_from(TEMPLATES),
    st.sampled_from(["", "", "first", "always"]),
    st.tuples(st.booleans(), *[st.sampled_from([False, False, False, True])] * 3),
    st.lists(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=5).map("".join), min_size=1, max_size=4),
)
def test_only_the_template_makes_special_tokens(
    normalizer: str, template: str, metaspace: str, flags: tuple[bool, ...], said: list[str]
) -> None:
    tokenizer = made(normalizer, template, metaspace, flags)
    if flags[0] and flags[3]:  # a character that is removed has no shape that other text could keep
        said = [re.sub("[\u200b\u0301\u0338]", "", content) or "x" for content in said]
    messages = turns(*said)
    keep = flags[3] or normalizer == "sentencepiece"
    shown = [c.split("end")[-1] if template == THINKS and i % 2 else c for i, c in enumerate(said)]
    instead = turns(*(harmless(content, keep) for content in shown))
    closed = len(said) % 2 == 0
    rust = tokenizer.backend_tokenizer
    text, usual = (
        tokenizer.apply_chat_template(list(m), tokenize=False, add_generation_prompt=not closed)
        for m in (messages, instead)
    )
    rust.encode_special_tokens = False
    as_usual = rust.encode(text, add_special_tokens=False).ids
    expected = Counter(specials(tokenizer, rust.encode(usual, add_special_tokens=False).ids))
    try:
        whole = answer(tokenizer, messages[:-1], said[-1], source="a:1").tokens.tolist() if closed else []
        tokens = whole or Renderer(tokenizer).prompt(messages, "a:1")
    except UserError as error:
        assert template == THINKS and "a:1: a message may spell" in str(error)
        return
    found = Counter(specials(tokenizer, tokens))
    assert found <= expected if template == THINKS else found == expected
    if Counter(specials(tokenizer, as_usual)) == expected and not flags[0] and not flags[3]:
        assert list(tokens) == as_usual

    def canonical(written: str) -> str:
        """White space is no matter: tokens take it in, and sentencepiece puts it before words."""
        bare = re.sub(r"[\s▁]", "", written)
        return re.sub(r"[\s▁]", "", rust.normalizer.normalize_str(bare) if rust.normalizer else bare)

    assert canonical(tokenizer.decode(tokens)) == canonical(text)
