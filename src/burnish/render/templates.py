"""Chat templates: plain ones for models without a template of their own, and messages rendered to text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import UserError, did_you_mean
from burnish.types import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A model that samples after "Answer:" begins with a space of its own; answers in files rarely do. The template writes
# exactly one space for both, so that scoring an answer sees the ids that training saw.
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
"""Templates for models without one, by name. ``question_answer`` writes ``Question: ...\\n\\nAnswer: ...``, preceded by
``System: ...\\n\\n`` if there is a system message; ``text`` joins the contents as they are. Both end an answer with the
tokenizer's EOS token if it has one."""

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def set_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make a plain template the tokenizer's chat template; it is saved with the tokenizer.

    Raises:
        UserError: there is no plain template of that name.
    """
    if name not in PLAIN_TEMPLATES:
        hint = did_you_mean(name, PLAIN_TEMPLATES) or f"; expected one of {', '.join(PLAIN_TEMPLATES)}"
        raise UserError(f"template: there is no plain template {name!r}{hint}")
    tokenizer.chat_template = PLAIN_TEMPLATES[name]


class NoTemplateError(UserError):
    """A tokenizer has no chat template, which concerns all rows."""


class Rendered(NamedTuple):
    """Messages as text: ``Rendered("<s>Hi Yo</s>", ((6, 12),), ({"role": "user", ...}, ...), False, "chat.jsonl:17")``.

    ``generated`` are the spans of characters inside the template's ``{% generation %}`` blocks, one for each block, if
    they were asked for.
    """

    text: str
    generated: tuple[tuple[int, int], ...]
    messages: Messages
    add_generation_prompt: bool
    source: str


class ChatTemplate:
    """The chat template that a tokenizer has now: ``ChatTemplate(tokenizer).render(messages, "chat.jsonl:17").text``.

    ``marks_generation`` says whether the template marks the assistant's text by ``{% generation %}``; ``plain``
    whether it is one of ``PLAIN_TEMPLATES``.

    Raises:
        NoTemplateError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            self.source = tokenizer.get_chat_template()
        except ValueError as error:
            names = " or ".join(PLAIN_TEMPLATES)
            raise NoTemplateError(
                f"{tokenizer.name_or_path}: no chat template: set template: {names} ({error})"
            ) from error
        self.marks_generation = MARK.search(self.source) is not None
        self.plain = self.source in PLAIN_TEMPLATES.values()
        # Those that the template does not name would only cost time, for every conversation.
        special: dict[str, Any] = tokenizer.special_tokens_map
        self._special_tokens = {name: token for name, token in special.items() if name in self.source}

    def render(
        self, messages: Messages, source: str, add_generation_prompt: bool = False, find_generated: bool = False
    ) -> Rendered:
        """Render messages to text; ``find_generated``: with the spans that the template marks as generated.

        Raises:
            UserError: the template refuses the messages.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, generated = render_jinja_template(
                conversations=[list(messages)],  # pyright: ignore[reportArgumentType]
                chat_template=self.source,
                return_assistant_tokens_mask=find_generated,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"{source}: the chat template refuses these messages ({roles}): {error}") from error
        spans: Any = tuple(generated[0]) if find_generated else ()
        return Rendered(texts[0], spans, messages, add_generation_prompt, source)
