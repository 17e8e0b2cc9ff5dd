"""Special tokens that a message spells stay text: only what the chat template itself writes is special.

A message may contain a special token literally, in a form that the tokenizer normalizes to one, or split across two
messages. ``Renderer`` tokenizes every row as it is and compares its special tokens with those that the template writes
around harmless contents. The few rows that differ are tokenized again by ``LiteralEncoder``, which finds out which
characters come from a message and treats all of those as text.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import UserError
from burnish.render.templates import ChatTemplate, Rendered
from burnish.render.texts import fixed_texts, outline, texts_of, with_texts
from burnish.types import Messages

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

PRIVATE = range(0xF0000, 0xFFFFE)  # Unicode's first private plane, whose characters stand in for others


class Tokens(NamedTuple):
    """Token ids, and the characters that each was made from: ``Tokens([1, 9], [(0, 3), (3, 5)])``.

    ``offsets`` is empty if nothing asked for it. ``pieces`` has the end of each piece that was tokenized by itself, as
    a number of characters and a number of tokens: ``[(3, 1), (5, 2)]``.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    pieces: Sequence[tuple[int, int]] = ()


class Span(NamedTuple):
    """A special token and its characters in a text, without white space around them: ``Span(2, 17, 27)``."""

    id: int
    start: int
    end: int


