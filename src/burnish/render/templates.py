"""Conversations to token ids: plain templates, and content that spells a special token but stays text.

The special tokens of a row are those that its template's own text makes. A message may spell one literally, in a form
that the tokenizer normalizes to one, or together with the text beside it. Each row is first encoded as it is, and its
special tokens are compared with those of the same template around harmless contents (``Skeleton``). Only where they
differ, Burnish finds out which characters come from a message and encodes those as text (``_as_text``).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import UserError, did_you_mean
from burnish.render.drafts import Draft, How, Piece, make
from burnish.types import Messages

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

# An answer that a model sampled after "Answer:" begins with its own space; one from a file seldom does. Both are
# written with one space, so that scoring an answer sees the ids that training saw.
QUESTION_ANSWER = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ 'System: ' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' -%}{{ 'Question: ' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'Answer:' }}
{%- generation -%}
{{- ('' if message['content'][:1] == ' ' else ' ') + message['content'] + (eos_token or '') -}}
{%- endgeneration -%}
{%- if not loop.last or add_generation_prompt -%}{{ '\\n\\n' }}{%- endif -%}
{%- else -%}{{ raise_exception('question_answer has no place for the role ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Answer:' }}{%- endif -%}"""

TEXT = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + (eos_token or '') }}{%- endgeneration -%}
{%- else -%}{{ message['content'] }}
{%- endif -%}
{%- endfor -%}"""

PLAIN_TEMPLATES = {"question_answer": QUESTION_ANSWER, "text": TEXT}
"""Templates for models that have none, by name. ``question_answer`` writes ``Question: ...\\n\\nAnswer: ...``, after
``System: ...\\n\\n`` where there is a system message; ``text`` joins the contents as they are. Both end an answer with
the tokenizer's EOS where it has one."""

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PRIVATE = range(0xF0000, 0xFFFFE)
STAND_IN = re.compile(f"[{chr(PRIVATE[0])}-{chr(PRIVATE[-1])}]")
SKELETONS = 1000  # kept at once


class Written(NamedTuple):
    """Messages as their template writes them: ``Written("<s>Hi", ((3, 5),), ({"role": "user", ...},), False)``.

    ``marked`` are the spans of characters that the template marks as generated.
    """

    text: str
    marked: tuple[tuple[int, int], ...]
    messages: Messages
    generation_prompt: bool


class Tokens(NamedTuple):
    """Token ids, and the pieces of text they were made from: ``Tokens([1, 9], ["Hello"], [Piece([1, 9], [])])``.

    The offsets of a piece count from its own start.
    """

    ids: list[int]
    texts: list[str]
    pieces: list[Piece]

    def inside(self, first: int, last: int) -> tuple[int, int] | None:
        """The first token that lies in these characters, and the one behind the last that does; None for no token."""
        start, stop, done, begin = None, 0, 0, 0
        for text, (ids, offsets) in zip(self.texts, self.pieces, strict=True):
            end = begin + len(text)
            if begin <= last and end > first:
                near, far = first - begin, last - begin
                hits = (t for t, offset in enumerate(offsets) if _overlap(offset, near, far))
                if (hit := next(hits, None)) is not None:
                    start = done + hit if start is None else start
                    stop = done + next(t + 1 for t in reversed(range(len(ids))) if _overlap(offsets[t], near, far))
            done, begin = done + len(ids), end
        return None if start is None else (start, stop)


def _overlap(offset: tuple[int, int], first: int, last: int) -> bool:
    """Whether a token lies in the characters; byte-level tokenizers leave white space out of a token's own."""
    start, end = offset
    return first < end <= last if start == end else start < last and end > first


