"""Conversations to token ids: plain templates, and content that spells a special token but stays text."""

from __future__ import annotations

import difflib
import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.types import Messages, UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
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
    """Token ids and the characters each was made from: ``Tokens([1, 9], [(0, 3), (3, 5)])``."""

    ids: list[int]
    offsets: list[tuple[int, int]]


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


def marks_generation(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template says itself, by ``{% generation %}``, what the assistant writes."""
    return MARK.search(template_of(tokenizer)) is not None


def write(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, source: str, generation_prompt: bool = False
) -> Written:
    """The conversation as text, where a special token that a message spells is hidden behind private characters.

    Raises:
        UserError: the template refuses the messages, or there is none.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    template = template_of(tokenizer)
    hidden, typed = _hide(tokenizer, messages)
    try:
        rendered: Any = render_jinja_template(
            conversations=[list(hidden)],  # type: ignore[arg-type]
            chat_template=template,
            return_assistant_tokens_mask=MARK.search(template) is not None,
            add_generation_prompt=generation_prompt,
            **tokenizer.special_tokens_map,  # type: ignore[arg-type]
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{source}: the chat template refuses these messages ({roles}): {error}") from error
    (written,), marked = rendered
    return Written(written, tuple(marked[0]) if marked else (), typed)


def tokenise(tokenizer: PreTrainedTokenizerBase, written: Written, source: str) -> Tokens:
    """The ids of a written conversation. Chat templates write the special tokens themselves, so none are added.

    Raises:
        UserError: the tokenizer cannot write as text a special token that a message spells.
    """
    if not written.typed:
        found = backend(tokenizer).encode(written.text, add_special_tokens=False)
        return Tokens(found.ids, found.offsets)
    neutral = "".join("x" if character in written.typed else character for character in written.text)
    expected = backend(tokenizer).encode(neutral, add_special_tokens=False).ids
    spelled = written.text
    for character, special in written.typed.items():
        spelled = spelled.replace(character * len(special), special)
    tokens, of_text = _piecewise(tokenizer, written.text, spelled)
    banned = {_id(tokenizer, special) for special in written.typed.values()} & special_ids(tokenizer)
    if banned & of_text or _piecewise(tokenizer, neutral, neutral)[0].ids != expected:
        names = ", ".join(written.typed.values())
        raise UserError(f"{source}: a message spells {names}, which this tokenizer cannot write as text: take it out")
    return tokens


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Plain text with the tokens that the tokenizer puts around it; a special token that it spells stays text."""
    return backend(tokenizer, as_text=True).encode(text, add_special_tokens=True).ids


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What stands before and after a plain template's text: the tokenizer's own ``[CLS]`` and ``[SEP]``, or BOS.

    A template of the model's own writes its special tokens itself: nothing is put around it.
    """
    if template_of(tokenizer) not in PLAIN_TEMPLATES.values():
        return [], []
    found: Encoding = backend(tokenizer).encode("a", add_special_tokens=True)
    first = found.special_tokens_mask.index(0)
    last = len(found.ids) - found.special_tokens_mask[::-1].index(0)
    return found.ids[:first], found.ids[last:]


# --- special tokens -----------------------------------------------------------------------------------------------


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the special tokens, without the one for unknown words."""
    return _special(tokenizer, len(tokenizer), str(tokenizer.eos_token))[1]


def _id(tokenizer: PreTrainedTokenizerBase, special: str) -> int:
    found = backend(tokenizer).token_to_id(special)
    assert found is not None, special
    return found


@functools.lru_cache(maxsize=8)
def _special(tokenizer: Any, size: int, eos: str) -> tuple[re.Pattern[str], frozenset[int]]:
    """A pattern of the special tokens and their ids; size and EOS say whether the tokenizer was changed."""
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = added | {_id(tokenizer, token): token for token in tokenizer.all_special_tokens}
    longest_first = sorted(ids.values(), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return pattern, frozenset(ids) - ({tokenizer.unk_token_id} - {tokenizer.eos_token_id})


def _pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return _special(tokenizer, len(tokenizer), str(tokenizer.eos_token))[0]


def _hide(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[Messages, dict[str, str]]:
    """The messages with each special token that they spell replaced by as many copies of one private character."""
    pattern = _pattern(tokenizer)
    contents = [message["content"] for message in messages]
    spelled = sorted({found for content in contents for found in pattern.findall(content)})
    if not spelled:
        return messages, {}
    taken = set("".join(contents))
    free = (chr(code) for code in PRIVATE if chr(code) not in taken)
    stand_in = dict(zip(spelled, free, strict=False))

    def hide(content: str) -> str:
        return pattern.sub(lambda found: stand_in[found[0]] * len(found[0]), content)

    hidden: Messages = tuple({"role": m["role"], "content": hide(m["content"])} for m in messages)
    return hidden, {character: special for special, character in stand_in.items()}


def _piecewise(tokenizer: PreTrainedTokenizerBase, text: str, spelled: str) -> tuple[Tokens, set[int]]:
    """Tokens of ``spelled`` where only the special tokens of ``text``, of the same length, are special; text's ids."""
    tokens, of_text, done = Tokens([], []), set(), 0

    def add_text(start: int, end: int) -> None:
        found = backend(tokenizer, as_text=True).encode(spelled[start:end], add_special_tokens=False)
        of_text.update(found.ids)
        tokens.ids.extend(found.ids)
        tokens.offsets.extend((start + first, start + last) for first, last in found.offsets)

    for special in _pattern(tokenizer).finditer(text):
        add_text(done, special.start())
        tokens.ids.append(_id(tokenizer, special[0]))
        tokens.offsets.append(special.span())
        done = special.end()
    add_text(done, len(text))
    return tokens, of_text


def backend(tokenizer: PreTrainedTokenizerBase, as_text: bool = False) -> Tokenizer:
    """The tokenizer's Rust half, without the truncation and padding that its file or another call may have set.

    ``as_text``: special tokens that a text spells are not made special tokens of.

    Raises:
        UserError: it has none.
    """
    rust: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None:
        raise UserError(f"{tokenizer.name_or_path}: {type(tokenizer).__name__} is not a fast tokenizer")
    if rust.truncation is not None:
        rust.no_truncation()
    if rust.padding is not None:
        rust.no_padding()
    if rust.encode_special_tokens != as_text:
        rust.encode_special_tokens = as_text
    return rust