class SpecialTokens:
    """The special tokens of a tokenizer: ``SpecialTokens(tokenizer, rust).names`` is ``{1: "<|im_start|>", ...}``.

    Attributes:
        names: every special token by its id.
        ids: the ids that stand for nothing but a special token, so not that of unknown words.
        unknown: the id of unknown words, or None.
        eos: the EOS token as a list, empty if there is none.
        added: the special tokens that were added to the vocabulary, with how they are matched.
        fragile: those that depend on the text beside them or on its normalization.
        spelled: matches every special token.
        letter, mark: a letter and a punctuation mark that no special token contains.
        spaced: whether a special token contains white space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rust: Tokenizer) -> None:
        self._tokenizer, self._rust = tokenizer, rust
        added: dict[int, AddedToken] = rust.get_added_tokens_decoder()
        self.added = {id: token for id, token in added.items() if token.special}
        self.names = {id: token.content for id, token in self.added.items()}
        self.names |= {token_id(self._rust, name): name for name in tokenizer.all_special_tokens}
        eos: Any = tokenizer.eos_token_id
        unknown: Any = tokenizer.unk_token_id
        self.unknown: int | None = None if unknown == eos else unknown
        self.ids = frozenset(self.names) - {self.unknown}
        self.eos: list[int] = [] if eos is None else [eos]
        normalizes = self._rust.normalizer is not None
        self.fragile = frozenset(id for id, t in self.added.items() if t.single_word or (t.normalized and normalizes))
        longest_first = sorted(self.names.values(), key=len, reverse=True)
        self.spelled = re.compile(_any_of(longest_first))
        # Text is tokenized independently on both sides of a special token, unless the token takes in white space,
        # depends on what stands beside it, or is searched for in normalized text.
        borders = {t.content for t in self.added.values() if not (t.normalized or t.lstrip or t.single_word)}
        self._border = re.compile(f"({_any_of([name for name in longest_first if name in borders])})")
        characters = "".join(self.names.values()).casefold()
        self.letter = next((c for c in "xqzjkwyvbghcfdmnopuastiler" if c not in characters), "x")
        self.mark = next((c for c in ".,;:!?-" if c not in characters), ".")
        self.spaced = any(map(str.isspace, characters))
        self._blank: dict[int, bool] = {}

    def split(self, text: str) -> list[str]:
        """A text, cut before special tokens into pieces that can be tokenized one by one."""
        parts = self._border.split(text)  # text, special token, text, ..., special token, text
        pieces = list(map(add, parts[1::2], parts[2::2]))
        return [parts[0], *pieces] if parts[0] else pieces

    def within(self, ids: list[int]) -> list[int]:
        """The special tokens among ids, in order."""
        return [id for id in ids if id in self.ids]

    def spans(self, tokens: Tokens, text: str) -> list[Span]:
        """Where the special tokens of a text are."""
        spans = []
        for id, (start, end) in zip(tokens.ids, tokens.offsets, strict=True):
            if id in self.ids:
                while start < end and text[start].isspace() and not text[start:end].isspace():
                    start += 1
                while start < end and text[end - 1].isspace() and not text[start:end].isspace():
                    end -= 1
                spans.append(Span(id, start, end))
        return spans

    def is_blank(self, id: int) -> bool:
        """Whether a token is white space."""
        if id not in self._blank:
            self._blank[id] = not self._rust.decode([id], skip_special_tokens=False).strip()
        return self._blank[id]

    def show(self, ids: list[int]) -> list[str]:
        """The tokens of ids as the vocabulary spells them, for messages."""
        return self._tokenizer.convert_ids_to_tokens(ids)  # pyright: ignore[reportReturnType]

    def check_absent(self, ids: list[int], what: str) -> None:
        """Check that text that was tokenized without special tokens has none.

        Raises:
            UserError: the model's own vocabulary, not the list of added tokens, makes one of it.
        """
        if not self.ids.isdisjoint(ids):
            raise self.cannot_write(self.ids.intersection(ids), what)

    def cannot_write(self, ids: set[int] | frozenset[int], what: str) -> UserError:
        """The error that says which special tokens cannot be kept as text."""
        names = ", ".join(self.names[id] for id in sorted(ids))
        return UserError(f"{what} spells {names}, which this tokenizer cannot write as text: take it out")


def token_id(rust: Tokenizer, token: str) -> int:
    """The id of a token that is known to exist."""
    id = rust.token_to_id(token)
    assert id is not None, token
    return id


def _any_of(names: list[str]) -> str:
    return "|".join(map(re.escape, names)) or "(?!)"  # which matches nothing


class LiteralEncoder:
    """Tokenizes rendered conversations whose messages spell special tokens, keeping those as text.

    It is exact for any normalizer, any flags of the special tokens, and byte-level as well as metaspace tokenizers, and
    takes several passes over a row.
    """

    def __init__(self, rust: Tokenizer, template: ChatTemplate, special: SpecialTokens) -> None:
        self._rust, self._template, self._special = rust, template, special
        self._guards: dict[tuple[tuple[str, int], ...], _Guard] = {}

    def encode(self, rendered: Rendered) -> Tokens:
        """Tokenize a rendered conversation.

        Raises:
            UserError: the tokenizer cannot write as text a special token that a message spells, or the template
                depends on it.
        """
        special, text = self._special, rendered.text
        harmless = self._with_harmless_contents(rendered)
        if harmless is None:
            harmless = self._with_harmless_spellings(rendered)
        plain, own = self._tokens(text), self._tokens(harmless)
        typed, spans = special.spans(plain, text), special.spans(own, harmless)
        if typed == spans and special.unknown not in plain.ids:
            return plain
        unused = (chr(code) for code in PRIVATE if chr(code) not in text)
        stand_ins = dict(zip(sorted({span.id for span in spans}), unused, strict=False))
        guard = self._guard(stand_ins)
        tokens = guard.encode(text, spans, stand_ins)
        kept = [span.id for span in special.spans(tokens, text)]
        if kept != [span.id for span in spans] or guard.encode(harmless, spans, stand_ins).ids != own.ids:
            forged = {span.id for span in {*typed, *special.spans(tokens, text)} - set(spans)}
            raise special.cannot_write(forged or {span.id for span in spans}, f"{rendered.source}: a message")
        return tokens

    def _tokens(self, text: str) -> Tokens:
        self._rust.encode_special_tokens = False
        return _as_tokens(self._rust.encode(text, add_special_tokens=False))

    def _guard(self, stand_ins: dict[int, str]) -> _Guard:
        key = tuple((character, id) for id, character in stand_ins.items())
        if key not in self._guards:
            self._guards[key] = _Guard(self._rust, self._special, key)
        return self._guards[key]

    # --- the same text with harmless contents ---------------------------------------------------------------------

    def _with_harmless_contents(self, rendered: Rendered, where: list[set[int]] | None = None) -> str | None:
        """The text with these characters of each content made harmless, or with all of them.

        None if the template writes something else around other contents.
        """
        contents = texts_of(rendered.messages)
        taken = {*rendered.text, *"".join(contents)}
        stand_in = next(chr(code) for code in PRIVATE if chr(code) not in taken)
        if where is None:
            others = [re.sub("(?s)." if self._special.spaced else r"\S", stand_in, content) for content in contents]
        else:
            others = [
                "".join(stand_in if i in chosen else character for i, character in enumerate(content))
                for content, chosen in zip(contents, where, strict=True)
            ]
        messages = with_texts(rendered.messages, others)
        try:
            hidden = self._render_like(rendered, messages)
        except UserError:  # the template accepted the original messages: it depends on what they say
            return None
        if len(hidden) != len(rendered.text):
            return None
        pairs = list(zip(hidden, rendered.text, strict=True))
        if any(a != b and a != stand_in for a, b in pairs):
            return None
        return "".join([self._harmless(b) if a == stand_in else b for a, b in pairs])

    def _harmless(self, character: str) -> str:
        """A character of the same kind that no special token has: the text beside a special token may decide on it."""
        if character.isspace() and not self._special.spaced:
            return character
        word = character.isalnum() or character in "_ " or unicodedata.category(character)[0] == "M"
        return self._special.letter if word else self._special.mark

    def _with_harmless_spellings(self, rendered: Rendered) -> str:
        """The text without what contents may add to a special token, for templates that depend on the contents.

        Whatever a content shares with a special token in the text is made harmless, until no special token is left
        that could contain a character of a content. A template may also form a special token by leaving out what
        stands between its parts: special tokens beyond the template's usual ones must not be found in the contents.

        Raises:
            UserError: the template depends on just these characters.
        """
        special = self._special
        contents = texts_of(rendered.messages)
        where: list[set[int]] = [set() for _ in contents]
        harmless = rendered.text
        while True:
            spans = special.spans(self._tokens(harmless), harmless)
            spelled = {rendered.text[start:end] for _, start, end in spans}
            more = [chosen | _shared(content, spelled) for chosen, content in zip(where, contents, strict=True)]
            if more == where:
                break
            where, without = more, self._with_harmless_contents(rendered, more)
            if without is None:
                ids = {id for id, a, b in spans if any(_shared(content, {rendered.text[a:b]}) for content in contents)}
                raise self._depends(ids, rendered.source)
            harmless = without
        more_than_usual = Counter(span.id for span in spans) - Counter(self.usual(rendered) or [])
        said = "".join(contents).lower()
        made = {id for id, a, b in spans if id in more_than_usual and _in_order(harmless[a:b].lower(), said)}
        if made:
            raise self._depends(made, rendered.source)
        return harmless

    def usual(self, rendered: Rendered) -> list[int] | None:
        """The special tokens that the template writes around such messages that say nothing of interest.

        None if it refuses such messages.

        Raises:
            UserError: the name or the schema of a tool spells a special token.
        """
        for text in fixed_texts(rendered.messages, rendered.tools):
            if spelled := self._special.within(self._tokens(text).ids):
                names = ", ".join(self._special.names[id] for id in sorted(set(spelled)))
                raise UserError(f"{rendered.source}: the name or schema of a tool spells {names}: take it out")
        try:
            text = self._render_like(rendered, outline(rendered.messages, self._special.letter))
        except UserError:  # the template accepted the original messages: it depends on what they say
            return None
        return self._special.within(self._tokens(text).ids)

    def _render_like(self, rendered: Rendered, messages: Messages) -> str:
        """The text of other messages, with the tools and the generation prompt of these."""
        source, opens_turn = rendered.source, rendered.add_generation_prompt
        return self._template.render(messages, source, opens_turn, tools=rendered.tools).text

    def _depends(self, ids: set[int], source: str) -> UserError:
        names = ", ".join(sorted(self._special.names[id] for id in ids))
        return UserError(
            f"{source}: a message may spell a part of {names}, and the chat template depends on that part, so that it"
            " cannot be kept as text: take it out"
        )


def _in_order(part: str, whole: str) -> bool:
    """Whether a template could make a part of a whole by leaving out characters."""
    characters = iter(whole)
    return all(character in characters for character in part)


def _shared(content: str, spelled: set[str]) -> set[int]:
    """The characters of a content that may belong to one of these texts, which may begin before or end after it."""
    core = content.strip()
    first, last = content.find(core), content.find(core) + len(core)
    shared: set[int] = set()
    for name in spelled:
        for match in re.finditer(re.escape(name), content, re.IGNORECASE):
            shared.update(range(*match.span()))
        lower, size = name.lower(), min(len(name), len(core))
        for k in range(1, size + 1):
            if core[:k].lower() == lower[-k:]:
                shared.update(range(first, first + k))
            if core[-k:].lower() == lower[:k]:
                shared.update(range(last - k, last))
        if core.lower() in lower:
            shared.update(range(first, last))
    return shared


def _as_tokens(encoding: Encoding) -> Tokens:
    return Tokens(encoding.ids, encoding.offsets)


class _Guard:
    """A tokenizer of the same model that knows no special token, but treats some characters as it would treat one."""

    def __init__(self, original: Tokenizer, special: SpecialTokens, stand_ins: tuple[tuple[str, int], ...]) -> None:
        from tokenizers import AddedToken, Tokenizer

        rust = self._rust = Tokenizer(original.model)
        rust.normalizer = original.normalizer  # before tokens are added: it decides how they are searched for
        rust.pre_tokenizer = original.pre_tokenizer
        rust.post_processor = original.post_processor
        added = original.get_added_tokens_decoder()
        others = {id: added[id] for id in sorted(added) if id not in special.names}
        rust.add_tokens(list(others.values()))
        self._ids = {token_id(rust, token.content): id for id, token in others.items()}
        for character, id in stand_ins:
            token = special.added.get(id)
            kept = original.normalizer is None or character in original.normalizer.normalize_str(character)
            rust.add_tokens(
                [
                    AddedToken(
                        character,
                        normalized=token is not None and token.normalized and kept,
                        lstrip=token is not None and token.lstrip,
                        rstrip=token is not None and token.rstrip,
                    )
                ]
            )
            self._ids[token_id(rust, character)] = id

    def encode(self, text: str, spans: list[Span], stand_ins: dict[int, str]) -> Tokens:
        """Tokenize a text in which only these spans are special tokens, with the original's ids and offsets."""
        parts, places, done = [], [], 0  # places: the characters of the text behind each character of the parts
        for id, start, end in spans:
            parts += [text[done:start], stand_ins[id]]
            places += [*((i, i + 1) for i in range(done, start)), (start, end)]
            done = end
        parts.append(text[done:])
        places += [(i, i + 1) for i in range(done, len(text))]
        ids, offsets, _ = _as_tokens(self._rust.encode("".join(parts), add_special_tokens=False))
        ends = [*places, (places[-1][1],) * 2] if places else [(0, 0)]
        original = [(ends[a][0], ends[b - 1][1] if b > a else ends[a][0]) for a, b in offsets]
        return Tokens([self._ids.get(id, id) for id in ids], original)