def set_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make a plain template the tokenizer's chat template, with which it is saved.

    Raises:
        UserError: there is no plain template of that name.
    """
    if name not in PLAIN_TEMPLATES:
        hint = did_you_mean(name, PLAIN_TEMPLATES) or f"; expected one of {', '.join(PLAIN_TEMPLATES)}"
        raise UserError(f"template: there is no plain template {name!r}{hint}")
    tokenizer.chat_template = PLAIN_TEMPLATES[name]


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The source of the tokenizer's chat template.

    Raises:
        UserError: it has none.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        names = " or ".join(PLAIN_TEMPLATES)
        raise UserError(f"{tokenizer.name_or_path}: no chat template: set template: {names} ({error})") from error


class Renderer:
    """A tokenizer and its template as they are now, made ready for many rows: ``Renderer(tokenizer)``.

    Raises:
        UserError: the tokenizer has no half in Rust.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rust: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if rust is None:
            raise UserError(f"{tokenizer.name_or_path}: {type(tokenizer).__name__} is not a fast tokenizer")
        self.tokenizer, self.rust = tokenizer, rust
        self.of_text = How(rust, as_text=True)
        eos: Any = tokenizer.eos_token_id
        self.eos: list[int] = [] if eos is None else [eos]
        self.specials = _specials(tokenizer, len(tokenizer), str(tokenizer.eos_token), rust.normalizer is not None)
        self.special = self.specials.ids
        self._blank: dict[int, bool] = {}
        self._skeletons: dict[tuple[Any, ...], Skeleton | None] = {}
        self._guards: dict[tuple[tuple[str, int], ...], Guard] = {}

    @cached_property
    def source(self) -> str:
        """The chat template; raises as ``template_of``."""
        return template_of(self.tokenizer)

    @cached_property
    def marks(self) -> bool:
        """Whether the template says itself, by ``{% generation %}``, what the assistant writes."""
        return MARK.search(self.source) is not None

    @cached_property
    def plain(self) -> bool:
        """Whether the template is one of ``PLAIN_TEMPLATES``."""
        return self.source in PLAIN_TEMPLATES.values()

    @cached_property
    def written(self) -> How:
        """How a conversation is tokenized: its template writes the special tokens itself, so none are added."""
        return How(self.rust, offsets=self.marks or bool(self.specials.fragile))

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """What stands before and after a plain template's text: the tokenizer's own ``[CLS]`` and ``[SEP]``, or BOS.

        A template of the model's own writes its special tokens itself: nothing is put around it.
        """
        return self.frame if self.plain else ([], [])

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer itself puts before and after a text."""
        framed, bare = (make({how: ["a"]})[how]["a"].ids for how in (How(self.rust, framed=True), How(self.rust)))
        first = next(t for t in range(len(framed)) if framed[t : t + len(bare)] == bare)
        return framed[:first], framed[first + len(bare) :]

    @cached_property
    def _compiled(self) -> tuple[Any, dict[str, Any]]:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template: Any = _compile_jinja_template(self.source)
        _remember_verdicts(template.environment)
        return template, {**template.globals, "tools": None, "documents": None, **self.tokenizer.special_tokens_map}

    def render(self, messages: Messages, generation_prompt: bool) -> tuple[str, tuple[tuple[int, int], ...]]:
        """What the template makes of messages, and the spans of characters that it marks as generated.

        As transformers renders, without what it does for tools and objects that rows do not have.
        """
        from jinja2.runtime import new_context

        template, names = self._compiled
        names = {**names, "messages": list(messages), "add_generation_prompt": generation_prompt}
        context = new_context(template.environment, template.name, template.blocks, names, shared=True)
        blocks = template.root_render_func(context)
        if not self.marks:
            return "".join(blocks), ()
        before: list[str] = []
        marked: list[tuple[int, int]] = []
        with template.environment.activate_tracker(before, marked):
            for block in blocks:  # the marks are counted from what stands in the list
                before.append(block)
        return "".join(before), tuple(marked)

    def filled(self, written: Written) -> tuple[Skeleton, list[str], list[str]] | None:
        """The skeleton of a text, the pieces of the text, and the contents that stand in them.

        Contents are tried as they are, then with the white space around them in the skeleton: some templates strip it.
        Where the template changes contents, none are given; None where they may then add to a special token.
        """
        contents = [message["content"] for message in written.messages]
        skeleton = self.skeleton(written)
        if skeleton is not None and "".join(texts := skeleton.fill(contents)) == written.text:
            return skeleton, texts, contents
        cores = [content.strip() for content in contents]
        if cores != contents:
            outer = [tuple(c.split(core)) if core else (c, "") for c, core in zip(contents, cores, strict=True)]
            closer = self.skeleton(written, tuple(outer))
            if closer is not None and "".join(texts := closer.fill(cores)) == written.text:
                return closer, texts, cores
        specials = self.specials
        if skeleton is None or specials.fragile or specials.spelled.search("".join(contents)) is not None:
            return None
        return skeleton, specials.pieces(written.text), []

    def skeleton(self, written: Written, outer: tuple[tuple[str, ...], ...] = ()) -> Skeleton | None:
        """What the template writes around messages of these roles, with white space around their contents."""
        key = (written.generation_prompt, *[message["role"] for message in written.messages], *outer)
        if key not in self._skeletons:
            if len(self._skeletons) >= SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = _skeleton(self, written, outer)
        return self._skeletons[key]

    def guard(self, stand_ins: tuple[tuple[str, int], ...]) -> Guard:
        """The tokenizer that knows these characters for these special tokens, and no other special token."""
        if stand_ins not in self._guards:
            self._guards[stand_ins] = _guard(self, stand_ins)
        return self._guards[stand_ins]

    def blank(self, id: int) -> bool:
        """Whether a token is white space."""
        if id not in self._blank:
            self._blank[id] = not self.rust.decode([id], skip_special_tokens=False).strip()
        return self._blank[id]


def _remember_verdicts(sandbox: Any) -> None:
    """Make a sandbox ask once for each type and name whether a template may read it: ``loop.first`` of every row.

    Its verdict depends on nothing else.
    """
    judge, verdicts = type(sandbox).is_safe_attribute, {}

    def is_safe_attribute(found: Any, name: str, value: Any) -> bool:
        known = verdicts.get((type(found), name))
        if known is None:
            known = verdicts[type(found), name] = judge(sandbox, found, name, value)
        return known

    sandbox.is_safe_attribute = is_safe_attribute


def write(writer: Renderer, messages: Messages, source: str, generation_prompt: bool = False) -> Written:
    """The conversation as text.

    Raises:
        UserError: the template refuses the messages, or there is none.
    """
    import jinja2

    try:
        text, marked = writer.render(messages, generation_prompt)
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{source}: the chat template refuses these messages ({roles}): {error}") from error
    return Written(text, marked, messages, generation_prompt)


def tokenize(writer: Renderer, written: Written, source: str) -> Draft[Tokens]:
    """The tokens of a written conversation; a special token that a message spells stays text.

    The tokenizer takes special tokens out of a text before anything else, so the text is cut before each of them: what
    many rows have in common, such as a system message or the opening of a turn, is tokenized once.

    Raises:
        UserError: the tokenizer cannot write as text a special token that a message spells.
    """
    if (found := writer.filled(written)) is not None:
        skeleton, texts, contents = found
        if skeleton.special is None:
            *pieces, harmless = yield writer.written, [*texts, skeleton.harmless]
            skeleton.special = list(filter(writer.special.__contains__, harmless.ids))
        else:
            pieces = yield writer.written, texts
        tokens = _joined(texts, pieces)
        same = list(filter(writer.special.__contains__, tokens.ids)) == skeleton.special
        if same and writer.specials.unknown not in tokens.ids:
            # a message may unmake a fragile token of the template and spell the same one elsewhere
            sure = writer.specials.fragile.isdisjoint(tokens.ids)
            if sure or not skeleton.touched(writer, contents, texts, pieces):
                return tokens
    return (yield from _as_text(writer, written, source))


def check_text(writer: Renderer, ids: list[int], what: str) -> None:
    """Raise a UserError where ids of text, made without special tokens, hold one: the model's vocabulary has it."""
    if not writer.special.isdisjoint(ids):
        raise _cannot_write(writer, set(ids) & writer.special, what)


