"""Conversations to token ids: plain templates, and content that spells a special token but stays text."""

from __future__ import annotations

import difflib
import functools
import re
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.data.drafts import Draft, How, Piece, make
from burnish.types import Messages, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
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


class Written(NamedTuple):
    """A conversation as its template writes it: ``Written("<s>Hi", ((3, 5),), {})``.

    ``marked`` are the spans of characters that the template marks as generated. ``typed`` maps a private character to
    the special token that it stands for, once for each character of it, where a message spells one.
    """

    text: str
    marked: tuple[tuple[int, int], ...]
    typed: dict[str, str]


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
        near = difflib.get_close_matches(name, PLAIN_TEMPLATES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(PLAIN_TEMPLATES)}"
        raise UserError(f"template: there is no plain template {name!r}: {hint}")
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


class Writer:
    """A tokenizer and its template as they are now, made ready for many rows: ``Writer(tokenizer)``.

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
        self.spelled, self.cut, self.special = _special(tokenizer, len(tokenizer), str(tokenizer.eos_token))
        self._blank: dict[int, bool] = {}

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
        """How a conversation is tokenised: its template writes the special tokens itself, so none are added."""
        return How(self.rust, offsets=self.marks)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """What stands before and after a plain template's text: the tokenizer's own ``[CLS]`` and ``[SEP]``, or BOS.

        A template of the model's own writes its special tokens itself: nothing is put around it.
        """
        if not self.plain:
            return [], []
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


def write(writer: Writer, messages: Messages, source: str, generation_prompt: bool = False) -> Written:
    """The conversation as text, where a special token that a message spells is hidden behind private characters.

    Raises:
        UserError: the template refuses the messages, or there is none.
    """
    import jinja2

    hidden, typed = _hide(writer, messages)
    try:
        text, marked = writer.render(hidden, generation_prompt)
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{source}: the chat template refuses these messages ({roles}): {error}") from error
    return Written(text, marked, typed)


def tokenise(writer: Writer, written: Written, source: str) -> Draft[Tokens]:
    """The tokens of a written conversation.

    The tokenizer takes special tokens out of a text before anything else, so the text is cut before each of them: what
    many rows have in common, such as a system message or the opening of a turn, is tokenised once.

    Raises:
        UserError: the tokenizer cannot write as text a special token that a message spells.
    """
    if not written.typed:
        between = writer.cut.split(written.text)  # text, special token, text, ..., special token, text
        texts = list(map(add, between[1::2], between[2::2]))
        texts = [between[0], *texts] if between[0] else texts
        return _joined(texts, (yield writer.written, texts))
    neutral = "".join("x" if character in written.typed else character for character in written.text)
    (expected,) = yield writer.written, [neutral]
    spelled = written.text
    for character, special in written.typed.items():
        spelled = spelled.replace(character * len(special), special)
    tokens, of_text = yield from _piecewise(writer, written.text, spelled)
    banned = {_id(writer.rust, special) for special in written.typed.values()} & writer.special
    if banned & of_text or (yield from _piecewise(writer, neutral, neutral))[0].ids != expected.ids:
        names = ", ".join(written.typed.values())
        raise UserError(f"{source}: a message spells {names}, which this tokenizer cannot write as text: take it out")
    return tokens


def _joined(texts: list[str], pieces: list[Piece]) -> Tokens:
    ids: list[int] = []
    for piece in pieces:
        ids += piece[0]
    return Tokens(ids, texts, pieces)


# --- special tokens -----------------------------------------------------------------------------------------------


def _id(rust: Tokenizer, special: str) -> int:
    found = rust.token_to_id(special)
    assert found is not None, special
    return found


@functools.lru_cache(maxsize=8)
def _special(tokenizer: Any, size: int, eos: str) -> tuple[re.Pattern[str], re.Pattern[str], frozenset[int]]:
    """Patterns of the special tokens and of those before which a text may be cut; ids without that of unknown words.

    Size and EOS say whether the tokenizer was changed. A token that takes in white space or depends on what stands
    beside it, or is looked for in normalised text, is not cut before.
    """
    added = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {id: token.content for id, token in added.items()}
    ids |= {_id(tokenizer.backend_tokenizer, token): token for token in tokenizer.all_special_tokens}
    plain = {t.content for t in added.values() if not (t.normalized or t.lstrip or t.single_word)}
    longest_first = sorted(ids.values(), key=len, reverse=True)
    every, cut = (
        "|".join(map(re.escape, some)) or "(?!)" for some in (longest_first, filter(plain.__contains__, longest_first))
    )
    without_unknown = frozenset(ids) - ({tokenizer.unk_token_id} - {tokenizer.eos_token_id})
    return re.compile(every), re.compile(f"({cut})"), without_unknown


def _hide(writer: Writer, messages: Messages) -> tuple[Messages, dict[str, str]]:
    """The messages with each special token that they spell replaced by as many copies of one private character."""
    contents = [message["content"] for message in messages]
    if writer.spelled.search("".join(contents)) is None:
        return messages, {}
    spelled = sorted({found for content in contents for found in writer.spelled.findall(content)})
    taken = set("".join(contents))
    free = (chr(code) for code in PRIVATE if chr(code) not in taken)
    stand_in = dict(zip(spelled, free, strict=False))

    def hide(content: str) -> str:
        return writer.spelled.sub(lambda found: stand_in[found[0]] * len(found[0]), content)

    hidden: Messages = tuple({"role": m["role"], "content": hide(m["content"])} for m in messages)
    return hidden, {character: special for special, character in stand_in.items()}


def _piecewise(writer: Writer, text: str, spelled: str) -> Draft[tuple[Tokens, set[int]]]:
    """Tokens of ``spelled`` where only the special tokens of ``text``, of the same length, are special; text's ids."""
    found = [special.span() for special in writer.spelled.finditer(text)]
    edges = [0, *(edge for span in found for edge in span), len(text)]
    spans = list(pairwise(edges))  # text and special tokens by turns
    as_text = yield writer.of_text._replace(offsets=True), [spelled[a:b] for a, b in spans[::2]]
    marks = [Piece([_id(writer.rust, text[a:b])], [(0, b - a)]) for a, b in spans[1::2]]
    pieces = [piece for pair in zip(as_text, [*marks, Piece([], [])], strict=True) for piece in pair]
    tokens = _joined([spelled[a:b] for a, b in spans] + [""], pieces)
    return tokens, {id for piece in as_text for id in piece.ids}