def _joined(texts: list[str], pieces: list[Piece]) -> Tokens:
    ids: list[int] = []
    for piece in pieces:
        ids += piece[0]
    return Tokens(ids, texts, pieces)


# --- special tokens -----------------------------------------------------------------------------------------------


def _id(rust: Tokenizer, token: str) -> int:
    found = rust.token_to_id(token)
    assert found is not None, token
    return found


class Specials(NamedTuple):
    """The special tokens of a tokenizer.

    ``names`` are all of them and ``ids`` those that only a special token has: not that of unknown words, ``unknown``.
    ``fragile`` are those that the text beside them can unmake. ``spelled`` finds all of them in a text, and ``cut``
    those before which it may be cut.
    ``letter`` and ``mark`` are a letter and a mark of punctuation that none of them has; ``spaced`` says whether one
    has white space.
    """

    names: dict[int, str]
    added: dict[int, AddedToken]
    ids: frozenset[int]
    unknown: int | None
    fragile: frozenset[int]
    spelled: re.Pattern[str]
    cut: re.Pattern[str]
    letter: str
    mark: str
    spaced: bool

    def pieces(self, text: str) -> list[str]:
        """A text, cut before special tokens."""
        between = self.cut.split(text)  # text, special token, text, ..., special token, text
        texts = list(map(add, between[1::2], between[2::2]))
        return [between[0], *texts] if between[0] else texts


@functools.lru_cache(maxsize=8)
def _specials(tokenizer: Any, size: int, eos: str, normalizes: bool) -> Specials:
    """The special tokens of a tokenizer; the other arguments say whether it was changed.

    A token that takes in white space or depends on what stands beside it, or is looked for in normalized text, is not
    cut before.
    """
    added = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    names = {id: token.content for id, token in added.items()}
    names |= {_id(tokenizer.backend_tokenizer, name): name for name in tokenizer.all_special_tokens}
    plain = {t.content for t in added.values() if not (t.normalized or t.lstrip or t.single_word)}
    longest_first = sorted(names.values(), key=len, reverse=True)
    spelled, cut = (
        "|".join(map(re.escape, some)) or "(?!)" for some in (longest_first, filter(plain.__contains__, longest_first))
    )
    unknown = None if tokenizer.unk_token_id == tokenizer.eos_token_id else tokenizer.unk_token_id
    characters = "".join(names.values()).casefold()
    return Specials(
        names=names,
        added=added,
        ids=frozenset(names) - {unknown},
        unknown=unknown,
        fragile=frozenset(id for id, t in added.items() if t.single_word or (t.normalized and normalizes)),
        spelled=re.compile(spelled),
        cut=re.compile(f"({cut})"),
        letter=next((c for c in "xqzjkwyvbghcfdmnopuastiler" if c not in characters), "x"),
        mark=next((c for c in ".,;:!?-" if c not in characters), "."),
        spaced=any(map(str.isspace, characters)),
    )


def _cannot_write(writer: Renderer, ids: set[int], what: str) -> UserError:
    names = ", ".join(writer.specials.names[id] for id in sorted(ids))
    return UserError(f"{what} spells {names}, which this tokenizer cannot write as text: take it out")


class Skeleton:
    """What a template writes around contents, cut before its special tokens.

    ``harmless`` is its text around contents that spell nothing; ``special`` are the special tokens of that text, or
    None until they were asked for.
    """

    def __init__(self, pieces: list[str], letter: str) -> None:
        self.harmless = STAND_IN.sub(letter, "".join(pieces))
        self.special: list[int] | None = None
        self._pieces = pieces
        self._open: list[tuple[int, str, list[int], list[str]]] = []
        for at, piece in enumerate(pieces):
            if messages := [ord(character) - PRIVATE[0] for character in STAND_IN.findall(piece)]:
                pattern = STAND_IN.sub("%s", piece.replace("%", "%%"))
                self._open.append((at, pattern, messages, STAND_IN.split(piece)))

    def fill(self, contents: list[str]) -> list[str]:
        """The pieces with the contents in their places."""
        pieces = self._pieces.copy()
        for at, pattern, messages, _ in self._open:
            pieces[at] = pattern % tuple([contents[message] for message in messages])
        return pieces

    def touched(self, writer: Renderer, contents: list[str], texts: list[str], pieces: list[Piece]) -> bool:
        """Whether a special token of the filled pieces has a character of a content, other than white space."""
        for at, _, messages, around in self._open:
            spans, start = _spans(writer, pieces[at], texts[at]), 0
            for fixed, message in zip(around, messages, strict=False):
                start += len(fixed)
                end = start + len(contents[message])
                if any(a < end and b > start for _, a, b in spans):
                    return True
                start = end
        return False


def _skeleton(writer: Renderer, written: Written, outer: tuple[tuple[str, ...], ...]) -> Skeleton | None:
    """What the template writes around contents, or around what stands between their white space; None: it refuses.

    A content of nothing but white space is a part of the skeleton.
    """
    size = len(written.messages)
    stand_ins = list(map(chr, PRIVATE[:size]))
    for i, (before, after) in enumerate(outer):
        white = len(before) == len(written.messages[i]["content"])
        stand_ins[i] = before if white else before + stand_ins[i] + after
    text = _render_instead(writer, written, stand_ins) if len(stand_ins) == size else None
    if text is None or any(ord(character) >= PRIVATE[0] + size for character in STAND_IN.findall(text)):
        return None
    return Skeleton(writer.specials.pieces(text), writer.specials.letter)


def _render_instead(writer: Renderer, written: Written, contents: list[str]) -> str | None:
    """What the template makes of other contents, or None where it takes no others."""
    messages = [
        {"role": message["role"], "content": content}
        for message, content in zip(written.messages, contents, strict=True)
    ]
    try:
        return writer.render(tuple(messages), written.generation_prompt)[0]  # pyright: ignore[reportArgumentType]
    except Exception:  # the template wrote the messages themselves: it depends on what they say
        return None


def _as_text(writer: Renderer, written: Written, source: str) -> Draft[Tokens]:
    """The tokens of a conversation whose messages may spell special tokens."""
    text, whole = written.text, How(writer.rust, offsets=True)
    if (harmless := _without(writer, written)) is None:
        harmless = yield from _without_spelled(writer, written, source)
    plain, own = yield whole, [text, harmless]
    typed, spans = _spans(writer, plain, text), _spans(writer, own, harmless)
    if typed == spans and writer.specials.unknown not in plain.ids:
        return Tokens(plain.ids, [text], [plain])
    free = (chr(code) for code in PRIVATE if chr(code) not in text)
    stand_ins = dict(zip(sorted({id for id, _, _ in spans}), free, strict=False))
    guard = writer.guard(tuple((character, id) for id, character in stand_ins.items()))
    replaced, harmless_replaced = (_replace(t, spans, stand_ins) for t in (text, harmless))
    made, check = yield How(guard.rust, offsets=True), [replaced[0], harmless_replaced[0]]
    made = guard.read(made, replaced[1])
    if [span[0] for span in _spans(writer, made, text)] != [span[0] for span in spans] or (
        guard.read(check, harmless_replaced[1]).ids != own.ids
    ):
        forged = {span[0] for span in {*typed, *_spans(writer, made, text)} - set(spans)}
        raise _cannot_write(writer, forged or {span[0] for span in spans}, f"{source}: a message")
    return Tokens(made.ids, [text], [made])


Span = tuple[int, int, int]


def _spans(writer: Renderer, piece: Piece, text: str) -> list[Span]:
    """The special tokens in a text: the id of each, and its characters without the white space around them."""
    spans = []
    for id, (start, end) in zip(*piece, strict=True):
        if id in writer.special:
            while start < end and text[start].isspace() and not text[start:end].isspace():
                start += 1
            while start < end and text[end - 1].isspace() and not text[start:end].isspace():
                end -= 1
            spans.append((id, start, end))
    return spans


def _without(writer: Renderer, written: Written, where: list[set[int]] | None = None) -> str | None:
    """The text with these characters of the contents made harmless, or with all; None where it depends on them."""
    contents = [message["content"] for message in written.messages]
    taken = {*written.text, *"".join(contents)}
    stand_in = next(chr(code) for code in PRIVATE if chr(code) not in taken)
    if where is None:
        others = [re.sub("(?s)." if writer.specials.spaced else r"\S", stand_in, content) for content in contents]
    else:
        others = [
            "".join(stand_in if i in chosen else character for i, character in enumerate(content))
            for content, chosen in zip(contents, where, strict=True)
        ]
    hidden = _render_instead(writer, written, others)
    if hidden is None or len(hidden) != len(written.text):
        return None
    pairs = list(zip(hidden, written.text, strict=True))
    if any(a != b and a != stand_in for a, b in pairs):
        return None
    return "".join([_harmless(writer, b) if a == stand_in else b for a, b in pairs])


def _harmless(writer: Renderer, character: str) -> str:
    """A character of the same kind that no special token has: what stands beside a special token may decide on it."""
    if character.isspace() and not writer.specials.spaced:
        return character
    word = character.isalnum() or character in "_ " or unicodedata.category(character)[0] == "M"
    return writer.specials.letter if word else writer.specials.mark


def _without_spelled(writer: Renderer, written: Written, source: str) -> Draft[str]:
    """The text without what contents may add to a special token, for templates that depend on the contents.

    Of each special token in the text, whatever a content has of its characters is made harmless, until no special token
    is left that could hold a character of a content. A template may make one by leaving out what stands between: what
    is more than its usual special tokens may not be found in the contents.

    Raises:
        UserError: the template depends on just these characters.
    """
    contents = [message["content"] for message in written.messages]
    where: list[set[int]] = [set() for _ in contents]
    harmless = written.text
    while True:
        (own,) = yield How(writer.rust, offsets=True), [harmless]
        spans = _spans(writer, own, harmless)
        spelled = {written.text[start:end] for _, start, end in spans}
        more = [chosen | _shared(content, spelled) for chosen, content in zip(where, contents, strict=True)]
        if more == where:
            break
        where, found = more, _without(writer, written, more)
        if found is None:
            shared = {id for id, a, b in spans if any(_shared(content, {written.text[a:b]}) for content in contents)}
            raise _depends(writer, shared, source)
        harmless = found
    skeleton = writer.skeleton(written)
    (usual,) = yield How(writer.rust, offsets=True), [skeleton.harmless if skeleton else ""]
    more_than_usual = Counter(span[0] for span in spans) - Counter(usual.ids)
    said = "".join(contents).lower()
    made = {id for id, a, b in spans if id in more_than_usual and _in_order(harmless[a:b].lower(), said)}
    if made:
        raise _depends(writer, made, source)
    return harmless


def _depends(writer: Renderer, ids: set[int], source: str) -> UserError:
    names = ", ".join(sorted(writer.specials.names[id] for id in ids))
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
    found: set[int] = set()
    for special in spelled:
        for match in re.finditer(re.escape(special), content, re.IGNORECASE):
            found.update(range(*match.span()))
        name, size = special.lower(), min(len(special), len(core))
        for k in range(1, size + 1):
            if core[:k].lower() == name[-k:]:
                found.update(range(first, first + k))
            if core[-k:].lower() == name[:k]:
                found.update(range(last - k, last))
        if core.lower() in name:
            found.update(range(first, last))
    return found


class Guard(NamedTuple):
    """A tokenizer with characters in place of special tokens, and the ids of the original that differ from its own."""

    rust: Tokenizer
    ids: dict[int, int]

    def read(self, piece: Piece, places: list[tuple[int, int]]) -> Piece:
        """A piece in the ids of the original, and in the offsets of the text whose characters have these places."""
        ends = [*places, (places[-1][1],) * 2] if places else [(0, 0)]
        offsets = [(ends[a][0], ends[b - 1][1] if b > a else ends[a][0]) for a, b in piece.offsets]
        return Piece([self.ids.get(id, id) for id in piece.ids], offsets)


def _guard(writer: Renderer, stand_ins: tuple[tuple[str, int], ...]) -> Guard:
    """A tokenizer of the same model that has no special tokens but treats some characters as it would treat one."""
    from tokenizers import AddedToken, Tokenizer

    original, specials = writer.rust, writer.specials
    rust = Tokenizer(original.model)
    rust.normalizer = original.normalizer  # before tokens are added: it decides how they are looked for
    rust.pre_tokenizer = original.pre_tokenizer
    rust.post_processor = original.post_processor
    added = original.get_added_tokens_decoder()
    others = {id: added[id] for id in sorted(added) if id not in specials.names}
    rust.add_tokens(list(others.values()))
    ids = {_id(rust, token.content): id for id, token in others.items()}
    for character, id in stand_ins:
        token = specials.added.get(id)
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
        ids[_id(rust, character)] = id
    return Guard(rust, ids)


def _replace(text: str, spans: list[Span], stand_ins: dict[int, str]) -> tuple[str, list[tuple[int, int]]]:
    """The text with one character for each special token, and the places that each of its characters had."""
    parts, places, done = [], [], 0
    for id, start, end in spans:
        parts += [text[done:start], stand_ins[id]]
        places += [*((i, i + 1) for i in range(done, start)), (start, end)]
        done = end
    places += [(i, i + 1) for i in range(done, len(text))]
    return "".join([*parts, text[done:]]), places
